# SPDX-License-Identifier: Apache-2.0
"""The GPU kernel: values interpreted on CPU, lowering for an H200 on CPU."""

import functools
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import jax
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest

from attnres_kernels import depth_attention
from attnres_kernels import depth_merge
from attnres_kernels import dispatch
from attnres_kernels.depth_attention import pallas_gpu

NEW = jax.__version_info__ >= (0, 11)
needs_new = pytest.mark.skipif(
  not NEW, reason="not run: the kernel needs jax >= 0.11 for Mosaic GPU"
)
gpu = functools.partial(depth_attention, implementation="pallas_gpu")


def make(queries, sources, tokens, width, dtype):
  rng = np.random.default_rng(0)
  query = jnp.asarray(rng.normal(size=(queries, width)) * 0.1, jnp.float32)
  shape = (sources, *tokens, width)
  return query, tuple(jnp.asarray(rng.normal(size=shape), dtype))


@needs_new
class InterpretedTest(parameterized.TestCase):
  @parameterized.parameters(
    (2, 3, (2, 2), 256, "bfloat16"),
    (3, 1, (3,), 128, "float32"),
  )
  def test_values_and_gradients(self, *shape):
    self.check(*shape)

  def test_several_passes_over_the_queries(self):
    with mock.patch.object(pallas_gpu, "_REGISTERS", 4):
      self.check(3, 2, (1,), 256, "float32")

  def check(self, *shape):
    query, sources = make(*shape)

    def loss(f, query, *sources):
      out, lse = f(query, sources)
      return jnp.sum(out.astype(jnp.float32) ** 2) + jnp.sum(lse)

    argnums = tuple(range(1 + len(sources)))
    wanted_f = functools.partial(depth_attention, implementation="reference")
    wanted = jax.grad(functools.partial(loss, wanted_f), argnums)(
      query, *sources
    )
    with dispatch.interpreted(plgpu.InterpretGPUParams()):
      out, lse = gpu(query, sources)
      got = jax.grad(functools.partial(loss, gpu), argnums)(query, *sources)
    out_, lse_ = wanted_f(query, sources)
    tolerance = 2e-2 if shape[-1] == "bfloat16" else 2e-4
    as_float = lambda x: np.asarray(x.astype(jnp.float32))
    np.testing.assert_allclose(lse, lse_, atol=1e-5)
    np.testing.assert_allclose(
      as_float(out), as_float(out_), rtol=tolerance, atol=tolerance / 100
    )
    for a, b in zip(got, wanted):
      scale = np.abs(as_float(b)).max() + 1e-3
      np.testing.assert_allclose(
        as_float(a) / scale, as_float(b) / scale, atol=tolerance
      )


@needs_new
class LoweringTest(parameterized.TestCase):
  @parameterized.product(
    kind=("NVIDIA H100 80GB HBM3", "NVIDIA H200"),
    shape=((2, 9, (128,), 2048), (6, 8, (64,), 2304), (3, 4, (1,), 896)),
  )
  def test_lowers(self, kind, shape):
    # Private: no public name builds a device that is not there.
    from jax._src import mesh as mesh_lib

    device = mesh_lib.AbstractDevice(
      device_kind=kind, num_cores=132, platform="gpu"
    )
    mesh = jax.sharding.AbstractMesh((), (), abstract_device=device)
    query, sources = make(*shape, "bfloat16")
    with jax.sharding.use_abstract_mesh(mesh):
      lowered = (
        jax.jit(gpu).trace(query, sources).lower(lowering_platforms=("cuda",))
      )
    self.assertIn("mosaic_gpu", lowered.as_text())


class ReasonTest(absltest.TestCase):
  @pytest.mark.skipif(NEW, reason="not run: about jax older than 0.11")
  def test_old_jax(self):
    with self.assertRaisesRegex(NotImplementedError, "jax >= 0.11"):
      gpu(*make(1, 1, (2,), 128, "float32"))

  @needs_new
  def test_width_count_and_platform(self):
    with self.assertRaisesRegex(NotImplementedError, "multiple of 128"):
      gpu(*make(1, 1, (2,), 96, "float32"))
    with self.assertRaisesRegex(NotImplementedError, "count"):
      gpu(jnp.ones((1, 128)), jnp.ones((2, 3, 128)), num_sources=1)
    with self.assertRaisesRegex(NotImplementedError, "lowered for cpu"):
      gpu(*make(1, 1, (2,), 128, "float32"))

  def test_merge_has_no_gpu_kernel(self):
    x = jnp.ones((2, 8))
    with self.assertRaisesRegex(NotImplementedError, "no pallas_gpu"):
      depth_merge(x, x[:, 0], x[0], x, implementation="pallas_gpu")


if __name__ == "__main__":
  absltest.main()
