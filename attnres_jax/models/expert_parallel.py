# SPDX-License-Identifier: Apache-2.0
"""Routed experts, on one device or distributed: tokens are sent, weights stay.

Each device along the axis `expert` owns some experts and some tokens. Every
device gathers all tokens (an all-gather), applies its own experts to the tokens
that are routed to them, and returns the partial sums to the owners of the
tokens (a reduce-scatter in the dtype of activations). No token is dropped,
whatever the router does, and all shapes are static.

Along `fsdp`, each device stores a part of those experts, and gathers the others
before it uses them. They are sent as rows of one matrix, which a TPU receives
in the order in which its kernels read them.

With n devices along the axis, U tokens per device and width D, a device sends
(n - 1) U D numbers and returns as many, in the dtype of the activations. The
backward pass sends tokens and their gradients, and returns as many.

The work of a device, the rows of its experts, does depend on the router. Rows
are processed in pieces of a fixed size: one piece if experts are balanced, more
if not. So only one piece is in memory. The backward pass recomputes it. A
single device has one piece of all rows, and keeps its products.

The weight of a row multiplies its hidden units rather than its output. So the
rows that come in for the gradient need no weights, and the gradient of a weight
is a sum over the hidden units.

Axes: U tokens of this device; A = n U tokens of all devices; K experts of a
token; E experts of this device; P = A K pairs (token, expert); J rows of a
piece; G gate and up; C = 2 F, both side by side.
"""

from collections.abc import Callable
import dataclasses
import functools
import math
from typing import Any

import jax
from jax import ad_checkpoint
import jax.numpy as jnp

from attnres_jax import config as config_lib
from attnres_jax.common import precision
from attnres_jax.common import scopes
from attnres_jax.common import sharding
from attnres_jax.models import grouped_matmul
from attnres_jax.models import linear
from attnres_jax.models import mlp
from attnres_kernels import dispatch

# Rows of a piece, over the rows of a device if experts are balanced. More rows
# need a second piece, which reads the weights again.
_ROOM = 1.125


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def apply_experts(
  activation: config_lib.ActivationConfig,
  x_UD: jax.Array,
  weight_UK: jax.Array,
  expert_UK: jax.Array,
  sizes: jax.Array,
  gate_and_up_EGFD: jax.Array,
  down_EFD: jax.Array,
) -> jax.Array:
  """The weighted sum of each token's gated experts, on any device.

  Products are in the dtype of `x_UD`, sums and the gradients of weights in
  float32. On several devices, runs within `sharding.by_rows`.

  Args:
    activation: of the hidden units.
    x_UD: this device's tokens.
    weight_UK: of the outputs of their experts, float32.
    expert_UK: the experts, numbered across all devices.
    sizes: number of these tokens that each expert of all devices has.
    gate_and_up_EGFD: of this device's experts, or of the part that it has along
      `fsdp`; float32, like the next.
    down_EFD: see above.

  Returns:
    [U, D] in the dtype of `x_UD`.
  """
  arguments = x_UD, weight_UK, expert_UK, sizes, gate_and_up_EGFD, down_EFD
  return _forward(activation, *arguments)[0]


def _forward(
  activation: config_lib.ActivationConfig, x_UD: jax.Array,
  weight_UK: jax.Array, expert_UK: jax.Array, sizes: jax.Array,
  *weights: jax.Array,
) -> tuple[jax.Array, Any]:  # fmt: skip
  num_local = _num_local(weights[0], sizes)
  pairs = _Pairs.sort(expert_UK, weight_UK, sizes, num_local)
  x_AD = pairs.from_all(x_UD)
  gate_and_up_ECD, down_EFD = (
    _gather(w, num_local, x_UD.dtype) for w in weights
  )

  def one_piece(piece, y_AD):
    x_JD = piece.rows_of(x_AD)
    both_JC = piece.multiply(x_JD, gate_and_up_ECD, transposed=True)
    hidden_JF = piece.units(activation, both_JC, piece.weight_J)
    return piece.add(y_AD, piece.multiply(hidden_JF, down_EFD)), both_JC

  zeros_AD = jnp.zeros(x_AD.shape, weight_UK.dtype)
  y_AD, both_JC = one_piece(pairs.piece(0), zeros_AD)
  y_AD = pairs.more_pieces(lambda *args: one_piece(*args)[0], y_AD)
  kept = None
  if pairs.devices == 1:
    kept = ad_checkpoint.checkpoint_name(both_JC, linear.PRODUCT)
  residuals = x_UD, weight_UK, expert_UK, sizes, weights, kept
  return pairs.to_owners(y_AD, x_UD), residuals


def _backward(
  activation: config_lib.ActivationConfig, residuals: Any, dy_UD: jax.Array
) -> tuple[jax.Array | None, ...]:
  x_UD, weight_UK, expert_UK, sizes, weights, kept = residuals
  num_local = _num_local(weights[0], sizes)
  pairs = _Pairs.sort(expert_UK, weight_UK, sizes, num_local)
  x_AD, dy_AD = pairs.from_all(x_UD), pairs.from_all(dy_UD)
  gate_and_up_ECD, down_EFD = (
    _gather(w, num_local, x_UD.dtype) for w in weights
  )

  def one_piece(piece, sums, both_JC=None):
    dx_AD, dweight_P, dweights = sums
    x_JD, dy_JD = piece.rows_of(x_AD), piece.rows_of(dy_AD)
    if both_JC is None:
      both_JC = piece.multiply(x_JD, gate_and_up_ECD, transposed=True)
    units = functools.partial(piece.units, activation)
    hidden_JF, pull = jax.vjp(units, both_JC, piece.weight_J)
    dboth_JC, dweight_J = pull(piece.multiply(dy_JD, down_EFD, transposed=True))
    dx_JD = piece.multiply(dboth_JC, gate_and_up_ECD)
    factors = (dboth_JC, x_JD), (hidden_JF, dy_JD)
    return (
      piece.add(dx_AD, dx_JD),
      piece.put(dweight_P, dweight_J),
      [
        grouped_matmul.weight_gradient(*factor, piece.sizes_E, dweight)
        for factor, dweight in zip(factors, dweights)
      ],
    )

  # The first piece, which the loop is not about, makes those of weights.
  zeros = [
    jnp.zeros(shape, weight_UK.dtype)
    for shape in (x_AD.shape, pairs.weight_P.shape)
  ]
  sums = one_piece(pairs.piece(0), (*zeros, [None] * 2), kept)
  dx_AD, dweight_P, dweights = pairs.more_pieces(one_piece, sums)
  dweight_AK = jnp.reshape(dweight_P, (-1, expert_UK.shape[1]))
  if pairs.devices > 1:
    dweight_AK = jax.lax.psum_scatter(dweight_AK, sharding.EXPERT, tiled=True)
  return (
    pairs.to_owners(dx_AD, x_UD),
    dweight_AK,
    None,
    None,
    *(_own_part(d, weight) for d, weight in zip(dweights, weights)),
  )


apply_experts.defvjp(_forward, _backward)


def _num_local(weight: jax.Array, sizes: jax.Array) -> int:
  """The number of experts of this device, of which it may store a part."""
  if weight.shape[0] == sizes.shape[0]:
    return sizes.shape[0]
  return sizes.shape[0] // jax.lax.axis_size(sharding.EXPERT)


def _gather(weight: jax.Array, num_local: int, dtype: Any) -> jax.Array:
  """All of this device's experts, as matrices [E, rows, D] for products."""
  rows = jnp.reshape(weight, (-1, weight.shape[-1]))
  cut = sharding.cut_dim(weight, 0, num_local)
  rows = sharding.gather_parts(rows, cut, dtype)
  return jnp.reshape(rows, (num_local, -1, weight.shape[-1]))


def _own_part(dweight: jax.Array, weight: jax.Array) -> jax.Array:
  """This device's part of the gradient of what `_gather` returns."""
  rows = jnp.reshape(dweight, (-1, dweight.shape[-1]))
  cut = sharding.cut_dim(weight, 0, dweight.shape[0])
  rows = sharding.sum_parts(rows, cut)
  return jnp.reshape(rows, weight.shape).astype(weight.dtype)


@dataclasses.dataclass(frozen=True)
class _Piece:
  """Some pairs of this device's experts, sorted by expert.

  Attributes:
    token_J: index of the token; A for padding, which comes last.
    pair_J: index into [A, K], flattened; A K for padding.
    weight_J: of their outputs.
    sizes_E: number of pairs of each expert.
    row_UK: the row of each pair, if the piece has all pairs; else None.
  """

  token_J: jax.Array
  pair_J: jax.Array
  weight_J: jax.Array
  sizes_E: jax.Array
  row_UK: jax.Array | None

  def rows_of(self, x_AD: jax.Array) -> jax.Array:
    """The rows of the tokens; padding may be anything."""
    return x_AD.at[self.token_J].get(mode="clip")

  def multiply(
    self, x_JD: jax.Array, weight: jax.Array, transposed: bool = False
  ) -> jax.Array:
    """Rows times the matrices of their experts; padding may be anything."""
    return grouped_matmul.multiply(
      x_JD, weight, self.sizes_E, transposed=transposed
    )

  def units(
    self,
    activation: config_lib.ActivationConfig,
    both_JC: jax.Array,
    weight_J: jax.Array,
  ) -> jax.Array:
    """Weighted hidden units, with zeros for padding."""
    real_J = jnp.arange(both_JC.shape[0]) < jnp.sum(self.sizes_E)
    gate, up = (
      jnp.where(real_J[:, None], precision.widen(a), 0.0)
      for a in jnp.split(both_JC, 2, axis=1)
    )
    hidden_JF = weight_J[:, None] * mlp.units(activation, gate, up)
    return hidden_JF.astype(both_JC.dtype)

  def add(self, sum_AD: jax.Array, rows_JD: jax.Array) -> jax.Array:
    """Adds rows to their tokens, in the dtype of the sum."""
    if self.row_UK is not None:  # A gather, where nothing is to be added to.
      return jnp.sum(rows_JD[self.row_UK], axis=1, dtype=sum_AD.dtype)
    # The compiler would sort copies in the wide dtype.
    order_J = jnp.argsort(self.token_J)
    return sum_AD.at[self.token_J[order_J]].add(
      rows_JD[order_J].astype(sum_AD.dtype),
      mode="drop",
      indices_are_sorted=True,
    )

  def put(self, values_P: jax.Array, values_J: jax.Array) -> jax.Array:
    """Scatters values of the pairs to their places."""
    if self.row_UK is not None:
      return jnp.reshape(values_J[self.row_UK], -1)
    return values_P.at[self.pair_J].set(
      values_J, mode="drop", unique_indices=True
    )


@dataclasses.dataclass(frozen=True)
class _Pairs:
  """All pairs; the pairs of this device's experts come first.

  Attributes:
    order_P: indices into [A, K], flattened; on several devices, padded by a
      piece.
    weight_P: of the outputs, in the order of [A, K].
    stops_E: end of the pairs of each expert of this device.
    top_k: K.
    room: J.
    devices: n.
  """

  order_P: jax.Array
  weight_P: jax.Array
  stops_E: jax.Array
  top_k: int
  room: int
  devices: int

  @classmethod
  def sort(
    cls,
    expert_UK: jax.Array,
    weight_UK: jax.Array,
    sizes: jax.Array,
    num_local: int,
  ) -> "_Pairs":
    """Collects the parts of all devices, with `num_local` experts each."""
    room, top_k = expert_UK.size, expert_UK.shape[1]
    devices = sizes.shape[0] // num_local
    if devices == 1:
      order_P = jnp.argsort(jnp.reshape(expert_UK, -1), stable=True)
      weight_P = jnp.reshape(weight_UK, -1)
      return cls(order_P, weight_P, jnp.cumsum(sizes), top_k, room, 1)
    at_most = devices * expert_UK.shape[0] * min(top_k, num_local)
    room = min(math.ceil(_ROOM * room), at_most)
    first = jax.lax.axis_index(sharding.EXPERT) * num_local
    sizes = jax.lax.psum(sizes, sharding.EXPERT)
    expert_P = jnp.reshape(_from_all(expert_UK), -1) - first
    expert_P = jnp.where(
      (expert_P >= 0) & (expert_P < num_local), expert_P, num_local
    )
    return cls(
      jnp.pad(jnp.argsort(expert_P, stable=True), (0, room)),
      jnp.reshape(_from_all(weight_UK), -1),
      jnp.cumsum(jax.lax.dynamic_slice_in_dim(sizes, first, num_local)),
      top_k,
      room,
      devices,
    )

  def piece(self, i: Any) -> _Piece:
    start, num_pairs = i * self.room, self.weight_P.shape[0]
    pair_J = jax.lax.dynamic_slice_in_dim(self.order_P, start, self.room)
    real_J = start + jnp.arange(self.room) < self.stops_E[-1]
    stops_E = jnp.clip(self.stops_E - start, 0, self.room)
    row_UK = None
    if self.devices == 1:
      row_UK = jnp.reshape(jnp.argsort(self.order_P), (-1, self.top_k))
    return _Piece(
      jnp.where(real_J, pair_J // self.top_k, num_pairs // self.top_k),
      jnp.where(real_J, pair_J, num_pairs),
      jnp.where(real_J, self.weight_P[pair_J], 0),
      jnp.diff(stops_E, prepend=0),
      row_UK,
    )

  def more_pieces(self, body: Callable[..., Any], carry: Any) -> Any:
    """Runs `body(piece, carry)` for all pieces after the first."""
    # Usually there is none, and then nothing has to be added up.
    if self.devices == 1:
      return carry
    num_pieces = -(-self.stops_E[-1] // self.room)
    one = lambda i, carry: body(self.piece(i), carry)
    with scopes.mean_trips(0):
      return jax.lax.fori_loop(1, num_pieces, one, carry)

  def from_all(self, x: jax.Array) -> jax.Array:
    """Concatenates the arrays of all devices along `expert`."""
    return x if self.devices == 1 else _from_all(x)

  def to_owners(self, sum_AD: jax.Array, x_UD: jax.Array) -> jax.Array:
    """Sends partial sums to the owners of the tokens, which add them up."""
    low_AD = sum_AD.astype(x_UD.dtype)
    if self.devices == 1:
      return low_AD
    return dispatch.by_platform((low_AD,), _sum_wide, tpu=_sum, cuda=_sum)


def _sum(parts_AD: jax.Array) -> jax.Array:
  return jax.lax.psum_scatter(parts_AD, sharding.EXPERT, tiled=True)


def _sum_wide(parts_AD: jax.Array) -> jax.Array:
  """On CPU, whose compiler ends on sums of bfloat16 over devices."""
  return _sum(precision.widen(parts_AD)).astype(parts_AD.dtype)


def _from_all(x: jax.Array) -> jax.Array:
  return jax.lax.all_gather(x, sharding.EXPERT, tiled=True)
