# SPDX-License-Identifier: Apache-2.0
"""Phases, scans and checkpoints compute the same function."""

import functools

import jax
import jax.numpy as jnp
import pytest

from attnres_jax import config as config_lib
from attnres_jax.models import layer_stacks
from attnres_jax.models.residuals import base
from tests import compare
from tests import jaxprs
from tests import tiers
from tests import tiny_network
from tests.models import trunks

VALUE_QUERY = config_lib.DepthReadConfig(value_query=True)

pytestmark = pytest.mark.usefixtures("float64")


@tiers.parametrize(
  "name,fields",
  [
    ("prenorm", {}),
    ("rescaled", {}),
    ("full_attnres", dict(schedule_size=2)),
    ("full_attnres", dict(form="one_softmax")),
    ("block_attnres", dict(block_size=2)),
    ("block_attnres", dict(block_size=2, form="one_softmax")),
    ("delta_attnres", dict(read=VALUE_QUERY)),
    ("delta_block", dict(block_size=2, read=VALUE_QUERY)),
  ],
  first=["full_attnres", "block_attnres"],
)
def test_state_is_valid_between_any_two_sublayers(name, fields):
  """Segments can be cut anywhere (as in pipelines) without any effect."""
  module = trunks.scheme(name, 5, **fields)
  values = trunks.outputs(5)

  @jax.jit
  def one_by_one(module, values):
    state, reads = module.init(values[0]), []
    for l in range(5):
      carry, slots = module.open(state, l, l + 1)
      slot = jax.tree.map(lambda a: a[0], slots)
      reads.append(base.before_norm(module, carry, slot))
      carry = module.write(carry, slot, values[l + 1])
      state = module.close(state, carry, l + 1)
      state = module.put_together(*module.take_apart(state))
    return [*reads, module.readout(state)]

  expected = trunks.reads(module, values)
  compare.trees(one_by_one(module, values), expected, 1e-13)


@pytest.mark.parametrize(
  "name,fields,copies",
  [
    ("prenorm", dict(scan_layers=False), 8),
    ("block_attnres", dict(scan_layers=False), 8),
    # Once each in a scan over two blocks of four.
    ("block_attnres", dict(depth_loop="scan", block_size=4), 4),
    # Autodiff of a scan would keep the copies of all layers.
    ("prenorm", dict(scan_layers=True), 0),
  ],
)
def test_products_read_arrays_instead_of_slices(name, fields, copies):
  model = tiny_network.model(name, num_layers=4, **fields)
  tokens_BT = jnp.zeros((1, 4), jnp.int32)
  barriers = jaxprs.count(("optimization_barrier",), model.hidden, tokens_BT)
  assert barriers == copies


def test_the_gradient_of_an_output_is_one_array():
  model = tiny_network.model("prenorm", num_layers=4, scan_layers=False)
  tokens_BT = jnp.zeros((1, 4), jnp.int32)
  loss = lambda model: jnp.sum(model.hidden(tokens_BT))
  count = functools.partial(jaxprs.count, ("optimization_barrier",))
  # Of the weights of eight sublayers, forward and backward, and of outputs.
  assert count(jax.grad(loss), model) == 3 * 8


@pytest.mark.parametrize("remat,number", [("full", 2 + 4), ("none", 0)])
def test_gradients_of_weights_come_before_those_of_earlier_layers(
  remat, number
):
  """Of each of two blocks, and of outputs with two sublayers behind them."""
  model = tiny_network.model(
    "block_attnres", block_size=4, num_layers=4, scan_layers=False, remat=remat
  )
  model.sublayers = layer_stacks.separated(model.sublayers)
  shapes = {a.shape for a in jax.tree.leaves(model.sublayers)}
  loss = lambda model: jnp.sum(model.hidden(jnp.zeros((1, 4), jnp.int32)))
  barriers = [
    {v.aval.shape for v in equation.outvars}
    for equation in jaxprs.equations(jax.make_jaxpr(jax.grad(loss))(model))
    if equation.primitive.name == "optimization_barrier"
  ]
  state_BTD = (1, 4, model.config.width)
  both = [b for b in barriers if state_BTD in b and b & shapes]
  assert len(both) == number
