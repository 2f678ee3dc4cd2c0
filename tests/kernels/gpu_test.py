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
from attnres_kernels import problems
from attnres_kernels import token_walk
from attnres_kernels.depth_attention import shapes
from tests import compare
from tests.kernels import operators_test
from tests.kernels import tpu_aot_test

NEW = jax.__version_info__ >= (0, 12)
needs_new = pytest.mark.needs("jax>=0.12")  # Mosaic GPU
KINDS = ("NVIDIA H100 80GB HBM3", "NVIDIA H200")
ONE_QUERY = shapes.Shape("one_query", 1, 3, 8192, 7168)
# More than 2^31 elements in each array.
HUGE = (shapes.Shape("huge", 1, 1, 2**18 + 8, 8192),)
# Eight queries at a time leave one for the last round.
LAST_ALONE = shapes.Shape("last_alone", 57, 1, 8, 128)
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


def check_lowers(kind, name, shape):
  """Both passes of an operator, whose gradient may be plain JAX."""
  function, arguments = tpu_aot_test.program(name, shape, "pallas_gpu")
  text = lower(kind, function, *(jax.ShapeDtypeStruct(*a) for a in arguments))
  forward, backward = problems.OPERATORS[name].kernels["backward"]
  assert forward in text
  # Gradients of many wide queries do not fit in shared memory.
  assert (backward in text) == (shape.queries * shape.width <= 22_500)


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


def problem_of(name, dtype, *sizes):
  """Of an operator: queries, sources, tokens and width."""
  shape = shapes.Shape("gpu", *sizes)
  return problems.OPERATORS[name].build(
    shape, dtype, problems.draws(shape.width)
  )


def check(problem):
  """Values and all gradients against the definition in float64."""
  given = problems.arguments(problem)
  run = functools.partial(problems.results, problem)
  with interpreted():
    actual = run("pallas_gpu", *given)
  with jax.enable_x64(True):
    exact = run("reference", *(x.astype("float64") for x in given))
  for name, value in actual.items():
    assert_close(value, exact[name], name)


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
    check(problem_of("depth_attention", dtype, queries, sources, 2, width))

  @pytest.mark.parametrize("width", [1024, 200])
  def test_blocks_of_several_tokens(self, width, monkeypatch):
    """Sums over tokens; at the first width, sources are in two groups."""
    monkeypatch.setattr(token_walk, "BLOCKS", 2)
    assert 6 > token_walk.Tiles(1024).most
    check(problem_of("depth_attention", "float32", 2, 6, 5, width))

  @pytest.mark.parametrize("case", ["large", "equal", "zero"])
  def test_adversarial(self, case):
    problem = problem_of("depth_attention", "float32", 1, 3, 2, 128)
    query, first, *others = problem.arrays
    if case == "large":
      query = query * 6e3
    else:
      others = [first if case == "equal" else 0 * x for x in others]
    check(problem._replace(arrays=(query, first, *others)))

  def test_vmap_over_a_batch(self):
    problem = problem_of("depth_attention", "float32", 2, 2, 3, 128)
    query, *first = problems.arguments(problem)
    batch = [jnp.stack([x, jnp.flip(x, axis=-1)]) for x in first]
    run = functools.partial(problems.results, problem, "pallas_gpu", query)
    with interpreted():
      expected = [run(*(x[i] for x in batch)) for i in range(2)]
      actual = jax.vmap(run)(*batch)
    expected = jax.tree.map(lambda *x: jnp.stack(x), *expected)
    compare.trees(actual, expected, 1e-5)

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
    check_lowers(kind, "depth_attention", shape)

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
    check_lowers(kind, "depth_attention", shape)


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


def merge_of(dtype, width, number=1):
  """With tokens that are the first of a block, or have an empty mixture."""
  problem = problem_of("depth_merge_norm", dtype, 1, number, 5, width)
  out, lse, query, *rest = problem.arrays
  lse = lse.at[1].set(jnp.inf).at[2].set(-jnp.inf)
  if number == 1:  # With the norm, and alone.
    merges = functools.partial(operators_test.merges, None)
    problem = problem._replace(function=merges)
  return problem._replace(arrays=(out, lse, query, *rest))


@needs_new
class TestMerge:
  @pytest.mark.parametrize(
    "width,dtype",
    [
      pytest.param(384, "float32", id="two_tiles"),
      pytest.param(200, "bfloat16", id="overlap"),
      pytest.param(129, "float32", id="odd"),
    ],
  )
  def test_values_and_cotangents(self, width, dtype):
    check(merge_of(dtype, width))

  @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
  @pytest.mark.parametrize("number,width", [(2, 200), (7, 128)])
  def test_several_partial_sums(self, number, width, dtype):
    check(merge_of(dtype, width, number))

  @pytest.mark.parametrize("number", [1, 2])
  def test_blocks_of_several_tokens(self, number, monkeypatch):
    monkeypatch.setattr(token_walk, "BLOCKS", 2)
    check(merge_of("float32", 200, number))

  def test_large_scores(self):
    problem = merge_of("float32", 128)
    out, lse, query, *rest = problem.arrays
    check(problem._replace(arrays=(out, 1e3 * lse, 3e3 * query, *rest)))

  @pytest.mark.parametrize("kind", KINDS)
  @pytest.mark.parametrize(
    "shape",
    [
      *(shapes.Shape("merge", 1, 1, 8192, width) for width in (1168, 2304)),
      pytest.param(*HUGE, marks=pytest.mark.slow),
    ],
    ids=str,
  )
  def test_lowers(self, kind, shape):
    check_lowers(kind, "depth_merge_norm", shape)


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
