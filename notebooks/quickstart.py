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
# on two idle CPU cores. (Many programs shared the two cores that made the outputs
# below.)

# %%
import contextlib
import io
import tempfile
import time

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt

from attnres_jax import analysis
from attnres_jax import config as config_lib
from attnres_jax import data
from attnres_jax import models
from attnres_jax.analysis import figures
from attnres_jax.analysis import plots
from attnres_jax.train import checkpoint
from attnres_jax.train import loop
from attnres_jax.train import metrics
import attnres_kernels

# %% [markdown]
# ## The operator
#
# `depth_attention` mixes sources token by token. A zero query gives their mean,
# which is how every network starts. A large query along one source selects it.

# %%
sources = jax.random.normal(jax.random.key(0), (3, 1, 4, 8))  # M, B, T, D
queries = jnp.stack([jnp.zeros(8), 30.0 * sources[1, 0, 0]])  # Q, D
mixed, _ = attnres_kernels.depth_attention(queries, list(sources))
gap = lambda a, b: float(jnp.abs(a - b).max())
print(
  f"zero query, distance from the mean: {gap(mixed[0], sources.mean(0)):.0e}"
)
apart = gap(mixed[1, 0, 0], sources[1, 0, 0])
print(f"sharp query at token 0, distance from source 1: {apart:.0e}")

# %% [markdown]
# ## Build and train
#
# A residual scheme is a name in the configuration. The rest of the network, its
# initial weights and the order of the data stay the same. The text is one that
# every machine has: the standard library of the running Python.


# %%
def make_config(residual, steps=120):
  fields = config_lib.default_config().to_dict()
  fields["model"] |= {"width": 64, "num_layers": 4, "num_heads": 2}
  fields["model"] |= {"mlp_width": 160}
  fields["model"]["residual"] = {"name": residual, "num_blocks": 4}
  fields["data"] |= {"sequence_length": 128, "batch_size": 8}
  fields["optim"] |= {"peak_lr": 4e-3, "warmup_steps": 10}
  fields["train"] |= {"steps": steps, "eval_every": 20, "eval_batches": 8}
  fields["train"] |= {"depth_every": 0}
  return config_lib.build_run_config(fields)


schemes = ["prenorm", "full_attnres", "block_attnres"]
folder = tempfile.mkdtemp(prefix="attnres_")
start = time.perf_counter()
figure, axes = plt.subplots(figsize=(6, 3), layout="constrained")
for name in schemes:
  model = models.build_model(make_config(name).model)
  count = sum(leaf.size for leaf in jax.tree.leaves(model))
  with contextlib.redirect_stdout(io.StringIO()):  # hides the progress lines
    summary = loop.train_and_evaluate(make_config(name), f"{folder}/{name}")
  rows = metrics.read_rows(f"{folder}/{name}", "validation")
  steps, losses = zip(*((row["step"], row["loss"]) for row in rows))
  label, look = figures.name_of(name), figures.style_of(name)
  axes.plot(steps, losses, marker="o", markersize=3, label=label, **look)
  print(
    f"{label:15} {count:,} parameters, validation loss"
    f" {losses[-1]:.3f} nats per byte after {summary['seconds']:.0f} s"
  )
print(f"{time.perf_counter() - start:.0f} s in all")
axes.set(xlabel="step", ylabel="validation loss, nats per byte")
axes.legend(frameon=False)
figures.style(axes)
plt.show()

# %% [markdown]
# With one seed, small networks and a minute of training, a difference is a hint
# at best. `make demo` trains longer, with two seeds, and writes a report.
#
# ## Look at the depth weights
#
# Rows are transformer blocks and columns are sources. The left panels show what
# attention sublayers read, the right panels what MLPs read. Before training,
# every row is uniform.

# %%
trained = {n: checkpoint.load_model(f"{folder}/{n}")[1] for n in schemes}
batches = data.open_dataset(make_config("prenorm").data, "validation").batches()
tokens = next(batches)["tokens"][:, :-1]
batches.close()
plots.depth_weights(
  {n: analysis.depth_weights(trained[n], tokens) for n in schemes[1:]}
)

# %% [markdown]
# ## Next
#
# [depth_attention](https://github.com/attnres-jax/attnres-jax/blob/main/notebooks/depth_attention.ipynb)
# has sliders and your own text; [own_scheme](https://github.com/attnres-jax/attnres-jax/blob/main/notebooks/own_scheme.ipynb)
# adds a residual scheme in fifteen lines.
