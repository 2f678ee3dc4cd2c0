# %% [markdown]
# # Attention Residuals in three minutes
#
# A residual stream adds up the outputs of all earlier layers. With [Attention
# Residuals](https://arxiv.org/abs/2603.15031) every sublayer *chooses* what it
# reads: it attends over depth, with one learned pseudo-query $w_l$,
#
# $$h_l = \sum_{i<l} \alpha_{i \to l}\, v_i, \qquad
#   \alpha_{\cdot \to l} = \operatorname{softmax}_i\big(
#   w_l \cdot \mathrm{RMSNorm}(v_i)\big),$$
#
# where $v_0$ is the embedding and $v_i$ the output of sublayer $i$. The Block
# variant attends over sums of a few sublayers instead, which costs little. This
# notebook trains three networks and looks inside them: less than three minutes
# on two idle CPU cores. (Busy ones made the outputs below.)

# %%
import jax
import jax.numpy as jnp

from attnres_jax import analysis
from attnres_jax import data
from attnres_jax import load_config
from attnres_jax.analysis import plots
import attnres_kernels
from notebooks import colab

# %% [markdown]
# ## The operator
#
# `depth_attention` mixes sources token by token. A zero query gives their mean,
# which is how every network starts. A large query along one source selects it.

# %%
sources = jax.random.normal(jax.random.key(0), (3, 1, 4, 8))  # M, B, T, D
queries = jnp.stack([jnp.zeros(8), 30.0 * sources[1, 0, 0]])  # Q, D
mixed, _ = attnres_kernels.depth_attention(queries, list(sources))
gap = lambda a, b: f"{float(jnp.abs(a - b).max()):.0e}"
print("zero query, distance from the mean:", gap(mixed[0], sources.mean(0)))
apart = gap(mixed[1, 0, 0], sources[1, 0, 0])
print("sharp query at token 0, distance from source 1:", apart)

# %% [markdown]
# ## Build and train
#
# A residual scheme is a name in the configuration. The rest of the network, its
# initial weights and the order of the data stay the same. The text is one that
# every machine has: the standard library of the running Python.


# %%
def make_config(residual):
  fields = {
    "train.steps": 120, "train.eval_every": 20, "train.eval_batches": 8,
    "train.depth_every": 0, "optim.peak_lr": 4e-3,
  }  # fmt: skip
  return load_config(f"attnres_jax:lm:size=micro,residual={residual}", fields)


schemes = "prenorm", "full_attnres", "block_attnres"
trained = colab.race({name: make_config(name) for name in schemes})

# %% [markdown]
# With one seed, small networks and a minute of training, a difference is a hint
# at best. `make demo` trains twelve seeds of each, and writes a report.
#
# ## Look at the depth weights
#
# Rows are transformer blocks and columns are sources. The left panels show what
# attention sublayers read, the right panels what MLPs read. Before training,
# every row is uniform.

# %%
batches = data.open_dataset(make_config("prenorm").data, "validation").batches()
tokens = next(batches)["tokens"][:, :-1]
batches.close()
del trained["prenorm"]  # It has no weights over depth.
plots.depth_weights(
  {name: analysis.depth_weights(m, tokens) for name, m in trained.items()}
)

# %% [markdown]
# ## Next
#
# [depth_attention](https://github.com/attnres-jax/attnres-jax/blob/main/notebooks/depth_attention.ipynb)
# has sliders and your own text; [own_scheme](https://github.com/attnres-jax/attnres-jax/blob/main/notebooks/own_scheme.ipynb)
# adds a residual scheme in fifteen lines.
