# SPDX-License-Identifier: Apache-2.0
"""The GPU kernels: values interpreted on CPU, lowering for H100 and H200.

Values and all cotangents are compared with a definition in float64 (float32
kernels), or with that definition rounded to the storage dtype.
"""

import functools
from unittest import mock

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
from attnres_kernels.depth_attention import pallas_gpu_cluster_plan
from attnres_kernels.depth_attention import shapes

NEW = jax.__version_info__ >= (0, 12)
needs_new = pytest.mark.needs("jax>=0.12")  # Mosaic GPU
KINDS = ("NVIDIA H100 80GB HBM3", "NVIDIA H200")
ONE_QUERY = shapes.Shape("one_query", 1, 3, 8192, 7168)
# More than 2^31 elements, in each array or in a bank.
HUGE = (
  shapes.Shape("huge", 1, 1, 2**18 + 8, 8192),
  shapes.Shape("huge_bank", 1, 40, 8192, 8192),
)
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
    traced = jax.jit(function).trace(*arguments)
    return traced.lower(lowering_platforms=("cuda",)).as_text()


def interpreted():
  """Interprets kernels, but not what makes memory visible to other blocks."""
  params = plgpu.InterpretGPUParams(detect_races=True, inline_mgpu="ignore")
  return dispatch.interpreted(params)


def assert_close(actual, exact, name):
  """Within rounding: 1e-5 of the largest value, or twice that of storage."""
  exact = np.asarray(exact, np.float64)
  # A gradient that cancels to zero is as large as its terms.
  scale = np.abs(exact).max() + 1
  tolerance = 1e-5 if actual.dtype == jnp.float32 else 2**-8
  error = np.abs(np.asarray(actual.astype(jnp.float32)) - exact).max()
  np.testing.assert_array_less(error / scale, tolerance, err_msg=name)


def attention_oracle(query, sources, count=None):
  """Eq. 2-4 source by source; the first `count` of them count."""
  valid = sources[:count]
  if not len(valid):
    shape = (len(query), *sources.shape[1:])
    return jnp.zeros(shape), jnp.full(shape[:-1], -jnp.inf)
  scores = []
  for source in valid:
    rms = jnp.sqrt(jnp.mean(source**2, axis=-1, keepdims=True) + EPS)
    scores.append(jnp.einsum("td,qd->qt", source / rms, query))
  weights = jax.nn.softmax(jnp.stack(scores), axis=0)
  out = sum(w[..., None] * v[None] for w, v in zip(weights, valid))
  return out, jax.nn.logsumexp(jnp.stack(scores), axis=0)


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
    ],
  )
  def test_separate_sources(self, queries, sources, width, dtype):
    self.check(*self.make(queries, sources, 2, width, dtype))

  def test_groups_of_sources_and_rounds_of_tokens(self):
    with (
      mock.patch.object(pallas_gpu, "_REGISTERS", 4),
      mock.patch.object(warpgroup, "PROGRAMS", 2),
    ):
      self.check(*self.make(2, 3, 3, 128, "float32"))

  @pytest.mark.parametrize("count", [0, 2, None])
  def test_bank(self, count):
    query, sources, cotangents = self.make(2, 3, 2, 128, "float32")
    if count is not None:
      # The content of an unused slot must not matter.
      sources = sources.at[count:].set(jnp.nan)
    # Small groups, so that the bank has a full one and a remainder.
    with mock.patch.object(pallas_gpu, "_REGISTERS", 4):
      self.check(query, sources, cotangents, bank=True, count=count)

  @pytest.mark.parametrize("bank", [False, True])
  def test_query_gradients_beyond_shared_memory(self, bank):
    query, sources, cotangents = self.make(2, 3, 2, 200, "bfloat16")
    count = 2 if bank else None
    if bank:
      sources = sources.at[2:].set(jnp.nan)
    with mock.patch.object(warpgroup, "SUMS_BYTES", 0):
      self.check(query, sources, cotangents, bank=bank, count=count)

  @pytest.mark.parametrize("case", ["large", "equal", "zero"])
  def test_adversarial(self, case):
    query, sources, cotangents = self.make(2, 3, 2, 128, "float32")
    if case == "large":
      query = query * 3e3
    elif case == "equal":
      sources = jnp.broadcast_to(sources[:1], sources.shape)
    else:
      sources = sources.at[1:].set(0)
    self.check(query, sources, cotangents)

  @pytest.mark.parametrize("bank", [False, True])
  def test_accumulates(self, bank):
    query, sources, cotangents = self.make(2, 3, 2, 200, "bfloat16")
    before = jnp.cos(jnp.arange(sources.size, dtype=jnp.float32))
    before = before.reshape(sources.shape)
    count = 2 if bank else None
    _, lse = attention_oracle(query, sources.astype(jnp.float32), count)
    split = (lambda x: x) if bank else tuple
    dquery, dsources = pallas_gpu.backward(
      query,
      split(sources),
      None if count is None else jnp.int32(count),
      lse,
      *cotangents,
      split(before),
      eps=EPS,
      interpret=plgpu.InterpretGPUParams(detect_races=True),
    )
    _, (dquery_, dsources_) = self.exact(query, sources, cotangents, count)
    assert_close(dquery, dquery_, "dquery")
    # Sums in the dtype of `accumulate`, not of the sources.
    assert_close(
      jnp.stack(dsources), np.asarray(dsources_) + np.asarray(before), "sum"
    )

  def make(self, queries, sources, tokens, width, dtype):
    rng = np.random.default_rng(width)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    return (
      draw(queries, width) * 0.2,
      draw(sources, tokens, width).astype(dtype),
      (draw(queries, tokens, width).astype(dtype), draw(queries, tokens)),
    )

  def exact(self, query, sources, cotangents, count):
    # Zero for unused slots; the definition only has the others.
    sources = sources.at[count:].set(0) if count is not None else sources

    def run(query, sources, cotangents):
      f = lambda query, sources: attention_oracle(query, sources, count)
      values, vjp = jax.vjp(f, query, sources)
      return values, vjp(cotangents)

    return in_float64(run, query, sources, cotangents)

  def check(self, query, sources, cotangents, bank=False, count=None):
    def run(query, sources):
      f = functools.partial(gpu, num_sources=count, eps=EPS)
      values, vjp = jax.vjp(f, query, sources if bank else tuple(sources))
      return values, vjp(cotangents)

    with interpreted():
      (out, lse), (dquery, dsources) = run(query, sources)
    exact = self.exact(query, sources, cotangents, count)
    if count == 0:
      np.testing.assert_array_equal(lse, -np.inf)
    else:
      assert_close(lse, exact[0][1], "lse")
    assert_close(out, exact[0][0], "out")
    assert_close(dquery, exact[1][0], "dquery")
    assert_close(jnp.stack(dsources), exact[1][1], "dsources")

  def test_vmap_over_a_batch(self):
    arrays = self.make(2, 2, 3, 128, "float32")
    query, (sources, dout, dlse) = arrays[0], (arrays[1], *arrays[2])

    def run(f):
      values, vjp = jax.vjp(f, query, *sources[:, :, None])
      return values, vjp((dout[:, :, None], dlse[:, :, None]))

    plain = lambda query, *sources: gpu(query, sources)
    with interpreted():
      wanted = run(plain)
      got = run(jax.vmap(plain, in_axes=(None, 0, 0), out_axes=1))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted)):
      np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)

  @pytest.mark.parametrize("width", (128, 512))
  def test_lowers_when_rematerialized(self, width):
    struct = jax.ShapeDtypeStruct
    query = struct((2, width), "float32")
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
    "shape", (*shapes.TABLE, *shapes.ODD, LAST_ALONE, *HUGE)
  )
  @pytest.mark.slow
  def test_lowers_every_shape(self, kind, shape):
    self.lower(kind, shape)

  def lower(self, kind, shape):
    struct = jax.ShapeDtypeStruct
    query = struct((shape.queries, shape.width), jnp.float32)
    source = struct((shape.tokens, shape.width), jnp.bfloat16)
    sources = (source,) * shape.sources
    if shape.sources > 24:
      # Unrolled, so many separate ones take minutes.
      sources = struct((shape.sources, *source.shape), source.dtype)

    def step(query, sources):
      values, vjp = jax.vjp(gpu, query, sources)
      return vjp(values)

    text = lower(kind, step, query, sources)
    assert "depth_attention_forward" in text
    assert "depth_attention_backward" in text


@needs_new
class TestClusters:
  """The path of several bfloat16 queries, with rows as narrow as it can be."""

  make, exact = TestAttention.make, TestAttention.exact

  @pytest.fixture(autouse=True)
  def narrow(self):
    with mock.patch.object(pallas_gpu_cluster_plan, "_WIDTH", 128):
      yield

  def check(self, query, sources, *args, **kwargs):
    plan = functools.partial(
      pallas_gpu_cluster_plan.plan, tokens=sources.shape[1]
    )
    assert plan("forward", query, sources)
    TestAttention.check(self, query, sources, *args, **kwargs)

  @pytest.mark.parametrize(
    "queries,sources,tokens,width",
    [
      pytest.param(4, 8, 16, 208, id="full_rows", marks=pytest.mark.slow),
      pytest.param(8, 9, 16, 192, id="two_windows", marks=pytest.mark.slow),
      pytest.param(9, 3, 8, 128, id="streamed"),
      pytest.param(24, 8, 8, 192, id="three_spans", marks=pytest.mark.slow),
    ],
  )
  def test_separate_sources(self, queries, sources, tokens, width):
    self.check(*self.make(queries, sources, tokens, width, "bfloat16"))

  @pytest.mark.parametrize("queries", [2, 9])
  @pytest.mark.slow
  def test_rounds_of_tokens(self, queries):
    # One cluster takes all groups, with copies of the next during each.
    with mock.patch.object(warpgroup, "PROGRAMS", 3):
      self.check(*self.make(queries, 2, 24, 128, "bfloat16"))

  @pytest.mark.parametrize(
    "queries,count",
    [
      (2, 2),
      pytest.param(2, 0, marks=pytest.mark.slow),
      # Three spans share two buffers, and the last has one query.
      pytest.param(17, 2, marks=pytest.mark.slow),
    ],
  )
  def test_bank(self, queries, count):
    query, sources, cotangents = self.make(queries, 3, 8, 144, "bfloat16")
    # The content of an unused slot must not matter.
    sources = sources.at[count:].set(jnp.nan)
    self.check(query, sources, cotangents, bank=True, count=count)

  @pytest.mark.parametrize("case", ["large", "equal", "zero"])
  @pytest.mark.slow
  def test_adversarial(self, case):
    query, sources, cotangents = self.make(2, 3, 8, 128, "bfloat16")
    if case == "large":
      query = query * 3e2
    elif case == "equal":
      sources = jnp.broadcast_to(sources[:1], sources.shape)
    else:
      sources = sources.at[1:].set(0)
    self.check(query, sources, cotangents)

  @pytest.mark.slow
  def test_vmap_over_a_batch(self):
    query, sources, (dout, dlse) = self.make(2, 2, 16, 128, "bfloat16")
    split = lambda x: x.reshape(2, 2, 8, *x.shape[2:])

    def run(f):
      values, vjp = jax.vjp(f, query, *split(sources))
      return values, vjp((split(dout), split(dlse)))

    plain = lambda query, *sources: gpu(query, sources)
    with interpreted():
      wanted = run(plain)
      got = run(jax.vmap(plain, in_axes=(None, 0, 0), out_axes=1))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted)):
      a, b = (np.asarray(x.astype(jnp.float32)) for x in (a, b))
      np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)

  def test_what_runs_on_clusters(self):
    def plan(queries, sources, tokens, width, dtype=jnp.bfloat16):
      source = jax.ShapeDtypeStruct((tokens, width), dtype)
      query = jax.ShapeDtypeStruct((queries, width), jnp.float32)
      return [
        pallas_gpu_cluster_plan.plan(name, query, (source,) * sources, tokens)
        for name in ("forward", "backward")
      ]

    for queries, sources, width in ((4, 8, 1168), (6, 9, 2304), (24, 8, 7168)):
      for one in plan(queries, sources, 8192, width):
        assert one.shared_bytes <= warpgroup.SHARED_BYTES
        # All columns belong to a thread block, and no block is idle.
        columns = 64 * one.chunks
        assert columns * (one.parts - 1) < one.width <= columns * one.parts
    # Of so many queries, the terms do not fit beside the sources.
    assert [one.terms for one in plan(24, 8, 8192, 7168)] == [2, 3]
    assert [one.streamed for one in plan(24, 8, 8192, 7168)] == [False, True]
    for arguments in (
      (1, 8, 8192, 1168),
      (4, 8, 8188, 1168),
      (4, 8, 8192, 1160),
      (4, 17, 8192, 1168),
      (4, 8, 8192, 1168, jnp.float32),
    ):
      assert plan(*arguments) == [None, None]


def merge_oracle(out, lse, query, partial, update, gain):
  """One softmax over two log-weights; then, with a gain, the pre-norm."""
  total = partial if update is None else partial + update
  mean_square = jnp.mean(total**2, axis=-1)
  score = jnp.sum(query[None] * total, axis=-1) / jnp.sqrt(mean_square + EPS)
  # The mixture counts alone (lse = inf), or is empty (-inf), or shares.
  finite = jnp.where(jnp.isinf(lse), 0, lse)
  shares = jax.nn.softmax(jnp.stack([finite, score]), axis=0)[0]
  keep = jnp.where(jnp.isinf(lse), jnp.heaviside(lse, 0), shares)[:, None]
  mixed = keep * out + (1 - keep) * total
  if gain is not None:
    mean_square = jnp.mean(mixed**2, axis=-1, keepdims=True)
    mixed = mixed / jnp.sqrt(mean_square + NORM_EPS) * gain[None]
  return total, mixed


@needs_new
class TestMerge:
  @pytest.mark.parametrize(
    "width,dtype,update,gain",
    [
      pytest.param(256, "float32", True, True, id="pairs"),
      pytest.param(384, "float32", True, True, id="two_tiles"),
      pytest.param(200, "bfloat16", True, True, id="overlap"),
      pytest.param(129, "float32", False, True, id="odd"),
      pytest.param(256, "bfloat16", False, False, id="bare"),
    ],
  )
  def test_values_and_cotangents(self, width, dtype, update, gain):
    arrays = self.make(width, dtype, update, gain)
    self.check(arrays)

  def test_large_scores(self):
    arrays = self.make(128, "float32", True, True)
    arrays["query"] *= 1e3
    arrays["lse"] = arrays["lse"] * 1e3
    self.check(arrays)

  def test_more_tokens_than_programs(self):
    with mock.patch.object(warpgroup, "PROGRAMS", 2):
      self.check(self.make(128, "float32", True, True))

  def make(self, width, dtype, update, gain):
    rng = np.random.default_rng(width)
    tokens = 5
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    wide = lambda: draw(tokens, width).astype(dtype)
    # Sums of two coarse numbers are stored without rounding.
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

    with interpreted():
      got = run(kernel, given, cotangents)
    arrays = dict.fromkeys(arrays)
    wanted = in_float64(functools.partial(run, merge_oracle), given, cotangents)
    for values, exact in zip(got, wanted):
      assert values.keys() == exact.keys()
      for name in values:
        assert_close(values[name], exact[name], name)

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

    def step(*arrays):
      values, vjp = jax.vjp(merge, *arrays)
      return vjp(values)

    text = lower(kind, step, wide, lse, vector, wide, wide, vector)
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
      ("separate sources", jnp.ones((1, 128)), [jnp.ones((2, 128))] * 33),
      ("of shared memory", jnp.ones((999, 128)), jnp.ones((30, 2, 128))),
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
    with pytest.raises(NotImplementedError, match="lowered for cpu"):
      depth_merge(x, x[:, 0], x[0], x, implementation="pallas_gpu")
