# SPDX-License-Identifier: Apache-2.0
r"""What the benchmarks take on a slice, by arithmetic.

  python -m experiments.downstream.plan \
    --config=configs/kimi_linear.py:size=48b,residual=block_attnres \
    --kind="TPU v5" --devices=8

A lower bound: products at the peak of the chips for tokens that are scored or
are part of a prompt, and reading all weights once for each step of generation.
Tokens per question are estimates (`benchmarks`). Needs no accelerator.
"""

import argparse
from collections.abc import Sequence
import sys

import jax

from attnres_jax import config as config_lib
from attnres_jax import flops
from attnres_jax import models
from attnres_jax.common import chips
from attnres_jax.common import command_line
from attnres_jax.common import text_table
from attnres_jax.config import fields
from attnres_jax.inference import prepared
from experiments.downstream import benchmarks

# Tokens of a context, of which attention depends.
_LENGTH = 2048


def main(argv: Sequence[str] | None = None) -> int:
  """Prints the plan; returns the exit status."""
  parser = command_line.Parser("python -m experiments.downstream.plan", __doc__)
  add = parser.add_argument
  parser.add_config()
  add("--kind", default="TPU v5", help="of the devices, as JAX names it")
  add("--devices", type=int, default=8, help="how many there are")
  add("--slots", type=int, default=64, help="answers generated at once")
  return command_line.run(_plan, parser.parse_args(argv))


def _plan(options: argparse.Namespace) -> None:
  jax.config.update("jax_platforms", "cpu")  # Nothing runs.
  config = command_line.load_config(options.config)
  chip = chips.chip_of(options.kind)
  if chip is None or not chip.hbm_bytes_per_second:
    known = [k for k, c in chips.CHIPS.items() if c.hbm_bytes_per_second]
    config_lib.fail_argument("--kind", options.kind, "one of " + str(known))
  fields.accept("--devices", options.devices, fields.Size)
  fields.accept("--slots", options.slots, fields.Size)
  print(plan(config, chip, options.devices, options.slots))


def plan(
  config: config_lib.RunConfig, chip: chips.Chip, devices: int, slots: int
) -> str:
  """The time of each benchmark, and the memory of the weights."""
  model = jax.eval_shape(lambda: models.build_model(config.model))
  kept = jax.eval_shape(prepared.prepared, model)
  weight_bytes, training_bytes = (
    sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(tree))
    for tree in (kept, model)
  )
  per_token = flops.flops_per_token(config.model, _LENGTH).forward
  rows, total = [], 0.0
  for one in benchmarks.BENCHMARKS:
    scored = one.questions * one.scored * per_token
    seconds = scored / (devices * chip.peak_flops_per_second)
    steps = one.questions * one.drawn / slots
    rate = devices * chip.hbm_bytes_per_second
    drawing = steps * weight_bytes / rate
    total += seconds + drawing
    tokens = one.questions * (one.scored + one.drawn)
    rows.append(
      (one.name, tokens, f"{seconds / 60:.1f}", f"{drawing / 60:.1f}")
    )
  header = "benchmark", "tokens", "scored, min", "drawn, min"
  gib = 2**30
  room = chip.hbm_bytes / gib
  fits = training_bytes + weight_bytes <= devices * chip.hbm_bytes
  return "\n".join([
    text_table.table(header, rows),
    "",
    f"weights: {training_bytes / devices / gib:.1f} GiB per device in float32,"
    f" and {weight_bytes / devices / gib:.1f} GiB as the engine keeps them, of"
    f" {room:.0f} GiB: {'fits' if fits else 'does not fit'}",
    f"at least {total / 3600:.2f} hours on {devices} devices,"
    f" {total / 3600 * devices:.1f} device-hours",
  ])  # fmt: skip


if __name__ == "__main__":
  sys.exit(main())
