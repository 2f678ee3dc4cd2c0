# SPDX-License-Identifier: Apache-2.0
"""A tick takes as long as its slowest rank, as the schedule says."""

import dataclasses

import numpy as np
import pytest

from attnres_jax import config as config_lib
from attnres_jax import flops
from attnres_jax.common import chips
from attnres_jax.pipeline import layout as layout_lib
from attnres_jax.pipeline import schedule as schedule_lib
from attnres_jax.plan import hlo
from attnres_jax.plan import lockstep
from tests.plan import small

CHIP = chips.Chip(1.0, 0.0, 1.0, 1.0)


def _schedule(ranks=2, virtual=1, microbatches=2, sublayers=2):
  layout = layout_lib.Layout(ranks, virtual, sublayers)
  return schedule_lib.make_schedule(layout, microbatches)


@pytest.mark.parametrize("ranks,virtual,microbatches", [(2, 1, 2), (3, 2, 6)])
def test_equal_units_have_the_bubble_of_the_schedule(
  ranks, virtual, microbatches
):
  schedule = _schedule(ranks, virtual, microbatches)
  chunks = np.ones(ranks * virtual)
  seconds_TP = lockstep.of_ticks(schedule, chunks, 2 * chunks)
  ticks = seconds_TP.max(axis=1).sum()
  assert ticks / seconds_TP.sum(axis=0).mean() - 1 == pytest.approx(
    schedule.bubble(1.0, 2.0)
  )


def test_every_tick_waits_for_its_slowest_rank():
  # Two ranks, two microbatches: F0 | F0' F1 | ... by hand.
  #   tick   rank 0          rank 1
  #   0      F(m0)           idle
  #   1      F(m1)           F(m0) B(m0)
  #   2      B(m0)           F(m1) B(m1)
  #   3      B(m1)           idle
  units = np.array([1.0, 5.0]), np.array([20.0, 3.0])
  seconds_TP = lockstep.of_ticks(_schedule(), *units)
  expected = [[1, 0], [1, 8], [20, 8], [20, 0]]
  assert seconds_TP.tolist() == expected
  assert seconds_TP.max(axis=1).sum() == 1 + 8 + 20 + 20


# Four ticks. Each copies 80 bytes on all ranks, runs a forward unit (16 or 32
# bytes), then a backward one (48 or 64). Then 400 bytes.
def _text(chunks=2):
  def copy(name, floats):
    return (
      f"%{name} (a{name}: f32[{floats}]) -> f32[{floats}] {{\n"
      f"  %a{name} = f32[{floats}]{{0}} parameter(0)\n"
      f"  ROOT %c{name} = f32[{floats}]{{0}} copy(%a{name})\n}}\n"
    )

  sizes = {"forward0": 2, "forward1": 4, "backward0": 6, "backward1": 8}
  loops = "".join(
    f"  %loop_{slot}{chunk} = f32[2]{{0}} while(%q), condition=%any,"
    f" body=%{slot}{chunk}, metadata={{op_name="
    f'"jit(f)/while/body/mean_trips<0.25>{slot}<{chunk}>/while"}}\n'
    for slot in ("forward", "backward")
    for chunk in range(chunks)
  )
  return (
    "\n".join(copy(n, size) for n, size in sizes.items())
    + f"""
%any (pa: s32[]) -> pred[] {{
  %pa = s32[] parameter(0)
  ROOT %lessa = pred[] compare(%pa, %pa), direction=LT
}}

%condition (p: s32[]) -> pred[] {{
  %limit = s32[] constant(4), backend_config={{}}
  %p = s32[] parameter(0)
  ROOT %less = pred[] compare(%p, %limit), direction=LT
}}

%body (q: f32[10]) -> f32[10] {{
  %q = f32[10]{{0}} parameter(0)
{loops}  ROOT %r = f32[10]{{0}} copy(%q)
}}

ENTRY %main (m: f32[10], w: f32[50]) -> f32[50] {{
  %m = f32[10]{{0}} parameter(0)
  %w = f32[50]{{0}} parameter(1)
  %loop = f32[10]{{0}} while(%m), condition=%condition, body=%body
  ROOT %last = f32[50]{{0}} copy(%w)
}}
"""
  )


def test_loops_of_a_program_are_units():
  times = lockstep.of_program(
    hlo.Program(_text()), small.config(), _schedule(), CHIP, devices=2
  )
  # Without products only bytes count. Ticks as above.
  ticks = 16 + max(16, 32 + 64) + max(48, 32 + 64) + 48
  assert times.tick_seconds == ticks
  assert times.seconds == ticks + 4 * 80 + 400
  work = (2 * (16 + 48), 2 * (32 + 64))
  assert times.bubble == pytest.approx(ticks / np.mean(work) - 1)
  assert times.slowest_rank == 1


def test_a_program_without_a_unit_is_refused():
  program = hlo.Program(_text(chunks=1))
  message = "no loop for chunk 1 of 2 in the forward slot"
  with pytest.raises(config_lib.RunError, match=message):
    lockstep.of_program(program, small.config(), _schedule(), CHIP, devices=2)


@pytest.mark.parametrize("remat,again", [("none", 0), ("full", 1)])
def test_flops_of_units_are_those_of_the_network(remat, again):
  config = small.config(**{"model.num_layers": 4, "model.remat": remat})
  layout = layout_lib.Layout(2, 2, (1, 2, 2, 3), block_size=2)
  forward_C, backward_C = lockstep.unit_flops(config, layout, tokens=10.0)
  per_token = flops.flops_per_token(
    dataclasses.replace(config.model, remat="none"), 256
  )
  trunk = 10 * (per_token.forward - per_token.head)
  assert forward_C.sum() == pytest.approx(trunk)
  assert backward_C == pytest.approx((3 + again) * forward_C)
