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
from attnres_kernels import platforms
from tests import tiers

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
  @tiers.parametrize(
    "queries,options", [(2, OPTIONS[0]), (9, OPTIONS[1]), (9, OPTIONS[2])]
  )
  def test_depth_attention(self, queries, options):
    query, bank = _query(queries, options), _draw(3, 2, WIDTH)
    out_, lse_ = _by_loops(query, bank, **options)
    results = []
    for implementation in ("reference", None):
      f = functools.partial(
        depth_attention, eps=EPS, implementation=implementation, **options
      )
      (out, lse), vjp = _pulled(f, query, tuple(bank))
      np.testing.assert_allclose(out, out_, atol=1e-12)
      np.testing.assert_allclose(lse, lse_.reshape(lse.shape), atol=1e-12)
      dout, dlse = _draw(*out.shape, seed=2), _draw(*lse.shape, seed=3)
      results.append(jax.tree.leaves(vjp((dout, dlse))))
    for a, b in zip(*results, strict=True):
      np.testing.assert_allclose(a, b, atol=1e-12)

  @tiers.parametrize("options", OPTIONS[1:], ids=str)
  def test_merges(self, options):
    """The last source joins as the merge's; the second call norms, too."""
    query, bank = _query(1, options), _draw(3, 2, WIDTH)
    gain = _draw(WIDTH, seed=4)
    rank = options.get("rank")
    phase_1 = functools.partial(depth_attention, eps=EPS, **options)
    (out,), (lse,) = phase_1(query, tuple(bank[:2]))
    expected, lse_ = _by_loops(query, bank, **options)
    (out_b,), (lse_b,) = phase_1(query, tuple(bank[2:]))
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
    arguments = out, lse, query[0], bank[2], gain
    for implementation in ("reference", None):
      results, vjp = _pulled(
        functools.partial(both, implementation), *arguments
      )
      np.testing.assert_allclose(results[0], expected[0], atol=1e-12)
      cotangents = tuple(_draw(*r.shape, seed=6) for r in results)
      every.append([*results, *vjp(cotangents)])
    for a, b in zip(*every, strict=True):
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
    for a, b in zip(every[0], other, strict=True):
      np.testing.assert_array_equal(a, b)
