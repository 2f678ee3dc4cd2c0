# SPDX-License-Identifier: Apache-2.0
r"""Counts what a pipeline sends, holds and idles. No device needed.

  python -m attnres_jax.pipeline --stage=4 --virtual_stages=2 \
    --microbatches=8 --sublayers=16 --block_size=4
  python -m attnres_jax.pipeline --config=configs/pipeline.py:size=micro

The second one counts the pipeline that a config trains: its ranks, chunks,
microbatches, sublayers, blocks and rule, which flags then do not repeat.
`docs/pipeline.md` explains the words. A notebook, depth_attention, draws the
ticks (Fig. 3).
"""

import argparse
from collections.abc import Sequence
import sys

from attnres_jax import config as config_lib
from attnres_jax.common import command_line
from attnres_jax.common import text_table
from attnres_jax.config import fields
from attnres_jax.pipeline import layout as layout_lib
from attnres_jax.pipeline import memory
from attnres_jax.pipeline import schedule as schedule_lib

_CLOSED_FORMS = {
  "naive": layout_lib.naive_total,
  "cached": layout_lib.cached_total,
  "minimum": layout_lib.minimum_total,
}

# Chunks times microbatches, of which a table is made: a few seconds.
_MOST_UNITS = 100_000


def main(argv: Sequence[str] | None = None) -> int:
  """The command; returns its exit status."""
  return command_line.run(lambda: print(counts(argv), end=""))


def counts(argv: Sequence[str] | None = None) -> str:
  """The output of the command.

  Raises:
    ConfigError: naming the argument, its value and what is accepted.
  """
  options = _parser().parse_args(argv)
  if options.config:
    _take_config(options)
  chunks = options.stage * options.virtual_stages
  if chunks * options.microbatches > _MOST_UNITS:
    accepted = f"at most {_MOST_UNITS // chunks} with {chunks} chunks"
    config_lib.fail_argument("--microbatches", options.microbatches, accepted)
  layout = layout_lib.Layout(
    options.stage,
    options.virtual_stages,
    layout_lib.split_sublayers(options.sublayers, chunks),
    options.block_size or None,
    options.stream,
  )
  schedule = schedule_lib.make_schedule(layout, options.microbatches)
  return sends_text(layout) + "\n" + holds_text(schedule, options.rule)


def _take_config(options: argparse.Namespace) -> None:
  """Replaces what the config of a run says."""
  config = options.config.load()
  from attnres_jax.models import residuals

  model, pipeline = config.model, config.pipeline
  scheme = residuals.abstract_residual(model)
  settings = dict(
    stage=config.mesh.stage,
    virtual_stages=pipeline.virtual_stages,
    microbatches=pipeline.microbatches or config.mesh.stage,
    sublayers=model.num_sublayers,
    block_size=scheme.block_size or 0,
    rule=pipeline.rule,
  )
  options.stream = scheme.stream
  for name, value in settings.items():
    if name in options.given:
      given = getattr(options, name)
      config_lib.fail_argument(
        f"--{name}", given, f"{value}, as the config has"
      )
    setattr(options, name, value)


def sends(layout: layout_lib.Layout, rule: str) -> tuple[str, str, str]:
  """Vectors per microbatch, forward: by formula, by plan and on links.

  The formulas (Eq. 7, Eq. 8 and ours) assume that blocks complete at an even
  pace. A plan counts whole blocks, then the embedding. Links also carry padding
  and running sums.
  """
  total = layout.total_vectors(rule)
  if layout.block_size is None:
    formula, planned = "-", str(total)
  else:
    shape = layout.num_ranks, layout.num_virtual_stages
    pace = layout.num_sublayers / layout.block_size / layout.num_chunks
    blocks = layout.total_vectors(rule, embedding=False)
    formula = f"{_CLOSED_FORMS[rule](*shape, pace):g}"
    planned = f"{blocks} + {total - blocks}"
  links = sum(layout.link_vectors(rule)) + sum(layout.link_partials())
  return formula, planned, str(layout.num_virtual_stages * links)


def sends_text(layout: layout_lib.Layout) -> str:
  """A row per rule."""
  header = ("vectors sent", "formula", "planned", "on links")
  rows = [(rule, *sends(layout, rule)) for rule in layout_lib.RULES]
  return text_table.table(header, rows) + "\n"


def holds_text(schedule: schedule_lib.Schedule, rule: str) -> str:
  """A row per rank: the most that it holds at once, and the bubble."""
  ranks = range(schedule.layout.num_ranks)
  peaks = [schedule.peaks(rank, rule=rule) for rank in ranks]
  pools = [schedule.slot_pool(kind, rule=rule) for kind in memory.LIFETIMES]
  rows: list[tuple[object, ...]] = [
    (f"rank {r}", p.microbatches, p.units, p.blocks, p.gradients)
    for r, p in zip(ranks, peaks)
  ]
  inputs, blocks, gradients = (pool.size for pool in pools)
  rows.append(("slots of a pool", "", inputs, blocks, gradients))
  header = ("most at once", "microbatches", "units", "blocks", "gradients")
  return (
    text_table.table(header, rows)
    + f"\n{schedule.num_ticks} ticks, bubble"
    + f" {schedule.bubble(1, 2):.1%} with backward twice as long as forward\n"
  )


def _parser() -> command_line.Parser:
  parser = command_line.Parser("python -m attnres_jax.pipeline", __doc__)
  parser.add_config()
  parser.set_defaults(stream=False)  # A config says otherwise.
  count = dict(type=fields.Few, metavar="N")
  parser.add_argument("--stage", default=4, help="ranks, P", **count)
  parser.add_argument(
    "--virtual_stages", default=2, help="chunks per rank, V", **count
  )
  parser.add_argument("--microbatches", default=8, help="M", **count)
  parser.add_argument("--sublayers", default=16, help="L", **count)
  parser.add_argument(
    "--block_size", default=4,
    help="sublayers per block, S; 0 for schemes without blocks",
    type=fields.Count, metavar="N",
  )  # fmt: skip
  parser.add_argument(
    "--rule", default="minimum", choices=layout_lib.RULES,
    help="which blocks cross a boundary",
  )  # fmt: skip
  return parser


if __name__ == "__main__":
  sys.exit(main())
