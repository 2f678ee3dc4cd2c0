# SPDX-License-Identifier: Apache-2.0
"""Parameters, FLOPs and bytes of a config, without building its network.

  python -m attnres_jax.flops --config=configs/kimi_linear.py:size=48b
  python -m attnres_jax.flops --config=configs/kimi_linear.py:size=194m \
    --config.model.moe.num_experts=512 --config.model.moe.dense_layers=0 \
    --json=194m.json

Takes the same `--config` flags as training does.
"""

from collections.abc import Sequence
import json
import pathlib
import sys

from absl import app
from absl import flags

from attnres_jax import config as config_lib
from attnres_jax import main as main_lib
from attnres_jax.flops import report

_JSON = flags.DEFINE_string(
  "json", None, "Also write the numbers to this file; `-` prints them instead."
)


def main(argv: Sequence[str]) -> None:
  """Prints the tables of a config."""
  del argv
  try:
    numbers = report.make_report(main_lib.config_of_flags())
  except config_lib.ConfigError as error:
    main_lib.stop(str(error))
  text = json.dumps(numbers, indent=2) + "\n"
  if _JSON.value == "-":
    sys.stdout.write(text)
    return
  print(report.to_text(numbers))
  if _JSON.value:
    try:
      pathlib.Path(_JSON.value).write_text(text)
    except OSError as error:
      main_lib.stop(f"--json: {error}")


if __name__ == "__main__":
  app.run(main, flags_parser=main_lib.parse_flags)
