# SPDX-License-Identifier: Apache-2.0
"""What a step of a compiled program costs a device (`report` says how)."""

from collections.abc import Mapping
import dataclasses
from typing import Any

import jax

from attnres_jax.common import chips
from attnres_jax.common import topology
from attnres_jax.pipeline import spmd
from attnres_jax.plan import attribution
from attnres_jax.plan import bill
from attnres_jax.plan import collectives
from attnres_jax.plan import gpu
from attnres_jax.plan import hlo
from attnres_jax.plan import least
from attnres_jax.plan import lockstep
from attnres_jax.plan import timeline
from attnres_jax.train import train_state

# How many of the largest arrays, and of the largest movers, are listed.
NUM_LARGEST = 8


@dataclasses.dataclass(frozen=True)
class StepCost:
  """Of a device and step. Names end in their units; FLOPs have none."""

  parts: list[dict[str, Any]]  # Rows of `bill`.
  # Compiled ones, and analytic ones of parts with kernels.
  charged_flops: float
  least_flops: float  # That the step needs.
  least_bytes: float  # Of HBM, likewise.
  flops: float  # Of matrix products outside kernels.
  flops_ratio: float  # Charged FLOPs over the least.
  traffic_bytes: float  # Of HBM, compiled.
  sent_bytes: float  # To other devices.
  exposed_bytes: float  # Of these, beside which nothing is computed.
  bytes_between_slices: float  # Over the data-centre network.
  compute_seconds: float  # Of FLOPs at the compiler's peak.
  memory_seconds: float  # Of traffic at the compiler's peak.
  link_seconds: float  # Of what is sent.
  bound: str  # "compute", "memory" or "link", whichever takes longest.
  least_seconds: float  # At the published peaks.
  step_seconds: float  # The estimate.
  collectives: list[dict[str, Any]]  # A row per kind, mesh axes and place.
  largest: list[dict[str, Any]]  # Arrays, with bytes and source.
  busiest: list[dict[str, Any]]  # Movers, with bytes and runs.
  # Fields of `lockstep.Lockstep`, of a pipeline.
  lockstep: dict[str, Any] | None = None
  # Fields of `timeline.Timeline`, without a pipeline on TPUs.
  timeline: dict[str, Any] | None = None
  launches: float | None = None  # Of kernels on a GPU.
  launch_seconds: float | None = None  # Of these.
  work_seconds: float | None = None  # Of the kernels themselves, on a GPU.
  exposed_seconds: float | None = None  # Part of `link_seconds`, on a GPU.

  def fields(self) -> dict[str, Any]:
    """Those that this program has, for a report."""
    values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
    return {name: x for name, x in values.items() if x is not None}


def of_program(
  report: Mapping[str, Any], text: str, step: train_state.Program
) -> StepCost:
  """The cost of a compiled program, given what was known before."""
  device = step.mesh.devices.flat[0]
  chip = topology.chip(device)
  trains, analytic_flops = report["step"] == "train", report["analytic_flops"]
  needs = least.of_parts(step) if trains else {}
  program = hlo.Program(text)
  times = _work(program, chip, step.mesh, needs)
  times["flops_ratio"] = times["charged_flops"] / (
    times["least_flops"] or analytic_flops
  )
  larger = max(times["charged_flops"], analytic_flops)
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
  if device.platform == "gpu":
    times |= gpu.of_program(program, chip, device.device_kind)
    times["step_seconds"] = gpu.step_seconds(times)
  else:
    times["step_seconds"] = step_seconds(times, chip)
    if "lockstep" not in times:  # Which knows how long ranks wait.
      walked = timeline.of_program(text, step.mesh, chip, needs)
      times["timeline"] = dataclasses.asdict(walked)
  return StepCost(**times)


def step_seconds(report: Mapping[str, Any], chip: chips.Chip) -> float:
  """The estimate of `report` for TPUs, in seconds."""
  work = max(report["compute_seconds"], report["memory_seconds"])
  if "lockstep" in report:
    work = report["lockstep"]["seconds"]
  exposed = report["exposed_bytes"] / chip.link_bytes_per_second
  return max(work + exposed, report["link_seconds"])


def _work(
  program: hlo.Program,
  chip: chips.Chip,
  mesh: jax.sharding.Mesh,
  needs: Mapping[str, least.Least],
) -> dict[str, Any]:
  rows: dict[tuple[str, str, bool], dict[str, Any]] = {}
  for op in collectives.of_program(program):
    key = (op.kind, collectives.axes_of(op.group, mesh.shape), op.in_loop)
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
    bytes_between_slices=collectives.bytes_between_slices(program),
    link_seconds=sent / chip.link_bytes_per_second,
    exposed_bytes=sent - overlapped,
    collectives=sorted(rows.values(), key=lambda row: -row["sent_bytes"]),
    largest=[
      dict(array=str(array), bytes=array.nbytes, source=source)
      for array, source in program.largest(NUM_LARGEST)
    ],
    busiest=[
      dict(bytes=nbytes, runs=runs, array=array, source=source)
      for nbytes, runs, array, source in program.busiest(NUM_LARGEST)
    ],
  )
