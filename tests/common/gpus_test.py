# SPDX-License-Identifier: Apache-2.0
"""Names of GPUs, and what the compiler is told about them."""

import jax
import pytest

from attnres_jax import config as config_lib
from attnres_jax.common import chips
from attnres_jax.common import gpus
from attnres_jax.common import sharding
from attnres_jax.common import topology


@pytest.mark.parametrize(
  "name,parsed",
  [
    ("h100-1", ("h100", 1, 1)),
    ("h200-8", ("h200", 1, 8)),
    ("b200-8x8", ("b200", 8, 8)),
    ("h100:1x8", ("h100", 1, 8)),
    ("v5e-8", None),
    ("v5e:2x4", None),
  ],
)
def test_names(name, parsed):
  assert gpus.parse(name) == parsed
  if parsed:
    again = topology.topology_name(name)
    assert gpus.parse(again) == parsed


@pytest.mark.parametrize(
  "name", ["h100-3", "h100-16", "h100-2x4", "h100-0x8", "h100:8x", "h200"]
)
def test_hosts_have_eight(name):
  with pytest.raises(config_lib.ConfigError, match=f"got '{name}', .*hosts of"):
    topology.devices(name)


def test_a_missing_library_is_one_line(monkeypatch):
  monkeypatch.setattr(gpus, "version", lambda name: "1" * ("cudnn" not in name))
  with pytest.raises(config_lib.ConfigError) as refusal:
    topology.devices("h100-8")
  message = str(refusal.value)
  assert "nvidia-cudnn-cu13 is missing" in message and "\n" not in message
  assert "gpu-plan" in message


@pytest.mark.needs("jax-cuda13-plugin")
def test_one_slice_only():
  with pytest.raises(config_lib.ConfigError, match="num_slices: got 2"):
    topology.devices("h100-8", 2)


@pytest.mark.parametrize("kind", gpus.TARGETS)
def test_every_target_has_rates(kind):
  target = gpus.TARGETS[kind]
  chip = chips.chip_of(target.name)
  assert chip.published_hbm_bytes_per_second == target.memory_bytes_per_second
  assert chip.hbm_bytes == 0.75 * target.memory_bytes
  reached = chip.reached_flops_per_second / chip.peak_flops_per_second
  assert reached == pytest.approx(812.25 / 989)
  assert gpus.of_kind(target.name) is target


@pytest.mark.needs("jax-cuda13-plugin")
@pytest.mark.parametrize("name,hosts", [("h100-8", 1), ("b200-2x8", 2)])
def test_devices(name, hosts):
  devices = topology.devices(name)
  assert len(devices) == 8 * hosts
  assert len({device.process_index for device in devices}) == hosts
  assert devices[0].device_kind == gpus.TARGETS[name[:4]].name
  assert topology.chip(devices[0]).hbm_bytes > 59 * 2**30


@pytest.mark.needs("jax-cuda13-plugin")
def test_a_program_for_eight():
  config = config_lib.MeshConfig(data=8)
  mesh = sharding.make_mesh(config, topology.devices("h200-8"))
  place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
  x = jax.ShapeDtypeStruct((1024, 64), "float32", sharding=place)
  compiled = jax.jit(lambda x: x.sum()).lower(x).compile(gpus.COMPILER_OPTIONS)
  assert "all-reduce" in compiled.as_text()
  assert compiled.memory_analysis().argument_size_in_bytes == 1024 * 64 // 2
