# SPDX-License-Identifier: Apache-2.0
"""The public function of depth attention: checks, gradient rule, backend.

Phase 1 of Algorithm 1 in Attention Residuals (arXiv:2603.15031): all queries
of a block attend to the sources that exist when the block opens. One backward
pass per call reads every source once and recomputes the scores from it.
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
from attnres_kernels.depth_attention import reference


def depth_attention(
  query: Float[Array, "Q R"],
  sources: Sequence[Float[Array, "*T D"]],
  *,
  heads: int | None = None,
  rank: int | None = None,
  eps: float = 1e-6,
  implementation: platforms.Implementation | None = None,
) -> tuple[Float[Array, "Q *T D"], Float[Array, " Q *TH"]]:
  """Mixes earlier outputs with learned queries (arXiv:2603.15031, Eq. 2-4).

  Per token and query: a softmax over the M sources of query . rms_norm(source).

  Args:
    query: pseudo-queries folded with the key-norm gain, float32, as wide as
      the sources; zeros give the plain mean.
    sources: embedding first, then earlier outputs; any float dtype, with any
      number of token axes. They are never stacked.
    heads: H, a divisor of the width: each slice of D / H channels has its own
      softmax, over scores <query, source> / rms(source) of which the product is
      the slice's. None is one softmax.
    rank: the number of last coordinates of a source that are its key; queries
      are as wide. None for all.
    eps: added to the mean square inside the norm.
    implementation: a backend by name; None takes the best that fits.

  Returns:
    The mixtures, in the dtype of `sources`, and their float32 log-normalisers
    (nats), which `depth_merge` needs to add a further source: [Q, *T], or
    [Q, *T, H] if `heads` is given. Kernels write each mixture to an array of
    its own: a compiled program that takes the stack of mixtures apart again has
    no stack.

  Raises:
    ValueError: the widths differ, or M is zero.
    NotImplementedError: the named backend cannot run these shapes here.
  """
  platforms.check_implementation(implementation)
  platforms.check_eps(eps)
  query, sources = _check(query, sources)
  given = f"query {query.shape} and sources {_shapes(sources)}"
  width = sources[0].shape[-1] if sources[0].ndim else 0
  options: dict[str, Any] = dict(eps=float(eps))
  options |= heads_lib.options(width, query.shape[1], heads, rank, given)
  query = query.astype(platforms.accumulator(query, *sources))
  if implementation == "reference":
    out, lse = reference.forward(query, sources, **options)
  else:
    # Saves the log-normalisers. The caller keeps the sources alive anyway.
    given = tuple(options.items())
    rule = dispatch.Rule("depth_attention", implementation, given, saved=(1,))
    out, lse = dispatch.differentiable(rule, query, sources)
  return jnp.stack(out), lse[..., None] if heads == 1 else lse


def _check(query: Any, sources: Any) -> tuple[jax.Array, tuple[jax.Array, ...]]:
  """The arguments as arrays."""
  query = jnp.asarray(query)
  sources = tuple(jnp.asarray(source) for source in sources)
  if query.ndim != 2 or 0 in query.shape:
    raise ValueError(
      f"query must be [Q, D] with Q and D >= 1, got {query.shape}"
      f" for sources {_shapes(sources)}"
    )
  if not sources:
    raise ValueError(
      f"sources is empty (M = 0); query {query.shape} needs at least one"
    )
  first = sources[0]
  for source in sources[1:]:
    if source.shape != first.shape or source.dtype != first.dtype:
      raise ValueError(
        "sources must agree in shape and dtype:"
        f" {first.shape} {first.dtype} and {source.shape} {source.dtype}"
      )
  for name, array in (("query", query), ("sources", first)):
    if not jnp.issubdtype(array.dtype, jnp.floating):
      raise ValueError(f"{name} must be floating point, got {array.dtype}")
  return query, sources


def _shapes(sources: tuple[jax.Array, ...]) -> str:
  return str([source.shape for source in sources])
