# SPDX-License-Identifier: Apache-2.0
"""The public function: checks, gradients, choice of backend.

z_t = sum over taps i < W of taps_i x_(t - W + 1 + i)
y_t = silu(z_t), per head divided by sqrt(|y_t|^2 + eps) if that is wanted
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array
from jaxtyping import Float
from jaxtyping import Int

from attnres_kernels import dispatch
from attnres_kernels import platforms


def short_conv(
  x: Float[Array, "B T N H"],
  taps: Float[Array, "W N H"],
  *,
  tail: Float[Array, "B W-1 N H"] | None = None,
  segment_ids: Int[Array, "B T"] | None = None,
  unit_eps: float | None = None,
  implementation: platforms.Implementation | None = None,
) -> Float[Array, "B T N H"]:
  """SiLU of a causal convolution per channel.

  Args:
    x: tokens.
    taps: float32; the last one applies to the token itself.
    tail: the tokens before the first; zeros by default.
    segment_ids: tokens of other segments count as zero. Tokens of the tail
      belong to the segment of the first token.
    unit_eps: scale each head to length one, with this added to its square.
    implementation: a backend by name; None takes the best that fits.

  Returns:
    In the dtype of `x`; sums are float32 (float64 if `x` is).

  Raises:
    ValueError: shapes do not fit together.
    NotImplementedError: the named backend cannot run these shapes here.
  """
  platforms.check_implementation(implementation)
  if x.shape[2:] != taps.shape[1:]:
    raise ValueError(f"x {x.shape} and taps {taps.shape} differ in [N, H]")
  if unit_eps is not None:
    platforms.check_eps(unit_eps, "unit_eps")
  same = None
  if segment_ids is not None:
    same = _reach(segment_ids, taps.shape[0])
  options = (("unit_eps", unit_eps),)
  rule = dispatch.Rule("short_conv", implementation, options)
  return dispatch.differentiable(rule, x, taps, tail, same)


def _reach(ids: jax.Array, number: int) -> jax.Array:
  """Bit s of each token: whether it and the token s before share a segment."""
  bits = jnp.zeros(ids.shape, jnp.int32)
  for shift in range(number):
    before = jnp.pad(ids, ((0, 0), (shift, 0)), mode="edge")[:, : ids.shape[1]]
    bits |= (before == ids).astype(jnp.int32) << shift
  return bits
