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

On several TPUs, kernels (`attnres_kernels.experts`) keep hidden units out of
memory, and add up the rows of each token in float32.

Axes: U tokens of this device; A = n U tokens of all devices; K experts of a
token; E experts of this device; P = A K pairs (token, expert); J rows of a
piece; G gate and up; C = 2 F, both side by side.
"""

from collections.abc import Callable, Sequence
import dataclasses
import functools
import math
from typing import Any

import jax
from jax import ad_checkpoint
from jax.experimental import layout
import jax.numpy as jnp

from attnres_jax import config as config_lib
from attnres_jax.common import precision
from attnres_jax.common import scopes
from attnres_jax.common import sharding
from attnres_jax.models import expert_products
from attnres_jax.models import grouped_matmul
from attnres_jax.models import linear
from attnres_jax.models import mlp
from attnres_kernels import platforms
from attnres_kernels.experts import pallas_tpu as kernels

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
  matrices = [_gather(w, num_local, x_UD.dtype) for w in weights]
  units = functools.partial(mlp.units, activation)

  def one_piece(piece, y_AD=None):
    x_JD = piece.rows_of(x_AD)
    y_JD, both_JC = piece.apply(units, x_JD, matrices)
    return piece.add(y_AD, y_JD, len(x_AD)), both_JC

  y_AD, both_JC = one_piece(pairs.piece(0))
  y_AD = pairs.more_pieces(lambda *args: one_piece(*args)[0], y_AD)
  saved = None
  if pairs.devices == 1:
    saved = ad_checkpoint.checkpoint_name(both_JC, linear.PRODUCT)
  residuals = x_UD, weight_UK, expert_UK, sizes, weights, saved
  return pairs.to_owners(y_AD), residuals


def _backward(
  activation: config_lib.ActivationConfig, residuals: Any, dy_UD: jax.Array
) -> tuple[jax.Array | None, ...]:
  x_UD, weight_UK, expert_UK, sizes, weights, saved = residuals
  num_local = _num_local(weights[0], sizes)
  pairs = _Pairs.sort(expert_UK, weight_UK, sizes, num_local)
  x_AD, dy_AD = pairs.from_all(x_UD), pairs.from_all(dy_UD)
  matrices = [_gather(w, num_local, x_UD.dtype) for w in weights]
  units = functools.partial(mlp.units, activation)

  def one_piece(piece, sums, both_JC=None):
    dx_AD, dweight_P, *dmatrices = sums
    x_JD, dy_JD = piece.rows_of(x_AD), piece.rows_of(dy_AD)
    dx_JD, dweight_J, *dmatrices = piece.gradients(
      units, x_JD, matrices, dy_JD, dmatrices, both_JC
    )
    dx_AD = piece.add(dx_AD, dx_JD, len(x_AD))
    return dx_AD, piece.put(dweight_P, dweight_J), *dmatrices

  # The first piece makes the sums to which the loop adds.
  zeros_P = jnp.zeros(pairs.weight_P.shape, weight_UK.dtype)
  sums = one_piece(pairs.piece(0), (None, zeros_P), saved)
  dx_AD, dweight_P, *dweights = pairs.more_pieces(one_piece, sums)
  dweight_AK = jnp.reshape(dweight_P, (-1, expert_UK.shape[1]))
  if pairs.devices > 1:
    dweight_AK = jax.lax.psum_scatter(dweight_AK, sharding.EXPERT, tiled=True)
  return (
    pairs.to_owners(dx_AD),
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
  """The matrices of all of this device's experts, for products."""
  rows = jnp.reshape(weight, (-1, weight.shape[-1]))
  cut = sharding.cut_dim(weight, 0, num_local)
  rows = sharding.gather_parts(rows, cut, dtype)
  return jnp.reshape(rows, (num_local, *weight.shape[1:]))


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

  def apply(
    self, units: kernels.Units, x_JD: jax.Array, matrices: Sequence[jax.Array]
  ) -> tuple[jax.Array, jax.Array | None]:
    """Outputs of the experts of rows, and products if they are to be kept."""
    operands = x_JD, self.weight_J, self.sizes_E, *matrices
    if self.row_UK is not None:
      return expert_products.forward(units, *operands)
    plain = lambda *operands: expert_products.forward(units, *operands)[0]
    return _by_platform(plain, kernels.forward, operands, units), None

  def gradients(
    self,
    units: kernels.Units,
    x_JD: jax.Array,
    matrices: Sequence[jax.Array],
    dy_JD: jax.Array,
    existing: Sequence[jax.Array],
    both_JC: jax.Array | None,
  ) -> Sequence[jax.Array]:
    """Of rows, weights and matrices; the last are added to existing ones."""
    operands = x_JD, self.weight_J, self.sizes_E, *matrices, dy_JD, *existing
    plain = functools.partial(expert_products.backward, units, both_JC)
    if self.row_UK is not None:
      return plain(*operands)
    return _by_platform(plain, kernels.backward, operands, units)

  def add(
    self, sum_AD: jax.Array | None, rows_JD: jax.Array, tokens: int
  ) -> jax.Array:
    """Adds rows to their tokens in float32, and rounds once per piece."""
    wide = precision.wide(rows_JD.dtype)
    if self.row_UK is not None:  # A gather, where nothing is to be added to.
      rows_UKD = rows_JD[self.row_UK]
      return jnp.sum(rows_UKD, axis=1, dtype=wide).astype(rows_JD.dtype)

    def scattered(rows_JD, token_J):
      zeros_AD = jnp.zeros((tokens, rows_JD.shape[1]), wide)
      rows_JD = rows_JD.astype(wide)
      return zeros_AD.at[token_J].add(
        rows_JD, mode="drop", indices_are_sorted=True
      )

    order_J = jnp.argsort(self.token_J)
    operands = rows_JD[order_J], self.token_J[order_J]
    new_AD = _by_platform(
      lambda *operands: scattered(*operands).astype(rows_JD.dtype),
      functools.partial(kernels.sum_rows, tokens=tokens), operands,
    )  # fmt: skip
    if sum_AD is None:
      return new_AD
    both = precision.widen(sum_AD) + precision.widen(new_AD)
    return both.astype(rows_JD.dtype)

  def put(self, values_P: jax.Array, values_J: jax.Array) -> jax.Array:
    """Scatters values of the pairs to their places."""
    if self.row_UK is not None:
      return jnp.reshape(values_J[self.row_UK], -1)
    return values_P.at[self.pair_J].set(
      values_J, mode="drop", unique_indices=True
    )


def _by_platform(
  plain: Callable[..., Any],
  kernel: Callable[..., Any],
  operands: Sequence[jax.Array],
  units: kernels.Units | None = None,
) -> Any:
  """A kernel on the operands of a TPU if it takes them, else the plain form.

  `units` is for kernels of experts, whose matrices have to fit on the core.
  """
  rows_JD, options = operands[0], dict[str, Any](filled=1 / _ROOM)
  fits = grouped_matmul.fits_kernel(rows_JD)
  if units is not None:
    options["units"] = units
    _, hidden, width = operands[4].shape
    slices = kernels.num_slices(hidden, width, rows_JD.dtype)
    fits = fits and slices is not None

  def on_tpu(*operands):
    interpret = platforms.interpret_params() or False
    return kernel(*operands, interpret=interpret, **options)

  tpu = sharding.on_one_device(on_tpu) if fits else plain
  return platforms.by_platform(tuple(operands), plain, tpu=tpu)


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
    step = lambda i, carry: body(self.piece(i), carry)
    with scopes.mean_trips(0):
      return jax.lax.fori_loop(1, num_pieces, step, carry)

  def from_all(self, x: jax.Array) -> jax.Array:
    """Concatenates the arrays of all devices along `expert`."""
    return x if self.devices == 1 else _from_all(x)

  def to_owners(self, sum_AD: jax.Array) -> jax.Array:
    """Sends partial sums to the owners of the tokens, which add them up."""
    if self.devices == 1:
      return sum_AD
    return platforms.by_platform((sum_AD,), _sum_wide, tpu=_sum_rows, cuda=_sum)


def _sum_rows(parts_AD: jax.Array) -> jax.Array:
  """On TPU, where a layout for what follows would copy the parts instead."""
  rows = layout.Layout(major_to_minor=(0, 1))
  return _sum(layout.with_layout_constraint(parts_AD, rows))


def _sum(parts_AD: jax.Array) -> jax.Array:
  return jax.lax.psum_scatter(parts_AD, sharding.EXPERT, tiled=True)


def _sum_wide(parts_AD: jax.Array) -> jax.Array:
  """On CPU, whose compiler ends on sums of bfloat16 over devices."""
  return _sum(precision.widen(parts_AD)).astype(parts_AD.dtype)


def _from_all(x: jax.Array) -> jax.Array:
  return jax.lax.all_gather(x, sharding.EXPERT, tiled=True)
