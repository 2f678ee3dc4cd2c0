# SPDX-License-Identifier: Apache-2.0
"""Reads compiled programs correctly: written by hand, and known ones."""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

from attnres_jax import config as config_lib
from attnres_jax.common import sharding
from attnres_jax.common import topology
from attnres_jax.plan import collectives
from attnres_jax.plan import hlo

# A loop of five trips around a product of [4, 6] and [6, 8] in a fusion, and a
# reduction over pairs of partitions; after it, one product without a loop.
TEXT = """\
%fused (a: bf16[4,6], b: bf16[6,8]) -> f32[4,8] {
  %a = bf16[4,6]{1,0:T(8,128)} parameter(0)
  %b = bf16[6,8]{1,0:T(8,128)} parameter(1)
  ROOT %product = f32[4,8]{1,0:T(8,128)} convolution(%a, %b), dim_labels=bf_io->bf, metadata={op_name="x"}
}

%sum (x: f32[], y: f32[]) -> f32[] {
  %x = f32[]{:T(128)} parameter(0)
  %y = f32[]{:T(128)} parameter(1)
  ROOT %add = f32[]{:T(128)} add(%x, %y)
}

%condition (p: (s32[], bf16[4,6], bf16[6,8])) -> pred[] {
  %limit = s32[]{:T(128)} constant(5), backend_config={"flag_configs":[]}
  %p = (s32[]{:T(128)}, bf16[4,6]{1,0:T(8,128)}, /*index=2*/bf16[6,8]{1,0:T(8,128)}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%p), index=0
  ROOT %less = pred[]{:T(512)} compare(%i, %limit), direction=LT
}

%body (q: (s32[], bf16[4,6], bf16[6,8])) -> (s32[], bf16[4,6], bf16[6,8]) {
  %q = (s32[]{:T(128)}, bf16[4,6]{1,0:T(8,128)}, /*index=2*/bf16[6,8]{1,0:T(8,128)}) parameter(0)
  %j = s32[]{:T(128)} get-tuple-element(%q), index=0
  %left = bf16[4,6]{1,0:T(8,128)} get-tuple-element(%q), index=1
  %right = bf16[6,8]{1,0:T(8,128)S(1)} get-tuple-element(%q), index=2
  %y = f32[4,8]{1,0:T(8,128)} fusion(%left, %right), kind=kOutput, calls=%fused
  %r = f32[4,8]{1,0:T(8,128)} all-reduce(%y), channel_id=3, replica_groups=[4,2]<=[8], use_global_device_ids=true, to_apply=%sum
  ROOT %next = (s32[]{:T(128)}, bf16[4,6]{1,0:T(8,128)}, /*index=2*/bf16[6,8]{1,0:T(8,128)}) tuple(%j, %left, %right)
}

ENTRY %main (l: bf16[4,6], m: bf16[6,8]) -> f32[4,8] {
  %l = bf16[4,6]{1,0:T(8,128)} parameter(0)
  %m = bf16[6,8]{1,0:T(8,128)} parameter(1)
  %zero = s32[]{:T(128)} constant(0)
  %start = (s32[]{:T(128)}, bf16[4,6]{1,0:T(8,128)}, /*index=2*/bf16[6,8]{1,0:T(8,128)}) tuple(%zero, %l, %m)
  %loop = (s32[]{:T(128)}, bf16[4,6]{1,0:T(8,128)}, /*index=2*/bf16[6,8]{1,0:T(8,128)}) while(%start), condition=%condition, body=%body
  %g = bf16[8,6]{1,0:T(8,128)} all-gather(%l), channel_id=4, replica_groups={{0,4},{1,5},{2,6},{3,7}}, dimensions={0}
  ROOT %last = f32[4,8]{1,0:T(8,128)} fusion(%l, %m), kind=kOutput, calls=%fused
}
"""  # noqa: E501
MESH = {"data": 2, "fsdp": 2, "tensor": 2}


def test_loops_count_as_often_as_they_run():
  assert hlo.Program(TEXT).flops() == 2 * 4 * 6 * 8 * (5 + 1)


@pytest.mark.parametrize("trips", [0, 0.25, 3])
def test_a_loop_counts_as_often_as_its_name_says(trips):
  name = f'metadata={{op_name="jit(f)/part<moe>/mean_trips<{trips:f}>/while"}}'
  text = TEXT.replace("body=%body", f"body=%body, {name}")
  assert hlo.Program(text).flops() == 2 * 4 * 6 * 8 * (trips + 1)
  # An ordinary loop in such a scope.
  text = text.replace(">/while", ">/while/body/while")
  assert hlo.Program(text).flops() == 2 * 4 * 6 * 8 * (5 + 1)


def test_branches_count_as_often_as_they_run_in_the_mean():
  text = """\
%some (a: f32[8,128]) -> f32[8,128] {
  %a = f32[8,128]{1,0:T(8,128)} parameter(0)
  ROOT %copy.1 = f32[8,128]{1,0:T(8,128)} copy(%a)
}

%none (b: f32[8,128]) -> f32[8,128] {
  ROOT %b = f32[8,128]{1,0:T(8,128)} parameter(0)
}

ENTRY %main (c: s32[], d: f32[8,128]) -> f32[8,128] {
  %c = s32[] parameter(0)
  %d = f32[8,128]{1,0:T(8,128)} parameter(1)
  ROOT %choice = f32[8,128]{1,0:T(8,128)} conditional(%c, %d, %d, %d, %d), branch_computations={%none, %some, %none, %none}
}
"""  # noqa: E501
  assert hlo.Program(text).hbm_bytes() == 2 * 4 * 8 * 128 / 4


def test_traffic_leaves_out_what_stays_on_the_core():
  fusion = 2 * 4 * 6 + 4 * 4 * 8  # its right operand lies in S(1)
  reduce = 2 * 4 * 4 * 8
  gather = 2 * (4 * 6 + 8 * 6)
  last = 2 * 4 * 6 + 2 * 6 * 8 + 4 * 4 * 8
  expected = 5 * (fusion + reduce) + gather + last
  assert hlo.Program(TEXT).hbm_bytes() == expected


def test_traffic_of_scatters_and_of_other_tiles():
  """A row of an array is scattered, another one is cut out of a view of it."""
  text = """\
%second (old: s8[], new: s8[]) -> s8[] {
  %old = s8[]{:T(256)} parameter(0)
  ROOT %new = s8[]{:T(256)} parameter(1)
}

%tiles (a: s8[8,32,128]) -> s8[8,32,128] {
  %a = s8[8,32,128]{2,1,0:T(32,128)(4,1)} parameter(0)
  ROOT %other = s8[8,32,128]{2,1,0:T(8,128)(4,1)} copy(%a)
}

%cut (b: s8[8,32,128], i: s32[]) -> s8[1,32,128] {
  %b = s8[8,32,128]{2,1,0:T(32,128)(4,1)} parameter(0)
  %view = s8[8,32,128]{2,1,0:T(8,128)(4,1)} fusion(%b), kind=kLoop, output_to_operand_aliasing={{}: (0, {})}, calls=%tiles
  %i = s32[]{:T(128)} parameter(1)
  ROOT %row = s8[1,32,128]{2,1,0:T(8,128)(4,1)} dynamic-slice(%view, %i), dynamic_slice_sizes={1,32,128}
}

%put (c: s8[8,32,128], j: s32[2,1], d: s8[2,32,128]) -> s8[8,32,128] {
  %c = s8[8,32,128]{2,1,0:T(8,128)(4,1)} parameter(0)
  %j = s32[2,1]{1,0:T(2,128)S(1)} parameter(1)
  %d = s8[2,32,128]{2,1,0:T(8,128)(4,1)} parameter(2)
  ROOT %scattered = s8[8,32,128]{2,1,0:T(8,128)(4,1)} scatter(%c, %j, %d), to_apply=%second
}

ENTRY %main (x: s8[8,32,128], y: s8[2,32,128], k: s32[], l: s32[2,1]) -> s8[1,32,128] {
  %x = s8[8,32,128]{2,1,0:T(32,128)(4,1)} parameter(0)
  %y = s8[2,32,128]{2,1,0:T(8,128)(4,1)} parameter(1)
  %k = s32[]{:T(128)S(6)} parameter(2)
  %l = s32[2,1]{1,0:T(2,128)S(1)} parameter(3)
  %both = s8[8,32,128]{2,1,0:T(8,128)(4,1)} fusion(%x, %l, %y), kind=kCustom, calls=%put
  ROOT %one = s8[1,32,128]{2,1,0:T(8,128)(4,1)} fusion(%both, %k), kind=kLoop, calls=%cut
}
"""  # noqa: E501
  row = 32 * 128
  assert hlo.Program(text).hbm_bytes() == 2 * (2 * row) + 2 * row


def test_traffic_of_updates_in_place_and_of_cuts():
  text = """\
%update (a: bf16[8,4,6], b: bf16[4,6], i: s32[]) -> bf16[8,4,6] {
  %a = bf16[8,4,6]{2,1,0:T(8,128)} parameter(0)
  %b = bf16[4,6]{1,0:T(8,128)} parameter(1)
  %one = bf16[1,4,6]{2,1,0:T(8,128)} bitcast(%b)
  %i = s32[]{:T(128)} parameter(2)
  ROOT %put = bf16[8,4,6]{2,1,0:T(8,128)} dynamic-update-slice(%a, %one, %i)
}

%begin (c: bf16[1,4,6]) -> bf16[8,4,6] {
  %space = bf16[8,4,6]{2,1,0:T(8,128)} custom-call(), custom_call_target="AllocateBuffer"
  %c = bf16[1,4,6]{2,1,0:T(8,128)} parameter(0)
  %none = s32[]{:T(128)} constant(0)
  ROOT %first = bf16[8,4,6]{2,1,0:T(8,128)} dynamic-update-slice(%space, %c, %none)
}

%third (f: bf16[8,4,6], h: s32[]) -> bf16[2,4,6] {
  %f = bf16[8,4,6]{2,1,0:T(8,128)} parameter(0)
  %h = s32[]{:T(128)} parameter(1)
  ROOT %part = bf16[2,4,6]{2,1,0:T(8,128)} dynamic-slice(%f, %h), dynamic_slice_sizes={2,4,6}
}

%both (d: bf16[8,4,6], e: bf16[8,4,6], k: s32[]) -> (bf16[2,4,6], bf16[8,4,6]) {
  %e = bf16[8,4,6]{2,1,0:T(8,128)} parameter(1)
  %d = bf16[8,4,6]{2,1,0:T(8,128)} parameter(0)
  %k = s32[]{:T(128)} parameter(2)
  %part_of_d = bf16[2,4,6]{2,1,0:T(8,128)} fusion(%d, %k), kind=kLoop, calls=%third
  %twice = bf16[8,4,6]{2,1,0:T(8,128)} add(%e, %e)
  ROOT %pair = (bf16[2,4,6]{2,1,0:T(8,128)}, bf16[8,4,6]{2,1,0:T(8,128)}) tuple(%part_of_d, %twice)
}

ENTRY %main (x: bf16[1,4,6], y: bf16[4,6], j: s32[]) -> bf16[2,4,6] {
  %x = bf16[1,4,6]{2,1,0:T(8,128)} parameter(0)
  %y = bf16[4,6]{1,0:T(8,128)} parameter(1)
  %j = s32[]{:T(128)S(6)} parameter(2)
  %new = bf16[8,4,6]{2,1,0:T(8,128)} fusion(%x), kind=kLoop, calls=%begin
  %next = bf16[8,4,6]{2,1,0:T(8,128)} fusion(%new, %y, %j), kind=kLoop, calls=%update
  %same = bf16[8,4,6]{2,1,0:T(8,128)} dynamic-update-slice(%next, %x, %j)
  %two = (bf16[2,4,6]{2,1,0:T(8,128)}, bf16[8,4,6]{2,1,0:T(8,128)}) fusion(%same, %same, %j), kind=kLoop, calls=%both
  %cut = bf16[2,4,6]{2,1,0:T(8,128)} get-tuple-element(%two), index=0
  ROOT %less = bf16[1,4,6]{2,1,0:T(8,128)} slice(%cut), slice={[0:1], [0:4], [0:6]}
}
"""  # noqa: E501
  array = 2 * 4 * 6
  updates = 3 * (array + array)
  both = 2 * array + 2 * array + 8 * array + 8 * array
  assert hlo.Program(text).hbm_bytes() == updates + both + (array + array)


def test_traffic_of_gathers():
  """A gather reads only rows of its table."""
  text = """\
%pick (a: f32[100,8], i: s32[4]) -> f32[4,8] {
  %a = f32[100,8]{1,0:T(8,128)} parameter(0)
  %i = s32[4]{0:T(128)} parameter(1)
  %rows = f32[4,8]{1,0:T(8,128)} gather(%a, %i), offset_dims={1}, slice_sizes={1,8}
  ROOT %twice = f32[4,8]{1,0:T(8,128)} add(%rows, %rows)
}

ENTRY %main (x: f32[100,8], j: s32[4]) -> f32[4,8] {
  %x = f32[100,8]{1,0:T(8,128)} parameter(0)
  %j = s32[4]{0:T(128)} parameter(1)
  %some = f32[4,8]{1,0:T(8,128)} gather(%x, %j), offset_dims={1}, slice_sizes={1,8}
  ROOT %more = f32[4,8]{1,0:T(8,128)} fusion(%x, %j), kind=kLoop, calls=%pick
}
"""  # noqa: E501
  rows, numbers = 4 * 4 * 8, 4 * 4
  assert hlo.Program(text).hbm_bytes() == 2 * (rows + numbers + rows)


def test_space_for_results_is_not_traffic():
  text = """\
ENTRY %main () -> bf16[8,4] {
  ROOT %x = bf16[8,4]{1,0:T(8,128)} custom-call(), custom_call_target="TARGET"
}
"""
  for target, expected in (("AllocateBuffer", 0), ("tpu_custom_call", 64)):
    assert hlo.Program(text.replace("TARGET", target)).hbm_bytes() == expected


def test_traffic_of_copies_to_and_from_the_core():
  text = """\
ENTRY %main (x: bf16[8,4,6]) -> bf16[8,4,6] {
  %x = bf16[8,4,6]{2,1,0:T(8,128)} parameter(0)
  %in = (bf16[8,4,6]{2,1,0:T(8,128)S(1)}, bf16[8,4,6]{2,1,0:T(8,128)}, u32[]{:S(2)}) copy-start(%x)
  %here = bf16[8,4,6]{2,1,0:T(8,128)S(1)} copy-done(%in)
  %part = ((bf16[8,4,6]{2,1,0:T(8,128)}), bf16[2,4,6]{2,1,0:T(8,128)S(1)}, s32[]{:S(2)}) slice-start(%x), slice={[0:2], [0:4], [0:6]}
  %some = bf16[2,4,6]{2,1,0:T(8,128)S(1)} slice-done(%part)
  %out = (bf16[8,4,6]{2,1,0:T(8,128)}, bf16[8,4,6]{2,1,0:T(8,128)S(1)}, u32[]{:S(2)}) copy-start(%here)
  ROOT %there = bf16[8,4,6]{2,1,0:T(8,128)} copy-done(%out)
}
"""  # noqa: E501
  array = 2 * 4 * 6
  assert hlo.Program(text).hbm_bytes() == 8 * array + 2 * array + 8 * array


# An all-gather in three pieces, as v5e's compiler writes it; the middle one is
# beside a product of [8, 6] and [8, 4], and it hands on the gather's arrays.
IN_PIECES = """\
%first (a: bf16[4,6]) -> (bf16[4,6], bf16[8,6], u32[]) {
  %a = bf16[4,6]{1,0:T(8,128)} parameter(0)
  %g1 = bf16[8,6]{1,0:T(8,128)} all-gather(%a), replica_groups={{0,1}}, dimensions={0}, frontend_attributes={chain_id="7"}
  ROOT %s = (bf16[4,6]{1,0:T(8,128)}, bf16[8,6]{1,0:T(8,128)}, u32[]{:S(2)}) custom-call(%g1), custom_call_target="AsyncCollectiveStart"
}

%piece (b: bf16[4,6], c: bf16[8,6], t: u32[], l: bf16[8,6], r: bf16[8,4]) -> (f32[6,4], bf16[4,6], bf16[8,6], bf16[8,6], u32[]) {
  %l = bf16[8,6]{1,0:T(8,128)} parameter(3)
  %r = bf16[8,4]{1,0:T(8,128)} parameter(4)
  %product = f32[6,4]{1,0:T(8,128)} convolution(%l, %r), dim_labels=fb_io->bf, metadata={op_name="x"}
  %b = bf16[4,6]{1,0:T(8,128)} parameter(0)
  %c = bf16[8,6]{1,0:T(8,128)} parameter(1)
  %t = u32[]{:S(2)} parameter(2)
  %g2 = bf16[8,6]{1,0:T(8,128)} all-gather(%b), replica_groups={{0,1}}, dimensions={0}, frontend_attributes={chain_id="7"}
  ROOT %all = (f32[6,4]{1,0:T(8,128)}, bf16[4,6]{1,0:T(8,128)}, bf16[8,6]{1,0:T(8,128)}, bf16[8,6]{1,0:T(8,128)}, u32[]{:S(2)}) tuple(%product, %b, %c, %g2, %t)
}

%last (d: bf16[4,6], e: bf16[8,6], v: u32[]) -> bf16[8,6] {
  %d = bf16[4,6]{1,0:T(8,128)} parameter(0)
  %e = bf16[8,6]{1,0:T(8,128)} parameter(1)
  %v = u32[]{:S(2)} parameter(2)
  %g3 = bf16[8,6]{1,0:T(8,128)} all-gather(%d), replica_groups={{0,1}}, dimensions={0}, frontend_attributes={chain_id="7"}
  ROOT %end = bf16[8,6]{1,0:T(8,128)} custom-call(%d, %e, %g3, %v), custom_call_target="AsyncCollectiveDone"
}

ENTRY %main (x: bf16[4,6], y: bf16[8,6], z: bf16[8,4]) -> bf16[8,6] {
  %x = bf16[4,6]{1,0:T(8,128)} parameter(0)
  %y = bf16[8,6]{1,0:T(8,128)} parameter(1)
  %z = bf16[8,4]{1,0:T(8,128)} parameter(2)
  %async-collective-start.7 = (bf16[4,6]{1,0:T(8,128)}, bf16[8,6]{1,0:T(8,128)}, u32[]{:S(2)}) fusion(%x), kind=kCustom, output_to_operand_aliasing={{0}: (0, {})}, calls=%first
  %h1 = bf16[4,6]{1,0:T(8,128)} get-tuple-element(%async-collective-start.7), index=0
  %h2 = bf16[8,6]{1,0:T(8,128)} get-tuple-element(%async-collective-start.7), index=1
  %h3 = u32[]{:S(2)} get-tuple-element(%async-collective-start.7), index=2
  %f = (f32[6,4]{1,0:T(8,128)}, bf16[4,6]{1,0:T(8,128)}, bf16[8,6]{1,0:T(8,128)}, bf16[8,6]{1,0:T(8,128)}, u32[]{:S(2)}) fusion(%h1, %h2, %h3, %y, %z), kind=kOutput, output_to_operand_aliasing={{1}: (0, {}), {2}: (1, {}), {3}: (1, {}), {4}: (2, {})}, calls=%piece, metadata={op_name="x"}, backend_config={"continuation_config":{"output_tuple_original_start":"0","output_tuple_original_end":"0","operand_original_start":"3","operand_original_end":"4"}}
  %i1 = bf16[4,6]{1,0:T(8,128)} get-tuple-element(%f), index=1
  %i2 = bf16[8,6]{1,0:T(8,128)} get-tuple-element(%f), index=3
  %i3 = u32[]{:S(2)} get-tuple-element(%f), index=4
  ROOT %async-collective-done.7 = bf16[8,6]{1,0:T(8,128)} fusion(%i1, %i2, %i3), kind=kCustom, output_to_operand_aliasing={{}: (1, {})}, calls=%last
}
"""  # noqa: E501


def test_traffic_of_a_collective_in_pieces_is_that_of_the_whole():
  program = hlo.Program(IN_PIECES)
  gather = 2 * 4 * 6 + 2 * 8 * 6
  product = 2 * 8 * 6 + 2 * 8 * 4 + 4 * 6 * 4
  assert program.hbm_bytes() == gather + product
  assert (product, 1, "f32[6,4]", "x") in program.busiest(2)
  assert [str(array) for array, _ in program.largest(9)] == [
    "bf16[8,6]",
    "f32[6,4]",
  ]
  (sent,) = collectives.of_program(program)
  assert (sent.kind, sent.count, sent.overlapped) == ("all-gather", 1, True)


def test_collectives():
  ops = sorted(
    collectives.of_program(hlo.Program(TEXT)), key=lambda op: op.kind
  )
  gather, reduce = ops
  assert (reduce.kind, reduce.count, reduce.in_loop) == ("all-reduce", 5, True)
  assert reduce.sent_bytes == 4 * 4 * 8  # twice, half of it
  assert collectives.axes_of(reduce.group, MESH) == "tensor"
  assert (gather.kind, gather.count, gather.in_loop) == ("all-gather", 1, False)
  assert gather.sent_bytes == 2 * 4 * 6
  assert collectives.axes_of(gather.group, MESH) == "data"


# One gathering in three pieces, the middle one together with a product; two
# permutations, the first of which waits for nothing but itself; and two
# reductions of which each device keeps a part. All on the same channel.
OVERLAPPED = """\
%sum (x: f32[], y: f32[]) -> f32[] {
  %x = f32[]{:T(128)} parameter(0)
  %y = f32[]{:T(128)} parameter(1)
  ROOT %add = f32[]{:T(128)} add(%x, %y)
}

%first (a: bf16[4,6]) -> bf16[8,6] {
  %a = bf16[4,6]{1,0:T(8,128)} parameter(0)
  ROOT %g1 = bf16[8,6]{1,0:T(8,128)} all-gather(%a), channel_id=1, replica_groups=[4,2]<=[8], frontend_attributes={chain_id="0"}
}

%second (b: bf16[4,6]) -> bf16[8,6] {
  %b = bf16[4,6]{1,0:T(8,128)} parameter(0)
  ROOT %g2 = bf16[8,6]{1,0:T(8,128)} all-gather(%b), channel_id=1, replica_groups=[4,2]<=[8], frontend_attributes={chain_id="0"}
}

%third (c: bf16[4,6]) -> bf16[8,6] {
  %c = bf16[4,6]{1,0:T(8,128)} parameter(0)
  ROOT %g3 = bf16[8,6]{1,0:T(8,128)} all-gather(%c), channel_id=1, replica_groups=[4,2]<=[8], frontend_attributes={chain_id="0"}
}

%all-reduce-scatter.1 (d: f32[8,6]) -> f32[4,6] {
  %d = f32[8,6]{1,0:T(8,128)} parameter(0)
  %s = f32[8,6]{1,0:T(8,128)} all-reduce(%d), channel_id=1, replica_groups=[4,2]<=[8], to_apply=%sum
  ROOT %part = f32[4,6]{1,0:T(8,128)} slice(%s), slice={[0:4], [0:6]}
}

%all-reduce-scatter.2 (e: f32[8,6]) -> f32[4,6] {
  %e = f32[8,6]{1,0:T(8,128)} parameter(0)
  %t = f32[8,6]{1,0:T(8,128)} all-reduce(%e), channel_id=1, replica_groups=[4,2]<=[8], to_apply=%sum
  ROOT %rest = f32[4,6]{1,0:T(8,128)} slice(%t), slice={[0:4], [0:6]}
}

ENTRY %main (l: bf16[4,6], m: f32[8,6]) -> f32[4,6] {
  %l = bf16[4,6]{1,0:T(8,128)} parameter(0)
  %m = f32[8,6]{1,0:T(8,128)} parameter(1)
  %async-collective-start = bf16[8,6]{1,0:T(8,128)} fusion(%l), kind=kCustom, calls=%first
  %fusion.7 = bf16[8,6]{1,0:T(8,128)} fusion(%async-collective-start), kind=kCustom, calls=%second
  %async-collective-done = bf16[8,6]{1,0:T(8,128)} fusion(%fusion.7), kind=kCustom, calls=%third
  %p1 = bf16[4,6]{1,0:T(8,128)} collective-permute-start(%l), channel_id=1, source_target_pairs={{0,1},{1,0}}
  %p2 = bf16[4,6]{1,0:T(8,128)} collective-permute-start(%l), channel_id=1, source_target_pairs={{0,4},{4,0}}
  %q1 = bf16[4,6]{1,0:T(8,128)} collective-permute-done(%p1)
  %r1 = f32[4,6]{1,0:T(8,128)} fusion(%m), kind=kCustom, calls=%all-reduce-scatter.1, metadata={op_name="halves"}
  %q2 = bf16[4,6]{1,0:T(8,128)} collective-permute-done(%p2)
  ROOT %r2 = f32[4,6]{1,0:T(8,128)} fusion(%m), kind=kCustom, calls=%all-reduce-scatter.2, metadata={op_name="halves"}
}
"""  # noqa: E501


def test_pieces_of_one_collective_and_what_they_overlap_with():
  ops = collectives.of_program(hlo.Program(OVERLAPPED))
  assert [(c.kind, c.overlapped, c.sent_bytes) for c in ops] == [
    ("all-gather", True, 2 * 4 * 6),
    ("collective-permute", False, 2 * 4 * 6),
    ("collective-permute", True, 2 * 4 * 6),
    ("reduce-scatter", False, 4 * 8 * 6 / 2),
    ("reduce-scatter", False, 4 * 8 * 6 / 2),
  ]
  assert [str(c.arrays[0]) for c in ops][::4] == ["bf16[4,6]", "f32[8,6]"]
  plain = collectives.of_program(hlo.Program(TEXT))
  assert not any(op.overlapped for op in plain)


@pytest.mark.parametrize(("op", "expected"), [("conditional", 1), ("add", 0)])
def test_a_branch_hides_what_is_sent_while_it_runs(op, expected):
  text = f"""\
ENTRY %main (l: bf16[4,6], c: s32[]) -> bf16[4,6] {{
  %l = bf16[4,6]{{1,0:T(8,128)}} parameter(0)
  %c = s32[] parameter(1)
  %p = bf16[4,6]{{1,0:T(8,128)}} collective-permute-start(%l), channel_id=1, source_target_pairs={{{{0,1}},{{1,0}}}}
  %x = bf16[4,6]{{1,0:T(8,128)}} {op}(%c, %l, %l)
  ROOT %q = bf16[4,6]{{1,0:T(8,128)}} collective-permute-done(%p)
}}
"""  # noqa: E501
  (sent,) = collectives.of_program(hlo.Program(text))
  assert sent.overlapped == expected


def test_largest_arrays():
  arrays = hlo.Program(OVERLAPPED).largest(3)
  named = [(str(array), source) for array, source in arrays]
  # Each shape once per operation; arguments are not computed.
  assert named == [("bf16[8,6]", ""), ("f32[4,6]", "halves")]
  (largest, _), *_ = hlo.Program(TEXT).largest(1)
  assert str(largest) == "f32[4,8]"


def test_what_moves_most_is_summed_over_its_runs():
  moves = hlo.Program(TEXT).busiest(3)
  assert moves == [
    (5 * 2 * 4 * 4 * 8, 5, "f32[4,8]", "all-reduce"),
    (5 * (2 * 4 * 6 + 4 * 4 * 8) + 2 * 4 * 6 + 2 * 6 * 8 + 4 * 4 * 8, 6,
     "f32[4,8]", "fusion"),
    (2 * (4 * 6 + 8 * 6), 1, "bf16[8,6]", "all-gather"),
  ]  # fmt: skip


@pytest.mark.parametrize(
  "groups,axes",
  [
    ("replica_groups=[4,2]<=[8]", "tensor"),
    ("replica_groups=[1,8]<=[8]", "data+fsdp+tensor"),
    ("replica_groups=[4,2]<=[2,2,2]T(0,2,1)", "fsdp"),
    ("replica_groups=[4,2]<=[2,4]T(1,0)", "data"),
    ("replica_groups={{0,1,2,3},{4,5,6,7}}", "fsdp+tensor"),
    ("replica_groups=mesh['a'=2,'b'=2,'c'=2] {'c','a'}", "data+tensor"),
    ("source_target_pairs={{0,2},{2,0}}", "fsdp"),
  ],
)
def test_every_way_to_write_groups(groups, axes):
  text = TEXT.replace("replica_groups=[4,2]<=[8]", groups)
  op = [c for c in collectives.of_program(hlo.Program(text)) if c.count == 5][0]
  assert collectives.axes_of(op.group, MESH) == axes


# With libtpu, the same for programs with known numbers.


@functools.cache
def _mesh():
  config = config_lib.MeshConfig(data=2, fsdp=2, tensor=2)
  return sharding.make_mesh(config, topology.devices("v5e:2x4"))


def _program(function, *shapes, in_specs):
  mesh = _mesh()
  arguments = [
    jax.ShapeDtypeStruct(
      shape, jnp.bfloat16, sharding=jax.sharding.NamedSharding(mesh, spec)
    )
    for shape, spec in zip(shapes, in_specs)
  ]
  split = jax.shard_map(
    function, mesh=mesh, in_specs=in_specs, out_specs=P(), check_vma=False
  )
  return hlo.Program(jax.jit(split).lower(*arguments).compile().as_text())


@pytest.mark.needs("libtpu")
def test_batched_products_in_nested_loops():
  def body(x, w):
    def inner(x, _):
      return jnp.einsum("bij,bjk->bik", x, w).astype(x.dtype), None

    def outer(x, _):
      return jax.lax.scan(inner, x, length=3)[0], None

    return jax.lax.scan(outer, x, length=7)[0]

  program = _program(body, (4, 256, 128), (4, 128, 128), in_specs=(P(), P()))
  assert program.flops() == 3 * 7 * 2 * 4 * 256 * 128 * 128


@pytest.mark.needs("libtpu")
def test_what_is_sent_in_a_loop_and_after_it():
  def body(x):
    def step(x, _):
      return jnp.tanh(jax.lax.psum(x, "tensor")), None

    x = jax.lax.scan(step, x, length=5)[0]
    return jax.lax.all_gather(x, "fsdp")

  program = _program(body, (1024, 256), in_specs=(P(),))
  sent = {
    (c.kind, collectives.axes_of(c.group, _mesh().shape), c.in_loop): c
    for c in collectives.of_program(program)
  }
  reduce = sent["all-reduce", "tensor", True]
  assert reduce.count == 5
  # The compiler may reduce in float32.
  assert reduce.sent_bytes in (2 * 1024 * 256, 4 * 1024 * 256)
  gather = sent["all-gather", "fsdp", False]
  assert (gather.count, gather.sent_bytes) == (1, 2 * 1024 * 256)


@pytest.mark.needs("libtpu")
def test_traffic_of_a_product_too_large_for_the_core():
  size = 16384
  program = _program(jnp.dot, (size, size), (size, size), in_specs=(P(), P()))
  assert program.flops() == 2 * size**3
  np.testing.assert_allclose(program.hbm_bytes(), 3 * 2 * size**2, rtol=0.01)
