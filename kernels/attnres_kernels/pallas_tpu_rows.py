# SPDX-License-Identifier: Apache-2.0
"""What the TPU kernels over rows of tokens share: tiles, specs, statistics.

A grid step has a tile of rows [tokens, D]. Per-token statistics are stored
along lanes, [tiles, J, tokens], because a [tokens, J] array would be padded to
128 lanes in memory.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.experimental import pallas as pl
import jax.numpy as jnp

from attnres_kernels import platforms

LANES, SUBLANES = 128, 8  # Of a register.
ROWS = 16  # The row tile of bfloat16 in memory.


def why_slow(
  function: str, x: jax.Array, *args: Any, **options: Any
) -> str | None:
  """The reason why plain JAX is faster for these arguments, or None."""
  if x.size > x.shape[-1]:
    return None
  # A kernel, and what brings its arguments in shape, take longer to start than
  # the fusions of plain JAX.
  return "a single row"


class Call:
  """Tiles and layouts of a kernel that visits each row of some arrays once.

  Attributes:
    width: D.
    tokens: of all.
    token_bytes: moved per token.
    tile: tokens of a grid step, at most `most`, as long as two buffers of them
      take no more than a share of VMEM.
    tiles: grid steps.
    parts: of an outer axis of the grid, each of which sums over its own steps.
  """

  def __init__(self, slabs: list[Any], most: int = LANES, share: float = 3 / 7):
    self.width = slabs[0].shape[-1]
    self.tokens = slabs[0].size // self.width
    self.token_bytes = self.width * sum(x.dtype.itemsize for x in slabs)
    self.tile, room = most, share * platforms.tpu_vmem_bytes()
    while self.tile > ROWS and (
      2 * self.tile * self.token_bytes > room or self.tile // 2 >= self.tokens
    ):
      self.tile //= 2
    self.tiles = pl.cdiv(self.tokens, self.tile)
    self.parts = max(p for p in range(1, 9) if self.tiles % p == 0)

  def at(self, p: Any, s: Any = None) -> Any:
    """The tile of a grid step, given both axes or the only one."""
    return p if s is None else p * (self.tiles // self.parts) + s

  def vmem_limit(self, fixed_bytes: int = 0) -> int:
    """What a kernel reserves of VMEM, beside arrays that stay."""
    return platforms.tpu_vmem_limit(self.tile * self.token_bytes + fixed_bytes)

  def flat(self, x: jax.Array) -> jax.Array:
    return x.reshape(self.tokens, self.width)

  def like(self, x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((self.tokens, self.width), x.dtype)

  def wide_spec(self) -> pl.BlockSpec:
    return pl.BlockSpec((self.tile, self.width), lambda *i: (self.at(*i), 0))

  def stats_spec(self, count: int) -> pl.BlockSpec:
    shape = 1, count, self.tile
    return pl.BlockSpec(shape, lambda *i: (self.at(*i), 0, 0))

  def stats(self, x_QT: jax.Array, heads: int) -> jax.Array:
    """[Q, *T], or [Q, *T, H] with several heads, to [tiles, H Q, tile]."""
    if heads > 1:
      x_QT = jnp.moveaxis(x_QT, -1, 0)
    x_JT = x_QT.reshape(-1, self.tokens).astype(jnp.float32)
    missing = self.tiles * self.tile - self.tokens
    x_JT = jnp.pad(x_JT, ((0, 0), (0, missing)))
    return jnp.moveaxis(x_JT.reshape(-1, self.tiles, self.tile), 0, 1)

  def stats_out(self, count: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((self.tiles, count, self.tile), jnp.float32)

  def from_stats(
    self, x: jax.Array, tokens_shape: tuple[int, ...], heads: int
  ) -> jax.Array:
    """The inverse of `stats`."""
    x_JT = jnp.moveaxis(x, 1, 0).reshape(x.shape[1], -1)[:, : self.tokens]
    if heads == 1:
      return x_JT.reshape(-1, *tokens_shape)
    return jnp.moveaxis(x_JT.reshape(heads, -1, *tokens_shape), 0, -1)

  def cost(self, flops: int, transcendentals: int) -> pl.CostEstimate:
    """For the compiler's schedule; flops per column of a token."""
    return pl.CostEstimate(
      flops=flops * self.tokens * self.width,
      bytes_accessed=self.tokens * (self.token_bytes + 4),
      transcendentals=transcendentals * self.tokens,
    )


def constant_spec(shape: tuple[int, ...]) -> pl.BlockSpec:
  """The block spec of an array that every step sees in full."""
  return pl.BlockSpec(shape, lambda *i: (0,) * len(shape))


def sums_spec(shape: tuple[int, ...]) -> pl.BlockSpec:
  """The block spec of sums [parts, ...], of which a step adds to its part's."""
  rest = (0,) * (len(shape) - 1)
  return pl.BlockSpec((1, *shape[1:]), lambda p, s: (p, *rest))


def valid_rows(
  num_tokens: int, tile: int, base: Any, rows: int = ROWS
) -> jax.Array | None:
  """Which of the rows from `base` on are tokens; None if all are."""
  if num_tokens % tile == 0:
    return None
  return iota((rows, 1), 0) < num_tokens - base


def load_rows(
  ref: Any, rows: slice, valid: jax.Array | None = None
) -> jax.Array:
  """Rows in float32; zero where they are no tokens."""
  return zero_unless(valid, ref[rows, :].astype(jnp.float32))


def zero_unless(valid: jax.Array | None, x: jax.Array) -> jax.Array:
  """Rows of x; zero where they are no tokens, by `valid_rows`."""
  return x if valid is None else jnp.where(valid, x, 0.0)


def iota(shape: tuple[int, ...], dimension: int) -> jax.Array:
  return jax.lax.broadcasted_iota(jnp.int32, shape, dimension)


def dot(
  a: jax.Array, b: jax.Array, b_axis: int = 0, a_axis: int = 1, *, exact: bool
) -> jax.Array:
  """A product with float32 results, of float32 operands if exact."""
  return jax.lax.dot_general(
    a, b, (((a_axis,), (b_axis,)), ((), ())),
    precision=jax.lax.Precision.HIGHEST if exact else None,
    preferred_element_type=jnp.float32,
  )  # fmt: skip


Load = Callable[[slice], jax.Array]
