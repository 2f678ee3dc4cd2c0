# SPDX-License-Identifier: Apache-2.0
"""Names of slices."""

import math

import jax
import jax.numpy as jnp
import pytest

from attnres_jax import config as config_lib
from attnres_jax.common import sharding
from attnres_jax.common import topology
from attnres_jax.plan import collectives
from attnres_jax.plan import hlo

P = jax.sharding.PartitionSpec


@pytest.mark.parametrize(
  "name,expected",
  [
    ("v5e:4x4", "v5e:4x4"),
    ("v5e-16", "v5e:4x4"),
    ("v5litepod-256", "v5e:16x16"),
    ("v6e-8", "v6e:2x4"),
    ("v5p-128", "v5p:4x4x4"),  # sold by cores
    ("v4-8", "v4:2x2x1"),
    ("v3-8", "v3:2x2"),
  ],
)
def test_marketing_names(name, expected):
  assert topology.topology_name(name) == expected


def test_every_shape_has_as_many_chips_as_its_name_says():
  for kind, (shapes, _) in topology._MARKETING.items():
    for chips, shape in shapes.items():
      sides = map(int, shape.split("x"))
      assert math.prod(sides) == chips, (kind, shape)


@pytest.mark.parametrize(
  "name,message",
  [
    ("v5e-7", "'v5e-7', expected one of v5e-1, v5e-4, v5e-8"),
    ("v9-8", "'v9', expected one of b200, h100, h200, v2, v3, v4"),
    pytest.param("v5e:3x5", "'v5e:3x5'", marks=pytest.mark.needs("libtpu")),
  ],
)
def test_unknown_names(name, message):
  with pytest.raises(config_lib.ConfigError, match=f"^topology: got {message}"):
    topology.devices(name)


@pytest.mark.needs("libtpu")
@pytest.mark.parametrize("name", ["v2-8", "v3-8"])
def test_chips_without_plans_say_why(name):
  kind = f"TPU {name[:2]}"
  devices = topology.devices(name)
  assert len(devices) == 8 and devices[0].device_kind == kind
  with pytest.raises(
    config_lib.ConfigError, match=f"got '{kind}', .* not in our table: train"
  ):
    topology.chip(devices[0])


@pytest.mark.parametrize(
  "name,count",
  [("v5e:2x4", 8), ("v5e-1", 1), ("v5p-8", 4), ("v6e:2x2", 4), ("v4-8", 4)],
)
@pytest.mark.needs("libtpu")
def test_devices_have_a_row(name, count):
  devices = topology.devices(name)
  assert len(devices) == count
  assert topology.chip(devices[0]).hbm_bytes > 2**33


@pytest.mark.needs("libtpu")
def test_a_gradient_crosses_slices_once():
  """Each device hands over its share of the gradient, counted by hand."""
  config = config_lib.MeshConfig(data=2, fsdp=4)
  devices = topology.devices("v5e:2x2", num_slices=2)
  mesh = sharding.make_mesh(config, devices)
  shard = lambda *axes: jax.sharding.NamedSharding(mesh, P(*axes))
  w = jax.ShapeDtypeStruct((256, 512), jnp.float32, sharding=shard("fsdp"))
  x = jax.ShapeDtypeStruct(
    (64, 256), jnp.float32, sharding=shard(("data", "fsdp"))
  )
  loss = lambda w, x: jnp.sum(jnp.square(jnp.tanh(x @ w)))
  step = jax.jit(jax.grad(loss), out_shardings=shard("fsdp"))
  program = hlo.Program(step.lower(w, x).compile().as_text())
  assert collectives.bytes_between_slices(program) == 256 * 512 * 4 / 4
