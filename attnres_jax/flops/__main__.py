# SPDX-License-Identifier: Apache-2.0
"""Parameters, FLOPs and bytes of a config, without building its network.

  python -m attnres_jax.flops --config=configs/kimi_linear.py:size=48b
  python -m attnres_jax.flops --config=configs/kimi_linear.py:size=194m \
    --config.model.moe.num_experts=512 --config.model.moe.dense_layers=0 \
    --json=194m.json

Takes the same `--config` flags as training.
"""

from collections.abc import Sequence
import json
import pathlib
import sys

from absl import app
from absl import flags

from attnres_jax import command_line
from attnres_jax.flops import report

_JSON = flags.DEFINE_string(
    "json", None,
    "Also write the numbers to this file; `-` prints only the numbers.",
    allow_override=True,
)  # fmt: skip


def main(argv: Sequence[str]) -> int:
  """Prints the tables of a config; returns the exit status."""
  del argv
  return command_line.run(_report)


def _report() -> None:
  numbers = report.make_report(command_line.config_of_flags())
  text = json.dumps(numbers, indent=2) + "\n"
  if _JSON.value == "-":
    sys.stdout.write(text)
    return
  print(report.to_text(numbers))
  if _JSON.value:
    pathlib.Path(_JSON.value).write_text(text)


if __name__ == "__main__":
  app.run(main, flags_parser=command_line.parse_flags)
