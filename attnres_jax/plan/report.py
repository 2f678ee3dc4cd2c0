# SPDX-License-Identifier: Apache-2.0
"""Compiles a step of a config for TPUs or GPUs, without having them.

Everything is per device. Memory is the compiler's own account of one program.
The compiler counts no FLOPs inside Pallas kernels: for parts with kernels, the
analytic ones count (see `bill`). Bytes include the operands and results of
kernels, each once.

A step takes the larger of its compute and its memory at the peaks that the
compiler assumes, plus the transfers beside which nothing is computed, and never
less than all its transfers. In a pipeline, each unit of work takes the larger
of its own compute and memory, and each tick as long as its slowest rank, so
that the bubble counts (`lockstep`). On GPUs, a step is the sum of its launches
(`gpu`). No chip reaches its peaks, so real steps take longer. A step takes *at
least* the largest of the three at the published peaks.

These sums let the compute of one part hide the memory of another, and give
every transfer all links of a chip. Beside them stands what `timeline` finds
along the schedule, on the links there are.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import dataclasses
import math
import re
import time
from typing import Any

import jax

from attnres_jax import config as config_lib
from attnres_jax import flops
from attnres_jax.common import chips
from attnres_jax.common import compiler
from attnres_jax.common import gpus
from attnres_jax.common import sharding
from attnres_jax.common import text_table
from attnres_jax.common import topology
from attnres_jax.inference import prepared
from attnres_jax.inference import programs
from attnres_jax.pipeline import spmd
from attnres_jax.plan import attribution
from attnres_jax.plan import bill
from attnres_jax.plan import gpu
from attnres_jax.plan import hlo
from attnres_jax.plan import least
from attnres_jax.plan import lockstep
from attnres_jax.plan import schedule
from attnres_jax.plan import timeline
from attnres_jax.train import train_state

_GIB = 2**30
# How many of the largest arrays, and of the largest movers, a report lists.
_NUM_LARGEST = 8


def _trace_train(program):
  return program.train_step.trace(program.abstract_state, program.batch_shapes)


def _trace_decode(program):
  of_data = program.config.data
  return programs.trace_next(
    program.abstract_state.model,
    program.mesh,
    of_data.batch_size,
    of_data.sequence_length,
  )


# What a program traces: `train_state.Program` -> the traced program.
STEPS: Mapping[str, Callable[..., Any]] = {
  "train": _trace_train,
  "decode": _trace_decode,
}


def make_report(
  config: config_lib.RunConfig,
  devices: Sequence[Any],
  step: str = "train",
) -> dict[str, Any]:
  """Compiles and analyses a step; the result can be saved as JSON.

  `fits` is False if the program needs more memory than a device has. If the
  compiler refuses it for that reason, `reason` is its message, and the numbers
  of the compiled program are missing. If libtpu is too new for jaxlib to read
  its output, only the memory is known, and `unread` says why.

  Args:
    config: of the run.
    devices: of `topology.devices`.
    step: a key of `STEPS`.

  Raises:
    ConfigError: the config does not fit the mesh, or has no vocabulary size.
  """
  trace = config_lib.choose("step", step, STEPS)
  chip = topology.chip(devices[0])
  mesh = sharding.make_mesh(config.mesh, devices)
  program = train_state.make_program(config, mesh)
  report = _of_shapes(config, step, program, chip)
  start = time.perf_counter()
  staged = trace(program)
  if step != "train":
    stored = prepared.abstract_prepared(program.abstract_state.model, mesh)
    report["parameter_bytes"] = sharding.bytes_per_device(stored)
  lowered = staged.lower()
  report["lower_seconds"] = time.perf_counter() - start
  start = time.perf_counter()
  try:
    compiled = lowered.compile(gpus.COMPILER_OPTIONS if _is_gpu(mesh) else None)
  except jax.errors.JaxRuntimeError as error:
    if "RESOURCE_EXHAUSTED" not in str(error):
      raise
    largest = _largest_traced(staged.jaxpr)
    return report | dict(fits=False, reason=str(error), largest=largest)
  report["compile_seconds"] = time.perf_counter() - start
  report |= _memory(compiled, chip)
  try:
    text = compiled.as_text()
  except jax.errors.JaxRuntimeError as error:
    report["unread"] = str(error).strip().splitlines()[0]
    report["largest"] = _largest_traced(staged.jaxpr)
    return report
  return report | _times(report, text, program)


def make_schedule_report(
  config: config_lib.RunConfig, slice_name: str, num_slices: int = 1
) -> dict[str, Any]:
  """The report of a training step that is compiled up to its schedule.

  It takes a fraction of the time. Bytes and FLOPs are the same. The peak covers
  all allocations, without the program itself (docs/status.md). If the compiler
  refuses it without a peak, `reason` is its message. For GPUs, all is compiled.

  Args:
    config: of the run.
    slice_name: of `topology.devices`, like the next argument.
    num_slices: how many of them.

  Raises:
    ConfigError: the config does not fit the mesh, or has no vocabulary size.
  """
  devices = topology.devices(slice_name, num_slices)
  mesh = sharding.make_mesh(config.mesh, devices)
  if _is_gpu(mesh):
    return make_report(config, devices)
  chip = topology.chip(devices[0])
  program = train_state.make_program(config, mesh)
  report = _of_shapes(config, "train", program, chip)
  compiled = schedule.compile_step(config, slice_name, num_slices)
  if compiled.reason:
    largest = _largest_traced(_trace_train(program).jaxpr)
    return report | dict(fits=False, reason=compiled.reason, largest=largest)
  report |= dict(
    fits=compiled.peak_bytes <= chip.hbm_bytes,
    peak_bytes=compiled.peak_bytes,
    headroom_bytes=chip.hbm_bytes - compiled.peak_bytes,
    compile_seconds=compiled.seconds,
  )
  return report | _times(report, compiled.text, program)


def _of_shapes(
  config: config_lib.RunConfig,
  step: str,
  program: train_state.Program,
  chip: chips.Chip,
) -> dict[str, Any]:
  """What is known before the program is compiled."""
  mesh, state = program.mesh, program.abstract_state
  report: dict[str, Any] = dict(
    name=config.name,
    step=step,
    residual=config.model.residual.name,
    device_kind=mesh.devices.flat[0].device_kind,
    devices=mesh.size,
    mesh=dict(mesh.shape),
    batch_size=config.data.batch_size,
    sequence_length=config.data.sequence_length,
    microbatches=program.network.microbatches,
    remat=config.model.remat,
    parameter_bytes=sharding.bytes_per_device(state.model),
    hbm_bytes=chip.hbm_bytes,
    analytic_flops=_analytic_flops(config, step) / mesh.size,
  )
  if step == "train":
    report["optimiser_bytes"] = sharding.bytes_per_device(state.opt_state)
    report |= program.network.kept_bytes(state.model)
  return report


def _times(
  report: Mapping[str, Any], text: str, step: train_state.Program
) -> dict[str, Any]:
  """What a program computes, moves and sends, and what binds it."""
  device = step.mesh.devices.flat[0]
  chip = topology.chip(device)
  trains = report["step"] == "train"
  needs = least.of_parts(step) if trains else {}
  program = hlo.Program(text)
  times = _work(program, chip, step.mesh, needs)
  analytic = report["analytic_flops"]
  times["flops_ratio"] = times["charged_flops"] / (
    times["least_flops"] or analytic
  )
  larger = max(times["charged_flops"], analytic)
  times["compute_seconds"] = larger / chip.peak_flops_per_second
  bounds = ("compute_seconds", "memory_seconds", "link_seconds")
  bound = max(bounds, key=lambda name: times[name])
  times["bound"] = bound.removesuffix("_seconds")
  published = times["traffic_bytes"] / chip.published_hbm_bytes_per_second
  times["least_seconds"] = max(
    times["compute_seconds"], published, times["link_seconds"]
  )
  fused = step.config.pipeline.schedule == "fused"
  if trains and isinstance(step.network, spmd.Pipeline) and fused:
    times["lockstep"] = dataclasses.asdict(
      lockstep.of_program(
        program, step.config, step.network.schedule, chip, step.mesh.size
      )
    )
  if _is_gpu(step.mesh):
    times |= gpu.of_program(program, chip, device.device_kind)
    times["step_seconds"] = gpu.step_seconds(times)
  else:
    times["step_seconds"] = step_seconds(times, chip)
    if "lockstep" not in times:  # Which knows how long ranks wait.
      walked = timeline.of_program(text, step.mesh, chip, needs)
      times["timeline"] = dataclasses.asdict(walked)
  return times


def step_seconds(report: Mapping[str, Any], chip: chips.Chip) -> float:
  """The estimate of the module docstring, in seconds."""
  work = max(report["compute_seconds"], report["memory_seconds"])
  if "lockstep" in report:
    work = report["lockstep"]["seconds"]
  exposed = report["exposed_bytes"] / chip.link_bytes_per_second
  return max(work + exposed, report["link_seconds"])


def _is_gpu(mesh: jax.sharding.Mesh) -> bool:
  return mesh.devices.flat[0].platform == "gpu"


def to_text(report: Mapping[str, Any]) -> str:
  """The report as text."""
  mesh = " x ".join(f"{n} {axis}" for axis, n in report["mesh"].items())
  rows = f"{report['batch_size']} rows of {report['sequence_length']} tokens"
  if report["step"] == "train":
    rows += (
      f" in {report['microbatches']} microbatches, remat {report['remat']}"
    )
  else:
    rows += ", one more token for each row, whose cache is full"
  lines = [
    f"{report['name']} ({report['residual']}), {report['step']} step on"
    f" {report['devices']} {report['device_kind']} devices: {mesh}",
    rows,
    "",
    text_table.table(("memory per device", "GiB"), _memory_rows(report)),
  ]
  refused, unread = "reason" in report, "unread" in report
  if refused or unread:
    if refused:
      lines += ["", "does not fit:", _oom(report["reason"])]
    else:
      lines += ["", f"jaxlib cannot read the program: {report['unread']}"]
      lines += [] if report["fits"] else ["", "does not fit"]
    lines += ["", "before anything is split over devices or fused:"]
    return "\n".join([*lines, _largest(report)])
  lines += [
    "",
    text_table.table(
      ("per device and step", "amount", "seconds at peak"),
      _total_rows(report),
    ),
    f"a step takes {report['step_seconds']:.3f} s by estimate, bound by"
    f" {report['bound']}, and at least {report['least_seconds']:.3f} s",
    *_timeline(report),
    *_lockstep(report),
    *_warning(report),
    "",
    bill.to_text(report["parts"]),
    "* with kernels, whose FLOPs the compiler does not count",
    "",
    text_table.table(
      ("collective", "axes", "where", "times", "MB sent", "MB overlapped"),
      [
        (
          row["kind"], row["axes"], "in loop" if row["in_loop"] else "once",
          f"{row['count']:.0f}", f"{row['sent_bytes'] / 1e6:,.1f}",
          f"{row['overlapped_bytes'] / 1e6:,.1f}",
        )
        for row in report["collectives"]
      ],
    ),
    "",
    _largest(report),
    "",
    text_table.table(
      ("moves most", "GB of HBM", "runs", "makes", "computed by"),
      [
        (
          f"{row['bytes'] / report['traffic_bytes']:.1%}",
          f"{row['bytes'] / 1e9:,.1f}", f"{row['runs']:,.0f}", row["array"],
          row["source"],
        )
        for row in report["busiest"]
      ],
    ),
    "",
    *([] if report["fits"] else ["does not fit", ""]),
    _compile_time(report),
  ]  # fmt: skip
  return "\n".join(lines)


def _compile_time(report):
  compiled = f"{report['compile_seconds']:.0f} s"
  if "lower_seconds" not in report:
    return (
      f"compiled up to its schedule in {compiled}; the peak is that of its"
      " arrays, without machine code"
    )
  return f"lowered in {report['lower_seconds']:.0f} s, compiled in {compiled}"


def _total_rows(report):
  rows = [
    ("FLOPs of the model", "analytic_flops", ""),
    ("FLOPs, least", "least_flops", ""),
    ("FLOPs, compiled", "charged_flops", "compute_seconds"),
    ("bytes of HBM, least", "least_bytes", ""),
    ("bytes of HBM, compiled", "traffic_bytes", "memory_seconds"),
    ("bytes sent", "sent_bytes", "link_seconds"),
    ("of these, beside no work", "exposed_bytes", "exposed_seconds"),
    ("bytes between slices", "bytes_between_slices", ""),
  ]
  share = report["exposed_bytes"] / (report["sent_bytes"] or 1.0)
  report = {"exposed_seconds": share * report["link_seconds"]} | dict(report)
  if "launches" in report:
    rows.insert(3, ("launches", "launches", "launch_seconds"))
  report.setdefault("bytes_between_slices", 0.0)
  return [
    (label, f"{report[name]:.3e}", f"{report[time]:.3f}" if time else "")
    for label, name, time in rows
    if report[name] or time
  ]


def _warning(report: Mapping[str, Any]) -> list[str]:
  ratio = report["flops_ratio"]
  if ratio <= bill.WARN:
    return []
  return [f"warning: it computes {ratio:.2f} times the FLOPs that it needs"]


def _timeline(report: Mapping[str, Any]) -> list[str]:
  walked = report.get("timeline")
  if walked is None:
    return []
  seconds = lambda sums: ", ".join(
    f"{name or 'all'} {value:.3f}"
    for name, value in sorted(sums.items(), key=lambda pair: -pair[1])
    if value >= 0.0005
  )
  longer = max(report["compute_seconds"], report["memory_seconds"])
  before = [longer, *walked["up_to"].values()]
  added = ", ".join(
    f"{cause} {new - old:+.3f}"
    for cause, old, new in zip(walked["up_to"], before, before[1:])
  )
  return [
    f"along its schedule it takes {walked['seconds']:.3f} s: {longer:.3f}, the"
    f" longer of compute and memory; {added}",
    f"  work {sum(walked['parts'].values()):.3f} s: "
    + seconds(walked["parts"]),
    f"  waits for links {sum(walked['waited_seconds'].values()):.3f} s: "
    + (seconds(walked["waited_seconds"]) or "none"),
  ]


def _lockstep(report: Mapping[str, Any]) -> list[str]:
  ranks = report.get("lockstep")
  if ranks is None:
    return []
  return [
    "compute and memory are means over ranks; as ranks wait for each other,"
    f" work takes {ranks['seconds']:.3f} s, with a bubble of"
    f" {ranks['bubble']:.0%}; rank {ranks['slowest_rank']} has the most work"
  ]


def _memory_rows(report):
  names = {
    "parameters": "parameter_bytes",
    "optimiser state": "optimiser_bytes",
    "temporaries": "temporary_bytes",
    "  activations kept for backward": "running_state_bytes",
    "  cached blocks": "block_bytes",
    "peak": "peak_bytes",
    "of": "hbm_bytes",
    "headroom": "headroom_bytes",
  }
  return [
    (label, f"{report[name] / _GIB:.2f}")
    for label, name in names.items()
    if name in report
  ]


def _largest(report: Mapping[str, Any]) -> str:
  return text_table.table(
    ("largest arrays", "MiB", "computed by"),
    [
      (row["array"], f"{row['bytes'] / 2**20:,.1f}", row["source"])
      for row in report["largest"]
    ],
  )


def _largest_traced(jaxpr: Any) -> list[dict[str, Any]]:
  """Largest arrays of a traced program, one of each shape and primitive."""
  sizes = {}
  for equation in equations(jaxpr):
    for variable in equation.outvars:
      shape = getattr(variable.aval, "shape", None)
      if shape is not None and not jax.dtypes.issubdtype(
        variable.aval.dtype, jax.dtypes.extended
      ):
        key = variable.aval.str_short(), equation.primitive.name
        sizes[key] = math.prod(shape) * variable.aval.dtype.itemsize
  largest = sorted(sizes, key=lambda key: (-sizes[key], key))[:_NUM_LARGEST]
  return [
    dict(array=key[0], bytes=sizes[key], source=key[1]) for key in largest
  ]


def equations(jaxpr: Any) -> Iterator[Any]:
  """All equations, with nested programs replaced by their equations."""
  for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
    inner = [
      value
      for parameter in equation.params.values()
      for value in (
        parameter if isinstance(parameter, (tuple, list)) else (parameter,)
      )
      if hasattr(getattr(value, "jaxpr", value), "eqns")
    ]
    if not inner:
      yield equation
    for value in inner:
      yield from equations(value)


def _oom(reason: str) -> str:
  """The compiler's list of the largest allocations, without its preamble."""
  at = re.search(r"Largest program allocations", reason)
  first = reason.strip().splitlines()[0]
  listing = reason[at.start() :].splitlines()[:40] if at else []
  return "\n".join([first, *listing])


def _analytic_flops(config: config_lib.RunConfig, step: str) -> float:
  rows, length = config.data.batch_size, config.data.sequence_length
  per_token = flops.flops_per_token(config.model, length)
  if step == "train":
    return per_token.train * rows * length
  # The last token attends to twice as many as an average one.
  return (per_token.forward + per_token.attention) * rows


def _memory(compiled: Any, chip: chips.Chip) -> dict[str, Any]:
  peak = compiler.peak_bytes(compiled)
  return dict(
    fits=peak <= chip.hbm_bytes,
    temporary_bytes=compiled.memory_analysis().temp_size_in_bytes,
    peak_bytes=peak,
    headroom_bytes=chip.hbm_bytes - peak,
  )


def _work(
  program: hlo.Program,
  chip: chips.Chip,
  mesh: jax.sharding.Mesh,
  needs: Mapping[str, least.Least],
) -> dict[str, Any]:
  rows: dict[tuple[str, str, bool], dict[str, Any]] = {}
  for op in program.collectives():
    key = (op.kind, hlo.axes_of(op.group, mesh.shape), op.in_loop)
    row = rows.setdefault(
      key,
      dict(
        zip(("kind", "axes", "in_loop"), key),
        count=0,
        sent_bytes=0.0,
        overlapped_bytes=0.0,
      ),
    )
    sent_bytes = op.count * op.sent_bytes
    row["count"] += op.count
    row["sent_bytes"] += sent_bytes
    row["overlapped_bytes"] += sent_bytes * op.overlapped
  sent = sum(row["sent_bytes"] for row in rows.values())
  overlapped = sum(row["overlapped_bytes"] for row in rows.values())
  traffic = program.hbm_bytes()
  parts = bill.make_rows(attribution.costs(program), needs, chip)
  return dict(
    parts=parts,
    charged_flops=sum(row["charged_flops"] for row in parts),
    least_flops=sum(row["least_flops"] or 0.0 for row in parts),
    least_bytes=sum(row["least_bytes"] or 0.0 for row in parts),
    flops=program.flops(),
    traffic_bytes=traffic,
    memory_seconds=traffic / chip.hbm_bytes_per_second,
    sent_bytes=sent,
    bytes_between_slices=program.bytes_between_slices(),
    link_seconds=sent / chip.link_bytes_per_second,
    exposed_bytes=sent - overlapped,
    collectives=sorted(rows.values(), key=lambda row: -row["sent_bytes"]),
    largest=[
      dict(array=str(array), bytes=array.nbytes, source=source)
      for array, source in program.largest(_NUM_LARGEST)
    ],
    busiest=[
      dict(bytes=nbytes, runs=runs, array=array, source=source)
      for nbytes, runs, array, source in program.busiest(_NUM_LARGEST)
    ],
  )
