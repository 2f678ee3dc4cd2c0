# SPDX-License-Identifier: Apache-2.0
"""Which function runs on which platform, and which are traced at all."""

import jax
from jax._src import mesh as mesh_lib  # There is no public AbstractDevice.
import jax.numpy as jnp
import pytest

from attnres_kernels import dispatch
from attnres_kernels import platforms


def _mesh(kind, platform):
  device = mesh_lib.AbstractDevice(
    device_kind=kind, num_cores=1, platform=platform
  )
  return jax.sharding.AbstractMesh((), (), abstract_device=device)


def _program_of(mesh):
  """What is traced for a mesh: names of functions."""
  names = []

  def function(name, change):
    def call(x, missing):
      assert missing is None
      names.append(name)
      return x + change

    return call

  def choose(x):
    return platforms.by_platform(
      (x, None), function("default", 1), tpu=function("tpu", 2)
    )

  with jax.sharding.use_abstract_mesh(mesh):
    program = jax.jit(choose).trace(jnp.zeros(()))
  return names, program


@pytest.mark.parametrize(
  "platform,names",
  (
    ("tpu", ["tpu"]),
    ("cpu", ["default"]),
    # CUDA or ROCm: not yet known.
    ("gpu", ["tpu", "default"]),
    (None, ["tpu", "default"]),
  ),
)
def test_only_the_platform_of_the_mesh_is_traced(platform, names):
  mesh = jax.sharding.AbstractMesh((), ())
  if platform:
    mesh = _mesh("any", platform)
  assert sorted(_program_of(mesh)[0]) == sorted(names)


def test_without_a_mesh_the_lowering_decides():
  for platform, constant in (("tpu", "2.0"), ("cpu", "1.0")):
    mesh = jax.sharding.AbstractMesh((), ())
    _, program = _program_of(mesh)
    text = program.lower(lowering_platforms=(platform,)).as_text()
    assert f"dense<{constant}" in text
    assert text.count("stablehlo.add") == 1


def test_a_platform_is_required_of_trees_of_arrays():
  # The sources of depth attention are a tuple.
  def add(x):
    (pair, missing), y = platforms.require_platform(
      (((x, x), None), x), "add", "tpu"
    )
    assert missing is None
    return pair[0] + pair[1] + y

  program = jax.jit(add).trace(jnp.ones(()))
  assert "add" in program.lower(lowering_platforms=("tpu",)).as_text()
  with pytest.raises(NotImplementedError, match="add: runs on tpu.*cpu"):
    program.lower(lowering_platforms=("cpu",))


@pytest.mark.parametrize("op", ("depth_merge", "rms_norm"))
def test_tpus_run_a_single_row_without_a_kernel(op):
  """As in decoding one sequence, where kernels take longer to start."""

  def kernels(rows):
    x, row = jnp.ones((rows, 1, 256)), jnp.ones(256)
    arrays = {
      "depth_merge": (x, x[..., 0], row, x, row),
      "rms_norm": (x, row, None),
    }
    options = ("eps", 1e-6), ("norm_eps", 1e-6)
    rule = dispatch.Rule(op, None, options)
    return dispatch.kernels(rule, "forward", arrays[op])

  assert "tpu" not in kernels(1)
  assert kernels(2)["tpu"] == "pallas_tpu"
