# SPDX-License-Identifier: Apache-2.0
"""Attention in tiles against all pairs, and fused kernels against tiles."""

import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnres_jax import config as config_lib
from attnres_jax.common import sharding
from attnres_jax.common import topology
from attnres_jax.models.mixers import causal_attention
from attnres_kernels import platforms
from tests import jaxprs
from tests import tiers
from tests import tiny_network
from tests.models import reference

BATCH, HEADS, WIDTH, VALUE = 2, 4, 6, 3


def _small_inputs(length, kv_heads=HEADS, dtype="float32"):
  arrays = _inputs(length, HEADS, kv_heads, WIDTH, VALUE, dtype)
  return [2 * x for x in arrays[:3]]


def _thirds(length):
  first = jnp.arange(length) < length // 3
  second = jnp.arange(length) < length // 2
  return jnp.stack([jnp.where(first, 1, 2), jnp.where(second, 1, 0)])


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
  "length,tile,kv_heads",
  [(1, 4, 4), (8, 8, 4), (21, 4, 4), (16, 2, 2), (9, 4, 1), (7, 5, 4)],
)
def test_is_its_definition(length, tile, kv_heads, packed):
  arrays = _small_inputs(length, kv_heads)
  segments = _thirds(length) if packed else None
  actual = jax.jit(causal_attention.attend, static_argnames="tile")(
    *arrays, segments, tile=tile
  )
  in_numpy = [np.asarray(array, np.float64) for array in arrays]
  ids = np.zeros((BATCH, length)) if segments is None else segments
  expected = reference.attend(*in_numpy, np.asarray(ids))
  np.testing.assert_allclose(actual, expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("packed", [False, True])
def test_gradients_do_not_depend_on_the_tile(packed):
  length = 21
  arrays = _small_inputs(length, 2)
  segments = _thirds(length) if packed else None

  def gradients(tile):
    loss = lambda *a: jnp.sum(
      jnp.sin(causal_attention.attend(*a, segments, tile=tile))
    )
    return jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(*arrays)

  for a, b in zip(gradients(4), gradients(length)):
    assert np.abs(b).max() > 0.1
    np.testing.assert_allclose(a, b, rtol=0, atol=1e-5)


def test_many_tiles_do_not_add_up_gradients_in_bfloat16():
  """Gradients of keys and values are rounded once, after the sum."""
  length = 64
  query, key, value = _small_inputs(length, 1, "bfloat16")
  # Equal weights: gradients of values are long sums of equal terms.
  query = jnp.zeros_like(query)

  def gradient(tile, *arrays):
    loss = lambda value: jnp.sum(
      causal_attention.attend(*arrays[:2], value, tile=tile)
      .astype(jnp.float32)
    )  # fmt: skip
    return jax.jit(jax.grad(loss))(arrays[2]).astype(jnp.float32)

  exact = gradient(length, *(x.astype("float32") for x in (query, key, value)))
  error = np.abs(gradient(1, query, key, value) - exact) / np.abs(exact)
  # Weights are rounded, too: each term of a sum by up to 2^-9.
  assert error.max() < 2 * 2**-8


def test_memory_is_linear():
  """No pairs of all tokens; nothing is saved beside the arguments."""
  length, tile = 64, 4
  arrays = _small_inputs(length)
  attend = lambda *a: causal_attention.attend(*a, kernel="tiled", tile=tile)
  loss = lambda *a: jnp.sum(attend(*a))
  program = jax.make_jaxpr(jax.grad(loss, argnums=(0, 1, 2)))(*arrays)
  largest = max(np.prod(a.shape, dtype=int) for a in jaxprs.arrays(program))
  assert largest <= BATCH * HEADS * length * max(tile, WIDTH)
  assert not jaxprs.saved(attend, *arrays)


LENGTH = 300  # Blocks of 128, the last one of which is padded.


def _inputs(length, heads, kv_heads, width, value, dtype="float32"):
  keys = jax.random.split(jax.random.key(0), 4)
  shapes = (
    (heads, width), (kv_heads, width), (kv_heads, value), (heads, value),
  )  # fmt: skip
  return [
    jax.random.normal(key, (2, length, *shape), dtype)
    for key, shape in zip(keys, shapes)
  ]


def _segments(length):
  position = jnp.arange(length)
  return jnp.stack([1 + position // 130, jnp.where(position < 290, 1, 0)])


def _all(kernel, segments, query, key, value, dmixed):
  attend = lambda *a: causal_attention.attend(*a, segments, kernel=kernel)
  mixed, pull = jax.vjp(attend, query, key, value)
  return mixed, *pull(dmixed)


def _widened(arrays):
  return [x.astype(jnp.float32) for x in arrays]


@tiers.parametrize(
  "dtype,packed,heads,kv_heads,width,value",
  [
    ("float32", False, 2, 2, 24, 16),
    ("float32", True, 4, 2, 64, 64),
    ("bfloat16", True, 2, 2, 192, 128),
    ("bfloat16", False, 4, 1, 32, 32),
  ],
  first=2,
)
def test_splash_is_the_tiled_form(
  dtype, packed, heads, kv_heads, width, value, monkeypatch
):
  monkeypatch.setattr(causal_attention, "_BLOCKS", (128,))
  arrays = _inputs(LENGTH, heads, kv_heads, width, value, dtype)
  segments = _segments(LENGTH) if packed else None
  with platforms.interpreted():
    actual = jax.jit(lambda *a: _all("splash", segments, *a))(*arrays)
  exact = jax.jit(lambda *a: _all("tiled", segments, *a))(*_widened(arrays))
  assert [x.dtype for x in actual] == [jnp.dtype(dtype)] * 4
  if dtype == "float32":
    limits = [1e-5 * np.abs(x).max() for x in exact]
  else:
    tiled = jax.jit(lambda *a: _all("tiled", segments, *a))(*arrays)
    limits = [1.5 * np.abs(a - b).max() for a, b in zip(_widened(tiled), exact)]
  for a, b, limit in zip(_widened(actual), exact, limits):
    assert np.abs(b).max() > 1
    np.testing.assert_allclose(a, b, rtol=0, atol=limit)


@pytest.mark.parametrize("packed", [False, True])
def test_what_is_lowered(packed):
  """Kernels for TPU alone; on CPU what runs without any, and no call."""
  arrays = _inputs(LENGTH, 2, 2, 24, 16, "bfloat16")
  segments = _segments(LENGTH) if packed else None
  staged = jax.jit(lambda *a: _all("auto", segments, *a)).trace(*arrays)
  kernels = ("splash_mha_fwd", "splash_mha_dq", "splash_mha_dkv")
  on_tpu = staged.lower(lowering_platforms=("tpu",)).as_text()
  assert all(name in on_tpu for name in kernels)
  assert f"tensor<{LENGTH}x{LENGTH}" not in on_tpu
  elsewhere = staged.lower(lowering_platforms=("cpu",)).as_text()
  assert "custom_call" not in elsewhere and "splash" not in elsewhere


def test_blocks_pad_by_an_eighth_at_most():
  for length in (128, 300, 1025, 1536, 3968, 4097, 8192):
    block = causal_attention.block_sizes(length).block_q
    assert -length % block <= max(length // 8, 127), (length, block)
  assert causal_attention.block_sizes(8192).block_q == 1024


@pytest.mark.needs("libtpu")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(
  "slice_name",
  [
    "v5e:2x2",
    pytest.param("v5p:2x2x1", marks=pytest.mark.slow),
    pytest.param("v6e:2x2", marks=pytest.mark.slow),
    pytest.param("tpu7x:2x2x1", marks=pytest.mark.slow),
  ],
)
def test_compiles_for_tpu(slice_name, dtype):
  """Rows and heads over a mesh, packed, with an odd length."""
  sizes = config_lib.MeshConfig(data=2, tensor=2)
  mesh = sharding.make_mesh(sizes, topology.devices(slice_name)[:4])
  heads = jax.sharding.NamedSharding(mesh, sharding.HEADS)
  arrays = [
    jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=heads)
    for x in jax.eval_shape(lambda: _inputs(LENGTH, 4, 2, 192, 128, dtype))
  ]
  segments = jax.ShapeDtypeStruct(
    (2, LENGTH), jnp.int32, sharding=sharding.batch_sharding(mesh)
  )
  with sharding.ambient(mesh):
    step = jax.jit(lambda segments, *a: _all("splash", segments, *a))
    text = step.lower(segments, *arrays).compile().as_text()
  for kernel in ("fwd_segmented_residuals", "dkv_segmented", "dq_segmented"):
    assert f"splash_mha_{kernel}" in text
  for name in ("all-gather", "all-reduce", "all-to-all", "permute"):
    assert name not in text


@pytest.mark.parametrize(
  "kernel,dtype,segments,message",
  [
    ("splash", "float32", None, "runs on tpu, and this .* lowered for cpu"),
    ("splash", "float16", None, "takes bfloat16 and float32, not float16"),
    ("cudnn", "bfloat16", jnp.ones((2, 6), jnp.int32), "cuDNN|Hopper"),
    ("cudnn", "float32", None, "takes bfloat16 and float16, not float32"),
    ("cudnn", "bfloat16", None, "cuDNN|this .* lowered for cpu"),
  ],
)
def test_a_named_kernel_that_cannot_run_says_so(
  kernel, dtype, segments, message
):
  arrays = _inputs(6, 2, 2, 24, 16, dtype)
  line = f"model.attention_kernel='{kernel}': .*{message}"
  with pytest.raises(NotImplementedError, match=line):
    jax.jit(lambda *a: _all(kernel, segments, *a))(*arrays)


def test_documents_of_packed_rows():
  ids = jnp.asarray([[3, 3, 3, 1, 1, 0], [2, 2, 2, 2, 2, 2]], jnp.int32)
  lengths, starts, fit = causal_attention.documents(ids, 3)
  assert lengths.tolist() == [[3, 2, 1], [6, -1, -1]]
  assert starts.tolist() == [[0, 3, 5, -1], [0, -1, -1, -1]] and fit
  lengths, _, fit = causal_attention.documents(ids, 2)
  assert lengths.tolist() == [[3, 2], [6, -1]] and not fit
  assert lengths.dtype == starts.dtype == jnp.int32


@pytest.mark.more
@pytest.mark.parametrize("most", [2, 1])
def test_packed_documents_go_to_cudnn(most, monkeypatch):
  """With the definition in its place; rows of more documents do not."""
  cudnn = importlib.import_module("jax._src.cudnn.fused_attention_stablehlo")
  results = []

  def attend(
    query, key, value, bias, mask, lengths, _, starts, __, *, scale, mask_type
  ):
    assert bias is mask is None and mask_type == cudnn.MaskType.CAUSAL
    at = jnp.arange(query.shape[1])[None, None]
    after = at >= starts[:, :-1, None]
    inside = after & (at < (starts[:, :-1] + lengths)[..., None])
    inside &= lengths[..., None] > 0
    same = jnp.any(inside[..., None] & inside[:, :, None], axis=1)
    seen = (same & (at[0, :, :, None] >= at))[:, None]
    logits = jnp.einsum("BTNH,BSNH->BNTS", query, key)
    logits = jnp.where(seen, scale * logits.astype(jnp.float32), -jnp.inf)
    weights = jax.nn.softmax(logits).astype(value.dtype)
    out = jnp.einsum("BNTS,BSNH->BTNH", weights, value)
    jax.debug.callback(lambda: results.append(1))
    return out

  segments = _thirds(9)
  arrays = _inputs(9, 2, 2, 24, 16, "bfloat16")
  expected = _all("tiled", segments, *arrays)
  monkeypatch.setattr(cudnn, "dot_product_attention", attend)
  monkeypatch.setattr(causal_attention, "_DOCUMENTS", most)
  on_cpu = causal_attention.KERNELS["cudnn"]._replace(platform="cpu")
  monkeypatch.setitem(causal_attention.KERNELS, "cudnn", on_cpu)
  jax.clear_caches()
  actual = jax.jit(lambda *a: _all("cudnn", segments, *a))(*arrays)
  jax.effects_barrier()
  jax.clear_caches()
  assert bool(results) == (most == 2)
  for a, b in zip(_widened(actual), _widened(expected)):
    np.testing.assert_allclose(a, b, rtol=0, atol=2**-6 * np.abs(b).max())


@pytest.mark.needs("libtpu")
@pytest.mark.parametrize("remat,times", [("full", 2), ("attention", 1)])
def test_remat_by_name_does_not_run_it_again(remat, times):
  """In the compiled program: unused calls remain in what JAX traces."""
  place = jax.sharding.SingleDeviceSharding(topology.devices("v5e:2x2")[0])
  on_tpu = lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=place)
  model, tokens = jax.tree.map(
    on_tpu,
    jax.eval_shape(
      lambda: (
        tiny_network.model("prenorm", remat=remat),
        jnp.zeros((1, 8), jnp.int32),
      )
    ),
  )
  step = jax.jit(jax.grad(lambda model, tokens: jnp.sum(model(tokens))))
  text = step.lower(model, tokens).compile().as_text()
  calls = [line for line in text.splitlines() if "tpu_custom_call" in line]
  # In the body of the scan over both.
  for kernel, count in (("fwd_residuals", times), ("dkv_no_residuals", 1)):
    assert sum(f"%splash_mha_{kernel}" in line for line in calls) == count
