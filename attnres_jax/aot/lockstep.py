# SPDX-License-Identifier: Apache-2.0
"""How long a pipeline's step takes when every tick waits for its slowest rank.

All ranks run one program, a loop over ticks with two conditionals: the forward
and the backward slot. The chunk in a slot selects the branch, so a branch is
one unit of work, and the schedule says which rank runs which branch at which
tick. A unit takes the longer of its compute and its memory at peak. A tick
takes as long as its slowest rank, so that the bubble, uneven chunks and the
head on the last rank are included. Transfers are not: what is sent within a
tick is hidden or waited for as in any program (`waiting`).
"""

import dataclasses
import functools

import numpy as np

from attnres_jax import chips
from attnres_jax import config as config_lib
from attnres_jax.aot import hlo
from attnres_jax.aot import least
from attnres_jax.flops import operations
from attnres_jax.pipeline import layout as layout_lib
from attnres_jax.pipeline import schedule as schedule_lib


@dataclasses.dataclass(frozen=True)
class Units:
  """Seconds, FLOPs or bytes of units of work on one device.

  Attributes:
    forward_C: float64, of each chunk.
    backward_C: float64, of each chunk.
    idle: of a forward and of a backward slot without work.
  """

  forward_C: np.ndarray
  backward_C: np.ndarray
  idle: tuple[float, float] = (0.0, 0.0)

  def of_ticks(self, schedule: schedule_lib.Schedule) -> np.ndarray:
    """float64 [ticks, P]: what each rank does in each tick."""
    # An empty slot has chunk -1.
    forward = np.append(self.forward_C, self.idle[0])
    backward = np.append(self.backward_C, self.idle[1])
    return (
      forward[schedule.forward[:, :, 0]] + backward[schedule.backward[:, :, 0]]
    )


@dataclasses.dataclass(frozen=True)
class Lockstep:
  """The time of a step, at the peaks of a chip.

  Attributes:
    seconds: of a step.
    tick_seconds: of all ticks, a part of it; the rest is outside of them or in
      them on all ranks, such as adding gradients.
    bubble: ticks over what a rank works in them on average, less one.
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

  Args:
    program: compiled, of `pipeline.spmd` with `pipeline.schedule="fused"`.
    config: of the run.
    schedule: of the pipeline.
    chip: whose peaks count.
    devices: of the mesh.

  Raises:
    RunError: the program has no two conditionals with a branch per chunk.
  """
  slots = _slots(program, schedule.layout.num_chunks)
  tokens = config.data.batch_size * config.data.sequence_length / devices
  tokens *= schedule.layout.num_ranks / schedule.num_microbatches
  needs = unit_flops(config, schedule.layout, tokens)
  of_chunks = needs.forward_C, needs.backward_C
  times, all_bytes, all_flops = [], 0.0, 0.0
  for count, branches in slots:
    nbytes = np.asarray([program.hbm_bytes(name) for name in branches])
    flops = np.asarray([program.flops(name) for name in branches])
    all_bytes += count * nbytes.mean()
    all_flops += count * flops.mean()
    kernels = np.asarray([_has_kernels(program, name) for name in branches])
    analytic = np.append(0.0, of_chunks[len(times)])
    charged = np.where(kernels, np.maximum(flops, analytic), flops)
    times.append(
      np.maximum(
        charged / chip.peak_flops_per_second,
        nbytes / chip.hbm_bytes_per_second,
      )
    )
  forward, backward = times
  seconds_TP = Units(
    forward[1:], backward[1:], (forward[0], backward[0])
  ).of_ticks(schedule)
  ticks = float(seconds_TP.max(axis=1).sum())
  # What no branch does: the rest of a tick, and all that is outside the loop.
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


def unit_flops(
  config: config_lib.RunConfig, layout: layout_lib.Layout, tokens: float
) -> Units:
  """Analytic FLOPs of each unit on one device.

  The forward unit of the last chunk only receives, because its backward, in the
  same tick, computes it anyway. Backward computes a chunk again, and once more
  what `model.remat` leaves out, then twice for the gradients; the head is
  computed once.

  Args:
    config: of the run.
    layout: of its chunks.
    tokens: of a microbatch on one device.
  """
  model = config.model
  plain = dataclasses.replace(model, remat="none")
  each, depth, head = _forward_flops(plain, config.data.sequence_length)
  starts = (0, *layout.ends)
  forward_C = np.asarray([
    sum(each[kind] + depth for kind in model.sublayer_kinds[start:stop])
    for start, stop in zip(starts, layout.ends)
  ])  # fmt: skip
  again = model.remat not in least.KEEP_PRODUCTS
  backward_C = (3 + again) * forward_C
  backward_C[-1] += 3 * head
  forward_C[-1] = 0.0
  return Units(tokens * forward_C, tokens * backward_C)


@functools.cache
def _forward_flops(
  model: config_lib.ModelConfig, sequence_length: int
) -> tuple[dict[str, float], float, float]:
  """Per token: of a sublayer of each kind, of a depth read, and of the head."""
  each = {
    kind: of_all / model.sublayer_kinds.count(kind)
    for kind, of_all in operations.flops_of_kinds(
      model, sequence_length
    ).items()
  }
  per_token = operations.flops_per_token(model, sequence_length)
  return each, per_token.residual / model.num_sublayers, per_token.head


def _slots(
  program: hlo.Program, num_chunks: int
) -> list[tuple[float, list[str]]]:
  """(executions, branches) of the forward, then of the backward slot."""
  found = []
  for name, (count, in_loop) in program.runs.items():
    if not in_loop or name in program.fused:
      continue
    for instruction in program.computations[name].values():
      branches = [called for _, called in instruction.called()]
      if instruction.op == "conditional" and len(branches) == num_chunks + 1:
        found.append((count, branches))
  if len(found) != 2:
    raise config_lib.RunError(
      f"the program has {len(found)} conditionals over {num_chunks} chunks in"
      " loops, expected 2: a forward and a backward slot"
    )
  return found


def _has_kernels(program: hlo.Program, branch: str) -> bool:
  return any(
    "tpu_custom_call" in instruction.attributes
    for name in program.runs_from(branch)
    for instruction in program.computations[name].values()
  )
