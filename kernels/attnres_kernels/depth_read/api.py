# SPDX-License-Identifier: Apache-2.0
"""The public function of a read while decoding: checks, backend.

The two phases of Algorithm 1 (arXiv:2603.15031) save reads of sources, which
for one token per row cost less than starting the operations that save them. So
a sublayer reads everything at once: one softmax over all sources, and its
pre-norm (spec: pipeline_and_inference section 8).
"""

from collections.abc import Sequence
from typing import Any

import jax
from jaxtyping import Array
from jaxtyping import Float

from attnres_kernels import dispatch
from attnres_kernels.depth_read import reference
from attnres_kernels.depth_read import terms


def depth_read_norm(
  queries: Float[Array, "L D"],
  row: int,
  sources: Sequence[Float[Array, "*T D"] | tuple[Float[Array, "*T D"], ...]],
  gain: Float[Array, " D"],
  *,
  eps: float = 1e-6,
  norm_eps: float = 1e-6,
  implementation: dispatch.Implementation | None = None,
) -> Float[Array, "*T D"]:
  """The mixture of one query over all sources, normalised.

  For decoding: there is no gradient on TPUs, and the kernel holds all sources
  of 16 tokens on the core.

  Args:
    queries: the pseudo-queries of all sublayers, folded with key-norm gains. A
      program that reads with each of them in turn need not cut them apart.
    row: which of them.
    sources: the embedding first; any float dtype each, such as bfloat16 blocks
      and a float32 partial sum. A tuple is its float32 sum, which then costs no
      operation of its own.
    gain: of the next sublayer's pre-norm.
    eps: added to the mean square of a source when it is scored.
    norm_eps: added to the mean square inside the pre-norm.
    implementation: a backend by name; None takes the best that fits.

  Returns:
    rms_norm(mixture) * gain, in the dtype of the first source.

  Raises:
    ValueError: the shapes do not fit together.
    NotImplementedError: the named backend cannot run these shapes here.
  """
  dispatch.check_implementation(implementation)
  dispatch.check_eps(eps)
  dispatch.check_eps(norm_eps, "norm_eps")
  sources, sizes = terms.flatten(sources)
  if 0 in sizes:
    raise ValueError(
      "a source is an empty tuple; it must have at least one term"
    )
  _check(queries, row, sources, gain)
  options: dict[str, Any] = dict(
    row=row, eps=float(eps), norm_eps=float(norm_eps)
  )
  if max(sizes) > 1:
    options["sizes"] = sizes
  if implementation == "reference":
    return reference.forward(queries, gain, *sources, **options)
  dtype = dispatch.accumulator(queries, *sources)
  arrays = queries.astype(dtype), gain.astype(dtype), *sources
  return dispatch.call(
    "depth_read", "forward", implementation, *arrays, **options
  )


def _check(
  queries: jax.Array, row: int, sources: Sequence[jax.Array], gain: jax.Array
) -> None:
  if not sources or not sources[0].ndim:
    raise ValueError("sources must be at least one array [..., D]")
  shape = sources[0].shape
  if any(x.shape != shape for x in sources):
    raise ValueError(f"shapes differ: sources {[x.shape for x in sources]}")
  if queries.ndim != 2 or queries.shape[1] != shape[-1]:
    raise ValueError(
      f"queries must be [L, {shape[-1]}], as wide as sources, got"
      f" {queries.shape}"
    )
  if not 0 <= row < queries.shape[0]:
    raise ValueError(f"row={row} must be from 0 to {queries.shape[0] - 1}")
  if gain.shape != shape[-1:]:
    raise ValueError(f"gain must be [{shape[-1]}], got {gain.shape}")
