# SPDX-License-Identifier: Apache-2.0
"""Heads over depth and low-rank keys: operators against loops over slices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnres_kernels import combine_mixtures
from attnres_kernels import depth_attention
from attnres_kernels import depth_merge
from attnres_kernels import depth_merge_norm
from attnres_kernels import dispatch
from tests import compare

EPS = 1e-6
WIDTH = 12
OPTIONS = [dict(heads=2), dict(heads=6), dict(rank=5)]


def _draw(*shape, seed=0, dtype=np.float64):
  rng = np.random.default_rng(seed)
  return jnp.asarray(rng.standard_normal(shape).astype(dtype))


def _by_loops(query, sources, heads=1, rank=WIDTH):
  """Mixtures [Q, T, D] and log-normalisers [Q, T, H], one head at a time."""
  query, sources = np.asarray(query), np.asarray(sources)
  (queries, _), (_, tokens, _) = query.shape, sources.shape
  out = np.zeros((queries, tokens, WIDTH))
  lse = np.zeros((queries, tokens, heads))
  part, key_part = WIDTH // heads, rank // heads
  for q, t, h in np.ndindex(lse.shape):
    keys = sources[:, t, WIDTH - rank :]
    keys = keys / np.sqrt(np.mean(keys**2, axis=-1, keepdims=True) + EPS)
    mine = slice(h * key_part, (h + 1) * key_part)
    e = np.exp(keys[:, mine] @ query[q, mine])
    lse[q, t, h] = np.log(e.sum())
    mine = slice(h * part, (h + 1) * part)
    out[q, t, mine] = e / e.sum() @ sources[:, t, mine]
  return out, lse


def _pulled(f, *arguments):
  """`jax.vjp`, compiled as a whole."""
  results, vjp = jax.jit(functools.partial(jax.vjp, f))(*arguments)
  return results, jax.jit(lambda *cotangents: vjp(*cotangents))


def _query(queries, options, seed=1):
  return _draw(queries, options.get("rank", WIDTH), seed=seed)


@pytest.mark.usefixtures("float64")
class TestValuesAndGradients:
  @pytest.mark.parametrize(
    "queries,options", [(2, OPTIONS[0]), (9, OPTIONS[1]), (9, OPTIONS[2])]
  )
  def test_depth_attention(self, queries, options):
    query, bank = _query(queries, options), _draw(3, 2, WIDTH)
    out_, lse_ = _by_loops(query, bank, **options)
    found = []
    for implementation in ("reference", None):
      f = functools.partial(
        depth_attention, eps=EPS, implementation=implementation, **options
      )
      (out, lse), vjp = _pulled(f, query, tuple(bank))
      np.testing.assert_allclose(out, out_, atol=1e-12)
      np.testing.assert_allclose(lse, lse_.reshape(lse.shape), atol=1e-12)
      dout, dlse = _draw(*out.shape, seed=2), _draw(*lse.shape, seed=3)
      found.append(jax.tree.leaves(vjp((dout, dlse))))
    for a, b in zip(*found, strict=True):
      np.testing.assert_allclose(a, b, atol=1e-12)

  @pytest.mark.parametrize("options", OPTIONS[1:], ids=str)
  def test_merges(self, options):
    """The last source joins as the merge's; the second call norms, too."""
    query, bank = _query(1, options), _draw(3, 2, WIDTH)
    gain = _draw(WIDTH, seed=4)
    rank = options.get("rank")
    phase_1 = functools.partial(depth_attention, eps=EPS, **options)
    (out,), (lse,) = phase_1(query, tuple(bank[:2]))
    wanted, lse_ = _by_loops(query, bank, **options)
    (out_b,), (lse_b,) = phase_1(query, tuple(bank[2:]))
    joined, total = combine_mixtures(out, lse, out_b, lse_b)
    np.testing.assert_allclose(joined, wanted[0], atol=1e-12)
    np.testing.assert_allclose(total, lse_[0].reshape(total.shape), atol=1e-12)

    def both(implementation, out, lse, query, partial, gain):
      fixed = dict(eps=EPS, rank=rank, implementation=implementation)
      return (
        depth_merge(out, lse, query, partial, **fixed),
        depth_merge_norm(out, lse, query, partial, gain, **fixed),
      )

    found = []
    arguments = out, lse, query[0], bank[2], gain
    for implementation in ("reference", None):
      results, vjp = _pulled(
        functools.partial(both, implementation), *arguments
      )
      np.testing.assert_allclose(results[0], wanted[0], atol=1e-12)
      cotangents = tuple(_draw(*r.shape, seed=6) for r in results)
      found.append([*results, *vjp(cotangents)])
    for a, b in zip(*found, strict=True):
      np.testing.assert_allclose(a, b, atol=1e-12)

  @pytest.mark.parametrize("options", OPTIONS[1:], ids=str)
  def test_named_kernels_refuse(self, options):
    query, bank = _query(1, options), _draw(2, 2, WIDTH)
    (out,), (lse,) = depth_attention(query, tuple(bank), **options)
    for implementation, message in (
      ("pallas_tpu", "must be bfloat16 or float32"),
      ("pallas_gpu", "one head with keys of"),
    ):
      with pytest.raises(NotImplementedError, match=message):
        depth_attention(
          query, tuple(bank), implementation=implementation, **options
        )
      with pytest.raises(NotImplementedError, match=message):
        depth_merge(
          out, lse, query[0], bank[0], rank=options.get("rank"),
          implementation=implementation,
        )  # fmt: skip

  def test_too_many_softmaxes(self):
    query, bank = (_draw(*s, dtype=np.float32) for s in ((9, 64), (2, 3, 64)))
    with pytest.raises(NotImplementedError, match="512 softmaxes.*heads=64"):
      depth_attention(query, tuple(bank), heads=64, implementation="pallas_tpu")


def _case(*shape, heads=None, rank=None, dtype="bfloat16"):
  options = {"heads": heads} if heads else {"rank": rank}
  slow = [pytest.mark.slow] if shape[2] > 3 else []
  name = f"{shape}-{options}-{dtype}"
  return pytest.param(shape, options, dtype, id=name, marks=slow)


# Queries, sources, tokens, width. Registers have 128 columns: heads own some,
# one, parts of one or of two; keys start at column 128, and before and after.
TPU_CASES = [
  _case(2, 2, 3, 192, heads=3),
  _case(2, 2, 3, 192, rank=40),
  _case(2, 3, 9, 512, heads=2),
  _case(1, 2, 9, 160, heads=16),
  _case(3, 3, 9, 304, heads=2, dtype="float32"),
  _case(2, 18, 5, 256, heads=4),
  _case(2, 3, 9, 304, rank=140, dtype="float32"),
  _case(9, 2, 9, 256, rank=128),
]


class TestOnTpu:
  """The kernels, interpreted, against the reference in float32."""

  def check(self, run, dtype):
    """The error is at most a little larger than plain JAX's."""
    wanted = jax.jit(functools.partial(run, "reference", _to_float32))()
    plain = jax.jit(functools.partial(run, "xla", lambda x: x))()
    with dispatch.interpreted():
      found = jax.jit(functools.partial(run, "pallas_tpu", lambda x: x))()
    leaves = map(jax.tree.leaves, (found, plain, wanted))
    for one, other, exact in zip(*leaves, strict=True):
      assert one.dtype == other.dtype
      allowed = 1.2 * compare.error(other, exact) if dtype == "bfloat16" else 0
      assert compare.error(one, exact) < max(5e-6, allowed)

  @pytest.mark.parametrize("shape,options,dtype", TPU_CASES)
  def test_depth_attention(self, shape, options, dtype):
    queries, num_sources, tokens, width = shape
    query = 0.3 * _draw(
      queries, options.get("rank", width), seed=1, dtype=np.float32
    )
    sources = _draw(num_sources, tokens, width, dtype=np.float32)
    sources = sources.astype(dtype)
    of_heads = (options["heads"],) if "heads" in options else ()
    dout = _draw(queries, tokens, width, seed=2, dtype=np.float32).astype(dtype)
    dlse = _draw(queries, tokens, *of_heads, seed=3, dtype=np.float32)

    def run(implementation, cast):
      def attend(query, sources):
        return depth_attention(
          query, sources, implementation=implementation, **options
        )

      results, vjp = jax.vjp(attend, query, tuple(cast(sources)))
      return results, vjp((cast(dout).astype(results[0].dtype), dlse))

    self.check(run, dtype)

  @pytest.mark.parametrize("shape,options,dtype", TPU_CASES)
  def test_depth_merge_norm(self, shape, options, dtype):
    *_, tokens, width = shape
    rank = options.get("rank")
    of_heads = (options["heads"],) if "heads" in options else ()
    draw = functools.partial(_draw, dtype=np.float32)
    wide = [draw(tokens, width, seed=i).astype(dtype) for i in range(2)]
    cotangents = [draw(tokens, width, seed=i).astype(dtype) for i in (3, 4)]
    query, gain = draw(rank or width, seed=5), draw(width, seed=6)
    lse = draw(tokens, *of_heads, seed=7)

    def run(implementation, cast):
      out, partial = map(cast, wide)
      fixed = dict(rank=rank, implementation=implementation)

      def both(*arrays):
        alone = depth_merge(*arrays[:4], **fixed)
        return depth_merge_norm(*arrays, **fixed), alone

      results, vjp = jax.vjp(both, out, lse, query, partial, gain)
      return results, vjp(tuple(map(cast, cotangents)))

    self.check(run, dtype)

  def test_one_head_is_the_same_bit_by_bit(self):
    """Also one head of which the key is the full width."""
    query, sources = (
      _draw(*s, dtype=np.float32) for s in ((2, 24), (2, 3, 24))
    )
    found = []
    for options in ({}, {"heads": 1}, {"rank": 24}):
      with dispatch.interpreted():
        results, vjp = jax.vjp(
          lambda q, *s, options=options: depth_attention(
            q, s, implementation="pallas_tpu", **options
          ),
          query, *sources,
        )  # fmt: skip
        gradients = vjp(jax.tree.map(jnp.ones_like, results))
      found.append([results[0], jnp.ravel(results[1]), *gradients])
    for other in found[1:]:
      for a, b in zip(found[0], other, strict=True):
        np.testing.assert_array_equal(a, b)


def _to_float32(x):
  return x.astype(jnp.float32)


def test_one_head_is_the_same_bit_by_bit():
  query, bank = (_draw(*s, dtype=np.float32) for s in ((2, 8), (3, 5, 8)))
  gain = query[1]

  def run(heads, query, bank):
    out, lse = depth_attention(query, tuple(bank), heads=heads)
    assert lse.shape == ((2, 5) if heads is None else (2, 5, 1))
    merged = depth_merge_norm(out[0], lse[0], query[0], bank[0], gain)
    joined, total = combine_mixtures(out[0], lse[0], out[1], lse[1])
    total = total if heads is None else total[..., 0]
    return out, merged, joined, total

  found = []
  for heads in (None, 1):
    results, vjp = _pulled(functools.partial(run, heads), query, bank)
    found.append([*results, *vjp(jax.tree.map(jnp.ones_like, results))])
  for a, b in zip(*found, strict=True):
    np.testing.assert_array_equal(a, b)


def test_bad_arguments_are_named():
  query, bank = jnp.ones((1, 8)), jnp.ones((2, 3, 8))
  bad = [
    (dict(heads=3), "heads=3 must divide the width 8"),
    (dict(heads=2, rank=8), "rank=8 needs one head, got heads=2"),
    (dict(rank=9), "rank=9 must be from 1 to the width"),
    (dict(rank=4), "widths differ: query .1, 8. and sources .* with rank=4"),
  ]
  for options, message in bad:
    with pytest.raises(ValueError, match=message):
      depth_attention(query, tuple(bank), **options)
  with pytest.raises(ValueError, match="heads=3 must divide the width 8"):
    depth_merge(bank[0], jnp.ones((3, 3)), query[0], bank[1])
  with pytest.raises(ValueError, match="rank=8 needs one head, got heads=2"):
    depth_merge(bank[0], jnp.ones((3, 2)), query[0], bank[1], rank=8)
