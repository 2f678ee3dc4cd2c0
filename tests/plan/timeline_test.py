# SPDX-License-Identifier: Apache-2.0
"""The time along a schedule, against sums by hand."""

import types

import numpy as np
import pytest

from attnres_jax.common import chips
from attnres_jax.plan import hlo
from attnres_jax.plan import least
from attnres_jax.plan import timeline

# One of four links sends 10 bytes per second.
CHIP = chips.Chip(
  peak_flops_per_second=1000.0,
  hbm_bytes_per_second=1000.0,
  link_bytes_per_second=40.0,
  torus_axes=2,
)
ROW = "bf16[4,6]{1,0:T(8,128)(2,1)}"
TILE = 8 * 128 * 2  # Bytes of a row's only tile.

# A transfer between the first two devices beside a kernel, which is given one
# array twice, and a product of six passes; once more, without work beside it.
TEXT = f"""\
%body (p: {ROW}) -> {ROW} {{
  %p = {ROW} parameter(0)
  %s = {ROW} collective-permute-start(%p), source_target_pairs={{{{0,1}},{{1,0}}}}
  %k = {ROW} custom-call(%p, %p), custom_call_target="tpu_custom_call", metadata={{op_name="part<kda>/k"}}, backend_config={{"cost_estimate":{{"flops":"7000"}}}}
  %c = f32[4,4]{{1,0:T(8,128)S(1)}} convolution(%k, %p), dim_labels=bf_oi->bf, operand_precision={{highest,highest}}, metadata={{op_name="part<mla>/c"}}
  %d = {ROW} collective-permute-done(%s)
  %t = {ROW} collective-permute(%d), source_target_pairs={{{{0,1}},{{1,0}}}}
  ROOT %x = {ROW} copy(%t), metadata={{op_name="part<kda>/x"}}
}}

%condition (q: {ROW}) -> pred[] {{
  %limit = s32[] constant(3)
  ROOT %less = pred[] compare(%limit, %limit), direction=LT
}}

ENTRY %main (l: {ROW}) -> {ROW} {{
  %l = {ROW} parameter(0)
  ROOT %loop = {ROW} while(%l), condition=%condition, body=%body
}}
"""  # noqa: E501


def _mesh(rows=4, columns=4):
  """A mesh of devices in a plane."""
  devices = np.empty((rows, columns), object)
  for place in np.ndindex(rows, columns):
    devices[place] = types.SimpleNamespace(coords=(*place, 0))
  return types.SimpleNamespace(
    devices=devices, shape=dict(fsdp=rows, expert=columns)
  )


def test_a_step_is_what_its_schedule_says():
  walked = timeline.of_program(TEXT, _mesh(), CHIP, {})
  # It leaves enough of the memory's time for the row that is sent meanwhile.
  kernel = 7000 / 1000
  product = 2 * TILE / 1000  # To read two rows takes longer than to compute.
  copy = 2 * TILE / 1000
  moved = 2 * TILE / 1000  # By the second transfer, in memory.
  sent = TILE / 10
  waits = sent - kernel - product + sent - moved
  expected = kernel + product + moved + waits + copy
  np.testing.assert_allclose(walked.seconds, 3 * expected)
  np.testing.assert_allclose(walked.waited_seconds["expert"], 3 * waits)
  np.testing.assert_allclose(walked.flops, 3 * (7000 + 6 * 2 * 4 * 4 * 6))


def test_every_cause_of_a_longer_step():
  # The kernel needs half of what it computes with its tiles.
  needs = {"kda": least.Least(flops=3 * 3500.0)}
  walked = timeline.of_program(TEXT, _mesh(), CHIP, needs)
  row, tile = 4 * 6 * 2 / 1000, TILE / 1000  # Seconds to read or write.
  product = 2 * 4 * 4 * 6 / 1000
  # The kernel, the product, a transfer and a copy; all but the product's are
  # bound by memory, and the first transfer's row is read beside the kernel.
  in_order = 3.5 + product + 2 * row + 2 * row
  # Now the memory has no time for that row until something waits for it.
  tiles = 2 * tile + 2 * tile + tile + 2 * tile + 2 * tile
  passes = 7.0 + 2 * tile + 2 * tile + 2 * tile
  steps = in_order, tiles, passes, walked.seconds / 3
  assert product > 2 * row and 3.5 < 2 * tile and 7.0 > 3 * tile
  np.testing.assert_allclose(
    [walked.up_to[cause] for cause in timeline.CAUSES], 3 * np.array(steps)
  )
  waits = sum(walked.waited_seconds.values())
  np.testing.assert_allclose(walked.seconds, 3 * passes + waits)
  np.testing.assert_allclose(sum(walked.parts.values()), 3 * passes)


def test_copies_use_what_instructions_leave_of_the_memory():
  copies = timeline._Copies()
  copies.start("a", 3.0)
  copies.start("b", 2.0)
  copies.use(1.0)
  copies.use(-1.0)
  assert copies.end(["b"]) == 4.0  # One second of a was over.
  assert copies.end(["a"]) == 0.0
  copies.start("c", 2.0)
  copies.use(5.0)
  assert copies.end(["c"]) == 0.0


def test_a_kernel_without_an_estimate_does_what_its_part_needs():
  text = TEXT.replace("cost_estimate", "none")
  needs = {"kda": least.Least(flops=60_000.0)}
  walked = timeline.of_program(text, _mesh(), CHIP, needs)
  np.testing.assert_allclose(walked.flops, 60_000 + 3 * 6 * 2 * 4 * 4 * 6)


@pytest.mark.parametrize(
  ("shape", "axes", "links"),
  [
    ((4, 4, 1), 2, 1),  # A line.
    ((16, 4, 1), 2, 2),  # A ring along 16.
    ((2, 2, 4), 3, 1),
    ((4, 4, 8), 3, 2),
  ],
)
def test_links_of_a_torus(shape, axes, links):
  chip = chips.Chip(1.0, link_bytes_per_second=2.0 * axes, torus_axes=axes)
  group = [(i, 0, 0) for i in range(shape[0])]
  actual = timeline.link_bytes_per_second(group, shape, chip)
  assert actual == links
  # A corner of a group along two axes has the links of both.
  both = [(i, j, 0) for i in range(2) for j in range(2)]
  more = timeline.link_bytes_per_second(both, shape, chip)
  assert more == links + (2 if axes == 3 and links == 2 else 1)


@pytest.mark.parametrize(
  ("array", "nbytes"),
  [
    ("bf16[3,1168]{1,0:T(8,128)(2,1)}", 8 * 1280 * 2),
    ("bf16[3,1168]{0,1:T(8,128)(2,1)}", 128 * 1168 * 2),
    ("f32[2,5,528]{2,1,0:T(8,128)}", 2 * 8 * 640 * 4),
    ("f32[1000]{0:T(1024)}", 4096),
    ("s32[]{:T(128)}", 4),
  ],
)
def test_bytes_in_whole_tiles(array, nbytes):
  text = f"""\
ENTRY %main (l: {array}) -> {array} {{
  %l = {array} parameter(0)
  ROOT %c = {array} copy(%l)
}}
"""
  assert hlo.Program(text, tiled=True).hbm_bytes() == 2 * nbytes
  assert hlo.Program(text).hbm_bytes() <= 2 * nbytes
