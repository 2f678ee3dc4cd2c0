# %% [markdown]
# # Attention over depth, with sliders
#
# A sublayer of a transformer reads a sum in which every earlier output has the
# same weight. Attention Residuals ([arXiv:2603.15031](https://arxiv.org/abs/2603.15031))
# let it choose. First the problem, then an example small enough to follow every
# number, then a trained network that comes with the library, with your own text.
# One or two minutes on a CPU.

# %%
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

from attnres_jax import load_trained
from attnres_jax.analysis import edited
from attnres_jax.pipeline import schedule
from notebooks import colab

# %% [markdown]
# ## The problem: depth is time, turned by ninety degrees
#
# A recurrent network carries one state along a text, and early words fade.
# Attention solved this: every word reads all earlier words, with weights.
# A residual stream is the same recurrence, along depth. Every layer adds its
# output to one state. Attention Residuals solve it in the same way.


# %%
def draw_path(axes, title, upright, attends):
  """Six steps: an arrow from each to the next, or from each to the last."""
  place = lambda i: (0, i) if upright else (i, 0)
  for i in range(6):
    name = f"$v_{i}$" if upright else f"$x_{i + 1}$"
    axes.annotate(name, place(i), ha="center", va="center",
                  bbox={"boxstyle": "round", "fc": "white"})  # fmt: skip
    curve = (-0.5 if upright else 0.5) if attends else 0
    arrow = {"arrowstyle": "->", "connectionstyle": f"arc3,rad={curve}",
             "shrinkA": 9, "shrinkB": 9}  # fmt: skip
    if i < 5:
      axes.annotate(
        "", place(5 if attends else i + 1), place(i), arrowprops=arrow
      )
  span = (-3.2, 3.2), (-0.6, 5.6)
  axes.set(xlim=span[not upright], ylim=span[upright], title=title)
  axes.axis("off")


figure, panels = plt.subplots(
  1, 4, figsize=(10, 3.4), width_ratios=(2, 1, 2, 1), layout="constrained"
)
draw_path(panels[0], "time: one state", False, False)
draw_path(panels[1], "depth: one sum", True, False)
draw_path(panels[2], "time: attention", False, True)
draw_path(panels[3], "depth: attention", True, True)
plt.show()

# %% [markdown]
# How fast does an output fade? The norm in front of a sublayer divides out the
# length of the sum, so layer $l$ sees the mean of its $l$ sources: each counts
# $1/l$. A new output must grow to be heard.

# %%
depth = np.arange(1, 55)
with colab.figure(6, 2.6, xlabel="layer", ylabel="largest share") as axes:
  axes.plot(depth, 1 / depth, color="#8b929c", label="each output, in a sum")
  axes.axhline(1, color="#1f77b4", label="one output, chosen by a softmax")
  axes.set_ylim(0, 1.1)

# %% [markdown]
# ## A worked example
#
# Four tokens, vectors of eight numbers, six layers. Embeddings have length 1,
# and every layer returns a vector of length 0.4. `size` is the number of layers
# in a block; `size=1` is Full AttnRes. All layers attend, not only the first of
# a block, and the running sum of a block starts from zero.

# %%
words = ["The", "cat", "sat", "down"]
rng = np.random.default_rng(2)
embedding = rng.standard_normal((4, 8))
embedding /= np.linalg.norm(embedding, axis=1, keepdims=True)
layers = rng.standard_normal((24, 8, 8))
queries = 0.5 * rng.standard_normal((24, 8))


def rms_norm(x):
  return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True))


def layer(l, h):
  y = np.tanh(rms_norm(h) @ layers[l])
  return 0.4 * y / np.linalg.norm(y, axis=-1, keepdims=True)


def softmax(scores):
  weights = np.exp(scores - scores.max(axis=0))
  return weights / weights.sum(axis=0)


def mix(query, sources):
  """Keys are normalised, values are not."""
  weights = softmax(rms_norm(np.stack(sources)) @ query)
  return np.einsum("mt,mtd->td", weights, np.stack(sources)), weights


def attend(depth, size):
  """Reads, weights and sources of every layer."""
  blocks, partial, steps = [embedding], None, []
  for l in range(depth):
    sources = blocks if partial is None else [*blocks, partial]
    steps.append((*mix(queries[l], sources), sources))
    y = layer(l, steps[-1][0])
    partial = y if partial is None else partial + y
    if (l + 1) % size == 0:
      blocks, partial = [*blocks, partial], None
  return steps


def draw_weights(weights, title):
  with colab.figure(6.5, 2.8, title=title, ylabel="weight") as axes:
    for i, row in enumerate(weights):
      name = "embedding" if i == 0 else f"layer {i}"
      axes.bar(words, row, 0.7, weights[:i].sum(axis=0), label=name)
    axes.set_xlim(-0.5, 5.5)  # Leaves room for the legend.


summed = [embedding]
for l in range(5):
  summed.append(summed[-1] + layer(l, summed[-1]))
full, block = ([read for read, *_ in attend(6, size)] for size in (1, 3))
with colab.figure(6, 2.6, xlabel="layer", ylabel="length of its read") as axes:
  for name, reads in (("sum", summed), ("Full", full), ("Block of 3", block)):
    lengths = np.linalg.norm(reads, axis=-1).mean(axis=-1)
    axes.plot(range(1, 7), lengths, "o-", label=name)
draw_weights(attend(6, 1)[3][1], "Full: what layer 4 reads")

# %% [markdown]
# A sum tends to grow with depth. A read of Full AttnRes is a weighted mean, so
# it is never longer than its longest source.
#
# ### Three things to keep apart
#
# | not | but (arXiv:2603.15031) |
# |---|---|
# | layers attend at the start of a block only | every layer attends; the running sum is one more source (Alg. 1) |
# | normalised sources are mixed | keys are normalised; values keep their length (Eq. 2-4) |
# | early layers of a residual stream get too little gradient | they get the most (Fig. 5c) |
#
# ### Turn the pseudo-query
#
# `turn` moves the query of layer 4 from its random start to the direction of one
# source. `temperature` divides the scores: high is a plain mean, low is a choice.


# %%
def turn_query(source, turn, temperature):
  sources = attend(6, 1)[3][2]
  key = rms_norm(sources[source]).mean(0)
  target = 4 * key / np.linalg.norm(key)
  query = ((1 - turn) * queries[3] + turn * target) / temperature
  draw_weights(mix(query, sources)[1], f"layer 4, turned to source {source}")


colab.play(
  turn_query, source=(2, 0, 3), turn=(0.3, 0.0, 1.0),
  temperature=(1.0, 0.1, 4.0),
)  # fmt: skip

# %% [markdown]
# ### Change depth and block size
#
# A row is a layer, a column an output. Outputs of one block share one weight, so
# larger blocks make coarser columns and fewer sources.


# %%
def change_blocks(depth, size):
  size = min(size, depth)
  matrix = np.full((depth, depth), np.nan)
  for l, (_, weights, sources) in enumerate(attend(depth, size)):
    for i in range(l + 1):
      matrix[l, i] = weights[min(-(-i // size), len(sources) - 1)].mean()
  title = f"{len(sources)} sources in the last read"
  with colab.figure(
    5, 3.4, title=title, xlabel="output (0: embedding)"
  ) as axes:
    shown = axes.imshow(matrix, vmin=0, vmax=1, cmap="viridis")
    axes.set_ylabel("layer, from 0")
    axes.figure.colorbar(shown, label="mean weight")


colab.play(change_blocks, depth=(12, 2, 24), size=(3, 1, 24))

# %% [markdown]
# ### In a pipeline
#
# Blocks are also what a pipeline has to send (the paper's Fig. 3). Here four
# ranks have two virtual stages each. A number is a microbatch: blue on its way
# forward, orange backward, dark through the second stage of a rank.

# %%
layout = schedule.Layout(4, 2, sublayers_per_chunk=2, block_size=4)
plan = schedule.make_schedule(layout, num_microbatches=8)
with colab.figure(
  9, 3, xlabel="tick", title="which rank works on what"
) as axes:
  for tick, rank in np.ndindex(plan.num_ticks, layout.num_ranks):
    for row, unit in enumerate(plan.at(tick, rank)):
      if unit:
        place = rank + 0.4 * row
        shade = 0.45 + 0.35 * layout.virtual_stage(unit.chunk)
        color = (plt.cm.Blues, plt.cm.Oranges)[row](shade)
        axes.barh(place, 1, 0.4, tick, color=color, edgecolor="white")
        axes.text(tick + 0.5, place, unit.microbatch, ha="center", va="center")
  axes.set_yticks(np.arange(4) + 0.2, [f"rank {rank}" for rank in range(4)])
  axes.invert_yaxis()
for rule in schedule.RULES:
  print(f"{rule}: {layout.total_vectors(rule)} blocks sent per microbatch")

# %% [markdown]
# ## In a trained network
#
# A byte-level network of sixteen sublayers with Full AttnRes comes with the
# library. It was trained on the standard library of Python.

# %%
model = load_trained("full_attnres")
labels = model.residual.source_labels()
READOUT = len(labels)
print(f"{READOUT} reads; the last one goes to the head")

# %% [markdown]
# ### Your own text
#
# A column is a byte, a row a source of one read. A bright cell has most of the
# weight of its column.


# %%
@jax.jit
def trace(model, tokens_BT):
  """Values [M, B, T, D], and weights [read, M, B, T] with zeros behind."""
  values = model.trace(tokens_BT).values
  pad = lambda w: jnp.pad(w, ((0, len(values) - len(w)), (0, 0), (0, 0)))
  weights = model.residual.depth_weights(values)
  return jnp.stack(values), jnp.stack([pad(weight) for weight in weights])


encode = lambda text: np.asarray([list(text.encode())], np.int32)
TEXT = "def mean(values):\n  return sum(values) / len("


def show_read(text, read):
  names = labels[read - 1]
  weights_MT = trace(model, encode(text))[1][read - 1, : len(names), 0]
  title = "the readout" if read == READOUT else f"what sublayer {read} reads"
  marks = [chr(b) if 32 < b < 127 else "·" for b in text.encode()]
  with colab.figure(10, 2.6, title=title) as axes:
    shown = axes.imshow(weights_MT, aspect="auto", vmin=0, vmax=1, cmap="magma")
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.set_xticks(range(len(marks)), marks)
    axes.figure.colorbar(shown, label="weight")


colab.play(show_read, text=TEXT, read=(6, 1, READOUT))

# %% [markdown]
# ### Knock a source out
#
# One source is taken out of one read, and everything after it is computed again.
# Bars are the most likely next characters, before and after. A large weight does
# not always mean that the network needs the source: compare the two figures.


# %%
@jax.jit
def next_of(model, tokens_BT, read, source):
  """Probabilities [V] of the next token, before and after."""
  values, weights = trace(model, tokens_BT)
  removed_BTD = weights[read, source][..., None] * values[source]
  cut = edited.Edited(
    model.residual,
    read=lambda l, h: h - (l == read) * removed_BTD,
    readout=lambda h: h - (read == len(weights) - 1) * removed_BTD,
  )
  schemes = model.residual, cut
  last = [edited.logits(model, scheme, tokens_BT)[0, -1] for scheme in schemes]
  return [jax.nn.softmax(logits) for logits in last]


def knock_out(text, read, source):
  names = labels[read - 1]
  if source >= len(names):
    print(f"read {read} has only {len(names)} sources: {', '.join(names)}")
    return
  before, after = next_of(model, encode(text), read - 1, source)
  top = np.argsort(-np.maximum(before, after))[:8]
  title = f"next character, read {read} without {names[source]}"
  with colab.figure(6.5, 2.6, title=title) as axes:
    for shift, values, name in (
      (-0.2, before, "before"),
      (0.2, after, "after"),
    ):
      bars = axes.bar(
        np.arange(len(top)) + shift, values[top], 0.38, label=name
      )
      axes.bar_label(bars, fmt="%.3f", fontsize=7)
    axes.set_xticks(range(len(top)), [repr(chr(token)) for token in top])
    axes.margins(y=0.15)


colab.play(
  knock_out, text=TEXT, read=(2, 1, READOUT), source=(0, 0, READOUT - 1)
)
