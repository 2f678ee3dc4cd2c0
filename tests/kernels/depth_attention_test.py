# SPDX-License-Identifier: Apache-2.0
"""Depth attention: every backend against an independent float64 definition."""

import functools

import jax
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special

from attnres_kernels import depth_attention
from attnres_kernels import dispatch
from attnres_kernels import platforms
from tests import compare
from tests import tiers

EPS = 1e-6


def oracle(query, sources, heads=1, rank=None):
  """Eq. 2-4 in NumPy float64; lse is [Q, *tokens, heads]."""
  query, sources = np.asarray(query), np.asarray(sources)
  width = sources.shape[-1]
  rank = rank or width
  out = np.zeros((len(query),) + sources.shape[1:])
  lse = np.zeros((len(query),) + sources.shape[1:-1] + (heads,))
  for q, *token, h in np.ndindex(lse.shape):
    v = sources[(slice(None), *token)]
    key = v[:, width - rank :]
    key = key / np.sqrt((key**2).mean(-1, keepdims=True) + EPS)
    mine = slice(h * rank // heads, (h + 1) * rank // heads)
    score = key[:, mine] @ query[q, mine]
    mine = slice(h * width // heads, (h + 1) * width // heads)
    out[(q, *token)][mine] = special.softmax(score) @ v[:, mine]
    lse[(q, *token, h)] = special.logsumexp(score)
  return out, lse


def exact(query, source, dout, dlse, **options):
  """Values by the definition, and its gradients by autodiff, in float64."""
  with jax.enable_x64(True):
    query, source, dout, dlse = (
      jnp.asarray(a, "float64") for a in (query, source, dout, dlse)
    )
    out, lse, dquery, dsources = jax.device_get(
      _run_compiled("reference", query, tuple(source), dout, dlse, **options)
    )
    # The reference is differentiated by autodiff, so check its values.
    for a, b in zip((out, lse), oracle(query, source, **options)):
      np.testing.assert_allclose(a, b.reshape(a.shape), rtol=1e-9, atol=1e-11)
  return out, lse, dquery, np.stack(dsources)


def make(seed, queries, sources, tokens, width, dtype, heads=None, rank=None):
  rng = np.random.default_rng(seed)
  query = rng.normal(size=(queries, rank or width))
  query = jnp.asarray(query * 0.3, jnp.float32)
  shape = (sources, *tokens, width)
  source = jnp.asarray(rng.normal(size=shape), dtype)
  dout = jnp.asarray(rng.normal(size=(queries, *tokens, width)), dtype)
  of_heads = (heads,) if heads else ()
  dlse = rng.normal(size=(queries, *tokens, *of_heads))
  dlse = jnp.asarray(dlse, jnp.float32)
  return query, source, dout, dlse


def run(implementation, query, sources, dout, dlse, **options):
  """Values and both gradients through the public function."""

  def f(query, sources):
    return depth_attention(
      query, sources, eps=EPS, implementation=implementation, **options
    )

  params = pltpu.InterpretParams(detect_races=True)
  with platforms.interpreted(params):
    (out, lse), vjp = jax.vjp(f, query, sources)
    dquery, dsources = vjp((dout, dlse))
  return out, lse, dquery, dsources


_run_compiled = jax.jit(
  run, static_argnums=0, static_argnames=("heads", "rank")
)


def run_fast(implementation, *arrays, **options):
  """`run` as one program, except the interpreter, which is none."""
  call = run if implementation == "pallas_tpu" else _run_compiled
  return call(implementation, *arrays, **options)


PLAIN = ("reference", "xla", None)
ALL = ("reference", "xla", "pallas_tpu")


class TestDepthAttention:
  def check(self, implementation, query, source, dout, dlse, **options):
    dtype = source.dtype
    out, lse, dquery, dsources = run_fast(
      implementation, query, tuple(source), dout, dlse, **options
    )
    assert out.dtype == dtype
    assert lse.dtype == jnp.float32
    dsources = jnp.stack(dsources)
    out_, lse_, dquery_, dsources_ = exact(query, source, dout, dlse, **options)
    # The error of storing the exact result in this dtype, plus 10 %.
    stored = [
      1.1 * compare.error(jnp.asarray(x, dtype), x)
      if dtype == jnp.bfloat16
      else 0
      for x in (out_, dsources_)
    ]
    assert compare.error(lse, lse_) < 2e-6
    assert compare.error(out, out_) < max(2e-6, stored[0])
    assert compare.error(dsources, dsources_) < max(2e-6, stored[1])
    assert compare.error(dquery, dquery_) < 5e-6

  @pytest.mark.parametrize("implementation", PLAIN)
  @pytest.mark.parametrize("dtype", ("float32", "bfloat16"))
  @tiers.parametrize(
    "shape,options",
    [
      ((1, 1, (3,), 8), {}),
      ((3, 4, (2, 5), 24), {}),
      ((9, 3, (2,), 12), dict(heads=6)),
      ((11, 3, (2, 2, 2), 40), {}),
      ((2, 3, (2,), 12), dict(heads=2)),
      ((9, 3, (2,), 12), dict(rank=5)),
    ],
    first=3,
  )
  def test_plain_backends(self, implementation, dtype, shape, options):
    """Operators with several heads, or keys of a lower rank, too."""
    self.check(implementation, *make(0, *shape, dtype, **options), **options)

  @tiers.parametrize(
    "dtype,shape",
    [
      ("float32", (3, 2, (20,), 40)),
      ("bfloat16", (2, 3, (2, 8), 136)),
      ("bfloat16", (14, 2, (1,), 40)),
      ("bfloat16", (3, 1, (17,), 136)),
      pytest.param("bfloat16", (64, 3, (3,), 24), marks=pytest.mark.slow),
      pytest.param("float32", (2, 17, (3,), 24), marks=pytest.mark.slow),
      # The most sources.
      pytest.param("bfloat16", (2, 130, (3,), 24), marks=pytest.mark.slow),
    ],
    first=2,
  )
  def test_pallas_tpu_interpreted(self, dtype, shape):
    self.check("pallas_tpu", *make(1, *shape, dtype))

  @pytest.mark.parametrize("implementation", ALL)
  @pytest.mark.parametrize("kind", ("large", "equal", "zero"))
  def test_adversarial_values(self, implementation, kind):
    query, source, dout, dlse = make(3, 2, 3, (4,), 16, "float32")
    if kind == "large":
      query = query * (1e4 / np.abs(exact(query, source, dout, dlse)[1]).max())
    elif kind == "equal":
      source = jnp.broadcast_to(source[:1], source.shape)
    else:
      source = source.at[1].set(0)
    out, lse, dquery, dsources = run_fast(
      implementation, query, tuple(source), dout, dlse
    )
    out_, lse_, dquery_, dsources_ = exact(query, source, dout, dlse)
    if kind == "large":
      # A logit of 1e4 has 1e-3 between neighbours in float32, so weights do.
      assert np.abs(lse_).max() > 5e3
      tolerance = 2e-2
    else:
      tolerance = 2e-5
    np.testing.assert_allclose(out, out_, atol=tolerance)
    # Terms of a score cancel, so its rounding depends on their size.
    rounding = 1e-7 * np.abs(lse_).max() + 1e-5
    np.testing.assert_allclose(lse, lse_, rtol=1e-6, atol=rounding)
    scale = np.abs(dsources_).max()
    np.testing.assert_allclose(
      jnp.stack(dsources) / scale, dsources_ / scale, atol=tolerance
    )
    np.testing.assert_allclose(dquery, dquery_, atol=tolerance * 10)


@pytest.mark.usefixtures("any_arguments")
@pytest.mark.parametrize(
  "query,sources,options,message",
  [
    ((2, 8), [(3, 9)], {}, r"\(2, 8\).*\(3, 9\)"),
    ((2, 0), [(3, 0)], {}, "Q and D >= 1"),
    ((2, 8), [], {}, r"M = 0.*\(2, 8\)"),
    ((8,), [(3, 8)], {}, r"\[Q, D\].*\(8,\).*\(3, 8\)"),
    ((2, 8), [(3, 8), (4, 8)], {}, r"\(3, 8\).*\(4, 8\)"),
    ((2, 8), [(3, 8)], dict(eps=-1e-6), "eps=.* finite number"),
    ((2, 8), [(3, 8)], dict(eps=float("nan")), "eps=.* finite number"),
    ((2, 8), [(3, 8)], dict(eps=float("inf")), "eps=.* finite number"),
    ((2, 8), [(3, 8)], dict(implementation="cuda"), "pallas_tpu"),
    ((2, 8), [(3, 8)], dict(heads=3), "heads=3 must divide the width 8"),
    ((2, 8), [(3, 8)], dict(heads=2, rank=8), "rank=8 needs one head, got hea"),
    ((2, 8), [(3, 8)], dict(rank=9), "rank=9 must be from 1 to the width"),
    ((2, 8), [(3, 8)], dict(rank=4), r"query \(2, 8\) and sources .* rank=4"),
  ],
)
def test_bad_input_is_named(query, sources, options, message):
  with pytest.raises(ValueError, match=message):
    depth_attention(jnp.ones(query), [*map(jnp.ones, sources)], **options)


def test_gradient_compiles_a_few_instructions_per_source():
  """Autodiff of the forward pass gives 14 loops per source, at four queries."""
  query, source, dout, dlse = make(0, 4, 8, (2, 8), 16, "float32")

  def loops(count):
    arrays = query, tuple(source[:count]), dlse, tuple(dout), dlse
    rule = dispatch.Rule("depth_attention", "xla", (("eps", EPS),))
    backward = dispatch.choose(rule, "backward", arrays)
    lowered = jax.jit(backward).lower(*arrays)
    text = lowered.compile().as_text()
    entry = text[text.index("\nENTRY") :]
    return sum(entry.count(f" {name}(") for name in ("fusion", "dot", "call"))

  assert loops(8) - loops(4) <= 4 * 9


def test_named_backend_that_cannot_run_says_why(any_arguments):
  f = functools.partial(depth_attention, implementation="pallas_tpu")
  with pytest.raises(NotImplementedError, match="lowered for cpu"):
    f(jnp.ones((2, 8)), [jnp.ones((3, 8))])
  with pytest.raises(NotImplementedError, match="float16"):
    f(jnp.ones((2, 8)), [jnp.ones((3, 8), jnp.float16)])
  with pytest.raises(NotImplementedError, match="VMEM"):
    jax.eval_shape(f, jnp.ones((64, 8192)), [jnp.ones((16, 8192))] * 130)
  with pytest.raises(NotImplementedError, match="must be bfloat16 or float32"):
    f(jnp.ones((2, 8)), [jnp.ones((3, 8), jnp.float16)], heads=2)
  with pytest.raises(NotImplementedError, match="one head with keys of"):
    g = functools.partial(depth_attention, implementation="pallas_gpu")
    g(jnp.ones((2, 8)), [jnp.ones((3, 8))], heads=2)
  with pytest.raises(NotImplementedError, match="512 softmaxes.*heads=64"):
    f(jnp.ones((9, 64)), [jnp.ones((3, 64))] * 2, heads=64)
