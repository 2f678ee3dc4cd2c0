# %% [markdown]
# # Your own residual scheme in fifteen lines
#
# A residual scheme says what each sublayer reads and where its output goes.
# Training, evaluation, sampling, checkpoints, FLOPs and figures come with it.
# This notebook writes a scheme, checks it, and trains it beside PreNorm, in about
# two minutes on two idle CPU cores.

# %%
from flax import nnx
import jax.numpy as jnp
import numpy as np

from attnres_jax import analysis
from attnres_jax import build_model
from attnres_jax import load_config
from attnres_jax.analysis import plots
from attnres_jax.models import residuals
from attnres_jax.models.residuals import prenorm
from notebooks import colab

# %% [markdown]
# ## Fifteen lines
#
# The idea: a stream that fades. Before sublayer $l$ adds its output, it keeps a
# learned share $a_l$ of the stream, for each channel:
#
# $$h_{l+1} = a_l \odot h_l + v_l$$
#
# `Stream` holds one state, which sublayers read unchanged. `open` hands each
# sublayer its slot, here its row of `share`, and `write` adds its output. All
# shares start at one, so the network starts as PreNorm.


# %%
class Fading(prenorm.Stream):
  """h_{l+1} = a_l h_l + f_l(h_l), with one learned share per channel."""

  style = residuals.Style("Fading", "#c2185b", "D")

  def __init__(self, config, *, rngs):
    super().__init__(config, rngs=rngs)
    ones_LD = jnp.ones((self.num_sublayers, config.width))
    self.share = nnx.Param(ones_LD, axes="LD", decays=False)

  def open(self, state, start, stop):
    return state, self.share[start:stop]

  def write(self, carry, slot, y_BTD):
    return slot[None, None] * carry + y_BTD.astype(carry.dtype)


residuals.RESIDUALS["fading"] = Fading

# %% [markdown]
# The name is now a choice of every config. Both networks start as the same
# function:


# %%
def make_config(residual):
  fields = {
    "model.num_layers": 6, "optim.peak_lr": 4e-3, "train.steps": 300,
    "train.eval_every": 30, "train.eval_batches": 8, "train.depth_every": 0,
  }  # fmt: skip
  return load_config(f"attnres_jax:lm:size=micro,residual={residual}", fields)


schemes = ["prenorm", "fading"]
tokens = np.asarray([list(b"for name in sorted(names):")], np.int32)
first, second = (build_model(make_config(n).model)(tokens) for n in schemes)
print("largest difference of logits:", float(jnp.abs(first - second).max()))

# %% [markdown]
# ## Train it beside PreNorm
#
# Same data in the same order, same initial weights, same rate.

# %%
trained = colab.race({name: make_config(name) for name in schemes})

# %% [markdown]
# One seed and small networks: a difference here is a reason to look closer, no
# more. `experiments/TEMPLATE` makes an experiment of it.
#
# ## What it has learned
#
# The share of the stream that each sublayer keeps, and both schemes as matrices
# over depth: how much of each output $v_i$ reaches each read $h_l$. Most shares
# end above one: this network does not fade its stream, it lets early outputs grow.

# %%
share_LD = np.asarray(trained["fading"].residual.share[...])
labels = {"xlabel": "sublayer", "ylabel": "share kept, over channels"}
with colab.figure(6, 2.6, **labels) as axes:
  axes.boxplot(share_LD.T, showfliers=False)
  axes.axhline(1, color="grey", linewidth=0.8)
plots.mixing_matrices(
  {n: analysis.mixing_matrix(m, tokens) for n, m in trained.items()}
)

# %% [markdown]
# ## Next
#
# To keep a scheme, put its class into a file of `attnres_jax/models/residuals/`
# and its name into `attnres_jax/config/schemes.py`. Tests of all schemes then run on it as well.
