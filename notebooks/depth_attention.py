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
# # What attention over depth does, by hand and in a trained network
#
# [![Open In Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/attnres-jax/attnres-jax/blob/main/notebooks/depth_attention.ipynb)
#
# First an example small enough to follow every number. Then a network that was
# just trained, with your own text: which source does each token read, and what
# happens to the loss if it cannot? Two or three minutes on a CPU.

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

# %% [markdown]
# ## By hand
#
# Four tokens, vectors of eight numbers, six layers in two blocks of three. The
# embeddings have length 1, and every layer returns a vector of length about
# 0.4.

# %%
words = ["The", "cat", "sat", "down"]
rng = np.random.default_rng(2)
embedding = rng.standard_normal((4, 8))
embedding /= np.linalg.norm(embedding, axis=1, keepdims=True)
layers = rng.standard_normal((6, 8, 8))


def rms_norm(x):
  return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True))


def layer(l, h):
  y = np.tanh(rms_norm(h) @ layers[l])
  return 0.4 * y / np.linalg.norm(y, axis=-1, keepdims=True)


def softmax(scores):
  weights = np.exp(scores - scores.max(axis=0))
  return weights / weights.sum(axis=0)


def mix(query, sources):
  """Scores of normalised keys; the values themselves are not normalised."""
  sources = np.stack(sources)
  weights = softmax(rms_norm(sources) @ query)
  return np.einsum("mt,mtd->td", weights, sources), weights


# %% [markdown]
# A softmax over four sources, as in the fourth layer: scores of 0.2, 0.8, 1.5
# and 0.6 become weights of 0.125, 0.228, 0.460 and 0.187.

# %%
print(np.round(softmax(np.asarray([0.2, 0.8, 1.5, 0.6])), 4))

# %% [markdown]
# Now the whole depth, three times. In a plain sum, the state tends to grow
# with every layer. Full AttnRes mixes all earlier outputs with weights that sum
# to 1, so a read is never longer than the longest source. Block AttnRes mixes
# the embedding, the sums of completed blocks and the sum so far of its own
# block, which starts from zero at each block. *Every* layer attends, not only
# those at a block's boundary.

# %%
queries = 0.5 * rng.standard_normal((6, 8))


def plain():
  state, reads = embedding, []
  for l in range(6):
    reads.append(state)
    state = state + layer(l, state)
  return reads, None


def full():
  values, reads, weights = [embedding], [], []
  for l in range(6):
    h, weight = mix(queries[l], values)
    reads.append(h)
    weights.append(weight)
    values.append(layer(l, h))
  return reads, weights


def block(size=3):
  blocks, partial, reads, weights = [embedding], None, [], []
  for l in range(6):
    sources = blocks if partial is None else [*blocks, partial]
    h, weight = mix(queries[l], sources)
    reads.append(h)
    weights.append(weight)
    y = layer(l, h)
    partial = y if partial is None else partial + y
    if (l + 1) % size == 0:
      blocks, partial = [*blocks, partial], None
  return reads, weights


print("mean length of what each layer reads")
for name, run in [("plain sum", plain), ("full", full), ("block", block)]:
  lengths = [np.linalg.norm(h, axis=1).mean() for h in run()[0]]
  print(f"{name:10}", *(f"{length:.2f}" for length in lengths))

print("\nweights of the fourth layer (full): a row per source")
_, weights = full()
print(" " * 10, *(f"{word:>6}" for word in words))
for i, row in enumerate(weights[3]):
  source = "embedding" if i == 0 else f"layer {i}"
  print(f"{source:10}", *(f"{weight:6.3f}" for weight in row))

# %% [markdown]
# ## In a trained network
#
# A byte-level network of eight sublayers, trained for about a minute on the
# standard library of the running Python.


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
  fields["train"] |= {"steps": steps, "eval_every": steps, "depth_every": 0}
  return config_lib.build_run_config(fields)


config = make_config("full_attnres")
folder = tempfile.mkdtemp(prefix="attnres_")
with contextlib.redirect_stdout(io.StringIO()):  # hides the progress lines
  summary = loop.train_and_evaluate(config, folder)
_, model = checkpoint.load_model(folder)
print(f"validation loss {summary['validation_loss']:.3f} nats per byte")

# %% [markdown]
# Change the text and rerun the cell. Each panel is one read; a column is a
# character, a row a source. Weights are those of this text, per token, not
# means.

# %%
TEXT = "def mean(values):\n  return sum(values) / len(values)"

tokenizer = data.make_tokenizer(config.data)
tokens = np.asarray([tokenizer.encode(TEXT)], np.int32)


@jax.jit
def weights_of(model, tokens):
  """Weights [sources, tokens] of each read."""
  found = model.residual.depth_weights(model.trace(tokens).values)
  return [weights[:, 0] for weights in found]


found, labels = weights_of(model, tokens), model.residual.source_labels()
shown = [2, 5, len(found) - 1]
figure, panels = plt.subplots(len(shown), 1, figsize=(10, 6.4))
for axes, l in zip(panels, shown):
  axes.imshow(found[l], aspect="auto", vmin=0, vmax=1, cmap="viridis")
  axes.set_yticks(range(len(labels[l])), labels[l], fontsize=8)
  axes.set_xticks(range(len(TEXT)), [c.strip() or "·" for c in TEXT])
  what = "the readout" if l == len(found) - 1 else f"sublayer {l + 1}"
  axes.set_title(f"what {what} reads", fontsize=10)
figure.tight_layout()
plt.show()

# %% [markdown]
# ## Does a large weight mean that a source matters?
#
# `source_removal` takes one source out of one read, computes the rest of the
# network again, and measures the loss. A point is a (read, source) pair. With a
# network this small and one batch, take it as an example of the method.

# %%
batches = data.open_dataset(config.data, "validation").batches()
batch = next(batches)["tokens"][:4]
batches.close()

removal = analysis.source_removal(model, batch)
exists = ~np.isnan(removal.importance)
figure, axes = plt.subplots(figsize=(5, 3.4))
axes.scatter(removal.weights[exists], removal.importance[exists], s=14)
axes.axhline(0, color="grey", linewidth=0.8)
axes.set_yscale("symlog", linthresh=0.01)
axes.set_xlabel("mean weight")
axes.set_ylabel("change of the loss, nats")
axes.set_title("remove a source from a read")
figures.style(axes)
plt.show()

# %% [markdown]
# ## Every scheme is a matrix over depth
#
# How much of each output $v_i$ reaches each read $h_l$. The schemes start
# alike or trivial, so their parameters are moved at random here. Add any name
# of `attnres_jax.models.residuals.RESIDUALS`; all of them are on [one
# page](https://github.com/attnres-jax/attnres-jax/tree/main/experiments/residual_zoo).

# %%
SCHEMES = [
  "prenorm", "rescaled", "layerscale", "highway_scalar",
  "hyper_connections", "mhc", "denseformer", "mudd",
  "full_attnres", "block_attnres", "delta_attnres", "linear_attnres",
]  # fmt: skip


def matrix(scheme):
  residual = config_lib.ResidualConfig(name=scheme, block_size=2)
  network = models.build_model(
    dataclasses.replace(config.model, width=32, residual=residual)
  )
  rng = np.random.default_rng(1)
  network.residual = jax.tree.map(
    lambda a: a + 0.3 * rng.standard_normal(a.shape).astype(a.dtype),
    network.residual,
  )
  return analysis.mixing_matrix(network, tokens, norms=True)


plots.mixing_matrices({name: matrix(name) for name in SCHEMES}, columns=4)
