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

`mesh.tensor` stays as the config has it. Pipelines are not planned: the report
gives the mean over ranks, and ranks in lockstep wait for the slowest.

How a step's time is estimated from a compiled program: the larger of compute
and memory at their peaks, plus the time of what is sent without work beside it;
at least the time of all that is sent. No chip reaches its peaks, so real steps
take longer; compare plans with each other.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import dataclasses
import importlib.metadata
import math
from typing import Any

from absl import app
from absl import flags
import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from attnres_jax import chips
from attnres_jax import command_line
from attnres_jax import config as config_lib
from attnres_jax import flops
from attnres_jax import plans as plans_lib
from attnres_jax import sharding
from attnres_jax import text_table
from attnres_jax import train_state
from attnres_jax.aot import report as report_lib
from attnres_jax.aot import topology
from attnres_jax.models import linear
from attnres_jax.models import residuals
from attnres_jax.models import sublayer
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
_ONLY = flags.DEFINE_string(
  "only", "", "Regular expression over names of a sweep's runs."
)

_GIB = 2**30
_TILE = 128  # columns of a tile in a TPU's memory
# Plans that turn out not to fit, before giving up.
_MISFITS = 6
# The rough estimate only ranks plans. Reads and writes of a vector of the width
# per token and sublayer, in all passes, as found in compiled steps.
_VECTORS = 120
# Without checkpointing, autodiff keeps about this many times the results of the
# products.
_UNCHECKPOINTED = 3.0
# Above this share of the memory, a plan will probably not fit.
_SAFE = 0.6
# How often the forward pass runs, by what is kept of it.
_PASSES = {"none": 1.0, "dots": 1.1, "attention": 1.9, "full": 2.0}


@dataclasses.dataclass(frozen=True)
class Plan:
  """One way to run a config.

  Attributes:
    overrides: of the config's fields.
    kept_bytes: per device: state, gradients and activations that are kept. The
      largest sublayer's own work comes on top.
    rough_seconds: by which plans are ranked before compiling; longer for those
      that leave little room.
  """

  overrides: Mapping[str, Any]
  kept_bytes: float
  rough_seconds: float

  def apply(self, config: config_lib.RunConfig) -> config_lib.RunConfig:
    """The config with these fields."""
    return plans_lib.apply(config, self.overrides)


def plans(
  config: config_lib.RunConfig, devices: Sequence[Any]
) -> tuple[list[Plan], dict[str, int]]:
  """All plans that fit by arithmetic, by rough time; and why others do not.

  Args:
    config: of the run.
    devices: of `topology.devices`.

  Raises:
    ConfigError: the config is pipelined, or has no vocabulary size.
  """
  if config.mesh.stage != 1:
    config_lib.fail("mesh.stage", config.mesh.stage, "1, to be planned")
  if not config.model.vocab_size:
    config_lib.fail("model.vocab_size", 0, "the tokenizer's vocabulary size")
  chip = topology.chip(devices[0])
  saved = _saved_bytes(config.model)
  length = config.data.sequence_length
  forward = flops.flops_per_token(config.model, length).forward
  found, dropped = [], {}
  for mesh_fields in _meshes(config, len(devices)):
    meshed = dataclasses.replace(config, mesh=mesh_fields)
    try:
      cost = _Cost.of(meshed, devices, chip, forward)
    except config_lib.ConfigError as error:
      reason = str(error).partition(",")[0]
      dropped[reason] = dropped.get(reason, 0) + 1
      continue
    for accumulate, remat in _shapes(meshed):
      kept = cost.kept_bytes(accumulate, saved[remat])
      if kept > chip.hbm_bytes:
        reason = f"more than {chip.hbm_bytes / _GIB:.0f} GiB by arithmetic"
        dropped[reason] = dropped.get(reason, 0) + 1
        continue
      overrides = {
        f"mesh.{axis}": getattr(mesh_fields, axis)
        for axis in (sharding.DATA, sharding.FSDP, sharding.EXPERT)
      } | {"optim.accumulate_steps": accumulate, "model.remat": remat}
      seconds = cost.seconds(accumulate, remat)
      seconds *= 1 + max(0.0, kept / chip.hbm_bytes - _SAFE)
      found.append(Plan(overrides, kept, seconds))
  # Of plans that look equal, the one with the largest microbatches.
  found.sort(
    key=lambda plan: (
      plan.rough_seconds, plan.overrides["optim.accumulate_steps"]
    )
  )  # fmt: skip
  return found, dropped


def compiled(
  config: config_lib.RunConfig, overrides: Mapping[str, Any], slice_name: str
) -> dict[str, Any]:
  """Compiles a plan, given its overrides, up to its schedule; a table's row.

  `fits`; and if the program could be read: `peak_bytes`, `headroom_bytes`,
  `bound`, `step_seconds`, `tokens_per_second`, `model_flop_utilisation`,
  `hours` and `chip_hours` to the run's end.
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
      f"{o['mesh.data']} x {o['mesh.fsdp']} x {o['mesh.expert']}",
      str(o["optim.accumulate_steps"]), o["model.remat"],
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
    "data x fsdp x expert", "microbatches", "remat", "fits", "headroom, GiB",
    "bound", "step, s", "tokens/s", "MFU", "hours", "chip-hours",
  )  # fmt: skip
  lines = [text_table.table(header, cells)]
  best = next((row for row in rows if row["fits"]), None)
  if best:
    overrides = best["overrides"].items()
    lines += ["", *(f"--config.{name}={value}" for name, value in overrides)]
  return "\n".join(lines)


@dataclasses.dataclass(frozen=True)
class _Cost:
  """What ranks the plans of one mesh; bytes per device.

  Attributes:
    state: of parameters and optimiser, at rest.
    gradient: the float32 gradient, as parameters are at rest.
    gathered: parameters that a device computes with, in the dtype of products.
    forward: FLOPs of a token.
    tokens: of a device and step.
    kept: what is kept per token with remat=full.
  """

  config: config_lib.RunConfig
  chip: chips.Chip
  forward: float
  state: float
  gradient: float
  gathered: float
  tokens: float
  kept: float

  @classmethod
  def of(
    cls,
    config: config_lib.RunConfig,
    devices: Sequence[Any],
    chip: chips.Chip,
    forward: float,
  ) -> "_Cost":
    # One microbatch, so that what is kept is that of all tokens.
    model = dataclasses.replace(config.model, remat="full")
    optim = dataclasses.replace(config.optim, accumulate_steps=1)
    config = dataclasses.replace(config, model=model, optim=optim)
    mesh: Mesh = sharding.make_mesh(config.mesh, devices)
    program = train_state.make_program(config, mesh)
    state = program.abstract_state
    tokens = config.data.batch_size * config.data.sequence_length / mesh.size
    kept = sum(program.network.kept_bytes(state.model).values())
    experts = mesh.shape[sharding.EXPERT]
    used = _bytes_with(state.model, lambda p: experts if "E|" in p.axes else 1)
    itemsize = jnp.dtype(model.dtype).itemsize
    return cls(
      config,
      chip,
      forward=forward,
      state=sharding.bytes_per_device((state.model, state.opt_state)),
      gradient=sharding.bytes_per_device(state.model),
      gathered=used / 4 * itemsize,
      tokens=tokens,
      kept=kept / tokens,
    )

  def kept_bytes(self, accumulate: int, saved: float) -> float:
    """What a device holds at the end of the forward pass.

    Args:
      accumulate: microbatches.
      saved: bytes per token that are kept beyond the running states.
    """
    activations = self.tokens / accumulate * (self.kept + saved)
    return self.state + self.gradient + activations

  def seconds(self, accumulate: int, remat: str) -> float:
    """The largest of compute, memory and links, roughly."""
    model, mesh, chip = self.config.model, self.config.mesh, self.chip
    passes = _PASSES[remat]
    work = (passes + 2) * self.forward * self.tokens
    # Weights are read in every pass, and float32 gradients are added.
    weights = accumulate * self.gathered * (passes + 2 + 4)
    vectors = _VECTORS * model.num_sublayers * model.width * 2
    cut = 1 - 1 / mesh.fsdp
    sent = accumulate * self.gathered * cut * (passes + 1 + 2)
    sent += 2 * self.gradient * (1 - 1 / mesh.data)
    experts = model.sublayer_kinds.count("moe") * (mesh.expert - 1)
    sent += self.tokens * model.width * 2 * experts * 2 * (passes + 1)
    return max(
      work / chip.peak_flops_per_second,
      (weights + vectors * self.tokens) / chip.hbm_bytes_per_second,
      sent / chip.link_bytes_per_second,
    )


def _meshes(
  config: config_lib.RunConfig, devices: int
) -> Iterator[config_lib.MeshConfig]:
  """Meshes over all devices; fsdp leaves whole tiles, or is 1."""
  tensor = max(1, config.mesh.tensor)
  model = config.model
  if devices % tensor:
    config_lib.fail("mesh.tensor", tensor, f"a divisor of {devices} devices")
  shards = devices // tensor
  for expert in _divisors(math.gcd(shards, model.moe.num_experts or 1)):
    for fsdp in _divisors(shards // expert):
      if fsdp == 1 or model.width % (fsdp * _TILE) == 0 or model.width < _TILE:
        yield dataclasses.replace(
          config.mesh,
          data=shards // expert // fsdp,
          fsdp=fsdp,
          expert=expert,
          tensor=tensor,
        )


def _shapes(config: config_lib.RunConfig) -> Iterator[tuple[int, str]]:
  """(microbatches, remat): every number that divides a device's rows."""
  mesh = config.mesh
  rows = config.data.batch_size // (mesh.data * mesh.fsdp * mesh.expert)
  for accumulate in _divisors(rows):
    for remat in _PASSES:
      yield accumulate, remat


def _saved_bytes(model: config_lib.ModelConfig) -> dict[str, float]:
  """Bytes per token that each remat keeps beyond the running states.

  The results of products, where they are kept. The outputs of attention are
  left out.
  """
  length = 256
  x_BTD = jax.ShapeDtypeStruct((1, length, model.width), model.dtype)
  each = {}
  for kind in dict.fromkeys(model.sublayer_kinds):
    core = sublayer.abstract_core(kind, model)
    with linear.counting():
      traced = jax.make_jaxpr(lambda core, x_BTD: core(x_BTD))(core, x_BTD)
    each[kind] = sum(
      math.prod(v.aval.shape) * v.aval.dtype.itemsize
      for equation in report_lib.equations(traced.jaxpr)
      if equation.params.get("name") == linear.PRODUCT
      for v in equation.outvars
    )
  products = sum(each[kind] for kind in model.sublayer_kinds) / length
  kept = {"none": _UNCHECKPOINTED, "dots": 1.0}
  return {remat: kept.get(remat, 0.0) * products for remat in _PASSES}


def _bytes_with(model: Any, shards: Callable[[Any], int]) -> float:
  """Float32 bytes of all parameters, each divided by `shards` of it."""
  sizes = []

  def add(parameter: sharding.Parameter) -> None:
    sizes.append(4 * math.prod(parameter.value.shape) / shards(parameter))

  sharding.map_parameters(add, model)
  return sum(sizes)


def _divisors(number: int) -> list[int]:
  return [n for n in range(1, number + 1) if number % n == 0]


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
  path = command_line.plans_file()
  known = plans_lib.under_other_schemes(
    config, devices, residuals.RESIDUALS, path
  )
  if known:
    print("as under another residual scheme:")
    yield known
  candidates, dropped = plans(config, devices)
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
    "compile_seconds": (row["compile_seconds"], ".0f"),
  }
  cells = {
    name: "" if value is None else format(value, shape)
    for name, (value, shape) in numbers.items()
  }
  return cells | {"bound": row["bound"] or ""}


def _libtpu() -> str:
  return importlib.metadata.version("libtpu")


def _different(candidates: Sequence[Plan]) -> list[Plan]:
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
