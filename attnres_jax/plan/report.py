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
import time
from typing import Any

import jax

from attnres_jax import config as config_lib
from attnres_jax import flops
from attnres_jax.common import chips
from attnres_jax.common import compiler
from attnres_jax.common import gpus
from attnres_jax.common import sharding
from attnres_jax.common import topology
from attnres_jax.inference import prepared
from attnres_jax.inference import programs
from attnres_jax.plan import cost
from attnres_jax.plan import schedule
from attnres_jax.train import train_state


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
  """Compiles and analyses a step of `STEPS`; the result can be saved as JSON.

  `fits` is False if the program needs more memory than a device has. If the
  compiler refuses it for that reason, `reason` is its message, and the numbers
  of the compiled program are missing. If libtpu is too new for jaxlib to read
  its output, only the memory is known, and `unread` says why.

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
    return report | dict(fits=False, reason=str(error))
  report["compile_seconds"] = time.perf_counter() - start
  report |= _of_peak(compiler.peak_bytes(compiled), chip)
  temporary = compiled.memory_analysis().temp_size_in_bytes
  report["temporary_bytes"] = temporary
  try:
    text = compiled.as_text()
  except jax.errors.JaxRuntimeError as error:
    return report | dict(unread=str(error).strip().splitlines()[0])
  return report | cost.of_program(report, text, program).fields()


def make_schedule_report(
  config: config_lib.RunConfig, slice_name: str, num_slices: int = 1
) -> dict[str, Any]:
  """The report of a training step that is compiled up to its schedule.

  It takes a fraction of the time. Bytes and FLOPs are the same. The peak covers
  all allocations, without the program itself (docs/status.md). If the compiler
  refuses it without a peak, `reason` is its message. For GPUs, all is compiled.

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
  compiled = schedule.up_to_schedule(
    schedule.lower_step, config, slice_name, num_slices
  )
  if compiled.reason:
    return report | dict(fits=False, reason=compiled.reason)
  report |= _of_peak(compiled.peak_bytes, chip)
  report["compile_seconds"] = compiled.seconds
  return report | cost.of_program(report, compiled.text, program).fields()


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


def _is_gpu(mesh: jax.sharding.Mesh) -> bool:
  return mesh.devices.flat[0].platform == "gpu"


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


def _analytic_flops(config: config_lib.RunConfig, step: str) -> float:
  rows, length = config.data.batch_size, config.data.sequence_length
  per_token = flops.flops_per_token(config.model, length)
  if step == "train":
    return per_token.train * rows * length
  # The last token attends to twice as many as an average one.
  return (per_token.forward + per_token.attention) * rows


def _of_peak(peak: int, chip: chips.Chip) -> dict[str, Any]:
  return dict(
    fits=peak <= chip.hbm_bytes,
    peak_bytes=peak,
    headroom_bytes=chip.hbm_bytes - peak,
  )
