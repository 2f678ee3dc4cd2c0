# SPDX-License-Identifier: Apache-2.0
"""Phase 2: two phases equal one softmax, on every backend, with gradients."""

import functools

import jax
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp
import numpy as np
import pytest

from attnres_kernels import combine_mixtures
from attnres_kernels import depth_attention
from attnres_kernels import depth_merge
from attnres_kernels import depth_merge_norm
from attnres_kernels import platforms
from tests import compare
from tests import tiers
from tests.kernels import depth_attention_test

EPS = depth_attention_test.EPS
ALL = ("reference", "xla", "pallas_tpu")


def make(tokens, width, sources=3, seed=0):
  rng = np.random.default_rng(seed)
  query = jnp.asarray(rng.normal(size=(width,)) * 0.5, jnp.float32)
  shape = (sources, *tokens, width)
  return query, jnp.asarray(rng.normal(size=shape), jnp.float32)


@jax.jit
def one_softmax(query, sources):
  out, lse = depth_attention(query[None], sources, implementation="reference")
  return out[0], lse[0]


def rms_norm(x, eps):
  return x / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True) + eps)


def assert_same_gradients(actual, expected, arrays, tolerance):
  """Scalars of two functions, and their gradients by all arguments."""
  both = [
    jax.jit(jax.value_and_grad(f, argnums=tuple(range(len(arrays)))))
    for f in (actual, expected)
  ]
  with platforms.interpreted(pltpu.InterpretParams(detect_races=True)):
    got = both[0](*arrays)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, atol=tolerance),
    got, both[1](*arrays),
  )  # fmt: skip


class TestDepthMerge:
  @pytest.mark.parametrize("implementation", ALL)
  @tiers.parametrize("tokens,width", (((3,), 40), ((2, 5), 16)))
  def test_two_phases_are_one_softmax(self, implementation, tokens, width):
    query, source = make(tokens, width)
    cotangent = jnp.cos(jnp.arange(source[0].size)).reshape(source[0].shape)

    def at_once(query, *sources):
      return jnp.vdot(one_softmax(query, sources)[0], cotangent)

    def phases(query, *sources):
      out, lse = one_softmax(query, sources[:-1])
      h = depth_merge(
        out, lse, query, sources[-1], implementation=implementation
      )
      return jnp.vdot(h, cotangent)

    assert_same_gradients(phases, at_once, (query, *source), 2e-5)

  @pytest.mark.parametrize("implementation", ALL)
  def test_fused_form(self, implementation):
    query, source = make((20,), 24, 4)
    gain = 1 + query
    out, lse = one_softmax(query, tuple(source[:2]))

    def plain(out, lse, query, partial, gain):
      merged = depth_merge(
        out, lse, query, partial, eps=1e-5, implementation="reference"
      )
      return jnp.vdot(rms_norm(merged, 1e-3) * gain[None], source[3])

    def fused(*arrays):
      normed = depth_merge_norm(
        *arrays, eps=1e-5, norm_eps=1e-3, implementation=implementation
      )
      return jnp.vdot(normed, source[3])

    arrays = out, lse, query, source[2], gain
    assert_same_gradients(fused, plain, arrays, 3e-5)

  @pytest.mark.parametrize("implementation", ("reference", "xla"))
  def test_several_partial_sums_are_as_many_sources(self, implementation):
    query, source = make((20,), 24, 6)

    def at_once(query, gain, *sources):
      mixed, _ = one_softmax(query, sources)
      return jnp.vdot(rms_norm(mixed, 1e-3) * gain[None], source[5])

    def phases(query, gain, *sources):
      out, lse = one_softmax(query, sources[:2])
      normed = depth_merge_norm(
        out, lse, query, sources[2:], gain, norm_eps=1e-3,
        implementation=implementation,
      )  # fmt: skip
      return jnp.vdot(normed, source[5])

    arrays = query, 1 + query, *source[:5]
    assert_same_gradients(phases, at_once, arrays, 3e-5)

  def test_tokens_that_fill_no_tile_have_no_part_in_sums(self):
    """Without an epsilon, the norm of a row of zeros is infinite."""
    query, source = make((5,), 24, 3)
    arrays = source[0], source[2, ..., 0], query, source[1], 1 + query

    def loss(implementation, *arrays):
      options = dict(eps=0.0, norm_eps=0.0, implementation=implementation)
      return jnp.sum(jnp.sin(depth_merge_norm(*arrays, **options)))

    gradients = jax.grad(loss, range(1, 6))
    expected = gradients("reference", *arrays)
    with platforms.interpreted():
      actual = gradients("pallas_tpu", *arrays)
    for a, b in zip(actual, expected, strict=True):
      np.testing.assert_allclose(a, b, atol=2e-5)

  @pytest.mark.parametrize("implementation", ALL)
  @pytest.mark.parametrize("size", (0.0, 1e-3))
  def test_gradients_at_small_partial_sums(self, implementation, size):
    """What cancels behind the norm is amplified by 1 / rms, up to 1000."""
    query, source = make((4, 2), 24, 4)
    out, partial, gain, cotangent = *source[:2], 1 + query, source[3]
    arrays = out, source[2, ..., 0], query, size * partial, gain

    def gradients(implementation, arrays, cotangent):
      f = functools.partial(depth_merge_norm, implementation=implementation)
      pull = lambda arrays, cotangent: jax.vjp(f, *arrays)[1](cotangent)
      gradient = jax.jit(pull)(arrays, cotangent)
      return jax.tree.map(np.asarray, gradient)

    with platforms.interpreted():
      got = gradients(implementation, arrays, cotangent)
    with jax.enable_x64(True):
      given = jax.tree.map(lambda x: x.astype("float64"), (arrays, cotangent))
      expected = gradients("reference", *given)
    for actual, exact in zip(got, expected, strict=True):
      # The gradient of the log-normaliser is nearly zero.
      limit = 1e-6 + 3e-4 * np.abs(exact).max()
      np.testing.assert_allclose(actual, exact, rtol=0, atol=limit)

  @pytest.mark.parametrize("implementation", ALL)
  @pytest.mark.parametrize("lse", (np.inf, -np.inf))
  def test_infinite_log_normaliser(self, implementation, lse):
    query, source = make((4,), 16)
    out, partial, cotangent = source

    def f(out, lse, query, partial):
      h = depth_merge(out, lse, query, partial, implementation=implementation)
      return jnp.vdot(h, cotangent), h

    lse_T = jnp.full((4,), lse, jnp.float32)
    with platforms.interpreted():
      gradient = jax.jit(jax.grad(f, (0, 1, 2, 3), has_aux=True))
      grads, h = gradient(out, lse_T, query, partial)
    # +inf: the partial does not count; -inf: only the partial counts.
    taken, dropped = (0, 3) if lse > 0 else (3, 0)
    np.testing.assert_array_equal(h, (out, None, None, partial)[taken])
    np.testing.assert_array_equal(grads[taken], cotangent)
    np.testing.assert_array_equal(grads[dropped], 0)
    np.testing.assert_array_equal(grads[1], 0)
    np.testing.assert_array_equal(grads[2], 0)

  @pytest.mark.parametrize("implementation", ALL)
  def test_wide_partial_beside_narrow_mixture(self, implementation):
    query, source = make((16,), 24)
    out, partial, cotangent = source
    arrays = out.astype(jnp.bfloat16), jnp.zeros(16), query, partial, query
    f = functools.partial(depth_merge_norm, implementation=implementation)
    with platforms.interpreted():
      normed, vjp = jax.vjp(f, *arrays)
      dpartial = vjp(cotangent.astype(jnp.bfloat16))[3]
    assert normed.dtype == jnp.bfloat16
    assert dpartial.dtype == jnp.float32

  def test_combining_empty_sets(self):
    empty = jnp.zeros((2, 4)), jnp.full((2,), -jnp.inf)
    out, lse = combine_mixtures(*empty, *empty)
    np.testing.assert_array_equal(out, 0)
    np.testing.assert_array_equal(lse, -np.inf)
    gradient = jax.grad(
      lambda x: jnp.sum(combine_mixtures(x, *empty[1:], *empty)[0])
    )
    np.testing.assert_array_equal(gradient(empty[0]), 0)


def _draw(*shape, seed=0, dtype=np.float64):
  rng = np.random.default_rng(seed)
  return jnp.asarray(rng.standard_normal(shape).astype(dtype))


def _pulled(f, *arguments):
  """`jax.vjp`, compiled as a whole."""
  results, vjp = jax.jit(functools.partial(jax.vjp, f))(*arguments)
  return results, jax.jit(lambda *cotangents: vjp(*cotangents))


@pytest.mark.usefixtures("float64")
@tiers.parametrize("options", [dict(heads=6), dict(rank=5)], ids=str)
def test_heads_and_low_rank_keys(options):
  """The last source joins as the merge's; the second call norms, too."""
  rank, width = options.get("rank"), 12
  query, bank = _draw(rank or width, seed=1), _draw(3, 2, width)
  phase_1 = functools.partial(depth_attention, eps=EPS, **options)
  (out,), (lse,) = phase_1(query[None], tuple(bank[:2]))
  expected, lse_ = depth_attention_test.oracle(query[None], bank, **options)
  (out_b,), (lse_b,) = phase_1(query[None], tuple(bank[2:]))
  joined, total = combine_mixtures(out, lse, out_b, lse_b)
  np.testing.assert_allclose(joined, expected[0], atol=1e-12)
  np.testing.assert_allclose(total, lse_[0].reshape(total.shape), atol=1e-12)

  def both(implementation, out, lse, query, partial, gain):
    fixed = dict(eps=EPS, rank=rank, implementation=implementation)
    return (
      depth_merge(out, lse, query, partial, **fixed),
      depth_merge_norm(out, lse, query, partial, gain, **fixed),
    )

  every = []
  arguments = out, lse, query, bank[2], _draw(width, seed=4)
  for implementation in ("reference", None):
    results, vjp = _pulled(functools.partial(both, implementation), *arguments)
    np.testing.assert_allclose(results[0], expected[0], atol=1e-12)
    cotangents = tuple(_draw(*r.shape, seed=6) for r in results)
    every.append([*results, *vjp(cotangents)])
  for a, b in zip(*every, strict=True):
    np.testing.assert_allclose(a, b, atol=1e-12)


@tiers.parametrize("implementation", [None, "pallas_tpu"])
def test_one_head_is_the_same_bit_by_bit(implementation):
  """Also one head of which the key is the full width."""
  query, bank = (_draw(*s, dtype=np.float32) for s in ((2, 24), (3, 5, 24)))
  fixed = dict(implementation=implementation)

  def run(options, query, bank):
    out, lse = depth_attention(query, tuple(bank), **options, **fixed)
    assert lse.shape == ((2, 5, 1) if "heads" in options else (2, 5))
    merged = depth_merge_norm(
      out[0], lse[0], query[0], bank[0], query[1], **fixed
    )
    joined, total = combine_mixtures(out[0], lse[0], out[1], lse[1])
    return out, merged, joined, jnp.ravel(total)

  every = []
  for options in ({}, {"heads": 1}, {"rank": 24}):
    with platforms.interpreted():
      results, vjp = _pulled(functools.partial(run, options), query, bank)
      every.append([*results, *vjp(jax.tree.map(jnp.ones_like, results))])
  for other in every[1:]:
    compare.trees(other, every[0], 0)


@pytest.mark.usefixtures("any_arguments")
class TestBadInput:
  @pytest.mark.parametrize(
    "out,lse,query,partial,message",
    [
      ((3, 9), (3,), (8,), (3, 8), r"\(3, 9\).*\(8,\)"),
      ((3, 8), (4,), (8,), (3, 8), r"\(4,\).*\(3, 8\)"),
      ((3, 8), (3,), (2, 8), (3, 8), r"\[D\].*\(2, 8\)"),
      ((3, 8), (3,), (8,), (4, 8), r"\(4, 8\).*\(3, 8\)"),
      ((3, 0), (3,), (0,), (3, 0), "D >= 1"),
      ((3, 8), (3, 3), (8,), (3, 8), "heads=3 must divide the width 8"),
    ],
  )
  def test_shapes(self, out, lse, query, partial, message):
    with pytest.raises(ValueError, match=message):
      depth_merge(*map(jnp.ones, (out, lse, query, partial)))

  def test_gain(self):
    x, lse, query = jnp.ones((3, 8)), jnp.ones(3), jnp.ones(8)
    for name in ("eps", "norm_eps"):
      with pytest.raises(ValueError, match=f"{name}=-1 must be a finite"):
        depth_merge_norm(x, lse, query, x, query, **{name: -1})
    with pytest.raises(ValueError, match=r"gain \(9,\).*\(8,\)"):
      depth_merge_norm(x, lse, query, x, jnp.ones(9))
