# SPDX-License-Identifier: Apache-2.0
"""The public function of the norm: checks, gradient rule, backend.

Compilers fuse a norm into the matrix products around it, which is free where
one product makes its input. A mixture of `depth_attention` comes from a kernel,
so its norm would be read once more for the mean square, and once per product.

Heads are normalised one by one. A compiler would give heads a separate axis,
in float32, and copy what kernels read and write with heads side by side.
"""

from jaxtyping import Array
from jaxtyping import Float

from attnres_kernels import dispatch
from attnres_kernels import platforms


def rms_norm(
  x: Float[Array, "*T D"],
  gain: Float[Array, " D"],
  gate: Float[Array, "*T D"] | None = None,
  *,
  eps: float = 1e-6,
  implementation: platforms.Implementation | None = None,
) -> Float[Array, "*T D"]:
  """X / rms(x) * gain over the last axis (arXiv:1910.07467), in one pass.

  With a gate, times sigmoid(gate); then the axis before the last is of heads.

  Args:
    x: bfloat16 or wider.
    gain: of each column.
    gate: in the dtype of `x`.
    eps: added to the mean square.
    implementation: a backend by name; None takes the best that fits.

  Returns:
    In the dtype of `x`; statistics are float32 (float64 if `x` is).

  Raises:
    ValueError: the shapes do not fit together.
    NotImplementedError: the named backend cannot run these shapes here.
  """
  platforms.check_implementation(implementation)
  platforms.check_eps(eps)
  if gain.shape != x.shape[-1:]:
    raise ValueError(f"gain must be {x.shape[-1:]}, got {gain.shape}")
  if gate is not None and gate.shape != x.shape:
    raise ValueError(f"gate must be {x.shape}, got {gate.shape}")
  gain = gain.astype(platforms.accumulator(x, gain))
  rule = dispatch.Rule("rms_norm", implementation, (("eps", float(eps)),))
  return dispatch.differentiable(rule, x, gain, gate)
