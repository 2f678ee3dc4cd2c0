# %% [markdown]
# # A pipeline of Block AttnRes: move P, V and K
#
# In Block AttnRes every sublayer reads all earlier blocks, so a boundary between
# two devices carries a history instead of one hidden state. Section 4.1 of the
# [paper](https://arxiv.org/abs/2603.15031) avoids most of these transfers with a
# cache. Choose a pipeline, and see which rank works on what and what crosses each
# boundary. Nothing is trained; it takes seconds.

# %%
import matplotlib.pyplot as plt

from attnres_jax.common import text_table
from attnres_jax.pipeline import drawing
from attnres_jax.pipeline import layout as layout_lib
from attnres_jax.pipeline import life
from attnres_jax.pipeline import schedule as schedule_lib
from notebooks import colab

# %% [markdown]
# ## Which rank works on what
#
# - P `ranks`: devices in a row;
# - V `virtual_stages`: pieces of the depth per device, so that chunk $c$ of $PV$
#   is on rank $c \bmod P$;
# - K `chunks_per_block`: how many chunks an AttnRes block spans;
# - M: `rounds` times P microbatches.
#
# The first choice is the paper's Fig. 3. Colours are virtual stages, numbers are
# microbatches; light is forward, dark is backward, white is idle. Backward takes
# twice as long as forward.


# %%
def plan(ranks, virtual_stages, chunks_per_block, rounds=2):
  layout = layout_lib.Layout(ranks, virtual_stages, 1, chunks_per_block)
  return layout, schedule_lib.make_schedule(layout, rounds * ranks)


def show_schedule(**choice):
  _, schedule = plan(**choice)
  drawing.draw_schedule(schedule)
  plt.show()
  microbatches = choice["rounds"] * choice["ranks"]
  ideal = (choice["ranks"] - 1) / (choice["virtual_stages"] * microbatches)
  print(f"idle over work time: {schedule.bubble(1, 2):.1%}")
  print(f"ideal, (P - 1) / (V M): {ideal:.1%}")


CHOICE = {
  "ranks": (4, 1, 8), "virtual_stages": (2, 1, 4), "chunks_per_block": (2, 1, 8)
}  # fmt: skip
colab.play(show_schedule, **CHOICE, rounds=(2, 1, 4))

# %% [markdown]
# ## What crosses each boundary
#
# In vectors of [tokens, width] per microbatch in the forward pass; the backward
# pass sends as many gradients the other way. Three rules say what a rank keeps:
# nothing (`naive`, Eq. 7), what it received (`cached`, Eq. 8), or also what it
# computed (`minimum`). The last column is what a program in lockstep sends: each
# message over a link is as large as the largest that a chunk behind it needs.


# %%
def show_transfers(**choice):
  layout, _ = plan(**choice)
  drawing.draw_transfers(layout)
  plt.show()
  header = ["rule", "blocks", "with the embedding", "largest", "on the links"]
  lines = [
    [
      rule,
      layout.total_vectors(rule, embedding=False),
      layout.total_vectors(rule),
      layout.peak_vectors(rule),
      choice["virtual_stages"] * sum(layout.link_vectors(rule)),
    ]
    for rule in layout_lib.RULES
  ]
  print(text_table.table(header, lines))


colab.play(show_transfers, **CHOICE)

# %% [markdown]
# ## The life of a microbatch
#
# `b2@5` is block 2 in slot 5 of the rank's pool, `p` the running sum of an open
# block; `db2` and `dp` are gradients. The forward pass looks up what earlier
# chunks of the same rank stored, so only the missing blocks arrive.


# %%
def show_life(rule, microbatch):
  print(life.life_text(plan(4, 2, 2)[1], microbatch, rule=rule))


colab.play(show_life, rule=["minimum", "cached", "naive"], microbatch=(0, 0, 7))

# %% [markdown]
# The [page on pipelines](https://github.com/attnres-jax/attnres-jax/blob/main/docs/pipeline.md)
# has the command that runs this plan.
