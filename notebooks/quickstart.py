# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   outputs: true
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Attention Residuals in five minutes
#
# [![Open In Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/attnres-jax/attnres-jax/blob/main/notebooks/quickstart.ipynb)
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
# variant attends over sums of a few sublayers instead, which costs little.
#
# This notebook builds, trains and compares networks, and looks inside them. It
# takes two or three minutes on a CPU.

# %%
# Where the library is missing, as on Colab: finds CPU, GPU or TPU, and installs
# what fits. It says so if the session has to be restarted.
import pathlib
import urllib.request

here = pathlib.Path("notebooks/colab.py").exists()
if not here and not pathlib.Path("colab.py").exists():
  source = "https://raw.githubusercontent.com/attnres-jax/attnres-jax/main"
  urllib.request.urlretrieve(f"{source}/notebooks/colab.py", "colab.py")
if here:
  from notebooks import colab
else:
  import colab

colab.prepare("plots")

# %%
import contextlib
import dataclasses
import io
import tempfile

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

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

print("jax", jax.__version__, "on", jax.devices())

# %% [markdown]
# ## The operator
#
# `depth_attention` mixes sources per token. A zero query gives their mean,
# which is how every network starts; a large query along one source selects that
# source.

# %%
sources = jax.random.normal(jax.random.key(0), (3, 1, 4, 8))  # M, B, T, D
queries = jnp.stack([jnp.zeros(8), 30.0 * sources[1, 0, 0]])  # Q, D
mixed, lse = attnres_kernels.depth_attention(queries, list(sources))

print("zero query, distance from the mean:")
print(float(jnp.abs(mixed[0] - sources.mean(0)).max()))
print("sharp query at token 0, distance from source 1:")
print(float(jnp.abs(mixed[1, 0, 0] - sources[1, 0, 0]).max()))

# %% [markdown]
# ## Build
#
# A residual scheme is a name in the configuration. The rest of the network and
# its initial weights stay the same.


# %%
def make_config(residual, steps=120):
  fields = config_lib.default_config().to_dict()
  fields["model"] |= {
    "width": 64,
    "num_layers": 4,
    "num_heads": 2,
    "mlp_width": 160,
    "residual": {"name": residual, "num_blocks": 4},
  }
  fields["data"] |= {"sequence_length": 128, "batch_size": 8}
  fields["optim"] |= {"peak_lr": 4e-3, "warmup_steps": 10}
  fields["train"] |= {
    "steps": steps,
    "eval_every": steps // 4,
    "depth_every": 0,
  }
  return config_lib.build_run_config(fields)


schemes = ["prenorm", "full_attnres", "block_attnres"]
networks = {
  name: models.build_model(make_config(name).model) for name in schemes
}
for name, model in networks.items():
  count = sum(leaf.size for leaf in jax.tree.leaves(model))
  print(f"{figures.name_of(name):15} {count:,} parameters")

# %% [markdown]
# Before training, all three are the same function. Zero queries average what
# PreNorm adds up, and the norm in front of each sublayer removes the constant
# factor between the two. (Only the epsilon of the norm makes a difference,
# because states are small at the start; here we make it even smaller.) So a
# trained PreNorm network can be turned into an AttnRes network without losing
# anything.

# %%
tokens = np.asarray([list(b"for name in sorted(names):")], np.int32)
logits = {}
for name in schemes:
  config = dataclasses.replace(make_config(name).model, norm_eps=1e-12)
  logits[name] = models.build_model(config)(tokens)
largest = float(jnp.abs(logits["prenorm"]).max())
for name in schemes[1:]:
  apart = float(jnp.abs(logits[name] - logits["prenorm"]).max()) / largest
  print(
    f"{figures.name_of(name):15} differs by {apart:.0e} of the largest logit"
  )

# %% [markdown]
# ## Train
#
# The text is one that every machine has: the standard library of the running
# Python. `train_and_evaluate` is what `python -m attnres_jax.main` calls; if
# you stop it, rerun the cell to resume.

# %%
folder = tempfile.mkdtemp(prefix="attnres_")
for name in schemes:
  with contextlib.redirect_stdout(io.StringIO()):  # hides the progress lines
    summary = loop.train_and_evaluate(make_config(name), f"{folder}/{name}")
  print(
    f"{figures.name_of(name):15} validation loss"
    f" {summary['validation_loss']:.3f} nats per byte"
    f" after {summary['seconds']:.0f} s"
  )

# %% [markdown]
# ## Compare

# %%
figure, axes = plt.subplots(figsize=(6, 3.2))
for name in schemes:
  rows = metrics.read_rows(f"{folder}/{name}", "validation")
  steps, losses = zip(*((row["step"], row["loss"]) for row in rows))
  look = figures.style_of(name)
  axes.plot(steps, losses, marker="o", label=figures.name_of(name), **look)
axes.set_xlabel("step")
axes.set_ylabel("validation loss, nats per byte")
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
trained = {}
for name in schemes:
  _, trained[name] = checkpoint.load_model(f"{folder}/{name}")
batches = data.open_dataset(make_config("prenorm").data, "validation").batches()
tokens = next(batches)["tokens"][:, :-1]
batches.close()

plots.depth_weights(
  {
    name: analysis.depth_weights(trained[name], tokens)
    for name in ("full_attnres", "block_attnres")
  }
)

# %% [markdown]
# The same as a matrix over *all* values, for any scheme: how much of every
# $v_i$ reaches every $h_l$. PreNorm is all ones below the diagonal; in a Block
# matrix, the values of one block share their weight.

# %%
plots.mixing_matrices(
  {
    name: analysis.mixing_matrix(trained[name], tokens, include_output=True)
    for name in schemes
  }
)

# %% [markdown]
# ## Next
#
# - `make demo`: four schemes, two seeds, a report with plots.
# - `python -m attnres_jax.main --config=configs/lm.py:size=tiny,residual=block_attnres --workdir=runs/tiny`:
#   a run of your own.
# - `docs/architecture.md`: where everything is, and how to add a scheme.
