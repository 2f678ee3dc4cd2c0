# SPDX-License-Identifier: Apache-2.0
"""How long a pipeline's step takes when every tick waits for its slowest rank.

All ranks run one program, a loop over ticks. In it, every unit of work, forward
or backward through a chunk, is a loop of one or no trip with a name, and the
schedule says which rank runs which unit at which tick. A unit takes the longer
of its compute and its memory at peak. A tick takes as long as its slowest rank,
so that bubble and uneven chunks are included. The head takes equally long on
all ranks. `report` adds the transfers.
"""

import dataclasses

import numpy as np

from attnres_jax import config as config_lib
from attnres_jax.common import chips
from attnres_jax.common import scopes
from attnres_jax.flops import operations
from attnres_jax.pipeline import layout as layout_lib
from attnres_jax.pipeline import schedule as schedule_lib
from attnres_jax.plan import hlo
from attnres_jax.plan import least


@dataclasses.dataclass(frozen=True)
class Lockstep:
  """The time of a step, at the peaks of a chip.

  Attributes:
    seconds: of a step.
    tick_seconds: of the units in all ticks, a part of it; the rest is outside
      of ticks or in them on all ranks, such as the head and adding gradients.
    bubble: ticks over what a rank works in them on average, minus one.
    slowest_rank: the rank with the most work.
  """

  seconds: float
  tick_seconds: float
  bubble: float
  slowest_rank: int


def of_program(
  program: hlo.Program,
  config: config_lib.RunConfig,
  schedule: schedule_lib.Schedule,
  chip: chips.Chip,
  devices: int,
) -> Lockstep:
  """Reads the units of a compiled step, and runs them by the schedule.

  The program is of `pipeline.spmd`, with `pipeline.schedule="fused"`.

  Raises:
    RunError: the program has no loop for some unit of work.
  """
  tokens = config.data.batch_size * config.data.sequence_length / devices
  tokens *= schedule.layout.num_ranks / schedule.num_microbatches
  needs = unit_flops(config, schedule.layout, tokens)
  units = _units(program, schedule.layout.num_chunks)
  all_bytes = all_flops = 0.0
  times = []
  for slot, analytic_C in (
    (scopes.FORWARD, needs[0]),
    (scopes.BACKWARD, needs[1]),
  ):
    seconds_C = np.zeros(len(analytic_C))
    for chunk, analytic in enumerate(analytic_C):
      body = units[slot, chunk]
      count, _ = program.runs[body]
      nbytes, work = program.hbm_bytes(body), program.flops(body)
      all_bytes += count * nbytes
      all_flops += count * work
      if any(
        instruction.is_kernel
        for name in program.runs_from(body)
        for instruction in program.computations[name].values()
      ):
        work = max(work, analytic)
      seconds_C[chunk] = max(
        work / chip.peak_flops_per_second, nbytes / chip.hbm_bytes_per_second
      )
    times.append(seconds_C)
  seconds_TP = of_ticks(schedule, *times)
  ticks = float(seconds_TP.max(axis=1).sum())
  # What no unit does: the rest of a tick, and all that is outside the loop.
  rest = max(
    (program.flops() - all_flops) / chip.peak_flops_per_second,
    (program.hbm_bytes() - all_bytes) / chip.hbm_bytes_per_second,
  )
  work_P = seconds_TP.sum(axis=0)
  return Lockstep(
    float(rest) + ticks,
    ticks,
    ticks / float(work_P.mean()) - 1,
    int(work_P.argmax()),
  )


def of_ticks(
  schedule: schedule_lib.Schedule,
  forward_C: np.ndarray,
  backward_C: np.ndarray,
) -> np.ndarray:
  """float64 [ticks, P]: each rank's part, given the parts of chunks."""
  # An empty slot has chunk -1.
  forward, backward = np.append(forward_C, 0.0), np.append(backward_C, 0.0)
  return (
    forward[schedule.forward[:, :, 0]] + backward[schedule.backward[:, :, 0]]
  )


def unit_flops(
  config: config_lib.RunConfig, layout: layout_lib.Layout, tokens: float
) -> tuple[np.ndarray, np.ndarray]:
  """Analytic FLOPs [C] on one device, forward and backward, without the head.

  Backward computes a chunk again, and once more what `model.remat` leaves out,
  then twice for the gradients. `tokens` are how many a microbatch has on one
  device.
  """
  model = config.model
  length = config.data.sequence_length
  of_kinds = operations.flops_of_kinds(model, length)
  each = {
    kind: of_all / model.sublayer_kinds.count(kind)
    for kind, of_all in of_kinds.items()
  }
  per_token = operations.flops_per_token(model, length)
  depth = per_token.residual / model.num_sublayers
  starts = (0, *layout.ends)
  forward_C = np.asarray([
    sum(each[kind] + depth for kind in model.sublayer_kinds[start:stop])
    for start, stop in zip(starts, layout.ends)
  ])  # fmt: skip
  again = model.remat not in least.KEEP_PRODUCTS
  return tokens * forward_C, tokens * (3 + again) * forward_C


def _units(program: hlo.Program, num_chunks: int) -> dict[tuple[str, int], str]:
  """(slot, chunk) -> the computation of every unit."""
  bodies = {}
  for name in program.runs:
    for instruction in program.computations[name].values():
      if instruction.op == "while" and (
        unit := scopes.unit_of_name(instruction.op_name)
      ):
        bodies[unit] = dict(instruction.called())["body"]
  for slot in (scopes.FORWARD, scopes.BACKWARD):
    for chunk in range(num_chunks):
      if (slot, chunk) not in bodies:
        raise config_lib.RunError(
          f"the program has no loop for chunk {chunk} of {num_chunks} in the"
          f" {slot} slot"
        )
  return bodies
