# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
#   outputs: true
# ---

# %% [markdown]
# # A pipeline of Block AttnRes: move P, V and K
#
# [![Open In Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/attnres-jax/attnres-jax/blob/main/notebooks/pipeline.ipynb)
#
# In Block AttnRes every sublayer reads all earlier blocks, so a boundary
# between two devices carries a history instead of one hidden state. Section 4.1
# of the [paper](https://arxiv.org/abs/2603.15031) avoids most of these
# transfers with a cache. Choose a pipeline below and rerun the cells after it
# to see which rank works on what, what crosses each boundary, and what a device
# holds. Nothing is trained, no device is needed, and it takes a few seconds.

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
import matplotlib.pyplot as plt

from attnres_jax.common import text_table
from attnres_jax.pipeline import drawing
from attnres_jax.pipeline import layout as layout_lib
from attnres_jax.pipeline import life
from attnres_jax.pipeline import schedule as schedule_lib

# %% [markdown]
# ## Choose a pipeline
#
# - P `ranks`: devices in a row;
# - V `virtual_stages`: chunks of the depth per device, one turn of the ring
#   apart, so that chunk $c$ of $PV$ is on rank $c \bmod P$;
# - K `chunks_per_block`: how many chunks an AttnRes block spans;
# - M `microbatches`: a multiple of P.
#
# The default is the paper's Fig. 3.

# %%
ranks = 4  # @param {type: "slider", min: 1, max: 16}
virtual_stages = 2  # @param {type: "slider", min: 1, max: 8}
chunks_per_block = 2  # @param {type: "slider", min: 1, max: 8}
microbatches = 8  # @param {type: "integer"}

layout = layout_lib.Layout(ranks, virtual_stages, 1, chunks_per_block)
schedule = schedule_lib.make_schedule(layout, microbatches)
print(
  f"{layout.num_chunks} chunks, {layout.num_blocks} blocks and the embedding,"
  f" {schedule.num_ticks} ticks"
)

# %% [markdown]
# ## Which rank works on what
#
# Backward takes twice as long as forward. Colours are virtual stages, numbers are
# microbatches; light is forward, dark is backward, white is idle. All ranks start
# a tick together, as in one compiled program.

# %%
drawing.draw_schedule(schedule)
plt.show()

# %% [markdown]
# Idle time over work time, and how many units (chunks of microbatches) wait for
# their backward pass on the fullest rank. `experiments/pipeline_cost` compares
# this order with others, in lockstep and running freely.

# %%
ideal = (ranks - 1) / (virtual_stages * microbatches)
units = max(schedule.peaks(rank).units for rank in range(ranks))
print(f"bubble {schedule.bubble(1, 2):.1%}, ideal (P - 1) / (V M) {ideal:.1%}")
print(f"units in flight: {units}")

# %% [markdown]
# ## What crosses each boundary
#
# In vectors of [tokens, width] per microbatch in the forward pass; the backward
# pass sends as many gradients the other way. Three rules say what a rank keeps:
# nothing (`naive`, Eq. 7), what it received (`cached`, Eq. 8), or also what it
# computed (`minimum`).

# %%
drawing.draw_transfers(layout)
plt.show()

# %%
formulas = {
  "naive": layout_lib.naive_total,
  "cached": layout_lib.cached_total,
  "minimum": layout_lib.minimum_total,
}
header = ["rule", "formula", "blocks", "and b0", "largest", "on the links"]
table = []
for rule, formula in formulas.items():
  table.append(
    [
      rule,
      f"{formula(ranks, virtual_stages, 1 / chunks_per_block):g}",
      layout.total_vectors(rule, embedding=False),
      layout.total_vectors(rule),
      layout.peak_vectors(rule),
      virtual_stages * sum(layout.link_vectors(rule)),
    ]
  )
print(text_table.table(header, table))
print(f"\nrunning sums of open blocks: {layout.total_partials()} more")

# %% [markdown]
# The last column is what a program in lockstep sends: at every tick, the
# message over a link is as large as the largest that any chunk behind it needs.
#
# ## The life of a microbatch
#
# `b2@5` is block 2 in slot 5 of the rank's pool, `p` the running sum of an open
# block; `db2` and `dp` are gradients. The forward pass looks up what earlier
# chunks of the same rank stored, so only the missing blocks arrive.

# %%
rule = "minimum"  # @param ["naive", "cached", "minimum"]
microbatch = 0  # @param {type: "integer"}

print(life.life_text(schedule, microbatch, rule=rule))

# %% [markdown]
# ## What a rank holds
#
# The schedule knows when a vector is first and last needed, so slots are
# assigned before anything runs. The pool is as large as the maximum number of
# live vectors; a ring buffer of 2P microbatches with all blocks would be as
# large as the dotted line.

# %%
figure, axes = plt.subplots(figsize=(8, 3.2), layout="constrained")
kinds = ("inputs", "blocks", "gradients")
for i, (name, colour) in enumerate(
  zip(layout_lib.RULES, ("#c7c7c7", "#1f77b4", "#2ca02c"))
):
  sizes = [schedule.slot_pool(kind, rule=name).size for kind in kinds]
  bars = axes.bar(
    [j + 0.27 * (i - 1) for j in range(3)],
    sizes,
    0.25,
    color=colour,
    label=name,
  )
  axes.bar_label(bars, fontsize=8)
ring = 2 * ranks * (layout.num_blocks + 1)
axes.axhline(ring, color="black", linestyle=":", linewidth=1)
axes.set_xticks(range(3), ["running sums", "blocks", "gradients of blocks"])
axes.set_ylabel("slots of a rank")
axes.legend(frameon=False, fontsize=8)
axes.spines[["top", "right"]].set_visible(False)
plt.show()

# %% [markdown]
# It does not depend on the number of microbatches:

# %%
figure, axes = plt.subplots(figsize=(8, 3.2), layout="constrained")
counts = [ranks * n for n in (1, 2, 4, 8)]
for kind in kinds:
  sizes = [
    schedule_lib.make_schedule(layout, count).slot_pool(kind).size
    for count in counts
  ]
  axes.plot(counts, sizes, "o-", label=kind)
axes.set_xlabel("microbatches")
axes.set_ylabel("slots of a rank")
axes.set_xticks(counts)
axes.set_ylim(0)
axes.legend(frameon=False, fontsize=8)
axes.spines[["top", "right"]].set_visible(False)
plt.show()

# %% [markdown]
# ## Run it
#
# ```
# JAX_NUM_CPU_DEVICES=8 python -m attnres_jax.main \
#   --config=configs/pipeline.py:size=micro --workdir=runs/pipeline \
#   --config.mesh.stage=4 --config.pipeline.virtual_stages=2 \
#   --config.pipeline.microbatches=16 --config.data.batch_size=32
# ```
#
# `docs/pipeline.md` explains the program that executes these plans;
# `experiments/pipeline_cost` measures it.
