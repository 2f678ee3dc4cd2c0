# SPDX-License-Identifier: Apache-2.0
"""Which mesh, microbatches and checkpointing suit a config on a slice.

  python -m attnres_jax.aot.plan --config=configs/kimi_linear.py:size=436m \
    --topology=v5p-32 --tries=3 --save
  python -m attnres_jax.aot.plan --config=configs/scaling.py:scale=paper \
    --sweep --topology=v5p-32 --tries=1 --save

Takes the same `--config` flags as training. It enumerates meshes (data, fsdp,
expert), microbatches and `model.remat`, drops what cannot fit by arithmetic,
ranks the rest by a rough estimate, compiles the best few for the slice, which
needs no TPU, and prints them, the fastest first, with flags that training
takes. Each takes a minute or two, since the compiler is stopped before it
writes machine code (`schedule`). Exit status 1: none of them fits.

With --save, the fastest that fits is added to the file of --plans, from which
runs with `optim.accumulate_steps=0` take it. With --sweep, every different step
of a sweep is planned, except those in the file: rerun the same command to
resume. Where the file has a plan of the same network under another residual
scheme, it is compiled first: schemes compare best on one mesh, with the same
microbatches.

`mesh.tensor` stays as the config has it. Pipelines are planned if the config
has `mesh.stage` above 1, or with

  --stages=1,4,8

which lists the values of `mesh.stage` to try, 1 for no pipeline.

How a step's time is estimated from a compiled program: the larger of compute
and memory at their peaks, plus the time of what is sent without work beside it;
at least the time of all that is sent. In a pipeline, every unit of work takes
the larger of its own two, and every tick as long as its slowest rank, so that
the bubble counts (`lockstep`). No chip reaches its peaks, so real steps take
longer; compare plans with each other.
"""

from collections.abc import Iterator, Mapping, Sequence
import dataclasses
import importlib.metadata
import math
from typing import Any

from absl import app
from absl import flags
import jax

from attnres_jax import chips
from attnres_jax import command_line
from attnres_jax import config as config_lib
from attnres_jax import plans as plans_lib
from attnres_jax import text_table
from attnres_jax.aot import candidates as candidates_lib
from attnres_jax.aot import report as report_lib
from attnres_jax.aot import topology
from attnres_jax.models import residuals
from attnres_jax.scaling import grid

_TOPOLOGY = flags.DEFINE_string(
  "topology",
  None,
  "TPU slice, such as v6e-16, v5e:4x4 or v5p:4x4x4.",
  allow_override=True,
)
_TRIES = flags.DEFINE_integer("tries", 3, "How many plans that fit to compile.")
_SAVE = flags.DEFINE_bool(
  "save", False, "Add the fastest plan that fits to the file of --plans."
)
_SWEEP = flags.DEFINE_bool(
  "sweep", False, "Plan the sweep of the config file, not one config."
)
_STAGES = flags.DEFINE_list(
  "stages", [], "Values of mesh.stage; by default that of the config."
)
_ONLY = flags.DEFINE_string(
  "only", "", "Regular expression over names of a sweep's runs."
)

_GIB = 2**30
# Plans that turn out not to fit, before giving up.
_MISFITS = 6


def compiled(
  config: config_lib.RunConfig, overrides: Mapping[str, Any], slice_name: str
) -> dict[str, Any]:
  """Compiles a plan, given its overrides, up to its schedule; a table's row.

  `fits`; and if the program could be read: `peak_bytes`, `headroom_bytes`,
  `bound`, `bubble` (of a pipeline), `step_seconds`, `tokens_per_second`,
  `model_flop_utilisation`, `hours` and `chip_hours` to the run's end.
  """
  planned = plans_lib.apply(config, overrides)
  found = report_lib.make_schedule_report(planned, slice_name)
  row: dict[str, Any] = {"overrides": dict(overrides)}
  row |= {
    name: found.get(name)
    for name in (
      "fits", "peak_bytes", "headroom_bytes", "hbm_bytes", "bound",
      "compute_seconds", "memory_seconds", "link_seconds", "compile_seconds",
    )
  }  # fmt: skip
  row["bubble"] = found.get("lockstep", {}).get("bubble")
  if not found["fits"]:
    return row
  devices = topology.devices(slice_name)
  chip = topology.chip(devices[0])
  seconds = step_seconds(found, chip)
  tokens = config.data.batch_size * config.data.sequence_length
  hours = config.train.steps * seconds / 3600
  work = found["analytic_flops"] / chip.peak_flops_per_second
  return row | {
    "step_seconds": seconds,
    "tokens_per_second": tokens / seconds,
    "model_flop_utilisation": work / seconds,
    "hours": hours,
    "chip_hours": hours * _num_chips(devices),
  }


def step_seconds(report: Mapping[str, Any], chip: chips.Chip) -> float:
  """The estimate of the module docstring, from a report."""
  exposed = sum(
    row["sent_bytes"] - row["overlapped_bytes"] for row in report["collectives"]
  )
  work = max(report["compute_seconds"], report["memory_seconds"])
  if "lockstep" in report:
    work = report["lockstep"]["seconds"]
  exposed_seconds = exposed / chip.link_bytes_per_second
  return max(work + exposed_seconds, report["link_seconds"])


def to_text(rows: Sequence[Mapping[str, Any]]) -> str:
  """The compiled plans as a table, and the flags of the first that fits."""
  cells = []
  for row in rows:
    o = row["overrides"]
    known = row.get("step_seconds") is not None
    peak = row["peak_bytes"]
    cells.append((
      *_shape(o), o["model.remat"],
      "yes" if row["fits"] else "no",
      f"{row['headroom_bytes'] / _GIB:.1f}" if peak else "",
      row["bound"] if known else "",
      *(
        (
          f"{row['step_seconds']:.2f}", f"{row['tokens_per_second']:,.0f}",
          f"{row['model_flop_utilisation']:.0%}", f"{row['hours']:,.1f}",
          f"{row['chip_hours']:,.0f}",
        ) if known else ("",) * 5
      ),
    ))  # fmt: skip
  header = (
    "data x fsdp x expert", "stages", "microbatches", "remat", "fits",
    "headroom, GiB", "bound", "step, s", "tokens/s", "MFU", "hours",
    "chip-hours",
  )  # fmt: skip
  lines = [text_table.table(header, cells)]
  best = next((row for row in rows if row["fits"]), None)
  if best:
    overrides = best["overrides"].items()
    lines += ["", *(f"--config.{name}={value}" for name, value in overrides)]
  return "\n".join(lines)


def _shape(overrides: Mapping[str, Any]) -> tuple[str, str, str]:
  """Mesh, stages and microbatches of a plan, for a table."""
  o = overrides
  mesh = f"{o['mesh.data']} x {o['mesh.fsdp']} x {o['mesh.expert']}"
  if o.get("mesh.stage", 1) == 1:
    return mesh, "", str(o["optim.accumulate_steps"])
  stages = f"{o['mesh.stage']} x {o['pipeline.virtual_stages']}"
  stages += f", gather {o['pipeline.gather']}"
  return mesh, stages, str(o["pipeline.microbatches"])


def _num_chips(devices: Sequence[Any]) -> int:
  """Two devices of some TPUs are one chip, at one place of the torus."""
  return len({tuple(device.coords) for device in devices})


def main(argv: Sequence[str]) -> int:
  """Plans and prints; the exit status says whether any plan fits."""
  del argv
  return command_line.run(_plan)


def _plan() -> int:
  slice_name = _TOPOLOGY.value
  if not slice_name:
    raise config_lib.ConfigError(
      "--topology: missing, expected a slice such as v6e-16"
    )
  if _TRIES.value < 1:
    config_lib.fail_argument("--tries", _TRIES.value, "a number above 0")
  for number in _STAGES.value:
    if not number.isdigit() or not int(number):
      config_lib.fail_argument("--stages", number, "numbers, such as 1,4,8")
  if _SWEEP.value:
    configs = _unplanned(topology.devices(slice_name))
  else:
    configs = iter([command_line.config_of_flags()])
  fits = [_plan_one(config, slice_name) for config in configs]
  return 0 if all(fits) else 1


def _unplanned(
  devices: Sequence[Any],
) -> Iterator[config_lib.RunConfig]:
  """The configs of a sweep that are not in the file when their turn comes."""
  seen = set()
  runs = grid.load(command_line.config_spec())
  for run in grid.select(runs, _ONLY.value):
    config = config_lib.build_run_config(run.config)
    key = plans_lib.config_hash(config)
    known = plans_lib.find(config, devices, command_line.plans_file())
    if key not in seen and known is None:
      seen.add(key)
      print(f"{run.name}:", flush=True)
      yield dataclasses.replace(config, name=run.name)


def _plan_one(config: config_lib.RunConfig, slice_name: str) -> bool:
  """Compiles and prints the best plans; whether one of them fits."""
  devices = topology.devices(slice_name)
  rows = []
  for i, overrides in enumerate(_candidates(config, devices), start=1):
    fields = ", ".join(f"{k}={v}" for k, v in overrides.items())
    print(f"compiling {i}: {fields}", flush=True)
    rows.append(compiled(config, overrides, slice_name))
    fitting = sum(row["fits"] for row in rows)
    if fitting == _TRIES.value or i == _MISFITS + _TRIES.value:
      break
  rows.sort(key=lambda row: row.get("step_seconds") or math.inf)
  text = to_text(rows) if rows else "no plan fits by arithmetic"
  print(f"\n{text}\n", flush=True)
  best = next((row for row in rows if row["fits"]), None)
  if _SAVE.value and best:
    facts = _facts(best) | {"tries": len(rows)}
    facts |= dict(slice=slice_name, libtpu=_libtpu())
    path = command_line.plans_file()
    plans_lib.put(config, devices, best["overrides"], facts, path)
  return best is not None


def _candidates(
  config: config_lib.RunConfig, devices: Sequence[Any]
) -> Iterator[Mapping[str, Any]]:
  """Overrides in the order in which they are compiled."""
  stages = tuple(map(int, _STAGES.value))
  path = command_line.plans_file()
  known = plans_lib.under_other_schemes(
    config, devices, residuals.RESIDUALS, path
  )
  if known:
    print("as under another residual scheme:")
    yield known
  candidates, dropped = candidates_lib.plans(config, devices, stages)
  for reason, number in dropped.items():
    print(f"dropped {number}: {reason}")
  print(f"{len(candidates)} plans left", flush=True)
  for plan in _different(candidates):
    if plan.overrides != known:
      yield plan.overrides


def _facts(row: Mapping[str, Any]) -> dict[str, str]:
  """Columns of the file for readers; empty where the program is unread."""
  numbers = {
    "headroom_GiB": (row["headroom_bytes"] / _GIB, ".1f"),
    "step_seconds": (row.get("step_seconds"), ".3f"),
    "compute_seconds": (row["compute_seconds"], ".3f"),
    "memory_seconds": (row["memory_seconds"], ".3f"),
    "link_seconds": (row["link_seconds"], ".3f"),
    "tokens_per_second": (row.get("tokens_per_second"), ".0f"),
    "mfu_bound": (row.get("model_flop_utilisation"), ".3f"),
    "hours": (row.get("hours"), ".1f"),
    "chip_hours": (row.get("chip_hours"), ".0f"),
    "bubble": (row["bubble"], ".3f"),
    "compile_seconds": (row["compile_seconds"], ".0f"),
  }
  cells = {
    name: "" if value is None else format(value, shape)
    for name, (value, shape) in numbers.items()
  }
  return cells | {"bound": row["bound"] or ""}


def _libtpu() -> str:
  return importlib.metadata.version("libtpu")


def _different(
  candidates: Sequence[candidates_lib.Plan],
) -> list[candidates_lib.Plan]:
  """Of each mesh first its best plan, then its second, and so on."""
  ranked, seen = [], dict[Any, int]()
  for plan in candidates:
    mesh = tuple(v for k, v in plan.overrides.items() if k.startswith("mesh."))
    seen[mesh] = seen.get(mesh, -1) + 1
    ranked.append((seen[mesh], plan))
  ranked.sort(key=lambda pair: pair[0])
  return [plan for _, plan in ranked]


if __name__ == "__main__":
  # Programs are compiled for the topology; nothing runs.
  jax.config.update("jax_platforms", "cpu")
  app.run(main, flags_parser=command_line.parse_flags)
