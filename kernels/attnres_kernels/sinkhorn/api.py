# SPDX-License-Identifier: Apache-2.0
"""The public function: checks, gradient rule, backend.

The backward pass repeats the iterations, of which nothing is kept.
"""

from jaxtyping import Array
from jaxtyping import Float

from attnres_kernels import dispatch
from attnres_kernels.sinkhorn import reference


def sinkhorn(
  logits: Float[Array, "M M ..."],
  *,
  iterations: int = 20,
  implementation: dispatch.Implementation | None = None,
) -> Float[Array, "M M ..."]:
  """Returns exp(logits), its rows, then its columns, scaled to sums of one.

  Args:
    logits: of matrices; the axes of tokens come last.
    iterations: how often rows and columns are scaled; columns come last.
    implementation: a backend by name; None takes the best that fits.

  Raises:
    ValueError: the matrices are not square, or there is no iteration.
    NotImplementedError: the named backend cannot run these shapes here.
  """
  dispatch.check_implementation(implementation)
  if logits.ndim < 2 or logits.shape[0] != logits.shape[1]:
    raise ValueError(f"logits must be [M, M, ...], got {logits.shape}")
  if iterations < 1:
    raise ValueError(f"iterations={iterations} must be at least 1")
  if implementation == "reference":
    return reference.forward(logits, iterations=iterations)
  options = (("iterations", iterations),)
  return dispatch.differentiable(
    "sinkhorn", implementation, options, (), logits
  )
