# SPDX-License-Identifier: Apache-2.0
r"""Draws a pipeline: its ticks, what it sends, what it holds. No device needed.

  python -m attnres_jax.pipeline --stage=4 --virtual_stages=2 \
    --microbatches=8 --sublayers=16 --block_size=4
  python -m attnres_jax.pipeline --show=life --microbatch=5
  python -m attnres_jax.pipeline --config=configs/pipeline.py:size=micro

The last one draws the pipeline that a config trains: its ranks, chunks,
microbatches, sublayers, blocks and rule, which flags then do not repeat.
`docs/pipeline.md` explains what is drawn.
"""

import argparse
from collections.abc import Callable, Sequence
import sys

from attnres_jax import config as config_lib
from attnres_jax.common import command_line
from attnres_jax.common import text_table
from attnres_jax.pipeline import drawing
from attnres_jax.pipeline import layout as layout_lib
from attnres_jax.pipeline import life
from attnres_jax.pipeline import memory
from attnres_jax.pipeline import schedule as schedule_lib


def main(argv: Sequence[str] | None = None) -> int:
  """The command; returns its exit status."""
  return command_line.run(lambda: print(draw(argv), end=""))


def draw(argv: Sequence[str] | None = None) -> str:
  """The output of the command.

  Raises:
    ConfigError: naming the argument, its value and what is accepted.
  """
  options = _parser().parse_args(argv)
  if options.config:
    _take_config(options)
  layout_lib.check_count("stage", options.stage)
  layout_lib.check_count("virtual_stages", options.virtual_stages)
  chunks = options.stage * options.virtual_stages
  layout = layout_lib.Layout(
    options.stage,
    options.virtual_stages,
    layout_lib.split_sublayers(options.sublayers, chunks),
    options.block_size or None,
    options.stream,
  )
  schedule = schedule_lib.make_schedule(layout, options.microbatches)
  return "\n".join(PARTS[name](schedule, options) for name in options.show)


def _take_config(options: argparse.Namespace) -> None:
  """Replaces what the config of a run says."""
  config = options.config.load()
  from attnres_jax.models import residuals

  model, pipeline = config.model, config.pipeline
  scheme = residuals.abstract_residual(model)
  found = dict(
    stage=config.mesh.stage,
    virtual_stages=pipeline.virtual_stages,
    microbatches=pipeline.microbatches or config.mesh.stage,
    sublayers=model.num_sublayers,
    block_size=scheme.block_size or 0,
    rule=pipeline.rule,
  )
  options.stream = scheme.stream
  for name, value in found.items():
    if name in options.given:
      given = getattr(options, name)
      config_lib.fail_argument(
        f"--{name}", given, f"{value}, as the config has"
      )
    setattr(options, name, value)


def holds_text(schedule: schedule_lib.Schedule, rule: str) -> str:
  """A row per rank: the most that it holds at once, and the bubble."""
  ranks = range(schedule.layout.num_ranks)
  peaks = [schedule.peaks(rank, rule=rule) for rank in ranks]
  pools = [schedule.slot_pool(kind, rule=rule) for kind in memory.KINDS]
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


PARTS: dict[str, Callable[[schedule_lib.Schedule, argparse.Namespace], str]] = {
  "schedule": lambda schedule, _: drawing.schedule_text(schedule),
  "transfers": lambda schedule, _: drawing.transfers_text(schedule.layout),
  "life": lambda schedule, options: life.life_text(
    schedule, options.microbatch, rule=options.rule
  ),
  "holds": lambda schedule, options: holds_text(schedule, options.rule),
}


def _parser() -> command_line.Parser:
  parser = command_line.Parser("python -m attnres_jax.pipeline", __doc__)
  parser.add_config()
  parser.set_defaults(stream=False)  # A config says otherwise.
  count = dict(type=int, metavar="N")
  parser.add_argument("--stage", default=4, help="ranks, P", **count)
  parser.add_argument(
    "--virtual_stages", default=2, help="chunks per rank, V", **count
  )
  parser.add_argument("--microbatches", default=8, help="M", **count)
  parser.add_argument("--sublayers", default=16, help="L", **count)
  parser.add_argument(
    "--block_size", default=4,
    help="sublayers per block, S; 0 for schemes without blocks", **count,
  )  # fmt: skip
  parser.add_argument(
    "--rule", default="minimum", choices=layout_lib.RULES,
    help="which blocks cross a boundary",
  )  # fmt: skip
  parser.add_argument(
    "--show", default=list(PARTS), nargs="+", choices=PARTS, help="what"
  )
  parser.add_argument(
    "--microbatch", default=0, help="the microbatch whose life to show", **count
  )
  return parser


if __name__ == "__main__":
  sys.exit(main())
