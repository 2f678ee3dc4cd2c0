# SPDX-License-Identifier: Apache-2.0
"""The public function of depth attention: checks, gradient rule, backend.

Phase 1 of Algorithm 1 in Attention Residuals (arXiv:2603.15031): all queries
of a block attend to the sources that exist when the block opens. One backward
pass per call reads every source once and recomputes the scores from it.
"""

from collections.abc import Sequence
import functools
import operator

import jax
import jax.numpy as jnp
from jaxtyping import Array
from jaxtyping import Float
from jaxtyping import Int32

from attnres_kernels import dispatch
from attnres_kernels.depth_attention import reference


def depth_attention(
  query: Float[Array, "Q R"],
  sources: Sequence[Float[Array, "*T D"]] | Float[Array, "M *T D"],
  *,
  num_sources: int | Int32[Array, ""] | None = None,
  heads: int | None = None,
  rank: int | None = None,
  eps: float = 1e-6,
  norm_gain: Float[Array, " D"] | None = None,
  norm_eps: float = 1e-6,
  apart: bool = False,
  implementation: dispatch.Implementation | None = None,
) -> tuple[Float[Array, "Q *T D"], Float[Array, " Q *TH"]]:
  """Mixes earlier outputs with learned queries (arXiv:2603.15031, Eq. 2-4).

  Per token and query: a softmax over the M sources of query . rms_norm(source).

  Args:
    query: pseudo-queries folded with the key-norm gain, float32, as wide as
      the sources; zeros give the plain mean.
    sources: embedding first, then earlier outputs; any float dtype, with any
      number of token axes. One array is a bank, of which the first
      `num_sources` slots are valid; a sequence is never stacked.
    num_sources: how many slots of a bank are valid; may be traced. The other
      slots may contain anything, and their gradient is zero.
    heads: H, a divisor of the width: each slice of D / H channels has its own
      softmax, over scores <query, source> / rms(source) of which the product is
      the slice's. None is one softmax.
    rank: the number of last coordinates of a source that are its key; queries
      are as wide. None for all.
    eps: added to the mean square inside the norm.
    norm_gain: the first mixture is returned as `rms_norm` with this gain, which
      then costs no pass over memory: for a sublayer that merges no further
      source. Its log-normaliser is that of the mixture. Not for banks, several
      heads, or on GPUs: there, `rms_norm` of the mixture is the same.
    norm_eps: added to the mean square of the first mixture.
    apart: whether a kernel writes each mixture to an array of its own, which
      are then stacked, and likewise reads the gradient of each. Compilers
      remove the stack if it is cut again at once, instead of copying each
      mixture out of it; otherwise it is a copy.
    implementation: a backend by name; None takes the best that fits.

  Returns:
    The mixtures, in the dtype of `sources`, and their float32 log-normalisers
    (nats), which `depth_merge` needs to add a further source: [Q, *T], or
    [Q, *T, H] if `heads` is given. With no valid source the mixture is 0 and
    the log-normaliser -inf.

  Raises:
    ValueError: the widths differ, M is zero, a concrete count is out of range,
      or there is a gain with a bank or several heads.
    NotImplementedError: the named backend cannot run these shapes here.
  """
  dispatch.check_implementation(implementation)
  dispatch.check_eps(eps)
  query, sources, count = _check(query, sources, num_sources, rank)
  options = _options(eps, sources, heads, rank)
  query = query.astype(dispatch.accumulator(query, *jax.tree.leaves(sources)))
  gains = ()
  if norm_gain is not None:
    dispatch.check_eps(norm_eps, "norm_eps")
    _check_gain(norm_gain, sources, heads)
    gains = (norm_gain.astype(query.dtype),)
    options = (*options, ("norm_eps", float(norm_eps)))
  if apart and implementation != "reference":
    options = (*options, ("apart", True))
  arguments = query, sources, count, *gains
  if implementation == "reference":
    out, lse = reference.attend(*arguments, **dict(options))
  else:
    out, lse = _attend(options, implementation, *arguments)
    if isinstance(out, tuple):
      out = jnp.concatenate(out)
  return out, lse[..., None] if heads == 1 else lse


def depth_attention_vjp(
  query: Float[Array, "Q R"],
  sources: Sequence[Float[Array, "*T D"]] | Float[Array, "M *T D"],
  lse: Float[Array, " Q *TH"],
  dout: Float[Array, "Q *T D"],
  dlse: Float[Array, " Q *TH"],
  *,
  num_sources: int | Int32[Array, ""] | None = None,
  heads: int | None = None,
  rank: int | None = None,
  accumulate: Sequence[Float[Array, "*T D"]]
  | Float[Array, "M *T D"]
  | None = None,
  eps: float = 1e-6,
  implementation: dispatch.Implementation | None = None,
) -> tuple[
  Float[Array, "Q R"],
  tuple[Float[Array, "*T D"], ...] | Float[Array, "M *T D"],
]:
  """The backward pass of `depth_attention`, for callers that schedule it.

  A block representation is a source of every later block, so its gradient is a
  sum. Given the sum so far, the backward pass writes the new sum instead of one
  more term, which saves a pass over memory.

  Args:
    query: as in `depth_attention`.
    sources: as in `depth_attention`.
    lse: its second result.
    dout: cotangent of its first result.
    dlse: cotangent of its second result.
    num_sources: as in `depth_attention`.
    heads: as in `depth_attention`.
    rank: as in `depth_attention`.
    accumulate: the gradients of the sources so far, in the structure of
      `sources`; any float dtype, such as float32 for bfloat16 sources. Updated
      in place if the compiler finds that they are not used afterwards.
    eps: as in `depth_attention`.
    implementation: as in `depth_attention`.

  Returns:
    The gradient of `query`, and one per source in the structure of `sources`,
    in the dtype of `accumulate` or, without it, of `sources`.

  Raises:
    ValueError: the shapes do not fit together.
    NotImplementedError: the named backend cannot run these shapes here.
  """
  dispatch.check_implementation(implementation)
  dispatch.check_eps(eps)
  query, sources, count = _check(query, sources, num_sources, rank)
  options = _options(eps, sources, heads, rank)
  *tokens, width = sources[0].shape
  of_heads = () if heads is None else (heads,)
  for name, array, shape in (
    ("lse", lse, (query.shape[0], *tokens, *of_heads)),
    ("dout", dout, (query.shape[0], *tokens, width)),
    ("dlse", dlse, (query.shape[0], *tokens, *of_heads)),
  ):
    if array.shape != shape:
      raise ValueError(
        f"{name} must be {shape} for query {query.shape} and sources"
        f" {_shapes(sources)}, got {array.shape}"
      )
  if accumulate is not None:
    if isinstance(accumulate, list):
      accumulate = tuple(accumulate)
    if _shapes(accumulate) != _shapes(sources):
      raise ValueError(
        f"accumulate {_shapes(accumulate)} must be like the sources"
        f" {_shapes(sources)}"
      )
  query = query.astype(dispatch.accumulator(query, *jax.tree.leaves(sources)))
  if heads == 1:
    lse, dlse = jnp.squeeze(lse, -1), jnp.squeeze(dlse, -1)
  old = () if accumulate is None else (accumulate,)
  return _backward(
    options, implementation, query, sources, count, lse, dout, dlse, *old
  )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend(options, implementation, *arguments):
  found, _ = _attend_forward(options, implementation, *arguments)
  return found


def _attend_forward(options, implementation, *arguments):
  out_QTD, lse_QT, *inverses = dispatch.call(
    "depth_attention", "forward", implementation, *arguments, **dict(options)
  )
  # The caller keeps the sources alive anyway; the mixtures are not needed
  # again, not even that of a norm, but for its rms.
  return (out_QTD, lse_QT), (arguments, lse_QT, *inverses)


def _attend_backward(options, implementation, residuals, cotangents):
  (query, sources, count, *gains), lse, *inverses = residuals
  arguments = query, sources, count, lse, *cotangents
  if gains:
    arguments = *arguments, None, *gains, *inverses
  dquery, dsources, *dgains = _backward(options, implementation, *arguments)
  return dquery, dsources, None, *dgains


def _backward(options, implementation, *args):
  options = [option for option in options if option[0] != "apart"]
  return dispatch.call(
    "depth_attention", "backward", implementation, *args, **dict(options)
  )


_attend.defvjp(_attend_forward, _attend_backward)


def _options(eps, sources, heads, rank):
  """The static options of a backend, hashable; those of one head are few."""
  width = sources[0].shape[-1]
  if heads is not None and (heads < 1 or width % heads):
    raise ValueError(f"heads={heads} must divide the width {width}")
  if rank is not None and (heads or 1) > 1:
    raise ValueError(f"rank={rank} needs one head, got heads={heads}")
  options = dict(eps=float(eps))
  if heads is not None and heads > 1:
    options["heads"] = heads
  if rank is not None:
    options["rank"] = rank
  return tuple(options.items())


def _check(query, sources, num_sources, rank):
  query = jnp.asarray(query)
  if query.ndim != 2 or 0 in query.shape:
    raise ValueError(
      f"query must be [Q, D] with Q and D >= 1, got {query.shape}"
      f" for sources {_shapes(sources)}"
    )
  if isinstance(sources, (list, tuple)):
    sources = tuple(jnp.asarray(source) for source in sources)
    if not sources:
      raise ValueError(
        f"sources is empty (M = 0); query {query.shape} needs at least one"
      )
    if num_sources is not None:
      raise ValueError(
        f"num_sources={num_sources} counts the slots of a bank [M, ..., D];"
        f" here sources are {len(sources)} separate arrays {_shapes(sources)}"
      )
    for source in sources[1:]:
      if source.shape != sources[0].shape or source.dtype != sources[0].dtype:
        raise ValueError(
          "sources must agree in shape and dtype:"
          f" {sources[0].shape} {sources[0].dtype}"
          f" and {source.shape} {source.dtype}"
        )
    first, count = sources[0], None
  else:
    sources = jnp.asarray(sources)
    if sources.ndim < 2:
      raise ValueError(
        f"a bank of sources must be [M, ..., D], got {sources.shape}"
        f" for query {query.shape}"
      )
    if sources.shape[0] == 0:
      raise ValueError(
        f"the bank {sources.shape} has M = 0 slots; query {query.shape}"
        " needs at least one"
      )
    first = sources[0] if sources.ndim == 2 else sources
    count = _check_count(num_sources, sources.shape)
  if rank is not None and not 1 <= rank <= first.shape[-1]:
    raise ValueError(
      f"rank={rank} must be from 1 to the width of sources {_shapes(sources)}"
    )
  key_width = first.shape[-1] if first.ndim and rank is None else rank
  if first.ndim < 1 or key_width != query.shape[1]:
    raise ValueError(
      f"widths differ: query {query.shape} and sources {_shapes(sources)}"
      + ("" if rank is None else f" with rank={rank}")
    )
  for name, array in (("query", query), ("sources", first)):
    if not jnp.issubdtype(array.dtype, jnp.floating):
      raise ValueError(f"{name} must be floating point, got {array.dtype}")
  return query, sources, count


def _check_gain(gain, sources, heads):
  if not isinstance(sources, tuple) or (heads or 1) > 1:
    raise ValueError(
      "norm_gain needs separate sources and one head, got"
      f" {_shapes(sources)} and heads={heads}; use rms_norm of the mixture"
    )
  if gain.shape != sources[0].shape[-1:]:
    raise ValueError(
      f"norm_gain must be {sources[0].shape[-1:]}, got {gain.shape}"
    )


def _check_count(num_sources, bank_shape):
  if num_sources is None:
    return None
  if isinstance(num_sources, jax.core.Tracer):
    count = num_sources
  else:
    try:
      concrete = operator.index(num_sources)
    except TypeError as error:
      raise ValueError(
        f"num_sources must be an integer, got {num_sources!r}"
      ) from error
    if not 0 <= concrete <= bank_shape[0]:
      raise ValueError(
        f"num_sources={concrete} is out of range for the bank {bank_shape}:"
        f" 0 to {bank_shape[0]}"
      )
    count = concrete
  count = jnp.asarray(count)
  if count.ndim or not jnp.issubdtype(count.dtype, jnp.integer):
    raise ValueError(
      "num_sources must be an integer scalar,"
      f" got {count.dtype} {count.shape} for the bank {bank_shape}"
    )
  return count.astype(jnp.int32)


def _shapes(sources) -> str:
  if isinstance(sources, (list, tuple)):
    return str([jnp.shape(source) for source in sources])
  return str(jnp.shape(sources))
