# SPDX-License-Identifier: Apache-2.0
"""A step on any mesh is the step on one device."""

import dataclasses
import re

import jax
import numpy as np
import pytest

from attnres_jax import config as config_lib
from attnres_jax.common import sharding
from attnres_jax.train import train_state
from tests import jaxprs
from tests import tiny_network

# Combinations behave like their factors; they are slow tests.
MESHES = [
  dict(data=2, fsdp=2, tensor=2),
  *(
    pytest.param(mesh, marks=pytest.mark.slow)
    for mesh in (
      dict(data=4),
      dict(data=1, fsdp=4),
      dict(data=1, tensor=2),
      dict(data=2, fsdp=2),
      dict(data=2, tensor=2),
      dict(data=1, fsdp=2, tensor=2),
    )
  ),
]
# The smallest network with experts.
EXPERTS = dict(
  name="prenorm",
  moe=dataclasses.replace(tiny_network.KINDS["moe"], dense_layers=0),
)
EXPERT_MESHES = [
  dict(data=1, expert=2, tensor=2),
  dict(data=1, fsdp=2, expert=2),
  *(
    pytest.param(mesh, marks=pytest.mark.slow)
    for mesh in (dict(data=1, expert=4), dict(data=2, expert=2))
  ),
]


def _config(mesh, microbatches=1, **model):
  dense = dict(vocab_size=32, num_layers=1, block_size=1)
  return config_lib.RunConfig(
    model=tiny_network.config(**dense | model),
    data=config_lib.DataConfig(sequence_length=8, batch_size=8),
    # A large epsilon, since Adam would divide rounding errors by themselves.
    optim=config_lib.OptimConfig(
      warmup_steps=1, eps=1e-2, accumulate_steps=microbatches
    ),
    mesh=config_lib.MeshConfig(**mesh),
  )


def _step(config):
  """Loss and gradient norm of a step, the state before and after it."""
  tokens = np.random.default_rng(0).integers(0, 32, (8, 9), dtype=np.int32)
  mesh = sharding.make_mesh(config.mesh)
  program = train_state.make_program(config, mesh)
  state = program.init_state()
  before = jax.device_get(state.model)
  state, metrics = program.train_step(
    state, sharding.shard_batch({"tokens": tokens}, mesh)
  )
  return jax.device_get(metrics), before, state


_expected = {}


def _on_one_device(**model):
  key = tuple(model)
  if key not in _expected:
    metrics, before, state = _step(_config(dict(data=1), **model))
    _expected[key] = metrics, before, jax.device_get(state.model)
  return _expected[key]


def _assert_same_step(mesh, microbatches=1, **model):
  metrics, before, after = _on_one_device(**model)
  sharded, found_before, state = _step(_config(mesh, microbatches, **model))
  jax.tree.map(np.testing.assert_array_equal, found_before, before)
  load = [name for name in metrics if name.startswith("moe_")]
  assert bool(load) == ("moe" in model)
  for name in ("loss", "grad_norm", "tokens", *load):
    np.testing.assert_allclose(sharded[name], metrics[name], rtol=2e-5)
  for a, b in zip(jax.tree.leaves(state.model), jax.tree.leaves(after)):
    np.testing.assert_allclose(jax.device_get(a), b, rtol=0, atol=2e-6)
  return state


@pytest.mark.parametrize("mesh", MESHES)
def test_a_dense_network(mesh):
  state = _assert_same_step(mesh)
  # Optimiser state is sharded like its parameter.
  table = state.model.embedding.table[...]
  moments = [
    leaf
    for leaf in jax.tree.leaves(state.opt_state)
    if leaf.shape == table.shape
  ]
  assert len(moments) == 2
  assert all(m.sharding == table.sharding for m in moments)
  shards = mesh.get("fsdp", 1) * mesh.get("tensor", 1)
  assert table.addressable_shards[0].data.size * shards == table.size


@pytest.mark.slow
def test_a_network_of_several_kinds():
  mesh = dict(data=1, fsdp=2, expert=2, tensor=2)
  state = _assert_same_step(mesh, num_layers=2, **tiny_network.KINDS)
  experts = state.model.sublayers["moe"].core.down[...]
  assert experts.addressable_shards[0].data.size * 8 == experts.size


@pytest.mark.more
@pytest.mark.parametrize("mesh", EXPERT_MESHES)
def test_experts_alone_and_with_each_other_axis(mesh):
  state = _assert_same_step(mesh, **EXPERTS)
  # The load moved the biases as on one device.
  assert np.any(state.model.sublayers["moe"].core.selection_bias[...])


@pytest.mark.parametrize(
  "kind", ["dense", pytest.param("experts", marks=pytest.mark.more)]
)
def test_copies_sum_their_microbatches_apart(kind):
  """Gradients are sent once, after the loop, and a step is the same step."""
  model = EXPERTS if kind == "experts" else {}
  mesh = dict(data=2, fsdp=2, tensor=2) if kind == "dense" else dict(data=2)
  _assert_same_step(mesh, microbatches=2, **model)
  config = _config(dict(data=2), microbatches=2, **model)
  program = train_state.make_program(config, sharding.make_mesh(config.mesh))
  shapes = program.abstract_state, program.batch_shapes
  text = program.train_step.lower(*shapes).compile().as_text()
  loops = re.findall(r"body=(%[\w.-]+)", text)
  bodies = re.split(r"\n(?=%|ENTRY)", text)
  assert any("all-reduce" in b for b in bodies if b.startswith("ENTRY"))
  inside = [b for b in bodies if b.split(" ", 1)[0] in loops]
  assert loops and not any("all-reduce" in b for b in inside)


@pytest.mark.more
@pytest.mark.parametrize(
  "mesh,collectives",
  [
    pytest.param(dict(data=2), {"all-reduce"}, marks=pytest.mark.slow),
    (dict(data=1, fsdp=2), {"all-gather", "all-reduce"}),
  ],
)
def test_what_a_step_sends(mesh, collectives):
  """Copies send gradients only; shards also send parameters."""
  config = _config(mesh)
  mesh = sharding.make_mesh(config.mesh)
  program = train_state.make_program(config, mesh)
  lowered = program.train_step.lower(
    program.abstract_state, program.batch_shapes
  )
  text = lowered.compile().as_text()
  kinds = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"
  actual = set(re.findall(rf"\b({kinds})(?:-start)?\(", text))
  assert actual - {"reduce-scatter", "all-to-all"} == collectives


@pytest.mark.parametrize("mesh,number", [(dict(fsdp=2), 1), (dict(data=2), 0)])
def test_parts_of_the_head_s_gradient_come_before_the_trunk_s(mesh, number):
  config = _config(dict(data=1) | mesh)
  program = train_state.make_program(config, sharding.make_mesh(config.mesh))
  jaxpr = jax.make_jaxpr(program.train_step)(
    program.abstract_state, program.batch_shapes
  )
  head_DV = (config.model.width // config.mesh.fsdp, config.model.vocab_size)
  barriers = [
    e
    for e in jaxprs.equations(jaxpr)
    if e.primitive.name == "optimization_barrier"
    and head_DV in [v.aval.shape for v in e.outvars]
  ]
  assert len(barriers) == number
