# SPDX-License-Identifier: Apache-2.0
"""What residual schemes are written with: states, parameters, marks.

A read is a linear map of the earlier outputs, given its coefficients. Those
that depend on the input (softmax weights, gates, the factor of a norm in the
stream) go through `coefficient`, so that analysis can hold them fixed.
"""

from collections.abc import Callable, Sequence
import contextlib
import functools
from typing import Any, NamedTuple

from flax import nnx
import jax
from jax import ad_checkpoint
from jax.experimental import layout
import jax.numpy as jnp

from attnres_jax.common import sharding
from attnres_jax.models import norm as norm_lib
from attnres_jax.models.residuals import base
from attnres_kernels import platforms

# The name by which activation checkpointing recognises the running state.
DEPTH_STATE = "depth_state"
_LANES = 128  # Of a TPU.


class BlockState(NamedTuple):
  """Completed blocks, and the open one.

  Attributes:
    blocks: b_0, b_1, ..., separate arrays in the model's dtype.
    partial_BTD: float32 sum of the open block's outputs; None at a boundary.
  """

  blocks: tuple[jax.Array, ...]
  partial_BTD: jax.Array | None


class Blocks(base.Residual):
  """A scheme whose state is a `BlockState`."""

  def init(self, embedding_BTD: jax.Array) -> BlockState:
    return BlockState((embedding_BTD.astype(self.dtype),), None)

  def take_apart(self, state: BlockState) -> tuple[Any, Any]:
    return state

  def put_together(self, blocks: tuple[jax.Array, ...], rest: Any) -> Any:
    return BlockState(blocks, rest)


class Values(base.Residual):
  """A scheme whose state is the list of all values, in the model's dtype."""

  scannable = False
  block_size = 1

  def init(self, embedding_BTD: jax.Array) -> tuple[jax.Array, ...]:
    return (embedding_BTD.astype(self.dtype),)

  def write(self, carry: Any, slot: Any, y_BTD: jax.Array) -> Any:
    return (*carry, save(y_BTD.astype(self.dtype)))

  def take_apart(self, state: Any) -> tuple[tuple[jax.Array, ...], Any]:
    return state, None

  def put_together(self, blocks: tuple[jax.Array, ...], rest: Any) -> Any:
    return blocks


def each(
  read: Any, function: Callable[[Any], jax.Array]
) -> jax.Array | base.QKV:
  """Applies `function` to the read, and to the value read if there is one."""
  h_BTD = function(read)
  if read.value is None:
    return h_BTD
  return base.QKV(h_BTD, h_BTD, function(read.value))


def parameter(
  axes: str, start: Any, *shape: int, decays: bool = True
) -> nnx.Param:
  """A float32 parameter that starts as an array, or as a number everywhere."""
  value = jnp.asarray(start, jnp.float32)
  value = jnp.broadcast_to(value, shape) if shape else value
  return nnx.Param(value, axes=axes, decays=decays)


_fixing = jax.make_user_context(False)


def fixed_coefficients() -> contextlib.AbstractContextManager:
  """A context in which derivatives do not pass through `coefficient`."""
  return _fixing(True)


def coefficients_are_fixed() -> bool:
  """Whether this runs in `fixed_coefficients`, where kernels have no place."""
  return _fixing.value


def coefficient(x: jax.Array) -> jax.Array:
  """Marks a factor of values that itself depends on values; else identity."""
  return jax.lax.stop_gradient(x) if coefficients_are_fixed() else x


class History:
  """The tokens before a chunk, for schemes that look back at them.

  Each call of `before` has one entry, in the order of the calls.

  Attributes:
    earlier: [B, count, D] for each call; None while it is not known how many
      calls there are, and all of them are zero.
    later: the same after the chunk.
  """

  def __init__(
    self,
    earlier: Sequence[jax.Array] | None = None,
    length_B: jax.Array | int = 0,
  ):
    """For a chunk of `length_B` tokens."""
    self.earlier = earlier
    self.later: list[jax.Array] = []
    self._length_B = jnp.asarray(length_B)

  def looking_back(self) -> contextlib.AbstractContextManager:
    """A context in which `before` returns these tokens."""
    return _history(self)

  def before(self, x_BTD: jax.Array, count: int) -> jax.Array:
    """See the function of this name."""
    batch, _, width = x_BTD.shape
    if self.earlier is None:
      self.later.append(jnp.zeros((batch, count, width), x_BTD.dtype))
      return self.later[-1]
    earlier_BWD = self.earlier[len(self.later)]
    both_BPD = jnp.concatenate([earlier_BWD, x_BTD], axis=1)
    index_BW = self._length_B[:, None] + jnp.arange(count)[None]
    self.later.append(
      jnp.take_along_axis(both_BPD, index_BW[..., None], axis=1)
    )
    return earlier_BWD


_history = jax.make_user_context(None)


def before(x_BTD: jax.Array, count: int) -> jax.Array:
  """The `count` tokens before x: zeros, except while decoding.

  For schemes with convolutions over tokens. What it is called with must not be
  part of a scan.
  """
  if _history.value is not None:
    return _history.value.before(x_BTD, count)
  batch, _, width = x_BTD.shape
  return jnp.zeros((batch, count, width), x_BTD.dtype)


def rms_norm(x: jax.Array, gain: jax.Array, eps: float) -> jax.Array:
  """Normalises x [..., D] within the stream, in the dtype of sums.

  The gain is [D], or has more of the last axes of x.
  """
  gain = jnp.reshape(gain, (1,) * (x.ndim - gain.ndim) + gain.shape)
  return x * coefficient(norm_lib.inverse_rms(x, eps)) * gain


def save(x: jax.Array) -> jax.Array:
  """Marks a running state, for activation checkpointing to save.

  Or an output from which it is computed again, or that the backward pass needs,
  such as for the gradient of its factor: otherwise its sublayer would be
  recomputed once more.
  """
  return ad_checkpoint.checkpoint_name(x, DEPTH_STATE)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def narrowed(x_BTD: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
  """What a kernel reads of a sum, in this dtype.

  Kernels have tokens in rows. If D is not a multiple of the lanes of a TPU,
  everything else has tokens in lanes there. Left to itself, the compiler widens
  the gradient that a kernel writes before it copies it.
  """
  return x_BTD.astype(dtype)


@narrowed.defjvp
def _narrowed_jvp(dtype, primals, tangents):
  (x_BTD,), (dx_BTD,) = primals, tangents
  dy_BTD = dx_BTD.astype(dtype)
  if platforms.ambient_platform() == "tpu" and x_BTD.shape[-1] % _LANES:
    # On each device, or the compiler may gather all rows.
    tokens = sharding.TOKENS
    dy_BTD = sharding.by_shards(_with_tokens_in_lanes, (tokens,), tokens)(
      dy_BTD
    )
  return narrowed(x_BTD, dtype), dy_BTD


def _with_tokens_in_lanes(x_BTD: jax.Array) -> jax.Array:
  if len(x_BTD) == 1:  # A single sequence has them in rows everywhere.
    return x_BTD
  return layout.with_layout_constraint(
    x_BTD, layout.Layout(major_to_minor=(0, 2, 1))
  )
