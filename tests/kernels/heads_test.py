# SPDX-License-Identifier: Apache-2.0
"""Heads over depth and low-rank keys: operators against loops over slices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnres_kernels import combine_mixtures
from attnres_kernels import depth_attention
from attnres_kernels import depth_attention_vjp
from attnres_kernels import depth_merge
from attnres_kernels import depth_merge_norm

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


def _query(queries, options, seed=1):
  return _draw(queries, options.get("rank", WIDTH), seed=seed)


@pytest.mark.usefixtures("float64")
class TestValuesAndGradients:
  # Nine queries are more than are written out one by one.
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
      (out, lse), vjp = jax.vjp(f, query, tuple(bank))
      np.testing.assert_allclose(out, out_, atol=1e-12)
      np.testing.assert_allclose(lse, lse_.reshape(lse.shape), atol=1e-12)
      dout, dlse = _draw(*out.shape, seed=2), _draw(*lse.shape, seed=3)
      found.append(jax.tree.leaves(vjp((dout, dlse))))
    for a, b in zip(*found, strict=True):
      np.testing.assert_allclose(a, b, atol=1e-12)
    by_hand = depth_attention_vjp(
      query, bank, lse, dout, dlse, eps=EPS, accumulate=bank, **options
    )
    np.testing.assert_allclose(by_hand[0], found[0][0], atol=1e-12)
    np.testing.assert_allclose(by_hand[1] - bank, found[0][1:], atol=1e-12)

  @pytest.mark.parametrize("options", OPTIONS[1:], ids=str)
  def test_merges(self, options):
    """The last source joins as the merge's; the second call norms, too."""
    query, bank = _query(1, options), _draw(3, 2, WIDTH)
    gain, update = _draw(WIDTH, seed=4), _draw(2, WIDTH, seed=5)
    rank = options.get("rank")
    phase_1 = functools.partial(depth_attention, eps=EPS, **options)
    (out,), (lse,) = phase_1(query, tuple(bank[:2]))
    wanted, lse_ = _by_loops(query, bank, **options)
    (out_b,), (lse_b,) = phase_1(query, tuple(bank[2:]))
    joined, total = combine_mixtures(out, lse, out_b, lse_b)
    np.testing.assert_allclose(joined, wanted[0], atol=1e-12)
    np.testing.assert_allclose(total, lse_[0].reshape(total.shape), atol=1e-12)

    def both(implementation, out, lse, query, partial, update, gain):
      fixed = dict(eps=EPS, rank=rank, implementation=implementation)
      return (
        depth_merge(out, lse, query, partial, **fixed),
        *depth_merge_norm(out, lse, query, partial, update, gain, **fixed),
      )

    found = []
    arguments = out, lse, query[0], bank[2], update, gain
    for implementation in ("reference", None):
      results, vjp = jax.vjp(
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
    (out,), (lse,) = depth_attention(query, bank, **options)
    for implementation in ("pallas_tpu", "pallas_gpu"):
      with pytest.raises(NotImplementedError, match="one head with keys of"):
        depth_attention(query, bank, implementation=implementation, **options)
      with pytest.raises(NotImplementedError, match="one head with keys of"):
        depth_merge(
          out, lse, query[0], bank[0], rank=options.get("rank"),
          implementation=implementation,
        )  # fmt: skip


def test_one_head_is_the_same_bit_by_bit():
  query, bank = (_draw(*s, dtype=np.float32) for s in ((2, 8), (3, 5, 8)))
  gain = query[1]

  def run(heads, query, bank):
    out, lse = depth_attention(query, bank, heads=heads)
    assert lse.shape == ((2, 5) if heads is None else (2, 5, 1))
    _, merged = depth_merge_norm(
      out[0], lse[0], query[0], bank[0], bank[1], gain
    )
    joined, total = combine_mixtures(out[0], lse[0], out[1], lse[1])
    total = total if heads is None else total[..., 0]
    return out, merged, joined, total

  found = []
  for heads in (None, 1):
    results, vjp = jax.vjp(functools.partial(run, heads), query, bank)
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
      depth_attention(query, bank, **options)
  with pytest.raises(ValueError, match="heads of lse .3, 3. must divide"):
    depth_merge(bank[0], jnp.ones((3, 3)), query[0], bank[1])
  with pytest.raises(ValueError, match="rank=8 needs one head, got lse .3, 2."):
    depth_merge(bank[0], jnp.ones((3, 2)), query[0], bank[1], rank=8)
