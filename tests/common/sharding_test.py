# SPDX-License-Identifier: Apache-2.0
"""Meshes over the eight CPU devices of the tests."""

import itertools
import math
import re
import types

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnres_jax import config as config_lib
from attnres_jax.common import sharding
from attnres_jax.common import topology


def test_all_devices_or_the_first_few():
  assert jax.device_count() == 8  # tests/conftest.py
  mesh = sharding.make_mesh(config_lib.MeshConfig())
  ones = dict.fromkeys(sharding.AXES, 1)
  assert mesh.shape == ones | {"data": 8}
  few = sharding.make_mesh(config_lib.MeshConfig(data=3))
  assert few.devices.ravel().tolist() == jax.devices()[:3]
  cut = sharding.make_mesh(config_lib.MeshConfig(data=2, fsdp=-1, tensor=2))
  assert cut.shape == ones | {"data": 2, "fsdp": 2, "tensor": 2}
  assert sharding.num_row_shards(cut) == 4


def test_one_axis_takes_what_others_leave():
  message = r"mesh\.fsdp: got -1, expected a number.*data is -1"
  with pytest.raises(config_lib.ConfigError, match=message):
    sharding.make_mesh(config_lib.MeshConfig(fsdp=-1))


def test_the_axis_that_does_not_fit_is_named():
  """What the error suggests is accepted, and no other axis is to blame."""
  refused = 0
  for data, fsdp, tensor, count in itertools.product(
    (-1, 1, 3, 4), (1, 2, 3, 16), (1, 2, 5, 2**31 - 1), (1, 2, 6, 7, 8)
  ):
    sizes = dict(data=data, fsdp=fsdp, tensor=tensor)
    others = (fsdp * tensor, max(data, 1) * fsdp * tensor)
    fits = count % others[0] == 0 if data == -1 else others[1] <= count
    devices = jax.devices()[:count]
    if fits:
      sharding.make_mesh(config_lib.MeshConfig(**sizes), devices)
      continue
    refused += 1
    with pytest.raises(config_lib.ConfigError) as error:
      sharding.make_mesh(config_lib.MeshConfig(**sizes), devices)
    match = re.fullmatch(
      r"config\.(.*): got (\d+), expected .* such as (\d+)(?: or (\d+))?",
      str(error.value),
    )
    named = [axis.removeprefix("mesh.") for axis in match[1].split(" x ")]
    assert math.prod(sizes[axis] for axis in named) == int(match[2])
    assert all(sizes[axis] > 1 for axis in named)
    for size in filter(None, match.groups()[2:]):
      mended = sizes | dict.fromkeys(named, 1) | {named[-1]: int(size)}
      sharding.make_mesh(config_lib.MeshConfig(**mended), devices)
    if len(named) > 1:  # None of them is at fault by itself.
      assert math.prod(sizes[a] for a in named) == others[1]
  assert refused > 100


@pytest.mark.parametrize(
  "axis,axes,shape,message",
  [
    ("tensor", "V|D", (10, 8), "10, .*, such as 2 or 5$"),
    # Heads, and experts.
    ("tensor", "D|NH", (8, 6, 2), "6, .*, such as 2 or 3$"),
    ("expert", "E|D|F", (6, 8, 8), "6, .*, such as 2 or 3$"),
    ("fsdp", "E|D|F", (6, 8, 8), "6, .*, such as 2 or 3$"),
  ],
)
def test_a_cut_that_leaves_a_remainder(axis, axes, shape, message):
  mesh = sharding.make_mesh(config_lib.MeshConfig(data=1, **{axis: 4}))
  leaf = jax.ShapeDtypeStruct(shape, jnp.float32)
  tree = {"core": {"gate": nnx.Param(leaf, axes=axes)}}
  message = rf"^config\.mesh\.{axis}: got 4, expected a divisor of {message}"
  with pytest.raises(config_lib.ConfigError, match=message) as error:
    sharding.state_sharding(tree, mesh)
  assert f"which it cuts in core/gate {shape}" in str(error.value)


@pytest.mark.parametrize("num_slices", [1, 2])
@pytest.mark.needs("libtpu")
def test_axes_that_divide_those_of_the_torus(num_slices):
  devices = topology.devices("v5p:4x4x4", num_slices)
  sizes = dict(stage=8, data=num_slices, expert=8)
  mesh = sharding.make_mesh(config_lib.MeshConfig(**sizes), devices)
  assert mesh.size == len({device.id for device in mesh.devices.flat})
  assert {axis: mesh.shape[axis] for axis in sizes} == sizes


@pytest.mark.needs("libtpu")
def test_data_crosses_slices():
  """The other axes stay within a slice, whose devices are linked."""
  devices = topology.devices("v5e:2x4", num_slices=2)
  config = config_lib.MeshConfig(data=4, fsdp=2, tensor=2)
  mesh = sharding.make_mesh(config, devices)
  slices = np.vectorize(lambda device: device.slice_index)(mesh.devices)
  data = sharding.AXES.index(sharding.DATA)
  by_data = np.moveaxis(slices, data, 0).reshape(4, -1)
  np.testing.assert_array_equal(
    by_data, np.repeat([0, 0, 1, 1], 4).reshape(4, 4)
  )
  message = (
    r"mesh\.data: got 1, expected a multiple of the 2 slices, such as 2$"
  )
  with pytest.raises(config_lib.ConfigError, match=message):
    sharding.make_mesh(config_lib.MeshConfig(data=1, fsdp=16), devices)


@pytest.mark.parametrize(
  "sizes,processes,expected",
  [
    (dict(data=8), [0, 0, 1, 1, 2, 2, 3, 3], [0, 1, 2, 3]),
    # Both ranks of a pipeline work on all rows, and so do both tensor shards.
    (dict(stage=2, data=4), [0, 0, 0, 0, 1, 1, 1, 1], [0, 0]),
    (dict(stage=2, data=4), [0, 0, 1, 1, 2, 2, 3, 3], [0, 1, 0, 1]),
    (dict(data=2, tensor=4), [0, 0, 1, 1, 2, 2, 3, 3], [0, 0, 1, 1]),
    (dict(data=2, fsdp=2, expert=2), [1, 1, 1, 1, 0, 0, 0, 0], [1, 0]),
  ],
)
def test_processes_with_the_same_rows_read_them_all(sizes, processes, expected):
  mesh = _mesh_of_processes(sizes, processes)
  shares = [sharding.share_of_rows(mesh, i) for i in range(len(expected))]
  assert shares == [(part, 1 + max(expected)) for part in expected]


def test_rows_that_processes_share_in_part():
  mesh = _mesh_of_processes(dict(data=4, tensor=2), [0, 1, 1, 2, 0, 0, 1, 2])
  message = r"^config\.mesh: got '1 stage x 4 data .*, expected sizes that give"
  with pytest.raises(config_lib.ConfigError, match=message):
    sharding.share_of_rows(mesh, 0)


def test_a_process_without_devices(monkeypatch):
  monkeypatch.setattr(jax, "process_count", lambda: 2)
  mesh = _mesh_of_processes(dict(data=2), [0, 0])
  message = r"^config\.mesh: got '.* 2 data .*; process 1 has none"
  for process in range(2):
    with pytest.raises(config_lib.ConfigError, match=message):
      sharding.share_of_rows(mesh, process)


def _mesh_of_processes(sizes, processes):
  """The rows of processes with these devices of a mesh."""
  shape = dict.fromkeys(sharding.AXES, 1) | sizes
  devices = np.empty(len(processes), object)
  devices[:] = [types.SimpleNamespace(process_index=i) for i in processes]
  return types.SimpleNamespace(
    devices=devices.reshape(tuple(shape.values())), shape=shape
  )


def _run(batch_size, accumulate_steps=1):
  return config_lib.RunConfig(
    data=config_lib.DataConfig(batch_size=batch_size),
    optim=config_lib.OptimConfig(accumulate_steps=accumulate_steps),
  )


def test_rows_that_cannot_be_split():
  mesh = sharding.make_mesh(config_lib.MeshConfig(data=4))
  sharding.check_divides(_run(24, 3), mesh)
  for rows, parts, nearest in ((30, 3, "24 or 36"), (3, 1, "4"), (6, 2, "8")):
    message = (
      rf"config\.data\.batch_size: got {rows}, .*= 4 x {parts}, such as"
      rf" {nearest}$"
    )
    with pytest.raises(config_lib.ConfigError, match=message):
      sharding.check_divides(_run(rows, parts), mesh)


def test_batches_are_split_by_rows():
  mesh = sharding.make_mesh(config_lib.MeshConfig(data=4))
  tokens = np.arange(8 * 3, dtype=np.int32).reshape(8, 3)
  batch = sharding.shard_batch({"tokens": tokens}, mesh)
  array = batch["tokens"]
  assert array.sharding == sharding.batch_sharding(mesh)
  np.testing.assert_array_equal(array, tokens)
  for i, shard in enumerate(array.addressable_shards):
    np.testing.assert_array_equal(shard.data, tokens[2 * i : 2 * i + 2])
