# SPDX-License-Identifier: Apache-2.0
"""The GPU kernels: values interpreted on CPU, lowering for H100 and H200.

Values and all cotangents are compared with a definition in float64 (float32
kernels), or with that definition rounded to the storage dtype.
"""

import functools

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest

from attnres_kernels import depth_attention
from attnres_kernels import depth_merge
from attnres_kernels import depth_merge_norm
from attnres_kernels import platforms
from attnres_kernels import token_walk
from attnres_kernels.depth_attention import shapes
from tests.kernels import depth_attention_test

NEW = jax.__version_info__ >= (0, 12)
needs_new = pytest.mark.needs("jax>=0.12")  # Mosaic GPU
KINDS = ("NVIDIA H100 80GB HBM3", "NVIDIA H200")
ONE_QUERY = shapes.Shape("one_query", 1, 3, 8192, 7168)
# More than 2^31 elements in each array.
HUGE = (shapes.Shape("huge", 1, 1, 2**18 + 8, 8192),)
# Eight queries at a time leave one for the last round.
LAST_ALONE = shapes.Shape("last_alone", 57, 1, 8, 128)
EPS, NORM_EPS = 1e-6, 1e-3
gpu = functools.partial(depth_attention, implementation="pallas_gpu")


def lower(kind, function, *arguments):
  """The text of a program for a GPU, which need not exist."""
  # Private: there is no public way to describe an absent device.
  from jax._src import mesh as mesh_lib

  device = mesh_lib.AbstractDevice(
    device_kind=kind, num_cores=132, platform="gpu"
  )
  mesh = jax.sharding.AbstractMesh((), (), abstract_device=device)
  with jax.sharding.use_abstract_mesh(mesh):
    staged = jax.jit(function).trace(*arguments)
    return staged.lower(lowering_platforms=("cuda",)).as_text()


def interpreted():
  """Interprets kernels, but not what makes memory visible to other blocks."""
  params = plgpu.InterpretGPUParams(detect_races=True, inline_mgpu="ignore")
  return platforms.interpreted(params)


def assert_close(actual, exact, name):
  """Within rounding: 2e-6 of the largest value, or twice that of storage."""
  exact = np.asarray(exact, np.float64)
  # A gradient that cancels to zero is as large as its terms.
  scale = np.abs(exact).max() + 1
  tolerance = 2e-6 if actual.dtype == jnp.float32 else 2**-8
  error = np.abs(np.asarray(actual.astype(jnp.float32)) - exact).max()
  np.testing.assert_array_less(error / scale, tolerance, err_msg=name)


def in_float64(function, *arrays):
  with jax.enable_x64(True):
    return function(*jax.tree.map(lambda x: x.astype(jnp.float64), arrays))


@needs_new
class TestAttention:
  @pytest.mark.parametrize(
    "queries,sources,width,dtype",
    [
      pytest.param(2, 3, 384, "float32", id="pairs_overlap"),
      pytest.param(9, 2, 200, "bfloat16", id="two_spans_overlap"),
      pytest.param(3, 1, 128, "bfloat16", id="one_source"),
      pytest.param(1, 2, 128, "float32", id="one_query"),
      pytest.param(1, 3, 200, "bfloat16", id="one_query_overlaps"),
    ],
  )
  def test_separate_sources(self, queries, sources, width, dtype):
    self.check(*self.make(queries, sources, 2, width, dtype))

  @pytest.mark.parametrize("width", [1024, 200])
  def test_blocks_of_several_tokens(self, width, monkeypatch):
    """Sums over tokens; at the first width, sources are in two groups."""
    monkeypatch.setattr(token_walk, "BLOCKS", 2)
    assert 6 > token_walk.Tiles(1024).most
    self.check(*self.make(2, 6, 5, width, "float32"))

  @pytest.mark.parametrize("case", ["large", "equal", "zero"])
  def test_adversarial(self, case):
    query, sources, cotangents = self.make(1, 3, 2, 128, "float32")
    if case == "large":
      query = query * 3e3
    elif case == "equal":
      sources = jnp.broadcast_to(sources[:1], sources.shape)
    else:
      sources = sources.at[1:].set(0)
    self.check(query, sources, cotangents)

  def make(self, queries, sources, tokens, width, dtype):
    rng = np.random.default_rng(width)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    return (
      draw(queries, width) * 0.2,
      draw(sources, tokens, width).astype(dtype),
      (draw(queries, tokens, width).astype(dtype), draw(queries, tokens)),
    )

  def check(self, query, sources, cotangents):
    with interpreted():
      values, vjp = jax.vjp(
        functools.partial(gpu, eps=EPS), query, tuple(sources)
      )
      dquery, dsources = vjp(cotangents)
    exact = depth_attention_test.exact(query, sources, *cotangents)
    actual = *values, dquery, jnp.stack(dsources)
    names = "out", "lse", "dquery", "dsources"
    for a, b, name in zip(actual, exact, names, strict=True):
      assert_close(a, b, name)

  def test_vmap_over_a_batch(self):
    arrays = self.make(2, 2, 3, 128, "float32")
    query, (sources, dout, dlse) = arrays[0], (arrays[1], *arrays[2])

    def run(f):
      values, vjp = jax.vjp(f, query, *sources[:, :, None])
      return values, vjp((dout[:, :, None], dlse[:, :, None]))

    plain = lambda query, *sources: gpu(query, sources)
    with interpreted():
      expected = run(plain)
      got = run(jax.vmap(plain, in_axes=(None, 0, 0), out_axes=1))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected)):
      np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)

  @pytest.mark.parametrize("width", (128, 512))
  def test_lowers_when_rematerialized(self, width):
    struct = jax.ShapeDtypeStruct
    query = struct((1, width), "float32")
    source = struct((8, width), "bfloat16")

    @jax.checkpoint
    def loss(query, *sources):
      out, lse = gpu(query, sources)
      return jnp.sum(out.astype(jnp.float32)) + jnp.sum(lse)

    text = lower(KINDS[0], jax.grad(loss), query, source, source)
    assert "depth_attention_backward" in text

  @pytest.mark.parametrize(
    "kind,shape",
    [
      (KINDS[0], shapes.BLOCK_48B[1]),
      (KINDS[1], shapes.TABLE_2[1]),
      (KINDS[1], ONE_QUERY),
    ],
  )
  def test_lowers(self, kind, shape):
    self.lower(kind, shape)

  @pytest.mark.parametrize("kind", KINDS)
  @pytest.mark.parametrize(
    "shape",
    [
      shape
      for shape in (*shapes.TABLE, *shapes.ODD, LAST_ALONE, *HUGE)
      if shape.sources <= 24
    ],
  )
  @pytest.mark.slow
  def test_lowers_every_shape(self, kind, shape):
    self.lower(kind, shape)

  def lower(self, kind, shape):
    struct = jax.ShapeDtypeStruct
    query = struct((shape.queries, shape.width), jnp.float32)
    source = struct((shape.tokens, shape.width), jnp.bfloat16)
    sources = (source,) * shape.sources

    def step(query, sources):
      values, vjp = jax.vjp(gpu, query, sources)
      return vjp(values)

    text = lower(kind, step, query, sources)
    assert "depth_attention_forward" in text
    # Gradients of many wide queries do not fit in shared memory.
    fits = shape.queries * shape.width <= 22_500
    assert ("depth_attention_backward" in text) == fits


@needs_new
@pytest.mark.parametrize(
  "kind,tokens,chosen",
  [
    (KINDS[0], 256, True),
    (KINDS[0], 255, False),  # decoding, where plain JAX is faster
    ("NVIDIA A100-SXM4-80GB", 256, False),
  ],
)
def test_the_automatic_choice_knows_the_gpu(kind, tokens, chosen):
  struct = jax.ShapeDtypeStruct
  query = struct((1, 256), "float32")
  source = struct((tokens, 256), "bfloat16")
  automatic = lambda query, *sources: depth_attention(query, sources)[0]
  text = lower(kind, automatic, query, source, source)
  assert ("depth_attention_forward" in text) == chosen


def merge_oracle(out, lse, query, totals, gain):
  """One softmax over all log-weights; then, with a gain, the pre-norm."""
  totals = jnp.stack(totals)
  mean_square = jnp.mean(totals**2, axis=-1)
  scores = jnp.sum(query[None, None] * totals, axis=-1) / jnp.sqrt(
    mean_square + EPS
  )
  # The mixture counts alone (lse = inf), or is empty (-inf), or shares.
  finite = jnp.where(jnp.isinf(lse), 0, lse)
  shares = jax.nn.softmax(jnp.concatenate([finite[None], scores]), axis=0)[0]
  share = jnp.where(jnp.isinf(lse), jnp.heaviside(lse, 0), shares)[:, None]
  weights = jax.nn.softmax(scores, axis=0)[..., None]
  mixed = share * out + (1 - share) * jnp.sum(weights * totals, axis=0)
  if gain is not None:
    mean_square = jnp.mean(mixed**2, axis=-1, keepdims=True)
    mixed = mixed / jnp.sqrt(mean_square + NORM_EPS) * gain[None]
  return mixed


@needs_new
class TestMerge:
  @pytest.mark.parametrize(
    "width,dtype,gain",
    [
      pytest.param(384, "float32", True, id="two_tiles"),
      pytest.param(200, "bfloat16", True, id="overlap"),
      pytest.param(129, "float32", True, id="odd"),
      pytest.param(256, "bfloat16", False, id="bare"),
    ],
  )
  def test_values_and_cotangents(self, width, dtype, gain):
    self.check(self.make(width, dtype, gain))

  @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
  @pytest.mark.parametrize("number,width", [(2, 200), (7, 128)])
  def test_several_partial_sums(self, number, width, dtype):
    self.check(self.make(width, dtype, True, number))

  @pytest.mark.parametrize("number", [1, 2])
  def test_blocks_of_several_tokens(self, number, monkeypatch):
    monkeypatch.setattr(token_walk, "BLOCKS", 2)
    self.check(self.make(200, "float32", True, number))

  def test_large_scores(self):
    arrays = self.make(128, "float32", True)
    arrays["query"] *= 1e3
    arrays["lse"] = arrays["lse"] * 1e3
    self.check(arrays)

  def make(self, width, dtype, gain, number=1):
    rng = np.random.default_rng(width)
    tokens = 5
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    wide = lambda: draw(tokens, width).astype(dtype)
    arrays = {
      "out": wide(),
      # The first sublayer of a block, and a mixture of no source.
      "lse": draw(tokens).at[1].set(jnp.inf).at[2].set(-jnp.inf),
      "query": draw(width) * 0.3,
      "partial": [wide() for _ in range(number)],
    }
    gains = {"gain": 1 + draw(width) * 0.3} if gain else {}
    return arrays | gains | {"dmixed": wide()}

  def check(self, arrays):
    arrays = dict(arrays)
    dmixed = arrays.pop("dmixed")

    def run(function, arrays, dmixed):
      mixed, vjp = jax.vjp(lambda given: function(**given), arrays)
      return {"mixed": mixed} | {f"d{k}": v for k, v in vjp(dmixed)[0].items()}

    def kernel(out, lse, query, partial, gain=None):
      options = {"eps": EPS, "implementation": "pallas_gpu"}
      if len(partial) == 1:
        (partial,) = partial
      if gain is None:
        return depth_merge(out, lse, query, partial, **options)
      return depth_merge_norm(
        out, lse, query, partial, gain, norm_eps=NORM_EPS, **options
      )

    def exact(out, lse, query, partial, gain=None):
      return merge_oracle(out, lse, query, partial, gain)

    with interpreted():
      got = run(kernel, arrays, dmixed)
    expected = in_float64(functools.partial(run, exact), arrays, dmixed)
    assert got.keys() == expected.keys()
    for name, value in got.items():
      for a, b in zip(*map(jax.tree.leaves, (value, expected[name]))):
        assert_close(a, b, name)

  @pytest.mark.parametrize("kind", KINDS)
  @pytest.mark.parametrize("width", (1168, 2304))
  def test_lowers(self, kind, width):
    self.lower(kind, 4096, width)

  @pytest.mark.parametrize("kind", KINDS)
  @pytest.mark.slow
  def test_lowers_more_than_2_to_31_elements(self, kind):
    self.lower(kind, HUGE[0].tokens // 2, HUGE[0].width)

  def lower(self, kind, tokens, width):
    wide = jax.ShapeDtypeStruct((2, tokens, width), jnp.bfloat16)
    lse = jax.ShapeDtypeStruct((2, tokens), jnp.float32)
    vector = jax.ShapeDtypeStruct((width,), jnp.float32)
    merge = functools.partial(depth_merge_norm, implementation="pallas_gpu")

    def step(out, lse, query, partial, gain):
      normed, vjp = jax.vjp(merge, out, lse, query, partial, gain)
      return vjp(normed)

    text = lower(kind, step, wide, lse, vector, wide, vector)
    assert "depth_merge_forward" in text
    assert "depth_merge_backward" in text


@pytest.mark.usefixtures("any_arguments")
class TestReason:
  @pytest.mark.skipif(NEW, reason="not run: about jax older than 0.12")
  def test_old_jax(self):
    with pytest.raises(NotImplementedError, match="jax >= 0.12"):
      gpu(jnp.ones((1, 128)), [jnp.ones((2, 128))])

  @needs_new
  def test_attention(self):
    for expected, query, sources in (
      ("at least 128, the threads", jnp.ones((1, 96)), [jnp.ones((2, 96))]),
      ("bfloat16 or float32", jnp.ones((1, 128)), [jnp.ones((2, 128), "f2")]),
      ("at most 64 sources", jnp.ones((1, 128)), [jnp.ones((2, 128))] * 65),
      ("scores per token", jnp.ones((99, 128)), [jnp.ones((2, 128))] * 30),
      ("no token", jnp.ones((1, 128)), [jnp.ones((0, 128))]),
      ("lowered for cpu", jnp.ones((1, 128)), [jnp.ones((2, 128))]),
    ):
      with pytest.raises(NotImplementedError, match=expected):
        gpu(query, sources)

  @needs_new
  def test_merge(self):
    x = jnp.ones((2, 96))
    with pytest.raises(NotImplementedError, match="at least 128"):
      depth_merge(x, x[:, 0], x[0], x, implementation="pallas_gpu")
    x = jnp.ones((2, 128))
    with pytest.raises(NotImplementedError, match="at most 7 arrays"):
      depth_merge_norm(
        x, x[:, 0], x[0], [x] * 8, x[0], implementation="pallas_gpu"
      )
    with pytest.raises(NotImplementedError, match="lowered for cpu"):
      depth_merge(x, x[:, 0], x[0], x, implementation="pallas_gpu")
