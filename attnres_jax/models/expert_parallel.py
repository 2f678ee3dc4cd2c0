# SPDX-License-Identifier: Apache-2.0
"""Experts distributed over devices: tokens are sent, weights stay.

Each device along the axis `expert` owns some experts and some tokens. Every
device gathers all tokens (an all-gather), applies its own experts to the tokens
that are routed to them, and returns the partial sums to the owners of the
tokens (an all-to-all), which add them up in float32. No token is dropped,
whatever the router does, and all shapes are static.

With n devices along the axis, U tokens per device and width D, a device sends
(n - 1) U D numbers and returns as many, in the dtype of the activations. The
backward pass sends tokens and their gradients, and returns as many. An exchange
of (token, expert) pairs (`jax.lax.ragged_all_to_all`) would send K U D (n - 1)
/ n each way, which is more as long as n < K. It would still need memory for the
worst case, n times the average, and its bytes would depend on the router.

The work of a device, the rows of its experts, does depend on the router. Rows
are processed in pieces of a fixed size: one piece if experts are balanced, more
if not. So only one piece is in memory. The backward pass recomputes it.

Axes: U tokens of this device; A = n U tokens of all devices; K experts of a
token; E experts of this device; J rows of a piece.
"""

from collections.abc import Callable, Sequence
import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from attnres_jax import config as config_lib
from attnres_jax.common import precision
from attnres_jax.common import scopes
from attnres_jax.common import sharding
from attnres_jax.models import grouped_matmul
from attnres_jax.models import mlp

# Rows of a piece, over the rows of a device if experts are balanced. More rows
# need a second piece, which reads the weights again.
_ROOM = 1.125


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def apply_experts(
  activation: config_lib.ActivationConfig,
  x_UD: jax.Array,
  weight_UK: jax.Array,
  expert_UK: jax.Array,
  gate_EDF: jax.Array,
  up_EDF: jax.Array,
  down_EFD: jax.Array,
) -> jax.Array:
  """The weighted sum of each token's gated experts, on any device.

  Runs within `sharding.by_rows`. Products are in the dtype of `x_UD`, sums and
  the gradients of weights in float32.

  Tokens are this device's, and so are the float32 matrices of E experts; `fsdp`
  may cut their side D. Experts of tokens are numbered across all devices.
  Returns [U, D] in the dtype of `x_UD`.
  """
  arguments = x_UD, weight_UK, expert_UK, gate_EDF, up_EDF, down_EFD
  return _forward(activation, *arguments)[0]


def _forward(
  activation: config_lib.ActivationConfig, x_UD: jax.Array,
  weight_UK: jax.Array, expert_UK: jax.Array, *weights: jax.Array,
) -> tuple[jax.Array, Any]:  # fmt: skip
  x_AD = _from_all(x_UD)
  gate, up, down = _gather(weights, x_UD)
  pairs = _Pairs.sort(expert_UK, weight_UK, down.shape[0])

  def add_piece(i, y_AD):
    piece = pairs.piece(i)
    x_JD = piece.rows_of(x_AD)
    gate_JF, up_JF = piece.multiply(x_JD, gate), piece.multiply(x_JD, up)
    hidden_JF = piece.real(units(activation, gate_JF, up_JF))
    y_JD = piece.multiply(hidden_JF, down)
    return piece.add(y_AD, y_JD, piece.weight_J)

  y_AD = pairs.for_pieces(add_piece, jnp.zeros(x_AD.shape, weight_UK.dtype))
  return _to_owners(y_AD, x_UD), (x_UD, weight_UK, expert_UK, weights)


def _backward(
  activation: config_lib.ActivationConfig, residuals: Any, dy_UD: jax.Array
) -> tuple[jax.Array | None, ...]:
  x_UD, weight_UK, expert_UK, weights = residuals
  x_AD, dy_AD = _from_all(x_UD), _from_all(dy_UD)
  gate, up, down = _gather(weights, x_UD)
  pairs = _Pairs.sort(expert_UK, weight_UK, down.shape[0])
  # With the gradients of gate and up side by side, one product gives that of
  # the rows, where the sum of two would be read and written again.
  gate_and_up = jnp.concatenate([gate, up], axis=2)

  def add_piece(i, sums):
    dx_AD, dweight_P, dweights = sums
    piece = pairs.piece(i)
    weight_J1, sizes_E = piece.weight_J[:, None], piece.sizes_E
    x_JD, dy_JD = piece.rows_of(x_AD), piece.rows_of(dy_AD)
    gate_JF, up_JF = piece.multiply(x_JD, gate), piece.multiply(x_JD, up)
    hidden_JF = piece.real(units(activation, gate_JF, up_JF))
    # Before weighting, since its product with the gradient gives the gradient
    # of the weights.
    dhidden_JF = piece.multiply(dy_JD, down, transposed=True)
    dhidden_JF = dhidden_JF.astype(weight_UK.dtype)
    dweight_J = jnp.sum(dhidden_JF * precision.widen(hidden_JF), axis=1)
    _, pull = jax.vjp(
      functools.partial(mlp.units, activation),
      *map(precision.widen, (gate_JF, up_JF)),
    )
    doutputs = pull(weight_J1 * dhidden_JF)
    doutputs = [piece.real(d.astype(x_JD.dtype)) for d in doutputs]
    dboth_JH = jnp.concatenate(doutputs, axis=1)
    dy_JD = (weight_J1 * precision.widen(dy_JD)).astype(x_JD.dtype)
    factors = *((x_JD, d) for d in doutputs), (hidden_JF, dy_JD)
    dx_JD = piece.multiply(dboth_JH, gate_and_up, transposed=True)
    return (
      piece.add(dx_AD, dx_JD, jnp.ones_like(piece.weight_J)),
      piece.put(dweight_P, dweight_J),
      [
        grouped_matmul.weight_gradient(rows_J, d_J, sizes_E, dweight)
        for (rows_J, d_J), dweight in zip(factors, dweights)
      ],
    )

  # The first piece, which the loop is not about, makes those of weights.
  zeros = [
    jnp.zeros(shape, weight_UK.dtype)
    for shape in (x_AD.shape, pairs.weight_P.shape)
  ]
  dx_AD, dweight_P, dweights = pairs.for_pieces(add_piece, (*zeros, [None] * 3))
  dweight_AK = jnp.reshape(dweight_P, (-1, expert_UK.shape[1]))
  return (
    _to_owners(dx_AD, x_UD),
    jax.lax.psum_scatter(dweight_AK, sharding.EXPERT, tiled=True),
    None,
    *(
      sharding.sum_parts(d, cut).astype(weight.dtype)
      for d, cut, weight in zip(
        dweights, fsdp_cuts(weights, x_UD.shape[1]), weights
      )
    ),
  )


apply_experts.defvjp(_forward, _backward)


def fsdp_cuts(weights: Sequence[jax.Array], width: int) -> Sequence[int | None]:
  """The dimension along which `fsdp` cuts gate, up and down, if any."""
  return [
    sharding.cut_dim(weight, dim, width)
    for weight, dim in zip(weights, (1, 1, 2), strict=True)
  ]


# Checkpointed, so that two arrays are kept instead of six.
@functools.partial(jax.checkpoint, static_argnums=(0,))
def units(
  activation: config_lib.ActivationConfig, gate_PF: jax.Array, up_PF: jax.Array
) -> jax.Array:
  """The hidden units of an expert."""
  return mlp.units(activation, gate_PF, up_PF)


@dataclasses.dataclass(frozen=True)
class _Piece:
  """Some (token, expert) pairs of this device, sorted by expert.

  Attributes:
    token_J: index of the token; A for padding.
    pair_J: index into [A, K], flattened; A K for padding.
    weight_J: of their outputs.
    sizes_E: number of pairs of each expert.
  """

  token_J: jax.Array
  pair_J: jax.Array
  weight_J: jax.Array
  sizes_E: jax.Array

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

  def real(self, x_JF: jax.Array) -> jax.Array:
    """The same with zeros for padding."""
    real_J = jnp.arange(x_JF.shape[0]) < jnp.sum(self.sizes_E)
    return jnp.where(real_J[:, None], x_JF, jnp.zeros((), x_JF.dtype))

  def add(
    self, sum_AD: jax.Array, rows_JD: jax.Array, weight_J: jax.Array
  ) -> jax.Array:
    """Adds weighted rows to their tokens, in the dtype of the sum."""
    # The compiler would sort copies in the wide dtype.
    order_J = jnp.argsort(self.token_J)
    rows_JD = rows_JD[order_J].astype(sum_AD.dtype)
    return sum_AD.at[self.token_J[order_J]].add(
      weight_J[order_J, None] * rows_JD,
      mode="drop",
      indices_are_sorted=True,
    )

  def put(self, values_P: jax.Array, values_J: jax.Array) -> jax.Array:
    """Scatters values of the pairs to their places."""
    return values_P.at[self.pair_J].set(
      values_J, mode="drop", unique_indices=True
    )


@dataclasses.dataclass(frozen=True)
class _Pairs:
  """All (token, expert) pairs, with this device's first.

  Attributes:
    order_P: indices into [A, K], flattened; padded by a piece.
    weight_P: of the outputs, in the order of [A, K].
    stops_E: end of the pairs of each expert of this device.
    top_k: K.
    room: J, rows of a piece.
  """

  order_P: jax.Array
  weight_P: jax.Array
  stops_E: jax.Array
  top_k: int
  room: int

  @classmethod
  def sort(
    cls, expert_UK: jax.Array, weight_UK: jax.Array, num_local: int
  ) -> "_Pairs":
    """Collects the parts of all devices, with `num_local` experts each."""
    expert_P = jnp.reshape(_from_all(expert_UK), -1)
    expert_P -= jax.lax.axis_index(sharding.EXPERT) * num_local
    expert_P = jnp.where(
      (expert_P >= 0) & (expert_P < num_local), expert_P, num_local
    )
    num_pairs, top_k = expert_P.shape[0], expert_UK.shape[1]
    at_most = num_pairs // top_k * min(top_k, num_local)
    room = min(math.ceil(_ROOM * expert_UK.size), at_most)
    return cls(
      jnp.pad(jnp.argsort(expert_P, stable=True), (0, room)),
      jnp.reshape(_from_all(weight_UK), -1),
      jnp.sum(
        expert_P[None] <= jnp.arange(num_local)[:, None],
        axis=1,
        dtype=jnp.int32,
      ),
      top_k,
      room,
    )

  def piece(self, i: Any) -> _Piece:
    start, num_pairs = i * self.room, self.weight_P.shape[0]
    pair_J = jax.lax.dynamic_slice_in_dim(self.order_P, start, self.room)
    real_J = start + jnp.arange(self.room) < self.stops_E[-1]
    stops_E = jnp.clip(self.stops_E - start, 0, self.room)
    return _Piece(
      jnp.where(real_J, pair_J // self.top_k, num_pairs // self.top_k),
      jnp.where(real_J, pair_J, num_pairs),
      jnp.where(real_J, self.weight_P[pair_J], 0),
      jnp.diff(stops_E, prepend=0),
    )

  def for_pieces(self, body: Callable[..., Any], carry: Any) -> Any:
    """Runs `body(i, carry)` for all pieces; the first is outside the loop."""
    # Usually it is the only one, and then nothing has to be added up.
    num_pieces = -(-self.stops_E[-1] // self.room)
    carry = body(0, carry)
    with scopes.mean_trips(0):
      return jax.lax.fori_loop(1, num_pieces, body, carry)


def _from_all(x: jax.Array) -> jax.Array:
  """Concatenates the arrays of all devices along `expert`."""
  return jax.lax.all_gather(x, sharding.EXPERT, tiled=True)


def _to_owners(sum_AD: jax.Array, x_UD: jax.Array) -> jax.Array:
  """Sends partial sums to the owners of the tokens, which add them up."""
  parts = jnp.reshape(sum_AD.astype(x_UD.dtype), (-1, *x_UD.shape))
  parts = jax.lax.all_to_all(parts, sharding.EXPERT, 0, 0)
  return jnp.sum(parts, axis=0, dtype=sum_AD.dtype).astype(x_UD.dtype)


def _gather(
  weights: Sequence[jax.Array], x_UD: jax.Array
) -> Sequence[jax.Array]:
  """Gathers the experts of this device, in the dtype of products."""
  cuts = fsdp_cuts(weights, x_UD.shape[1])
  return [
    sharding.gather_parts(weight, cut, x_UD.dtype)
    for weight, cut in zip(weights, cuts)
  ]
