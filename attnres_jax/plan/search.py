# SPDX-License-Identifier: Apache-2.0
r"""Which mesh, microbatches and checkpointing suit a config on a slice.

  python -m attnres_jax.plan.search --config=configs/kimi_linear.py:size=436m \
    --config.data.source=tokens --config.data.path=gs://BUCKET/data/corpus \
    --config.data.tokenizer=ids --topology=v5p-32 --tries=3 --save

Takes the same `--config` flags as training. Whoever plans names the text of the
runs, of which nothing is read: as in training, a run that its text does not fit
is refused, such as a long one with the default text.

The command enumerates meshes (data, fsdp, expert), microbatches and
`model.remat`, drops what cannot fit by arithmetic, and orders the rest by a few
rules (`candidates`). It compiles the first few for the slice, which needs no
TPU, then the fastest in ever fewer microbatches, as long as that is faster and
leaves a twentieth of the memory. It prints all, the fastest first, with flags
that training takes. Each takes a minute or two, since the compiler is stopped
before it writes machine code (`schedule`). Exit status 1: none of them fits.

With --save, the fastest that fits is added to the file of --plans, from which
runs with `optim.accumulate_steps=0` take it. With --sweep, every different step
of a sweep is planned, except steps in the file: rerun the same command to
resume. Where the file has a plan of the same network under another residual
scheme, it is compiled first: schemes compare best on one mesh, with the same
microbatches. With --again, the plans in the file are compiled once more, except
rows of this commit, jax and libtpu: the way to see what a change of the code or
of the compiler does to their times. For one that no longer fits, another plan
is searched.

`mesh.tensor` stays as the config has it. Pipelines are not planned.

With --num_slices, the plans are for several slices, between which only
`mesh.data` crosses. What a device sends to others over the data-centre network
is printed, and is in no time. Runs do not take such plans from the file: give
them the flags that are printed.

`report` says how a step's time is estimated. Compare plans with each other.
"""

import argparse
from collections.abc import Mapping, Sequence
import dataclasses
import importlib.metadata
import math
import sys
import time
from typing import Any

import jax

from attnres_jax import config as config_lib
from attnres_jax import data
from attnres_jax.common import command_line
from attnres_jax.common import environment
from attnres_jax.common import gpus
from attnres_jax.common import plans as plans_lib
from attnres_jax.common import text_table
from attnres_jax.common import topology
from attnres_jax.config import fields
from attnres_jax.models import residuals
from attnres_jax.plan import candidates as candidates_lib
from attnres_jax.plan import report as report_lib
from attnres_jax.scaling import grid
from attnres_jax.train import account

_GIB = 2**30
# Plans that turn out not to fit, before giving up.
_MISFITS = 6
# Of the memory, at the end of a search.
_SPARE = 0.05


def compiled(
  config: config_lib.RunConfig,
  overrides: Mapping[str, Any],
  slice_name: str,
  num_slices: int = 1,
) -> dict[str, Any]:
  """Compiles a plan, given its overrides, up to its schedule; a table's row.

  `fits`; and if the program could be read: `peak_bytes`, `headroom_bytes`,
  `bound`, `step_seconds`, `timeline_seconds` (`timeline`),
  `tokens_per_second`, `model_flop_utilisation`,
  `hours` and `chip_hours` to the run's end, and `bytes_between_slices` of a
  device and step.
  """
  planned = plans_lib.apply(config, overrides)
  result = report_lib.make_schedule_report(planned, slice_name, num_slices)
  row: dict[str, Any] = {"overrides": dict(overrides)}
  row |= {
    name: result.get(name)
    for name in (
      "fits", "peak_bytes", "headroom_bytes", "hbm_bytes", "bound",
      "compute_seconds", "memory_seconds", "link_seconds", "compile_seconds",
      "bytes_between_slices",
    )
  }  # fmt: skip
  if not result["fits"]:
    return row
  devices = topology.devices(slice_name, num_slices)
  chip = topology.chip(devices[0])
  seconds = result["step_seconds"]
  tokens = config.data.batch_size * config.data.sequence_length
  hours = config.train.steps * seconds / 3600
  work = result["analytic_flops"] / chip.peak_flops_per_second
  return row | {
    "step_seconds": seconds,
    "timeline_seconds": result.get("timeline", {}).get("seconds"),
    "tokens_per_second": tokens / seconds,
    "model_flop_utilisation": work / seconds,
    "hours": hours,
    "chip_hours": hours * account.num_chips(devices),
  }


def to_text(rows: Sequence[Mapping[str, Any]]) -> str:
  """The compiled plans as a table, and the flags of the first that fits."""
  cells = []
  for row in rows:
    o = row["overrides"]
    has_time = row.get("step_seconds") is not None
    walked = row.get("timeline_seconds")
    peak = row["peak_bytes"]
    cells.append((
      f"{o['mesh.data']} x {o['mesh.fsdp']} x {o['mesh.expert']}",
      str(o["optim.accumulate_steps"]), o["model.remat"],
      "yes" if row["fits"] else "no",
      f"{row['headroom_bytes'] / _GIB:.1f}" if peak else "",
      row["bound"] if has_time else "",
      *(
        (
          f"{row['step_seconds']:.2f}", f"{walked:.2f}" if walked else "",
          f"{row['tokens_per_second']:,.0f}",
          f"{row['model_flop_utilisation']:.0%}", f"{row['hours']:,.1f}",
          f"{row['chip_hours']:,.0f}",
        ) if has_time else ("",) * 6
      ),
    ))  # fmt: skip
  header = (
    "data x fsdp x expert", "microbatches", "remat", "fits", "headroom, GiB",
    "bound", "step, s", "along its schedule, s", "tokens/s", "MFU", "hours",
    "chip-hours",
  )  # fmt: skip
  lines = [text_table.table(header, cells)]
  best = next((row for row in rows if row["fits"]), None)
  if best:
    overrides = best["overrides"].items()
    lines += ["", *(f"--config.{name}={value}" for name, value in overrides)]
    if between := best.get("bytes_between_slices"):
      lines.append(
        f"mesh.data crosses the slices: a device sends {between / 1e6:,.0f} MB"
        " per step over the data-centre network, in none of these times"
      )
  return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
  """Plans and prints; the exit status says whether any plan fits."""
  return command_line.run(_plan, make_parser().parse_args(argv))


def make_parser() -> command_line.Parser:
  parser = command_line.Parser("python -m attnres_jax.plan.search", __doc__)
  add = parser.add_argument
  parser.add_config()
  add(
    "--topology", help="TPU slice or GPUs, such as v6e-16, v5p:4x4x4 or h100-8"
  )
  add(
    "--num_slices",
    type=fields.Size,
    default=1,
    help="slices for one run, connected by the data-centre network",
  )
  add("--tries", type=fields.Size, default=3, help="plans that fit to compile")
  add(
    "--save",
    action="store_true",
    help="add the fastest plan that fits to the file of --plans",
  )
  add(
    "--again",
    action="store_true",
    help="compile the plan in the file of --plans once more, and save it",
  )
  add("--sweep", action="store_true", help="plan the sweep of the config file")
  add(
    "--only",
    default="",
    when="sweep",
    help="regular expression over names of runs",
  )
  parser.add_plans()
  return parser


def _plan(options: argparse.Namespace) -> int:
  # Programs are compiled for the topology; nothing runs.
  jax.config.update("jax_platforms", "cpu")
  slice_name = options.topology
  if not slice_name:
    raise config_lib.ConfigError(
      "--topology: missing, expected a slice such as v6e-16"
    )
  for name in ("save", "again"):
    if getattr(options, name) and options.num_slices > 1:
      config_lib.fail_argument(f"--{name}", True, "a plan for one slice")
  configs = requested(options)
  for config in configs:
    data.check(config, offline=True)
  devices = topology.devices(slice_name, options.num_slices)
  todo = _due(configs, options, devices)
  if not todo:
    has = "no older plans" if options.again else "all plans"
    print(f"nothing to compile: {options.plans} has {has}")
  start, fits = time.monotonic(), []
  for number, (config, row) in enumerate(todo):
    if options.again or options.sweep:
      left = (time.monotonic() - start) / 60 * (len(todo) - number)
      about = f", about {left / number:.0f} minutes left" if number else ""
      print(f"{config.name}, {number + 1} of {len(todo)}{about}:", flush=True)
    if row:
      fits.append(_again(config, slice_name, row, options))
    else:
      fits.append(_plan_one(config, slice_name, options))
  return 0 if all(fits) else 1


def _due(
  configs: Sequence[config_lib.RunConfig],
  options: argparse.Namespace,
  devices: Sequence[Any],
) -> list[tuple[config_lib.RunConfig, Mapping[str, str] | None]]:
  """The configs to compile, one for each step, with the rows to remake."""
  if not (options.again or options.sweep):
    return [(config, None) for config in configs]
  steps: dict[str, config_lib.RunConfig] = {}
  for config in configs:
    steps.setdefault(plans_lib.config_hash(config), config)
  pairs = [
    (config, plans_lib.find(config, devices, options.plans))
    for config in steps.values()
  ]
  if not options.again:
    return [(config, None) for config, row in pairs if row is None]
  if not (options.sweep or pairs[0][1]):
    config_lib.fail_argument("--again", True, f"a plan in {options.plans}")
  # What other code or another compiler has made.
  now = dict(
    commit=environment.commit(),
    jax=jax.__version__,
    libtpu=_compiler(options.topology),
  )
  return [
    (config, row)
    for config, row in pairs
    if row and not now.items() <= row.items()
  ]


def requested(options: argparse.Namespace) -> Sequence[config_lib.RunConfig]:
  """The configs that a command is to plan, with the names of their runs."""
  source = command_line.needed(options.config)
  if not options.sweep:
    return [source.load()]
  runs = grid.select(grid.load(source.spec, source.fields), options.only)
  return [
    dataclasses.replace(config_lib.build_run_config(run.config), name=run.name)
    for run in runs
  ]


def _again(
  config: config_lib.RunConfig,
  slice_name: str,
  old: Mapping[str, str],
  options: argparse.Namespace,
) -> bool:
  """Compiles the plan of a row once more; whether it or another one fits."""
  row = compiled(config, plans_lib.overrides_of(old), slice_name)
  before = f"before: {old['step_seconds']} s (commit {old['commit']})"
  print(f"\n{to_text([row])}\n{before}\n", flush=True)
  if not row["fits"]:
    return _plan_one(config, slice_name, options, [row["overrides"]])
  _save(config, slice_name, row, old["tries"], options)
  return True


def _save(
  config: config_lib.RunConfig,
  slice_name: str,
  row: Mapping[str, Any],
  tries: int | str,
  options: argparse.Namespace,
) -> None:
  facts = _facts(row) | dict(
    tries=tries, slice=slice_name, libtpu=_compiler(slice_name)
  )
  plans_lib.put(
    config,
    topology.devices(slice_name),
    row["overrides"],
    facts,
    options.plans,
  )


def _plan_one(
  config: config_lib.RunConfig,
  slice_name: str,
  options: argparse.Namespace,
  misfits: Sequence[Mapping[str, Any]] = (),
) -> bool:
  """Compiles and prints the best plans; whether one of them fits.

  `misfits` are overrides that have been compiled and do not fit.
  """
  devices = topology.devices(slice_name, options.num_slices)
  rows, tried = [], list(misfits)
  offered = _candidates(config, devices, options.plans)

  def attempt(overrides: Mapping[str, Any]) -> dict[str, Any]:
    fields = ", ".join(f"{k}={v}" for k, v in overrides.items())
    print(f"compiling {len(rows) + 1}: {fields}", flush=True)
    tried.append(overrides)
    rows.append(compiled(config, overrides, slice_name, options.num_slices))
    return rows[-1]

  for overrides in offered:
    if overrides in tried:
      continue
    attempt(overrides)
    fitting = [row for row in rows if row["fits"]]
    if len(fitting) == options.tries or len(rows) == _MISFITS + options.tries:
      break
  best = min((row for row in rows if row["fits"]), key=_seconds, default=None)
  while best and (fewer := _fewer_microbatches(offered, best["overrides"])):
    row = None if fewer in tried else attempt(fewer)
    if not row or not _has_room(row) or _seconds(row) >= _seconds(best):
      break
    best = row
  rows.sort(key=_seconds)
  none = f"no {'other ' if misfits else ''}plan fits by arithmetic"
  text = to_text(rows) if rows else none
  print(f"\n{text}\n", flush=True)
  if best and (options.save or options.again):
    _save(config, slice_name, best, len(rows), options)
  return best is not None


def _seconds(row: Mapping[str, Any]) -> float:
  return row.get("step_seconds") or math.inf


def _has_room(row: Mapping[str, Any]) -> bool:
  """Whether it fits with memory to spare."""
  return row["fits"] and row["headroom_bytes"] >= _SPARE * row["hbm_bytes"]


def _fewer_microbatches(
  offered: Sequence[Mapping[str, Any]], overrides: Mapping[str, Any]
) -> Mapping[str, Any] | None:
  """The plan with the next fewer microbatches, on the same mesh."""

  def rest(plan: Mapping[str, Any]) -> dict[str, Any]:
    free = "optim.accumulate_steps", "loss.tile_tokens"
    return {name: plan[name] for name in plan if name not in free}

  count = lambda plan: plan["optim.accumulate_steps"]
  fewer = [
    plan
    for plan in offered
    if rest(plan) == rest(overrides) and count(plan) < count(overrides)
  ]
  return max(fewer, key=count, default=None)


def _candidates(
  config: config_lib.RunConfig,
  devices: Sequence[Any],
  path: str,
) -> list[Mapping[str, Any]]:
  """Overrides in the order in which they are compiled; one may come twice."""
  candidates, dropped = candidates_lib.plans(config, devices)
  for reason, number in dropped.items():
    print(f"dropped {number}: {reason}")
  print(f"{len(candidates)} plans left", flush=True)
  offered = [plan.overrides for plan in _different(candidates)]
  proven = plans_lib.under_other_schemes(
    config, devices, residuals.RESIDUALS, path
  )
  return [proven, *offered] if proven else offered


def _facts(row: Mapping[str, Any]) -> dict[str, str]:
  """Columns of the file for readers; empty where the program is unread."""
  numbers = {
    "headroom_GiB": (row["headroom_bytes"] / _GIB, ".1f"),
    "step_seconds": (row.get("step_seconds"), ".3f"),
    "timeline_seconds": (row.get("timeline_seconds"), ".3f"),
    "compute_seconds": (row["compute_seconds"], ".3f"),
    "memory_seconds": (row["memory_seconds"], ".3f"),
    "link_seconds": (row["link_seconds"], ".3f"),
    "tokens_per_second": (row.get("tokens_per_second"), ".0f"),
    "mfu_bound": (row.get("model_flop_utilisation"), ".3f"),
    "hours": (row.get("hours"), ".1f"),
    "chip_hours": (row.get("chip_hours"), ".0f"),
    "compile_seconds": (row["compile_seconds"], ".0f"),
  }
  cells = {
    name: "" if value is None else format(value, shape)
    for name, (value, shape) in numbers.items()
  }
  return cells | {"bound": row["bound"] or ""}


def _compiler(slice_name: str) -> str:
  """The version of libtpu; for GPUs, of JAX's plugin, which has XLA."""
  if gpus.parse(slice_name):
    return f"gpu {gpus.version()}"
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
  sys.exit(main())
