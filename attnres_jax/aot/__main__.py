# SPDX-License-Identifier: Apache-2.0
"""Whether a config fits a pod, what bounds its step, and what it sends.

  python -m attnres_jax.aot --config=configs/lm.py:size=large \
    --config.mesh.data=1 --config.mesh.fsdp=16 --topology=v5e:4x4
  python -m attnres_jax.aot ... --topology=v5p-128 --num_slices=2 \
    --compare=residual=prenorm --json=report.json
  python -m attnres_jax.aot ... --step=decode
  python -m attnres_jax.aot ... --until=schedule

With --until=schedule, the compiler is stopped before it writes machine code,
which takes most of its time. Everything is reported but the size of the program
itself.

Takes the same `--config` flags as training. Exit status 1 means that it does
not fit.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import json
import pathlib
from typing import Any

from absl import app
from absl import flags
import jax

from attnres_jax import command_line
from attnres_jax import config as config_lib
from attnres_jax import plans
from attnres_jax.aot import report
from attnres_jax.aot import topology

_TOPOLOGY = flags.DEFINE_string(
  "topology",
  None,
  "TPU slice, such as v5e:4x4, v5p:4x4x4 or v5e-16.",
  allow_override=True,
)
_NUM_SLICES = flags.DEFINE_integer(
  "num_slices", 1, "Number of slices, connected by the data center network."
)
_STEP = flags.DEFINE_enum(
  "step", "train", list(report.STEPS), "What to compile."
)
_UNTIL = flags.DEFINE_enum(
  "until",
  "code",
  ["code", "schedule"],
  "Where to stop the compiler; schedule: for training steps only.",
)
_COMPARE = flags.DEFINE_string(
  "compare", None, "Also compile with this residual scheme: residual=prenorm."
)
_JSON = flags.DEFINE_string(
  "json", None, "Also write the numbers to this file.", allow_override=True
)


def main(argv: Sequence[str]) -> int:
  """Compiles and prints; the exit status says whether it fits."""
  del argv
  return command_line.run(_report)


def _report() -> int:
  reports = _make_reports()
  print("\n\n".join(report.to_text(one) for one in reports))
  if len(reports) == 2:
    print("\n" + report.compare(*reports))
  if _JSON.value:
    text = json.dumps(reports if _COMPARE.value else reports[0], indent=2)
    pathlib.Path(_JSON.value).write_text(text + "\n")
  return 0 if all(one["fits"] for one in reports) else 1


def _make_reports() -> list[Mapping[str, Any]]:
  if not _TOPOLOGY.value:
    raise config_lib.ConfigError(
      "--topology: missing, expected a slice such as v5e:4x4"
    )
  config = command_line.config_of_flags()
  if _UNTIL.value == "schedule" and _STEP.value != "train":
    config_lib.fail_argument("--until", "schedule", "code with --step=decode")
  slices = _TOPOLOGY.value, _NUM_SLICES.value
  devices = topology.devices(*slices)
  config = plans.resolve(config, devices, command_line.plans_file())
  configs = [config]
  if _COMPARE.value:
    name, _, value = _COMPARE.value.partition("=")
    if name != "residual" or not value:
      raise config_lib.ConfigError(
        f"--compare: got {_COMPARE.value!r}, expected residual=NAME"
      )
    residual = dataclasses.replace(config.model.residual, name=value)
    model = dataclasses.replace(config.model, residual=residual)
    configs.append(dataclasses.replace(config, model=model))
  if _UNTIL.value == "schedule":
    return [report.make_schedule_report(one, *slices) for one in configs]
  return [report.make_report(one, devices, _STEP.value) for one in configs]


if __name__ == "__main__":
  # The program is compiled for the topology; nothing runs.
  jax.config.update("jax_platforms", "cpu")
  app.run(main, flags_parser=command_line.parse_flags)
