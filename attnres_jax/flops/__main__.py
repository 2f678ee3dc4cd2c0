# SPDX-License-Identifier: Apache-2.0
r"""Parameters, FLOPs and bytes of a config, without building its network.

  python -m attnres_jax.flops --config=configs/kimi_linear.py:size=48b
  python -m attnres_jax.flops --config=configs/kimi_linear.py:size=194m \
    --config.model.moe.num_experts=512 --config.model.moe.dense_layers=0

Takes the same `--config` flags as training.
"""

import argparse
from collections.abc import Sequence
import sys

from attnres_jax.common import command_line


def main(argv: Sequence[str] | None = None) -> int:
  """Prints the tables of a config; returns the exit status."""
  parser = command_line.Parser("python -m attnres_jax.flops", __doc__)
  parser.add_config()
  return command_line.run(_report, parser.parse_args(argv))


def _report(options: argparse.Namespace) -> None:
  config = command_line.load_config(options.config)
  from attnres_jax.flops import report

  print(report.to_text(report.make_report(config)))


if __name__ == "__main__":
  sys.exit(main())
