# SPDX-License-Identifier: Apache-2.0
"""Phase 2 in plain JAX, forward and backward by hand.

Two passes over a token's row are enough: one for the sums that determine the
weights, one that writes. All statistics are in the accumulation dtype.
"""

import jax
import jax.numpy as jnp

from attnres_kernels import dispatch
from attnres_kernels import heads as heads_lib


def forward(
  out_TD,
  lse_T,
  query_D,
  partial_TD,
  update_TD,
  gain_D,
  rows=None,
  *,
  eps,
  norm_eps,
  heads=1,
  rank=None,
):
  """Returns (new partial, merged or merged and normed).

  With several heads, log-normalisers, scores and weights are [..., H]. Where
  the arguments lie (`api.Row`) does not matter here.
  """
  del rows
  dtype = query_D.dtype
  total_TD = _add(partial_TD, update_TD, dtype)
  score_T, _ = _score(_key(total_TD, rank), query_D, eps, heads)
  keep_T, take_T = two_weights(lse_T, score_T)
  mixed_TD = _spread(keep_T, heads, out_TD) * out_TD.astype(dtype)
  mixed_TD += _spread(take_T, heads, out_TD) * total_TD
  if gain_D is not None:
    inverse_T = _inverse_rms(mixed_TD, norm_eps)
    mixed_TD *= inverse_T[..., None]
    mixed_TD *= _row(gain_D, mixed_TD)
  new_partial = None
  if update_TD is not None:
    new_partial = total_TD.astype(partial_TD.dtype)
  return new_partial, mixed_TD.astype(out_TD.dtype)


def collecting(backward):
  """A backward pass with sinks (`api.Sinks`), given one without.

  With them, it returns the array of the row in place of the gradient of out,
  and both parts of the sum in place of that of total.
  """

  def run(*arrays, **options):
    *arrays, rows, sinks = (*arrays, *(None,) * (9 - len(arrays)))
    found = backward(*arrays, rows, **options)
    if sinks is None:
      return found
    dout_TD, dlse_T, dquery_D, dtotal_TD, dgain_D = found
    stack = jax.lax.dynamic_update_index_in_dim(
      sinks.out.stack, dout_TD, sinks.out.index, 0
    )
    narrow, wide = dtotal_TD.dtype, dquery_D.dtype
    collected = sinks.high.astype(wide) + sinks.low.astype(wide)
    parts = dispatch.high_and_low(collected + dtotal_TD.astype(wide), narrow)
    return stack, dlse_T, dquery_D, parts, dgain_D

  return run


@collecting
def backward(
  out_TD,
  lse_T,
  query_D,
  total_TD,
  gain_D,
  dtotal_TD,
  dmixed_TD,
  rows=None,
  *,
  eps,
  norm_eps,
  heads=1,
  rank=None,
):
  """Returns the gradients of out, lse, query, total and gain.

  `total` is the new partial sum; its gradient is also that of the old sum and
  of the update. It is the stored, rounded sum, whereas the forward pass scored
  the sum before rounding; the difference is of the order of the storage
  precision.
  """
  del rows
  dtype = query_D.dtype
  width, key_width = out_TD.shape[-1], query_D.shape[-1]
  total = total_TD.astype(dtype)
  out = out_TD.astype(dtype)
  key = _key(total, rank)
  score_T, inverse_T = _score(key, query_D, eps, heads)
  keep_T, take_T = two_weights(lse_T, score_T)
  keep_TD, take_TD = (_spread(x, heads, out) for x in (keep_T, take_T))
  dmixed = dmixed_TD.astype(dtype)
  dgain_D, apart = None, total - out
  slope_T, shift_T = keep_T * take_T, jnp.zeros_like(keep_T)
  if gain_D is not None:
    mixed_TD = keep_TD * out + take_TD * total
    norm_T = _inverse_rms(mixed_TD, norm_eps)
    pulled_TD = dmixed * _row(gain_D, dmixed)
    product_T = jnp.sum(pulled_TD * mixed_TD, axis=-1)
    along_T = product_T * norm_T**3 / width
    tokens = tuple(range(mixed_TD.ndim - 1))
    dgain_D = jnp.sum(dmixed * (mixed_TD * norm_T[..., None]), axis=tokens)
    dmixed = norm_T[..., None] * pulled_TD - along_T[..., None] * mixed_TD
    # Orthogonal to the mixture is the gradient of all heads together.
    if heads == 1:
      alone_T = partial_alone(keep_T, take_T, norm_T, inverse_T)
      apart = total - jnp.where(alone_T, 0, 1)[..., None].astype(dtype) * out
      slope_T = jnp.where(alone_T, take_T, slope_T)
      shift_T = jnp.where(alone_T, norm_eps * norm_T**3 * product_T, shift_T)
  dscore_T = slope_T * (_dot(dmixed, apart, heads) - shift_T)
  dout_TD = keep_TD * dmixed
  if heads == 1:
    pull_T = dscore_T * inverse_T
    bend_T = dscore_T * score_T * inverse_T**2 / key_width
    dquery_D = jnp.einsum("...,...d->d", pull_T, key)
  else:
    pull_T = dscore_T * inverse_T[..., None]
    bend_T = jnp.sum(dscore_T * score_T, -1) * inverse_T**2 / key_width
    of_slices = key.reshape(*key.shape[:-1], heads, -1)
    dquery_D = jnp.einsum("...h,...hk->hk", pull_T, of_slices).reshape(-1)
  dkey = _spread(pull_T, heads, key) * _row(query_D, key)
  if rank is None:
    dpartial = take_TD * dmixed - bend_T[..., None] * total
    dpartial += dkey
  else:
    dkey -= bend_T[..., None] * key
    beside = [(0, 0)] * (key.ndim - 1) + [(width - rank, 0)]
    dpartial = take_TD * dmixed + jnp.pad(dkey, beside)
  if dtotal_TD is not None:
    dpartial += dtotal_TD.astype(dtype)
  return (
    dout_TD.astype(out_TD.dtype),
    -dscore_T,
    dquery_D,
    dpartial.astype(total_TD.dtype),
    dgain_D,
  )


def _add(partial_TD, update_TD, dtype):
  total_TD = partial_TD.astype(dtype)
  return total_TD if update_TD is None else total_TD + update_TD.astype(dtype)


def _key(total_TD, rank):
  return total_TD if rank is None else total_TD[..., -rank:]


def _spread(weight_T, heads, like_TD):
  if heads == 1:
    return weight_T[..., None]
  return heads_lib.spread(weight_T, heads, like_TD.shape[-1])


def _dot(a_TD, b_TD, heads):
  if heads == 1:
    return jnp.sum(a_TD * b_TD, axis=-1)
  return heads_lib.totals(a_TD * b_TD, heads)


def _score(total_TD, query_D, eps, heads):
  inverse_T = _inverse_rms(total_TD, eps)
  if heads > 1:
    product_TH = heads_lib.totals(total_TD * _row(query_D, total_TD), heads)
    return product_TH * inverse_T[..., None], inverse_T
  product_T = jnp.einsum(
    "...d,d->...", total_TD, query_D, precision=jax.lax.Precision.HIGHEST
  )
  return product_T * inverse_T, inverse_T


def two_weights(lse_T, score_T):
  """Weights of the mixture and of the partial sum.

  Each is computed directly, so that the smaller one keeps its precision.
  """
  return jax.nn.sigmoid(lse_T - score_T), jax.nn.sigmoid(score_T - lse_T)


def partial_alone(keep_T, take_T, norm_T, inverse_T):
  """Where the gradient of the score is computed from the partial sum alone.

  With the mixture m = keep * out + take * total, the gradient dm before the
  pre-norm is orthogonal to m, except for shift = <dm, m>, a remainder due to
  norm_eps. So keep * take * <dm, total - out> = take * (<dm, total> - shift),
  and the right-hand side keeps its precision where keep * out is most of m. A
  zero partial sum is the extreme case: all of <dm, out> cancels.
  """
  return 2 * take_T * norm_T < keep_T * inverse_T


def _inverse_rms(x_TD, eps):
  return jax.lax.rsqrt(jnp.mean(jnp.square(x_TD), axis=-1) + eps)


def _row(x_D, like_TD):
  return x_D.astype(like_TD.dtype).reshape((1,) * (like_TD.ndim - 1) + (-1,))
