# SPDX-License-Identifier: Apache-2.0
"""What a pipeline sends, counted in its plan.

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
from experiments.pipeline_cost import tpu

# P ranks, V virtual stages each, K chunks per block.
SHAPES = (
  (4, 2, 1), (4, 2, 2), (4, 4, 1), (8, 4, 1), (8, 4, 2), (4, 1, 1), (8, 1, 2),
)  # fmt: skip
RULES = layout_lib.RULES
CLOSED_FORMS = {
  "naive": layout_lib.naive_total,
  "cached": layout_lib.cached_total,
  "minimum": layout_lib.minimum_total,
}


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
    layout, cells = make_layout(shape), [", ".join(map(str, shape))]
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


def _drawn(part: str, _: readme.Rows = ()) -> str:
  """The output of one part of `python -m attnres_jax.pipeline`."""
  return f"```\n{command.draw(['--show', part])}```"


_EXPLANATION = "../../docs/pipeline.md"
PUBLISHED = readme.Published(
  pathlib.Path(__file__).absolute().parent,
  [
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
