# SPDX-License-Identifier: Apache-2.0
"""The public functions of Kimi delta attention: checks and backend.

Kimi Linear's recurrence, per head with a state S of [K, V] and alpha = exp(g):

  S_t = (I - beta_t k_t k_t^T) diag(alpha_t) S_{t-1} + beta_t k_t v_t^T
  o_t = scale S_t^T q_t
"""

from collections.abc import Sequence
import operator
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array
from jaxtyping import Float
from jaxtyping import Int

from attnres_kernels import dispatch
from attnres_kernels import platforms
from attnres_kernels.kda import reference

Save = Literal["chunks", "arguments"]


def kda(
  q: Float[Array, "B T H K"],
  k: Float[Array, "B T H K"],
  v: Float[Array, "B T H V"],
  g: Float[Array, "B T H K"],
  beta: Float[Array, "B T H"],
  *,
  scale: float | None = None,
  initial_state: Float[Array, "B H K V"] | None = None,
  segment_ids: Int[Array, "B T"] | None = None,
  chunk_size: int = 64,
  save: Save = "chunks",
  implementation: platforms.Implementation | None = None,
) -> tuple[Float[Array, "B T H V"], Float[Array, "B H K V"]]:
  """Runs the gated delta rule over a sequence.

  Args:
    q: queries; this function does not normalise them.
    k: keys, not normalised either; their length should not exceed 1 where beta
      is near 1, or the recurrence itself grows.
    v: values.
    g: log-decay per channel, at most 0, in float32; -inf resets the channel.
    beta: how much of a token's error is corrected, 0 to 1.
    scale: factor of the output; `K ** -0.5` by default.
    initial_state: the state before the first token; zeros by default.
    segment_ids: where the id changes, the state is reset to zero, so that
      documents packed into one row do not see each other. The first segment
      continues from `initial_state`.
    chunk_size: tokens per chunk; affects the cost, not the result.
    save: what the TPU kernels keep for the backward pass. `chunks` are the
      arguments except v, and of every chunk the values written, the state
      before it, its scores and the inverse of its system; `arguments` are the
      arguments alone, from which the backward pass finds the chunks again. The
      other backends keep the arguments (the reference, every state).
    implementation: a backend by name; None takes the best that fits.

  Returns:
    The outputs in the dtype of `v`, and the state after the last token, in
    float32 (float64 if any input is).

  Raises:
    ValueError: shapes or dtypes do not fit together, or a name is unknown.
    NotImplementedError: the named backend cannot run these shapes here.
  """
  platforms.check_implementation(implementation)
  if save not in get_args(Save):
    raise ValueError(f"save={save!r} is not one of {get_args(Save)}")
  arrays = [jnp.asarray(x) for x in (q, k, v, g, beta)]
  _check(("q", "k", "v", "g", "beta"), arrays, "BTHK BTHK BTHV BTHK BTH")
  q, k, v, g, beta = arrays
  chunk_size = operator.index(chunk_size)
  if chunk_size < 1 or q.shape[1] < 1:
    raise ValueError(
      f"chunk_size={chunk_size} and the {q.shape[1]} tokens of q {q.shape}"
      " must be at least 1"
    )
  dtype = platforms.accumulator(*arrays, initial_state)
  state = _state(initial_state, arrays, dtype)
  scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
  g = _with_resets(g.astype(dtype), segment_ids)
  arguments = q, k, v, g, beta.astype(dtype), state
  if implementation == "reference":
    return reference.forward(*arguments, scale=scale, chunk_size=chunk_size)
  options = ("scale", scale), ("chunk_size", chunk_size), ("save", save)
  rule = dispatch.Rule("kda", implementation, options)
  return dispatch.choose(rule, "kda", arguments)(*arguments)


def kda_step(
  q: Float[Array, "B H K"],
  k: Float[Array, "B H K"],
  v: Float[Array, "B H V"],
  g: Float[Array, "B H K"],
  beta: Float[Array, "B H"],
  state: Float[Array, "B H K V"],
  *,
  scale: float | None = None,
) -> tuple[Float[Array, "B H V"], Float[Array, "B H K V"]]:
  """Runs the recurrence for one token, for decoding.

  Arguments and results are as in `kda`, of one token and its states before and
  after.
  """
  arrays = [jnp.asarray(x) for x in (q, k, v, g, beta, state)]
  names = ("q", "k", "v", "g", "beta", "state")
  _check(names, arrays, "BHK BHK BHV BHK BH BHKV")
  q, k, v, g, beta, state = arrays
  scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
  state = state.astype(platforms.accumulator(*arrays))
  o, state = reference.step(q, k, v, g, beta, state, scale=scale)
  return o.astype(v.dtype), state


def _check(
  names: Sequence[str], arrays: Sequence[jax.Array], axes: str
) -> None:
  """Checks that every letter stands for the same size in all arrays."""
  sizes = {}
  shapes = ", ".join(f"{n} {x.shape}" for n, x in zip(names, arrays))
  for name, array, letters in zip(names, arrays, axes.split()):
    expected = f"{name} must be [{', '.join(letters)}]"
    if array.ndim != len(letters):
      raise ValueError(f"{expected}, got {array.shape} among {shapes}")
    for letter, size in zip(letters, array.shape):
      if sizes.setdefault(letter, size) != size:
        raise ValueError(f"{expected} with {letter}={sizes[letter]}: {shapes}")
      if letter in "KV" and not size:
        raise ValueError(f"{expected} with {letter} >= 1: {shapes}")
    if not jnp.issubdtype(array.dtype, jnp.floating):
      raise ValueError(f"{name} must be floating point, got {array.dtype}")


def _state(
  state: jax.Array | None, arrays: Sequence[jax.Array], dtype: Any
) -> jax.Array:
  q, v = arrays[0], arrays[2]
  shape = (q.shape[0], q.shape[2], q.shape[3], v.shape[3])
  if state is None:
    return jnp.zeros(shape, dtype)
  if state.shape != shape:
    raise ValueError(
      f"initial_state must be [B, H, K, V] = {shape}, got {state.shape} for"
      f" q {q.shape}, v {v.shape}"
    )
  return state.astype(dtype)


def _with_resets(g: jax.Array, segment_ids: Any) -> jax.Array:
  """Resets the state by setting the log-decay of all channels to -inf."""
  if segment_ids is None:
    return g
  segment_ids = jnp.asarray(segment_ids)
  if segment_ids.shape != g.shape[:2]:
    raise ValueError(
      f"segment_ids must be [B, T] = {g.shape[:2]}, got {segment_ids.shape}"
      f" for g {g.shape}"
    )
  if not jnp.issubdtype(segment_ids.dtype, jnp.integer):
    raise ValueError(f"segment_ids must be integers, got {segment_ids.dtype}")
  changed = segment_ids[:, 1:] != segment_ids[:, :-1]
  reset = jnp.pad(changed, [(0, 0), (1, 0)])
  return jnp.where(reset[..., None, None], -jnp.inf, g)
