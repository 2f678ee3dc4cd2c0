# SPDX-License-Identifier: Apache-2.0
"""The public function: checks, gradient rule, backend.

mHC and its relatives (arXiv:2512.24880) keep M residual streams. Between two
sublayers, the output of one is written to all streams, which are mixed among
themselves. The new streams give the logits of the next coefficients. One of
these, a gate per stream, weighs what the next sublayer reads.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array
from jaxtyping import Float

from attnres_kernels import dispatch
from attnres_kernels.stream_mix import reference


def stream_mix(
  streams: Sequence[Float[Array, "*T D"]],
  y: Float[Array, "*T D"],
  write: Float[Array, "M ..."],
  mix: Float[Array, "M M ..."],
  weight: Float[Array, "M D C"],
  bias: Float[Array, " M"],
  scale: Float[Array, ""],
  *,
  eps: float = 1e-6,
  dtype: jax.typing.DTypeLike | None = None,
  implementation: dispatch.Implementation | None = None,
) -> tuple[
  tuple[Float[Array, "*T D"], ...],
  Float[Array, "*T D"],
  Float[Array, "C ..."],
]:
  """Everything between two sublayers with several streams.

    X_j <- sum_i mix_ij X_i + write_j y
    logits = rms_norm(X_1, ..., X_M) weight
    h = sum_j sigmoid(bias_j + scale logits_j) X_j

  The norm is over all M D entries. What else follows from the logits is left
  to the caller, as it needs no stream.

  Args:
    streams: X_1..X_M, of one dtype.
    y: the output of a sublayer.
    write: its weight in each new stream, float32 like the other coefficients.
    mix: from the stream of the first axis to the stream of the second.
    weight: of the logits, of which the first M belong to the read. Products run
      in the dtype of the streams, sums in float32.
    bias: of the read.
    scale: of the read.
    eps: added to the mean square inside the norm.
    dtype: of h; None for that of `y`.
    implementation: a backend by name; None takes the best that fits.

  Returns:
    The new streams, in their dtype; h; and the logits, in the dtype of sums. h
    and the logits are computed from the rounded streams.

  Raises:
    ValueError: the shapes do not fit together.
    NotImplementedError: the named backend cannot run these shapes here.
  """
  dispatch.check_implementation(implementation)
  dispatch.check_eps(eps)
  streams = tuple(streams)
  _check(streams, y, write, mix, weight, bias, scale)
  dtype = y.dtype if dtype is None else jnp.dtype(dtype)
  options = (("eps", float(eps)), ("dtype", dtype))
  small = write, mix, weight, bias, scale
  if implementation == "reference":
    return reference.forward(streams, y, *small, eps=float(eps), dtype=dtype)
  wide = dispatch.accumulator(*streams, y)
  small = [x.astype(wide) for x in small]
  new, h, logits, _ = dispatch.differentiable(
    "stream_mix", implementation, options, (0, 2, 3), streams, y, *small
  )
  return new, h, logits


def _check(
  streams: tuple[jax.Array, ...], y: jax.Array, write: jax.Array,
  mix: jax.Array, weight: jax.Array, bias: jax.Array, scale: jax.Array,
) -> None:  # fmt: skip
  count = len(streams)
  if not count or not y.ndim:
    raise ValueError("streams must be at least one array [..., D], like y")
  if any(x.shape != y.shape or x.dtype != streams[0].dtype for x in streams):
    raise ValueError(
      f"streams must be of one dtype and {y.shape}, like y, got"
      f" {[str(x.dtype) + str(x.shape) for x in streams]}"
    )
  *tokens, width = y.shape
  for name, array, shape in (
    ("write", write, (count, *tokens)),
    ("mix", mix, (count, count, *tokens)),
    ("weight", weight, (count, width, *weight.shape[2:3])),
    ("bias", bias, (count,)),
    ("scale", scale, ()),
  ):
    if array.shape != shape:
      raise ValueError(f"{name} must be {shape}, got {array.shape}")
  if weight.ndim != 3 or weight.shape[2] < count:
    raise ValueError(
      f"weight must be [{count}, {width}, C] with C >= {count}, got"
      f" {weight.shape}"
    )
