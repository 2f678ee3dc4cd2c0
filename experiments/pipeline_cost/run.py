# SPDX-License-Identifier: Apache-2.0
"""What a pipeline sends and how long it idles, counted in its plan.

  python -m experiments.pipeline_cost.run

Counts the plans of `attnres_jax.pipeline`, which takes a second, and fills the
tables of the documents. That devices receive and links carry exactly what the
plan says is a test: tests/pipeline/received_test.py.
"""

from collections.abc import Sequence
import functools
import pathlib
import sys

from attnres_jax.common import command_line
from attnres_jax.pipeline import __main__ as command
from attnres_jax.pipeline import layout as layout_lib
from experiments import publish
from experiments.pages import readme
from experiments.pipeline_cost import orders
from experiments.pipeline_cost import tpu

# P ranks, V virtual stages each, K chunks per block.
FIG_3 = (4, 2, 2)
SHAPES = (
  (4, 2, 1), FIG_3, (4, 4, 1), (8, 4, 1), (8, 4, 2), (4, 1, 1), (8, 1, 2),
)  # fmt: skip
# P ranks, V virtual stages, M microbatches.
BUBBLES = (
  (4, 1, 16), (4, 2, 16), (4, 4, 16), (8, 1, 32), (8, 2, 32), (8, 4, 32),
)  # fmt: skip
RULES = layout_lib.RULES
CLOSED_FORMS = {
  "naive": layout_lib.naive_total,
  "cached": layout_lib.cached_total,
  "minimum": layout_lib.minimum_total,
}
# Over a forward pass's.
_BACKWARD_TIME = 2.0


def make_layout(shape: Sequence[int]) -> layout_lib.Layout:
  """A layout of a shape (P, V, K) with one sublayer per chunk."""
  ranks, stages, chunks_per_block = shape
  return layout_lib.Layout(ranks, stages, 1, chunks_per_block)


def transfers(_: readme.Rows = ()) -> str:
  """Vectors per microbatch, forward: by formula, by plan and on links.

  The formulas are Eq. 7, Eq. 8 and the minimum for blocks that complete at an
  even pace. A plan counts whole blocks, then the embedding. Links also carry
  padding and running sums.
  """
  header = ["P, V, K"]
  for rule in RULES:
    header += [f"{rule}: formula", "planned", "on links"]
  lines = []
  for shape in SHAPES:
    layout, cells = make_layout(shape), [_words(shape)]
    for rule in RULES:
      blocks = layout.total_vectors(rule, embedding=False)
      links = sum(layout.link_vectors(rule)) + sum(layout.link_partials())
      cells += [
        f"{CLOSED_FORMS[rule](*shape[:2], 1 / shape[2]):g}",
        f"{blocks} + {layout.total_vectors(rule) - blocks}",
        str(shape[1] * links),
      ]
    lines.append(cells)
  return readme.table(header, lines)


def transitions(_: readme.Rows = ()) -> str:
  """The boundaries between the chunks of Fig. 3."""
  layout = make_layout(FIG_3)
  found = list(zip(*(layout.transitions(rule) for rule in RULES)))
  lines = [
    [
      str(same[0].chunk), str(same[0].receiver),
      *(" ".join(f"b{block}" for block in one.blocks) for one in same),
      "yes" if same[0].partial else "",
    ]
    for same in found
  ]  # fmt: skip
  totals = [str(sum(len(one.blocks) for one in own)) for own in zip(*found)]
  partials = sum(same[0].partial for same in found)
  lines.append(["**total**", "", *totals, str(partials)])
  return readme.table(("into chunk", "on rank", *RULES, "running sum"), lines)


def bubbles(_: readme.Rows = ()) -> str:
  """Idle time over work time of each order, in lockstep and free."""
  lines = []
  for ranks, stages, microbatches in BUBBLES:
    work = stages * microbatches * (1.0 + _BACKWARD_TIME)
    shares, units = [(ranks - 1) / (stages * microbatches)], []
    for make in orders.ORDERS.values():
      schedule = make(make_layout((ranks, stages, stages)), microbatches)
      for total in (
        schedule.total_time(1.0, _BACKWARD_TIME),
        orders.free_time(schedule, 1.0, _BACKWARD_TIME),
      ):
        shares.append(total / work - 1)
      peaks = (schedule.peaks(rank).units for rank in range(ranks))
      units.append(str(max(peaks)))
    shape = _words((ranks, stages, microbatches))
    lines.append([shape, *(f"{x:.1%}" for x in shares), ", ".join(units)])
  kinds = [f"{name}, {how}" for name in orders.ORDERS
           for how in ("lockstep", "free")]  # fmt: skip
  flight = f"units in flight: {', '.join(orders.ORDERS)}"
  return readme.table(("P, V, M", "ideal", *kinds, flight), lines)


def _words(shape: Sequence[int]) -> str:
  return ", ".join(map(str, shape))


def _drawn(part: str, _: readme.Rows = ()) -> str:
  """The output of one part of `python -m attnres_jax.pipeline`."""
  return f"```\n{command.draw(['--show', part])}```"


_EXPLANATION = "../../docs/pipeline.md"
PUBLISHED = readme.Published(
  pathlib.Path(__file__).absolute().parent,
  [
    readme.Place(transfers, "transfers", ""),
    readme.Place(transitions, "transitions", ""),
    readme.Place(bubbles, "bubbles", ""),
    readme.Place(functools.partial(tpu.table, "48b"), "pod", "tpu"),
    readme.Place(functools.partial(tpu.table, "4_layers"), "rules", "tpu"),
    readme.Place(transfers, "transfers", "", _EXPLANATION),
    *(
      readme.Place(
        functools.partial(_drawn, part), f"drawn_{part}", "", _EXPLANATION
      )
      for part in command.PARTS
    ),
  ],
)


def main(argv: Sequence[str] | None = None) -> int:
  """The command; returns its exit status."""
  parser = command_line.Parser(
    "python -m experiments.pipeline_cost.run", __doc__
  )
  parser.parse_args(argv)
  return command_line.run(lambda: publish.publish(PUBLISHED))


if __name__ == "__main__":
  sys.exit(main())
