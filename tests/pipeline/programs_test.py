# SPDX-License-Identifier: Apache-2.0
"""What the program of a pipeline sends, in which dtype, and what it keeps."""

import dataclasses
import re

import jax
import pytest

from attnres_jax.common import sharding
from attnres_jax.common import topology
from attnres_jax.plan import collectives
from attnres_jax.plan import hlo
from attnres_jax.train import train_state
from tests import jaxprs
from tests import tiers
from tests.pipeline import networks


@pytest.mark.more
def test_loops_of_chunks_do_not_grow_with_depth():
  def products(sublayers, **fields):
    config = networks.config((2, 1, 2, sublayers, 2), **fields)
    apply, arguments = (
      networks.make(config).value_and_grad,
      networks.draw(config),
    )
    return jaxprs.count(("dot_general",), apply, *arguments)

  looped, deeper = (products(n, depth_loop="scan") for n in (8, 12))
  # Five products for each of two further sources (dev/LOG.md).
  assert deeper - looped == 5 * 2
  assert 2 * looped < products(8) + 1


def _with_experts(mesh, **fields):
  return networks.config((2, 1, 2, 4, 2), mesh, moe=networks.MOE, **fields)


@pytest.mark.parametrize(
  "schedule", ["fused", pytest.param("gpipe", marks=pytest.mark.slow)]
)
@tiers.parametrize("gather", ["tick", "step"], first=["step"])
@pytest.mark.parametrize(
  "make",
  [_with_experts, pytest.param(networks.of_all_kinds, marks=pytest.mark.slow)],
)
def test_weights_travel_in_the_dtype_of_their_products(make, schedule, gather):
  """And their gradients in float32, which autodiff would not see to."""
  config = make(
    dict(fsdp=2, expert=2),
    dtype="bfloat16",
    pipeline=dict(schedule=schedule, gather=gather),
  )
  program = jax.make_jaxpr(networks.make(config).value_and_grad)
  all_of_it = list(jaxprs.equations(program(*networks.draw(config))))
  # With gpipe, forward and backward, of which one scatters.
  loops = [
    equation
    for equation in all_of_it
    if equation.primitive.name == "scan" and jaxprs.has(equation, "ppermute")
  ]
  inside = [e for loop in loops for e in jaxprs.equations(loop.params["jaxpr"])]
  travel = {"fused": "bfloat16", "gpipe": "float32"}[schedule]
  dtypes = {"all_gather": {travel}, "reduce_scatter": {"float32"}}
  if gather == "tick":
    assert _dtypes_of_cut_weights(inside) == dtypes
  else:
    names = {equation.primitive.name for equation in inside}
    assert "ppermute" in names and not names.intersection(dtypes)
    assert _dtypes_of_cut_weights(all_of_it) == dtypes


def _dtypes_of_cut_weights(equations):
  """In which their parts go from device to device, by collective."""
  dtypes = {"all_gather": set(), "reduce_scatter": set()}
  for equation in equations:
    name = equation.primitive.name
    # [chunks, rows, ...] once they are at their ranks; all others are matrices.
    # Of routers alone, 8 experts wide, there is a product in float32.
    if (
      name in dtypes
      and equation.invars[0].aval.ndim > 2
      and equation.invars[0].aval.shape[-2:] != (8, 8)
    ):
      dtypes[name].add(equation.invars[0].aval.dtype.name)
  return dtypes


def test_memory_does_not_grow_with_microbatches():
  temporary = []
  for microbatches in (4, 8):
    config = networks.config((2, 1, microbatches, 2, 1), scheme="prenorm")
    compiled, _ = networks.compile_step(config)
    temporary.append(compiled.memory_analysis().temp_size_in_bytes)
  # The tokens themselves.
  assert temporary[1] - temporary[0] <= 4 * 4 * networks.LENGTH * 4


@pytest.mark.slow
@pytest.mark.needs("libtpu")
def test_a_tpu_program():
  """The loop has only planned messages, and does not copy the cache."""
  config = networks.config((2, 2, 4, 4, 2), dict(data=4), dtype="bfloat16")
  config = dataclasses.replace(
    config,
    model=dataclasses.replace(config.model, width=256, mlp_width=704),
    data=dataclasses.replace(config.data, sequence_length=256),
  )
  mesh = sharding.make_mesh(config.mesh, topology.devices("v5e:2x4"))
  program = train_state.make_program(config, mesh)
  step = program.train_step.lower(program.abstract_state, program.batch_shapes)
  text, plan = step.compile().as_text(), program.network
  rule, layout = config.pipeline.rule, plan.stage.transport.layout
  per_tick = sum(layout.link_vectors(rule)) + sum(layout.link_partials())
  permute = r"collective-permute(?:-start)?\(.*source_target_pairs=\{(.*?)\}\}"
  pairs = [ends.count("{") for ends in re.findall(permute, text)]
  assert sum(pairs) == 2 * config.mesh.data * per_tick
  program = hlo.Program(text)
  in_loop = [op for op in collectives.of_program(program) if op.in_loop]
  ticks, microbatches = plan.schedule.num_ticks, plan.microbatches
  messages = [op for op in in_loop if op.count == ticks]
  assert len(messages) == len(pairs)
  # States to the ranks that share the head, and their gradients back.
  heads = [op.count for op in in_loop if op.count != ticks]
  assert heads == [pytest.approx(microbatches)] * 2
  for op in messages:
    assert op.kind == "collective-permute" and op.overlapped
    assert {array.dims for array in op.arrays} == {(1, 256, 256)}
  slots = [plan.stage.blocks.size, plan.stage.gradients.size]
  for count, instruction, _ in program.instructions():
    if count > 1 and instruction.op in ("copy", "copy-start"):
      for array in instruction.arrays:
        assert array.dims not in [(n, 1, 256, 256) for n in slots]
