# SPDX-License-Identifier: Apache-2.0
"""Options of the compiler."""

import types

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

from attnres_jax import config as config_lib
from attnres_jax.common import compiler
from attnres_jax.common import topology


def _options(kind, *given):
  train = config_lib.TrainConfig(compiler_options=given)
  device = types.SimpleNamespace(device_kind=kind)
  mesh = types.SimpleNamespace(devices=np.array([device]))
  return compiler.options(types.SimpleNamespace(train=train), mesh)


def test_kinds_of_devices():
  name = "xla_tpu_enable_async_all_to_all"
  assert _options("TPU v5")[name] == _options("TPU v6 lite")[name] == "true"
  assert not _options("cpu")
  changed = _options("TPU v5", f"{name}=false", "xla_other=a=b")
  assert changed == _options("TPU v5") | {name: "false", "xla_other": "a=b"}


@pytest.mark.parametrize("option", ["xla_flag", "xla_flag=", "=true", "a b=c"])
def test_bad_options(option):
  with pytest.raises(config_lib.ConfigError, match="options with values"):
    config_lib.TrainConfig(compiler_options=(option,))


@pytest.mark.needs("libtpu")
@pytest.mark.parametrize(
  "slice_name",
  [
    "v5e:2x4",
    *(
      pytest.param(name, marks=pytest.mark.slow)
      for name in ("v4:2x2x2", "v5p:2x2x2", "v6e:2x4", "tpu7x:2x2x1")
    ),
  ],
)
def test_a_product_with_a_sharded_matrix_is_no_loop_over_shards(slice_name):
  devices = topology.devices(slice_name)
  mesh = Mesh(np.array(devices), "fsdp")
  rows = NamedSharding(mesh, P("fsdp"))
  x_BTD, weight_DF = (
    jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=rows)
    for shape in ((128, 1024, 1024), (1024, 2752))
  )

  def is_loop(options):
    product = jax.jit(jnp.matmul, out_shardings=rows, compiler_options=options)
    compiled = product.lower(x_BTD, weight_DF).compile()
    return "collective-permute" in compiled.as_text()

  assert is_loop({})  # Else the option is no longer needed.
  assert not is_loop(_options(devices[0].device_kind))


def test_peak_holds_arguments_results_and_what_is_between():
  x = jax.ShapeDtypeStruct((256, 256), "float32")

  def program(x, y):
    return x + 1, (y @ y) @ y

  def peak(**options):
    compiled = jax.jit(program, **options).lower(x, x).compile()
    return compiler.peak_bytes(compiled)

  array = 4 * 256**2
  # Two arguments, two results, and the product between.
  assert 5 * array <= peak() < 5.5 * array
  assert peak() - peak(donate_argnums=0) == array


@pytest.mark.parametrize(
  "platform,mark,peak",
  [("tpu", 12, 12), ("tpu", 25, 19), ("tpu", 0, 8), ("gpu", 12, 19),
   ("cpu", 12, 19)],
)  # fmt: skip
def test_the_mark_of_the_compiler_counts_on_tpus(platform, mark, peak):
  """Unless it counts arrays on the core, or nothing."""
  memory = types.SimpleNamespace(
    argument_size_in_bytes=8, output_size_in_bytes=9, alias_size_in_bytes=8,
    temp_size_in_bytes=10, peak_memory_in_bytes=mark,
  )  # fmt: skip
  device = types.SimpleNamespace(platform=platform)
  compiled = types.SimpleNamespace(
    memory_analysis=lambda: memory,
    input_shardings=types.SimpleNamespace(device_set=[device]),
  )
  assert compiler.peak_bytes(compiled) == peak
