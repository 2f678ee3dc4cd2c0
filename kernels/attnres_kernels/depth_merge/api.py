# SPDX-License-Identifier: Apache-2.0
"""The public functions of phase 2: checks, gradient rules, backend.

Lines 7 to 14 of the paper's algorithm (arXiv:2603.15031): sublayer by sublayer,
the block's running partial sum joins the mixture of phase 1.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array
from jaxtyping import Float

from attnres_kernels import dispatch
from attnres_kernels import heads as heads_lib
from attnres_kernels import platforms
from attnres_kernels.depth_merge import reference


def depth_merge(
  out: Float[Array, "*T D"],
  lse: Float[Array, "*TH"],
  query: Float[Array, " R"],
  partial: Float[Array, "*T D"],
  *,
  rank: int | None = None,
  eps: float = 1e-6,
  implementation: platforms.Implementation | None = None,
) -> Float[Array, "*T D"]:
  """Merges one more source into a mixture of `depth_attention`.

  Args:
    out: a normalised mixture.
    lse: its log-normaliser; -inf means that the mixture is empty, +inf that the
      partial sum is ignored (its weight is then exactly 0). [*T, H] for H
      heads.
    query: the pseudo-query of the mixture, folded with the key-norm gain.
    partial: the additional source, usually the block's partial sum; its dtype
      may be wider than the dtype of `out`, such as float32 and bfloat16.
    rank: as in `depth_attention`.
    eps: added to the mean square inside the norm.
    implementation: a backend by name; None takes the best that fits.

  Returns:
    The mixture as if `partial` had been one more source, in the dtype of `out`.

  Raises:
    ValueError: the shapes do not fit together.
    NotImplementedError: the named backend cannot run these shapes here.
  """
  return _merge(out, lse, query, partial, None, rank, eps, 0.0, implementation)


def depth_merge_norm(
  out: Float[Array, "*T D"],
  lse: Float[Array, "*TH"],
  query: Float[Array, " R"],
  partial: Float[Array, "*T D"] | Sequence[Float[Array, "*T D"]],
  gain: Float[Array, " D"],
  *,
  rank: int | None = None,
  eps: float = 1e-6,
  norm_eps: float = 1e-6,
  implementation: platforms.Implementation | None = None,
) -> Float[Array, "*T D"]:
  """`depth_merge` and the next sublayer's pre-norm in one pass over memory.

  Returns rms_norm(mixture) * gain, in the dtype of `out`. `norm_eps` is added
  to the mean square inside this norm. Several partial sums are as many more
  sources; `merges_several` says where this is fast. All else is as in
  `depth_merge`.
  """
  arrays = out, lse, query, partial, gain
  return _merge(*arrays, rank, eps, norm_eps, implementation)


def merges_several(
  out: jax.Array, lse: jax.Array, query: jax.Array,
  partials: Sequence[jax.Array], *, rank: int | None = None,
) -> bool:  # fmt: skip
  """Whether a kernel merges all of these at once on the GPU of this program."""
  heads = lse.shape[-1] if lse.ndim == out.ndim else 1
  options = dict(eps=0.0, norm_eps=0.0, heads=heads, rank=rank)
  rule = dispatch.Rule("depth_merge", None, tuple(options.items()))
  arrays = out, lse, query, tuple(partials)
  return bool(dispatch.kernels(rule, "forward", arrays))


def combine_mixtures(
  out_a: Float[Array, "*T D"],
  lse_a: Float[Array, "*TH"],
  out_b: Float[Array, "*T D"],
  lse_b: Float[Array, "*TH"],
) -> tuple[Float[Array, "*T D"], Float[Array, "*TH"]]:
  """Joins mixtures over two disjoint sets of sources; associative.

  Both have the same query. A log-normaliser of -inf means an empty set; with H
  heads, it is [*T, H]. The result is in the dtype of `out_a`.
  """
  if out_a.shape != out_b.shape or lse_a.shape != lse_b.shape:
    raise ValueError(
      f"shapes differ: {out_a.shape} {lse_a.shape}"
      f" and {out_b.shape} {lse_b.shape}"
    )
  # Two empty sets: -inf - -inf is NaN, so shift by 0 instead.
  top = jnp.maximum(lse_a, lse_b)
  top = jax.lax.stop_gradient(jnp.where(jnp.isfinite(top), top, 0))
  exp_a, exp_b = jnp.exp(lse_a - top), jnp.exp(lse_b - top)
  total = exp_a + exp_b
  safe = jnp.where(total == 0, 1, total)
  lse = jnp.where(total == 0, -jnp.inf, jnp.log(safe) + top)
  weight_a, weight_b = exp_a / safe, exp_b / safe
  if lse.ndim == out_a.ndim:
    weight_a, weight_b = (
      heads_lib.spread(weight, lse.shape[-1], out_a.shape[-1])
      for weight in (weight_a, weight_b)
    )
  else:
    weight_a, weight_b = weight_a[..., None], weight_b[..., None]
  out = weight_a * out_a.astype(safe.dtype)
  out += weight_b * out_b.astype(safe.dtype)
  return out.astype(out_a.dtype), lse


def _merge(
  out: jax.Array, lse: jax.Array, query: jax.Array, partial: Any,
  gain: jax.Array | None, rank: int | None, eps: float, norm_eps: float,
  implementation: str | None,
) -> jax.Array:  # fmt: skip
  platforms.check_implementation(implementation)
  platforms.check_eps(eps)
  platforms.check_eps(norm_eps, "norm_eps")
  given = f"out {out.shape}, query {query.shape}"
  if query.ndim != 1 or not query.shape[0]:
    raise ValueError(f"query must be [D] with D >= 1; {given}")
  width = out.shape[-1] if out.ndim else 0
  heads = lse.shape[-1] if lse.ndim == out.ndim else None
  options: dict[str, Any] = dict(eps=float(eps), norm_eps=float(norm_eps))
  options |= heads_lib.options(width, query.shape[0], heads, rank, given)
  several = isinstance(partial, Sequence)
  partials = tuple(partial) if several else (partial,)
  if not partials:
    raise ValueError(f"partial is an empty sequence; {given}")
  for x in partials:
    if x.shape != out.shape:
      raise ValueError(f"shapes differ: partial {x.shape}, out {out.shape}")
  if lse.shape[: out.ndim - 1] != out.shape[:-1] or lse.ndim > out.ndim:
    raise ValueError(f"shapes differ: lse {lse.shape} and out {out.shape}")
  if gain is not None and gain.shape != (width,):
    raise ValueError(
      f"shapes differ: gain {gain.shape}, a row of out {out.shape[-1:]}"
    )
  if heads == 1:
    lse = jnp.squeeze(lse, -1)
  if implementation == "reference":
    return reference.forward(out, lse, query, partial, gain, **options)
  dtype = platforms.accumulator(out, query, *partials)
  lse, query = lse.astype(dtype), query.astype(dtype)
  gain = None if gain is None else gain.astype(dtype)
  rule = dispatch.Rule("depth_merge", implementation, tuple(options.items()))
  opened = partials if several else partial
  return dispatch.differentiable(rule, out, lse, query, opened, gain)
