# %% [markdown]
# # Your own residual scheme in fifteen lines
#
# A residual scheme says what each sublayer reads and where its output goes.
# Training, evaluation, sampling, checkpoints, FLOPs and figures come with it.
# This notebook writes a scheme, checks it, and trains it beside PreNorm. The
# training takes about two minutes on two idle CPU cores. (Other programs shared
# the machine that made the outputs below.)

# %%
import contextlib
import io
import tempfile
import time

from flax import nnx
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

from attnres_jax import analysis
from attnres_jax import config as config_lib
from attnres_jax import models
from attnres_jax.analysis import figures
from attnres_jax.analysis import plots
from attnres_jax.models import residuals
from attnres_jax.models.residuals import prenorm
from attnres_jax.train import checkpoint
from attnres_jax.train import loop
from attnres_jax.train import metrics

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
  fields = config_lib.default_config().to_dict()
  fields["model"] |= {"width": 64, "num_layers": 6, "num_heads": 2}
  fields["model"] |= {"mlp_width": 160, "residual": {"name": residual}}
  fields["data"] |= {"sequence_length": 128, "batch_size": 8}
  fields["optim"] |= {"peak_lr": 4e-3, "warmup_steps": 20}
  fields["train"] |= {"steps": 300, "eval_every": 30, "eval_batches": 8}
  fields["train"] |= {"depth_every": 0}
  return config_lib.build_run_config(fields)


schemes = ["prenorm", "fading"]
tokens = np.asarray([list(b"for name in sorted(names):")], np.int32)
both = [models.build_model(make_config(name).model) for name in schemes]
apart = both[1](tokens) - both[0](tokens)
print("largest difference of logits:", float(jnp.abs(apart).max()))

# %% [markdown]
# ## Train it beside PreNorm
#
# Same data in the same order, same initial weights, same rate.

# %%
folder = tempfile.mkdtemp(prefix="attnres_")
start = time.perf_counter()
figure, axes = plt.subplots(figsize=(6, 3), layout="constrained")
for name in schemes:
  with contextlib.redirect_stdout(io.StringIO()):  # hides the progress lines
    loop.train_and_evaluate(make_config(name), f"{folder}/{name}")
  rows = metrics.read_rows(f"{folder}/{name}", "validation")
  steps, losses = zip(*((row["step"], row["loss"]) for row in rows))
  look = figures.style_of(name)
  axes.plot(steps, losses, "o", ls="-", label=figures.name_of(name), ms=3, **{
    k: v for k, v in look.items() if k != "linestyle"})  # fmt: skip
  print(f"{figures.name_of(name):10} validation loss {losses[-1]:.3f}")
print(f"{time.perf_counter() - start:.0f} s")
axes.set(xlabel="step", ylabel="validation loss, nats per byte")
axes.legend(frameon=False)
figures.style(axes)
plt.show()

# %% [markdown]
# One seed and small networks: a difference here is a reason to look closer, no
# more. `experiments/TEMPLATE` makes an experiment with several seeds of it.
#
# ## What it has learned
#
# The share of the stream that each sublayer keeps, and both schemes as matrices
# over depth: how much of each output $v_i$ reaches each read $h_l$. Most shares
# end above one: this network does not fade its stream, it lets early outputs grow.

# %%
trained = {n: checkpoint.load_model(f"{folder}/{n}")[1] for n in schemes}
share_LD = np.asarray(trained["fading"].residual.share[...])
figure, axes = plt.subplots(figsize=(6, 2.6), layout="constrained")
axes.boxplot(share_LD.T, showfliers=False)
axes.axhline(1, color="grey", linewidth=0.8)
axes.set(xlabel="sublayer", ylabel="share kept, over channels")
figures.style(axes)
plt.show()
plots.mixing_matrices(
  {n: analysis.mixing_matrix(m, tokens) for n, m in trained.items()}
)

# %% [markdown]
# ## Next
#
# To keep a scheme, put its class into a file of `attnres_jax/models/residuals/`
# and its name into `RESIDUALS`. Tests of all schemes (causality, checkpoints,
# decoding, scan against loop) then run on it as well.
