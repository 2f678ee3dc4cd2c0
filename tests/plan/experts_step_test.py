# SPDX-License-Identifier: Apache-2.0
"""Four layers of the scaling sweep's largest network, compiled."""

import dataclasses
import math
import re

import pytest

from attnres_jax.common import plans
from attnres_jax.common import topology
from attnres_jax.plan import hlo
from attnres_jax.plan import schedule
from experiments.cost import networks

# A read within a sublayer.
_MERGE = re.compile("part<(moe|kda|mla|mlp)>.*part<residual>")


def misuses(program: hlo.Program, model, shards: int, tokens: int) -> list[str]:
  """What layouts and dtypes make the compiler do beside its work.

  Copies in memory of expert weights, of sums for all `tokens` that share
  experts, and of heads into an order with an axis of their own; float32
  scatters of rows; and gradients of merges that are widened by themselves.

  A weight is of one layer, of all experts of a device or of the part that it
  stores; gate and up are one array.
  """
  moe = model.moe
  rows = moe.num_experts * moe.expert_width // shards
  sizes = {
    number * cut * rows * model.width for number in (1, 2, 3) for cut in (1, 4)
  }
  sizes.add(tokens * model.width)
  lines = []
  for name in program.runs:
    for op in program.computations[name].values():
      for array in op.arrays:
        size = math.prod(array.dims)
        is_alone = array.in_hbm and name not in program.fused
        moves = op.op == "copy" and is_alone
        by_head = array.dims[-2:] == (model.num_heads, model.kda.head_width)
        if moves and (
          size in sizes or (by_head and size > tokens * array.dims[-1])
        ):
          lines.append(f"{op.name}: copy of {array}")
        is_wide = array.dtype == "f32" and model.width in array.dims
        if op.op == "scatter" and is_wide and "part<moe>" in op.op_name:
          lines.append(f"{op.name}: scatter to {array}")
        widens = op.op == "convert" and is_alone and is_wide
        if widens and _MERGE.search(op.op_name):
          lines.append(f"{op.name}: conversion to {array}")
  return lines


@pytest.mark.slow
@pytest.mark.needs("libtpu")
def test_a_step_copies_and_widens_nothing_large_for_its_layout():
  slice_name = "v6e-16"
  run = networks.load("436m").run
  row = plans.find(run, topology.devices(slice_name))
  config = plans.apply(run, plans.overrides_of(row))
  model = dataclasses.replace(config.model, num_layers=4)
  config = dataclasses.replace(config, model=model)
  text = schedule.up_to_schedule(schedule.lower_step, config, slice_name).text
  for name in ("forward", "backward", "sum_rows"):
    assert f"experts_{name}" in text
  rows = config.data.batch_size // config.optim.accumulate_steps
  tokens = rows * config.data.sequence_length // config.mesh.fsdp
  assert not misuses(hlo.Program(text), model, 16, tokens)


def test_what_counts_as_misuse():
  """The check would see each of them."""
  model = networks.load("436m").run.model
  rows = model.moe.num_experts * model.moe.expert_width // 16
  copy = f"f32[{rows},{model.width}]{{0,1:T(8,128)}}"
  wide = f"f32[64,{model.width}]{{1,0:T(8,128)}}"
  heads = f"bf16[{rows},8,{model.num_heads},128]{{3,2,1,0:T(8,128)}}"
  text = f"""\
ENTRY %main (l: {copy}) -> {copy} {{
  %l = {copy} parameter(0)
  %s = {wide} scatter(%l, %l, %l), metadata={{op_name="part<moe>/scatter"}}
  %t = {wide} copy(%s)
  %h = {heads} copy(%l)
  %w = {wide} convert(%t), metadata={{op_name="part<moe>/a/part<residual>/b"}}
  ROOT %c = {copy} copy(%l)
}}
"""
  lines = misuses(hlo.Program(text), model, 16, 64)
  assert [re.sub(":.*", "", line) for line in lines] == [
    "%s",
    "%t",
    "%h",
    "%w",
    "%c",
  ]
