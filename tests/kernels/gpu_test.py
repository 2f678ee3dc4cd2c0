# SPDX-License-Identifier: Apache-2.0
"""The GPU kernels: values interpreted on CPU, lowering for H100 and H200.

Values and every cotangent are held against a definition in float64 (float32
kernels) or against that definition rounded to the storage dtype.
"""

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
from attnres_kernels import depth_merge_norm
from attnres_kernels import dispatch
from attnres_kernels import warpgroup
from attnres_kernels.depth_attention import pallas_gpu

NEW = jax.__version_info__ >= (0, 11)
needs_new = pytest.mark.skipif(
  not NEW, reason="not run: the kernel needs jax >= 0.11 for Mosaic GPU"
)
KINDS = ("NVIDIA H100 80GB HBM3", "NVIDIA H200")
# A zero partial sum has a gradient of 1 / sqrt(EPS) times a cancelling sum.
EPS, NORM_EPS = 1e-2, 1e-3
gpu = functools.partial(depth_attention, implementation="pallas_gpu")


def lower(kind, function, *arguments):
  """The text of a program for a GPU that need not be there."""
  # Private: no public name builds a device that is not there.
  from jax._src import mesh as mesh_lib

  device = mesh_lib.AbstractDevice(
    device_kind=kind, num_cores=132, platform="gpu"
  )
  mesh = jax.sharding.AbstractMesh((), (), abstract_device=device)
  with jax.sharding.use_abstract_mesh(mesh):
    traced = jax.jit(function).trace(*arguments)
    return traced.lower(lowering_platforms=("cuda",)).as_text()


def assert_close(actual, exact, name):
  """Within rounding: 1e-5 of the largest value, or twice that of storage."""
  exact = np.asarray(exact, np.float64)
  # A gradient that cancels to zero is as large as its terms.
  scale = np.abs(exact).max() + 1
  tolerance = 1e-5 if actual.dtype == jnp.float32 else 2**-8
  error = np.abs(np.asarray(actual.astype(jnp.float32)) - exact).max()
  np.testing.assert_array_less(error / scale, tolerance, err_msg=name)


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


def merge_oracle(out, lse, query, partial, update, gain):
  """One softmax over two log-weights; then, with a gain, the pre-norm."""
  total = partial if update is None else partial + update
  mean_square = jnp.mean(total**2, axis=-1)
  score = jnp.sum(query[None] * total, axis=-1) / jnp.sqrt(mean_square + EPS)
  # The mixture counts alone (lse = inf), or is empty (-inf), or shares.
  finite = jnp.where(jnp.isinf(lse), 0, lse)
  shares = jax.nn.softmax(jnp.stack([finite, score]), axis=0)[0]
  keep = jnp.where(jnp.isinf(lse), lse > 0, shares)[:, None]
  mixed = keep * out + (1 - keep) * total
  if gain is not None:
    mean_square = jnp.mean(mixed**2, axis=-1, keepdims=True)
    mixed = mixed / jnp.sqrt(mean_square + NORM_EPS) * gain[None]
  return total, mixed


@needs_new
class MergeTest(parameterized.TestCase):
  @parameterized.named_parameters(
    ("pairs", 256, "float32", True, True),
    ("two_tiles", 384, "float32", True, True),
    ("overlap", 200, "bfloat16", True, True),
    ("odd", 129, "float32", False, True),
    ("bare", 256, "bfloat16", False, False),
  )
  def test_values_and_cotangents(self, width, dtype, update, gain):
    arrays = self.make(width, dtype, update, gain)
    self.check(arrays)

  def test_large_scores(self):
    arrays = self.make(256, "float32", True, True)
    arrays["query"] *= 1e3
    arrays["lse"] = arrays["lse"] * 1e3
    self.check(arrays)

  def test_more_tokens_than_programs(self):
    with mock.patch.object(warpgroup, "PROGRAMS", 2):
      self.check(self.make(256, "float32", True, True))

  def make(self, width, dtype, update, gain):
    rng = np.random.default_rng(width)
    tokens = 5
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    wide = lambda: draw(tokens, width).astype(dtype)
    # A sum of two coarse numbers is stored without rounding.
    coarse = lambda: (jnp.round(draw(tokens, width) * 4) / 4).astype(dtype)
    arrays = {
      "out": wide(),
      # The first sublayer of a block, and a mixture of no source.
      "lse": draw(tokens).at[1].set(jnp.inf).at[2].set(-jnp.inf),
      "query": draw(width) * 0.3,
      "partial": coarse().at[3].set(0),
      "update": coarse().at[3].set(0) if update else None,
      "gain": 1 + draw(width) * 0.3 if gain else None,
    }
    return arrays | {"dtotal": wide(), "dmixed": wide()}

  def check(self, arrays):
    arrays = dict(arrays)
    cotangents = arrays.pop("dtotal"), arrays.pop("dmixed")
    given = {name: x for name, x in arrays.items() if x is not None}

    def run(function, given, cotangents):
      values, vjp = jax.vjp(
        lambda given: function(*({**arrays, **given}).values()), given
      )
      return dict(zip(("total", "mixed"), values)), vjp(cotangents)[0]

    def kernel(out, lse, query, partial, update, gain):
      options = {"eps": EPS, "implementation": "pallas_gpu"}
      if gain is None:
        mixed = depth_merge(out, lse, query, partial, **options)
        return partial, mixed
      return depth_merge_norm(
        out, lse, query, partial, update, gain, norm_eps=NORM_EPS, **options
      )

    with dispatch.interpreted(plgpu.InterpretGPUParams()):
      got = run(kernel, given, cotangents)
    with jax.enable_x64(True):
      wide = jax.tree.map(lambda x: x.astype(jnp.float64), (given, cotangents))
      arrays = {k: wide[0].get(k) for k in arrays}
      wanted = run(merge_oracle, *wide)
    for values, exact in zip(got, wanted):
      self.assertEqual(values.keys(), exact.keys())
      for name in values:
        assert_close(values[name], exact[name], name)

  @parameterized.product(kind=KINDS, width=(1168, 2304, 7168))
  def test_lowers(self, kind, width):
    wide = jax.ShapeDtypeStruct((2, 4096, width), jnp.bfloat16)
    lse = jax.ShapeDtypeStruct((2, 4096), jnp.float32)
    vector = jax.ShapeDtypeStruct((width,), jnp.float32)
    merge = functools.partial(depth_merge_norm, implementation="pallas_gpu")

    def step(*arrays):
      values, vjp = jax.vjp(merge, *arrays)
      return vjp(values)

    text = lower(kind, step, wide, lse, vector, wide, wide, vector)
    self.assertIn("depth_merge_forward", text)
    self.assertIn("depth_merge_backward", text)


@needs_new
class LoweringTest(parameterized.TestCase):
  @parameterized.product(
    kind=KINDS,
    shape=((2, 9, (128,), 2048), (6, 8, (64,), 2304), (3, 4, (1,), 896)),
  )
  def test_lowers(self, kind, shape):
    query, sources = make(*shape, "bfloat16")
    self.assertIn("mosaic_gpu", lower(kind, gpu, query, sources))


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

  @needs_new
  def test_merge(self):
    x = jnp.ones((2, 96))
    with self.assertRaisesRegex(NotImplementedError, "at least 128"):
      depth_merge(x, x[:, 0], x[0], x, implementation="pallas_gpu")
    x = jnp.ones((2, 128))
    with self.assertRaisesRegex(NotImplementedError, "lowered for cpu"):
      depth_merge(x, x[:, 0], x[0], x, implementation="pallas_gpu")


if __name__ == "__main__":
  absltest.main()
