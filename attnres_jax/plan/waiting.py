# SPDX-License-Identifier: Apache-2.0
"""How long links keep a device waiting, by the compiler's schedule.

Work takes the longer of its bytes and its matrix products at peak; kernels,
whose products the compiler does not count, take their bytes. A transfer that
has started progresses while the device works, the oldest first, as if all of
them shared the links. What is left when its result is needed is waited for. So
is all of a transfer that is not asynchronous. Work before a loop does not hide
what is sent in it, and the other way round.
"""

import collections
from collections.abc import Callable

from attnres_jax.common import chips
from attnres_jax.plan import hlo


def seconds(program: hlo.Program, chip: chips.Chip) -> float:
  """Seconds per execution of the program that nothing hides."""
  nbytes = {one.place: moved for _, one, moved in program.instructions()}

  def work(instruction: hlo.Instruction) -> float:
    moving = nbytes.get(instruction.place, 0.0) / chip.hbm_bytes_per_second
    flops = program.inner_flops(instruction)
    return max(moving, flops / chip.peak_flops_per_second)

  return sum(
    count * _of_computation(program, name, work, chip.link_bytes_per_second)
    for name, (count, _) in program.runs.items()
    if name not in program.fused
  )


def _of_computation(
  program: hlo.Program,
  name: str,
  work: Callable[[hlo.Instruction], float],
  link_bytes_per_second: float,
) -> float:
  starts, ends = collections.defaultdict(list), collections.defaultdict(list)
  left: list[float] = []
  for number, (start, end, one) in enumerate(program.transfers(name)):
    starts[start].append(number)
    ends[end].append(number)
    left.append(one.sent_bytes / link_bytes_per_second)
  waits, running = 0.0, []
  for at, instruction in enumerate(program.computations[name].values()):
    running += starts[at]
    for number in ends[at]:
      running.remove(number)
      waits += left[number]
    own = 0.0 if starts[at] else work(instruction)
    for number in running:
      progress = min(own, left[number])
      left[number] -= progress
      own -= progress
  return waits
