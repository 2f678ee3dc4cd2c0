# SPDX-License-Identifier: Apache-2.0
"""Compiles the runs of a sweep for a TPU slice before you pay for one."""

from collections.abc import Sequence
import sys

import jax

from attnres_jax import config as config_lib
from attnres_jax.common import plans as plans_lib
from attnres_jax.common import topology
from attnres_jax.plan import report
from attnres_jax.plan import schedule
from attnres_jax.scaling import grid
from attnres_jax.sweep import folder as folder_lib

# Fields that affect neither memory nor time of a program: they are constants in
# it, or not part of it.
_CONSTANTS = (
  "name", "seed", "data.seed", "optim.peak_lr", "optim.warmup_steps",
)  # fmt: skip


# Workers on a TPU must not inherit what keeps libtpu from looking for one.
@schedule.environment(**topology.ENVIRONMENT)
def check(
  runs: Sequence[grid.Run], slice_name: str, plans: str = plans_lib.FILE
) -> bool:
  """Compiles each different program once, and prints whether it fits.

  Args:
    runs: the runs to be launched.
    slice_name: such as v5p:2x2x4, or 2xv5e-256 for two slices.
    plans: the file of plans, for `optim.accumulate_steps=0`.

  Returns:
    Whether all of them fit.

  Raises:
    ConfigError: no such slice, a config that its mesh cannot divide, or one
      without a plan.
  """
  # The programs are compiled for the slice; nothing runs, and no device is
  # needed.
  jax.config.update("jax_platforms", "cpu")
  count, times, name = slice_name.partition("x")
  several = times and count.isdigit()
  slices = (name, int(count)) if several else (slice_name, 1)
  devices = topology.devices(*slices)
  groups: dict[str, list[grid.Run]] = {}
  for run in runs:
    groups.setdefault(_program(run), []).append(run)
  misfits = 0
  for index, same in enumerate(groups.values(), start=1):
    print(
      f"compiling {index} of {len(groups)}: {same[0].name}",
      file=sys.stderr,
      flush=True,
    )
    config = folder_lib.run_config(same[0])
    config = plans_lib.resolve(config, devices, plans)
    result = report.make_schedule_report(config, *slices)
    names = same[0].name
    if len(same) > 1:
      names += f" and {len(same) - 1} more"
    print(f"{names}: {_verdict(result)}", flush=True)
    misfits += not result["fits"]
  if misfits:
    print(f"{misfits} of {len(groups)} programs do not fit {slice_name}")
  return not misfits


def _verdict(result) -> str:
  if "peak_bytes" not in result:
    return "does not fit"
  gib = 2**30
  fits = "fits" if result["fits"] else "does not fit"
  return (
    f"{fits}, {result['peak_bytes'] / gib:.1f} of"
    f" {result['hbm_bytes'] / gib:.0f} GiB,"
    f" {result['step_seconds']:.3f} s per step by estimate"
  )


def _program(run: grid.Run) -> str:
  """A key that is equal for runs with the same program, up to constants."""
  config = folder_lib.run_config(run)
  flat = config_lib.flatten(config_lib.to_dict(config))
  for name in _CONSTANTS:
    flat.pop(name)
  return repr(sorted(flat.items()))
