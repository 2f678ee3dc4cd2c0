# SPDX-License-Identifier: Apache-2.0
"""The op in plain JAX: streams apart, tokens last in coefficients.

Three passes over the streams: the write, the products, and the read. Each pass
has its gradient, from arrays that the forward pass kept.
"""

import functools

import jax
import jax.numpy as jnp

from attnres_kernels import dispatch


def forward(
  streams, y, write_MT, mix_MMT, weight_MDC, bias_M, scale, *, eps, dtype
):
  """Returns (new streams, the next read, logits, their inverse norm)."""
  new = _written(streams, y, write_MT, mix_MMT)
  wide = dispatch.accumulator(*new)
  square_T = _total(jnp.sum(jnp.square(x.astype(wide)), -1) for x in new)
  width = len(new) * new[0].shape[-1]
  inverse_T = jax.lax.rsqrt(square_T / width + eps)
  product_TC = _total(_project(x, w, wide) for x, w in zip(new, weight_MDC))
  logits_CT = inverse_T[None] * jnp.moveaxis(product_TC, -1, 0)
  h = _read(new, logits_CT[: len(new)], bias_M, scale, dtype)
  return new, h, logits_CT, inverse_T


def backward(
  streams,
  y,
  write_MT,
  mix_MMT,
  weight_MDC,
  bias_M,
  scale,
  new,
  logits_CT,
  inverse_T,
  dnew,
  dh,
  dlogits_CT,
  dinverse_T,
  *,
  eps,
  dtype,
):
  """Returns the gradients of the first seven arguments."""
  del eps, dinverse_T  # The inverse norm is no result of the public function.
  count, width = len(new), len(new) * new[0].shape[-1]
  read = functools.partial(_read, dtype=dtype)
  _, vjp = jax.vjp(read, new, logits_CT[:count], bias_M, scale)
  dread, dgates_MT, dbias_M, dscale = vjp(dh)
  dread_MT = dlogits_CT[:count] + dgates_MT
  dlogits_CT = jnp.concatenate([dread_MT, dlogits_CT[count:]])
  dproduct_TC = jnp.moveaxis(inverse_T[None] * dlogits_CT, 0, -1)
  along_T = jnp.sum(dlogits_CT * logits_CT, axis=0)
  bend_T1 = (along_T * jnp.square(inverse_T) / width)[..., None]
  dtotal, dweight = [], []
  for x, weight_DC, *gradients in zip(new, weight_MDC, dnew, dread):
    low_TC = dproduct_TC.astype(x.dtype)
    dx = _contract(low_TC, weight_DC.astype(x.dtype), ((x.ndim - 1,), (1,)))
    wide = dispatch.accumulator(x)
    dx = dx.astype(wide) - bend_T1 * x.astype(wide)
    dtotal.append(_total([*gradients, dx.astype(x.dtype)]))
    tokens = tuple(range(x.ndim - 1))
    dweight.append(_contract(x, low_TC, (tokens, tokens)))
  _, vjp = jax.vjp(_written, streams, y, write_MT, mix_MMT)
  dweight_MDC = jnp.stack(dweight).astype(weight_MDC.dtype)
  return *vjp(tuple(dtotal)), dweight_MDC, dbias_M, dscale


def _written(streams, y, write_MT, mix_MMT):
  wide = dispatch.accumulator(*streams, y)
  old = [x.astype(wide) for x in streams]
  return tuple(
    (
      _total(a_T[..., None] * x for a_T, x in zip(mix_MMT[:, j], old))
      + write_T[..., None] * y.astype(wide)
    ).astype(x.dtype)
    for j, (write_T, x) in enumerate(zip(write_MT, streams))
  )


def _read(new, logits_MT, bias_M, scale, dtype):
  wide = dispatch.accumulator(*new)
  ones = (1,) * (logits_MT.ndim - 1)
  read_MT = jax.nn.sigmoid(bias_M.reshape(-1, *ones) + scale * logits_MT)
  h = _total(a_T[..., None] * x.astype(wide) for a_T, x in zip(read_MT, new))
  return h.astype(dtype)


def _project(x, weight_DC, wide):
  axes = (x.ndim - 1,), (0,)
  return _contract(x, weight_DC.astype(x.dtype), axes).astype(wide)


def _contract(a, b, axes):
  return jax.lax.dot_general(
    a, b, (axes, ((), ())), dispatch.exact(a),
    preferred_element_type=dispatch.accumulator(a),
  )  # fmt: skip


def _total(terms):
  return functools.reduce(jnp.add, terms)
