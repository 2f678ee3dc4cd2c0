# SPDX-License-Identifier: Apache-2.0
"""The public functions of phase 2: checks, gradient rules, backend.

Lines 7-14 of Algorithm 1 in Attention Residuals (arXiv:2603.15031): sublayer
by sublayer, the block's running partial sum joins the mixture of phase 1.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array
from jaxtyping import Float
from jaxtyping import Int32

from attnres_kernels import dispatch
from attnres_kernels import heads as heads_lib
from attnres_kernels.depth_merge import reference


class Row(NamedTuple):
  """A row of an array, in which an argument lies.

  A kernel cannot be fused with a slice of an array, so the slice would be a
  copy. Given the row, the TPU kernel reads it from the array, and the slice is
  not computed. Other backends read the argument itself. Either way, the
  gradient is that of the argument, and the array has none.

  Attributes:
    stack: the array.
    index: of the row; may be traced, and must be within the array.
  """

  stack: Float[Array, "N *T D"]
  index: int | Int32[Array, ""]


class Sinks(NamedTuple):
  """Where gradients go that a caller collects over several calls.

  A gradient rule for a loop over sublayers sums the gradients of the partial
  sum, and stores those of mixtures as rows of an array. Given sinks, a call
  does both where it computes the gradients, instead of one more pass over
  memory each. It returns the sinks; their cotangents are what is collected so
  far, and the gradients of the sinks given are that and what the call adds.
  `out` and `partial` then have none themselves. What sinks contain does not
  matter, only that they have the shapes and dtypes of their gradients.

  Attributes:
    out: the gradient of `out` becomes this row, whatever it was.
    high: to the sum of `high` and `low`, the gradient of `partial` is added.
      This part is the sum, rounded to its dtype.
    low: the rest of the sum, rounded: of bfloat16, both have 16 bits.
  """

  out: Row
  high: Float[Array, "*T D"]
  low: Float[Array, "*T D"]


def depth_merge(
  out: Float[Array, "*T D"],
  lse: Float[Array, "*TH"],
  query: Float[Array, " R"],
  partial: Float[Array, "*T D"],
  *,
  out_row: Row | None = None,
  partial_row: Row | None = None,
  rank: int | None = None,
  eps: float = 1e-6,
  implementation: dispatch.Implementation | None = None,
) -> Float[Array, "*T D"]:
  """Merges one more source into a mixture of `depth_attention`.

  Args:
    out: a normalised mixture.
    lse: its log-normaliser; -inf means that the mixture is empty, +inf that the
      partial sum is ignored (its weight is then exactly 0). [*T, H] for H
      heads.
    query: the pseudo-query of the mixture, folded with the key-norm gain.
    partial: the additional source, usually the block's partial sum.
    out_row: the row of an array that `out` is, or None.
    partial_row: the row of an array that `partial` is, or None.
    rank: as in `depth_attention`.
    eps: added to the mean square inside the norm.
    implementation: a backend by name; None takes the best that fits.

  Returns:
    The mixture as if `partial` had been one more source, in the dtype of `out`.

  Raises:
    ValueError: the shapes do not fit together, or an array of rows has another
      dtype.
    NotImplementedError: the named backend cannot run these shapes here.
  """
  arrays, rows = (out, lse, query, partial, None, None), (out_row, partial_row)
  return _merge(arrays, rows, None, None, rank, eps, 0.0, implementation)[1]


def depth_merge_norm(
  out: Float[Array, "*T D"],
  lse: Float[Array, "*TH"],
  query: Float[Array, " R"],
  partial: Float[Array, "*T D"],
  update: Float[Array, "*T D"] | None,
  gain: Float[Array, " D"],
  *,
  out_row: Row | None = None,
  partial_row: Row | None = None,
  sinks: Sinks | None = None,
  carry_on: bool = False,
  rank: int | None = None,
  eps: float = 1e-6,
  norm_eps: float = 1e-6,
  implementation: dispatch.Implementation | None = None,
) -> tuple[Any, Float[Array, "*T D"]]:
  """Everything between two sublayers in one pass: add, score, merge, pre-norm.

  Args:
    out: as in `depth_merge`.
    lse: as in `depth_merge`; +inf at the first sublayer of a block.
    query: as in `depth_merge`.
    partial: the block's partial sum before `update`; its dtype may be wider
      than that of `out`, such as float32 and bfloat16.
    update: the last sublayer's output, which is added to `partial`; None adds
      nothing.
    gain: the gain of the next sublayer's pre-norm.
    out_row: as in `depth_merge`.
    partial_row: as in `depth_merge`.
    sinks: for the gradients of `out` and `partial`, or None. Not with an update
      or the reference.
    carry_on: whether the partial sum returned goes on to the next sublayer. The
      merge then reads it rounded to the dtype of `out`. What the rest of the
      network wants of its gradient is rounded, too, and added where the merge
      computes its own. Otherwise, autodiff leaves the two apart, and each
      matrix product that reads the gradient reads both. Not with an update,
      sinks or a row of partial sums.
    rank: as in `depth_attention`.
    eps: added to the mean square of the partial sum when it is scored.
    norm_eps: added to the mean square inside the pre-norm.
    implementation: a backend by name; None takes the best that fits.

  Returns:
    The new partial sum, in the dtype of `partial`, or the sinks if they are
    given; and the next sublayer's input rms_norm(mixture) * gain, in the dtype
    of `out`.

  Raises:
    ValueError: the shapes do not fit together, an array of rows has another
      dtype, there are sinks and an update, or `carry_on` and what it excludes.
    NotImplementedError: the named backend cannot run these shapes here.
  """
  arrays, rows = (
    (out, lse, query, partial, update, gain),
    (out_row, partial_row),
  )
  if sinks is not None:
    sinks = _checked(sinks, out, partial, update, implementation)
  carry = None
  if carry_on:
    excluded = dict(update=update, sinks=sinks, partial_row=partial_row)
    for name, value in excluded.items():
      if value is not None:
        raise ValueError(f"carry_on=True does not go with {name}")
    carry = partial
    arrays = out, lse, query, partial.astype(out.dtype), None, gain
  total, normed, sinks, carry = _merge(
    arrays, rows, sinks, carry, rank, eps, norm_eps, implementation
  )
  if sinks is not None:
    return sinks, normed
  if carry_on:
    return carry, normed
  return (partial if update is None else total), normed


def combine_mixtures(
  out_a: Float[Array, "*T D"],
  lse_a: Float[Array, "*TH"],
  out_b: Float[Array, "*T D"],
  lse_b: Float[Array, "*TH"],
) -> tuple[Float[Array, "*T D"], Float[Array, "*TH"]]:
  """Joins mixtures over two disjoint sets of sources; associative.

  Args:
    out_a: a normalised mixture.
    lse_a: its log-normaliser, -inf for an empty set; [*T, H] for H heads.
    out_b: another one, over other sources with the same query.
    lse_b: its log-normaliser.

  Returns:
    The mixture over both sets, in the dtype of `out_a`, and its
    log-normaliser.
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
  keep, take = exp_a / safe, exp_b / safe
  if lse.ndim == out_a.ndim:
    keep, take = (
      heads_lib.spread(weight, lse.shape[-1], out_a.shape[-1])
      for weight in (keep, take)
    )
  else:
    keep, take = keep[..., None], take[..., None]
  out = keep * out_a.astype(safe.dtype)
  out += take * out_b.astype(safe.dtype)
  return out.astype(out_a.dtype), lse


def _merge(arrays, rows, sinks, carry, rank, eps, norm_eps, implementation):
  """(new partial or None, merged or merged and normed, sinks, carry).

  After checks. The carry is the partial sum before it was rounded, or None
  unless it is carried on.
  """
  dispatch.check_implementation(implementation)
  dispatch.check_eps(eps)
  heads = _check(rank, *arrays)
  dispatch.check_eps(norm_eps, "norm_eps")
  out, lse, query, partial, update, gain = arrays
  out_row, partial_row = rows
  rows = _row("out", out, out_row), _row("partial", partial, partial_row)
  options = dict(eps=float(eps), norm_eps=float(norm_eps))
  if heads == 1:
    lse = jnp.squeeze(lse, -1)
  elif heads is not None:
    options["heads"] = heads
  if rank is not None:
    options["rank"] = rank
  if implementation == "reference":
    found = reference.forward(out, lse, query, partial, update, gain, **options)
    return *found, None, carry
  dtype = dispatch.accumulator(out, query, partial)
  lse, query = lse.astype(dtype), query.astype(dtype)
  gain = None if gain is None else gain.astype(dtype)
  arrays = out, lse, query, partial, update, gain
  return _call(
    tuple(options.items()), implementation, rows, sinks, carry, *arrays
  )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _call(options, implementation, rows, sinks, carry, *arrays):
  total, mixed = dispatch.call(
    "depth_merge",
    "forward",
    implementation,
    *arrays,
    *_given(rows),
    **dict(options),
  )
  return total, mixed, sinks, carry


def _call_forward(options, implementation, rows, sinks, carry, *arrays):
  results = _call(options, implementation, rows, sinks, carry, *arrays)
  total = results[0]
  out, lse, query, partial, update, gain = arrays
  kept = partial if update is None else total
  # The new sum lies nowhere else.
  rows = rows if update is None else (rows[0], None)
  # Zero-sized: only its dtype is wanted, for the gradient of the update.
  update_like = None if update is None else jnp.zeros((0,), update.dtype)
  index = None if sinks is None else sinks.out.index
  return results, (rows, index, update_like, out, lse, query, kept, gain)


def _call_backward(options, implementation, residuals, cotangents):
  rows, index, update_like, *arrays = residuals
  dtotal, dmixed, sinks, dcarry = cotangents
  given = _given(rows)
  if dcarry is not None:
    *_, kept, _ = arrays
    dtotal = dcarry.astype(kept.dtype)
  if sinks is not None:
    sinks = sinks._replace(out=Row(sinks.out.stack, index))
    given = rows, sinks
  *gradients, dpartial, dgain = dispatch.call(
    "depth_merge",
    "backward",
    implementation,
    *arrays,
    dtotal,
    dmixed,
    *given,
    **dict(options),
  )
  if sinks is not None:
    no_index: Any = None
    sinks = Sinks(Row(gradients[0], no_index), *dpartial)
    return None, sinks, None, None, *gradients[1:], None, None, dgain
  if dcarry is not None:
    # Of the sum before it was rounded, which is not an argument by itself.
    dcarry = dpartial.astype(dcarry.dtype)
    return None, None, dcarry, *gradients, None, None, dgain
  dupdate = None
  if update_like is not None:
    dupdate = dpartial.astype(update_like.dtype)
  return None, None, None, *gradients, dpartial, dupdate, dgain


_call.defvjp(_call_forward, _call_backward)


def _given(rows):
  """The last argument of a backend, if there is any row."""
  return () if rows == (None, None) else (rows,)


def _row(name, array, row):
  """The row, with an index that is an array; or None."""
  if row is None:
    return None
  stack, index = row
  if stack.shape[1:] != array.shape or stack.dtype != array.dtype:
    raise ValueError(
      f"{name} {array.shape} {array.dtype} is no row of an array"
      f" {stack.shape} {stack.dtype}"
    )
  if isinstance(index, int) and not 0 <= index < stack.shape[0]:
    raise ValueError(f"{name} cannot be row {index} of an array {stack.shape}")
  index = jnp.asarray(index)
  if index.ndim or not jnp.issubdtype(index.dtype, jnp.integer):
    raise ValueError(
      f"the index of the row of {name} must be an integer scalar, got"
      f" {index.dtype} {index.shape}"
    )
  return Row(stack, index.astype(jnp.int32))


def _checked(sinks, out, partial, update, implementation):
  """The sinks, with an index that is an array."""
  if update is not None or implementation == "reference":
    raise ValueError(
      "sinks are for gradients of the partial sum itself, by a gradient rule:"
      " not with an update, nor with implementation='reference'"
    )
  for name in ("high", "low"):
    part = getattr(sinks, name)
    if part.shape != partial.shape or part.dtype != partial.dtype:
      raise ValueError(
        f"the sink {name} {part.shape} {part.dtype} must be like partial"
        f" {partial.shape} {partial.dtype}"
      )
  return sinks._replace(out=_row("out", out, sinks.out))


def _check(rank, out, lse, query, partial, update, gain):
  """The number of heads; None if the log-normaliser has no axis of heads."""
  if query.ndim != 1 or not query.shape[0]:
    raise ValueError(
      f"query must be [D] with D >= 1, got {query.shape}; out {out.shape}"
    )
  width = out.shape[-1] if out.ndim else 0
  if rank is not None and not 1 <= rank <= width:
    raise ValueError(f"rank={rank} must be from 1 to the width {width}")
  if query.shape[0] != (width if rank is None else rank):
    raise ValueError(
      f"widths differ: out {out.shape}, query {query.shape}"
      + ("" if rank is None else f" with rank={rank}")
    )
  if partial.shape != out.shape:
    raise ValueError(f"shapes differ: partial {partial.shape}, out {out.shape}")
  heads = lse.shape[-1] if lse.ndim == out.ndim else None
  if lse.shape[: out.ndim - 1] != out.shape[:-1] or lse.ndim > out.ndim:
    raise ValueError(f"shapes differ: lse {lse.shape} and out {out.shape}")
  if update is not None and update.shape != partial.shape:
    raise ValueError(
      f"shapes differ: update {update.shape} and partial {partial.shape}"
    )
  if gain is not None and gain.shape != (width,):
    raise ValueError(
      f"shapes differ: gain {gain.shape}, a row of out {out.shape[-1:]}"
    )
  if heads is not None and (heads < 1 or width % heads):
    raise ValueError(f"heads of lse {lse.shape} must divide the width {width}")
  if rank is not None and (heads or 1) > 1:
    raise ValueError(f"rank={rank} needs one head, got lse {lse.shape}")
  return heads
