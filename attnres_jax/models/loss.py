# SPDX-License-Identifier: Apache-2.0
"""Next-token cross-entropy that never holds more than a tile of logits.

With a vocabulary of V, the float32 logits of a batch are V / D times as large
as its states; for V = 163840 they would be the largest array of the step. So
the loss is summed tile by tile over the sequence, and the gradient of each tile
is computed together with its logits. (The loss is a sum, so the backward pass
only has to scale this gradient.) This takes three matrix products per tile, as
without tiling, and no recomputation.

A tile reads the head and adds to its gradient, 8 to 12 D V bytes for 6 D V
FLOPs per token. Chips do 150 to 600 FLOPs in the time of moving one byte, so a
tile of less than a few hundred tokens is bound by memory, for any D and V.
"""

from collections.abc import Mapping
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from attnres_jax import config as config_lib
from attnres_jax.common import precision
from attnres_jax.common import scopes
from attnres_jax.common import sharding
from attnres_jax.models import embedding
from attnres_jax.models import layer_stacks
from attnres_jax.models import linear
from attnres_kernels import platforms

# Bytes of float32 logits that one device holds at once, and the minimum number
# of tokens per tile, if there are as many. With V = 163840 and D = 2304 on v5p,
# moving the bytes of a tile of 4096 takes an estimated 0.4 times as long as its
# products, and its logits take 2.5 GiB.
TILE_BYTES, TILE_TOKENS = 64 * 2**20, 4096


class Examples(NamedTuple):
  """What a network reads and has to predict, [B, T] each.

  Attributes:
    inputs: int32 tokens.
    targets: int32, the tokens that follow.
    weights: float32, 0 for targets that do not count.
    segment_ids: int32 document numbers of the inputs, or None.
  """

  inputs: jax.Array
  targets: jax.Array
  weights: jax.Array
  segment_ids: jax.Array | None

  @classmethod
  def of(cls, batch: Mapping[str, jax.Array]) -> "Examples":
    """From a batch in the form that `train_state.Program.train_step` takes."""
    segment_ids = batch.get("segment_ids")
    return cls(
      inputs=batch["tokens"][:, :-1],
      targets=batch["tokens"][:, 1:],
      weights=counted(batch).astype(jnp.float32),
      segment_ids=None if segment_ids is None else segment_ids[:, :-1],
    )


def counted(batch: Mapping[str, Any]) -> Any:
  """Which targets of a batch the loss counts, bool [B, T].

  `counts` says it. A batch without them counts targets in the segment of their
  context, but no padding (segment 0); without segments, all of them.
  """
  if "counts" in batch:
    return batch["counts"][:, 1:] > 0
  segment_ids = batch.get("segment_ids")
  if segment_ids is None:
    return jnp.ones(batch["tokens"][:, 1:].shape, bool)
  target = segment_ids[:, 1:]
  return (segment_ids[:, :-1] == target) & (target > 0)


class LossSums(NamedTuple):
  """Sums over the counted tokens; nats.

  Attributes:
    total: what is differentiated: nll + z_loss * z.
    nll: negative log-likelihood of the targets.
    z: squared log-normalisers of the logits.
  """

  total: jax.Array
  nll: jax.Array
  z: jax.Array


def no_loss(dtype: jax.typing.DTypeLike = jnp.float32) -> LossSums:
  """The sums over no tokens."""
  return LossSums(*[jnp.zeros((), dtype)] * 3)


def loss_sums(
  config: config_lib.RunConfig,
  h_BTD: jax.Array,
  head_DV: jax.Array,
  examples: Examples,
) -> LossSums:
  """`cross_entropy` of states after the final norm, with a run's options."""
  return cross_entropy(
    h_BTD,
    head_DV,
    examples.targets,
    examples.weights,
    soft_cap=config.model.logit_soft_cap,
    z_loss=config.loss.z_loss,
    tile_tokens=config.loss.tile_tokens,
  )


def cross_entropy(
  h_BTD: jax.Array,
  head_DV: jax.Array,
  target_BT: jax.Array,
  weight_BT: jax.Array,
  *,
  soft_cap: float = 0.0,
  z_loss: float = 0.0,
  tile_tokens: int = 0,
) -> LossSums:
  """Sums the loss over tokens; differentiable in `h_BTD` and `head_DV`.

  If `sharding.ambient` splits rows over devices, each device processes tiles of
  its own rows. A head that is sharded over `fsdp` is gathered once, in the
  dtype of `h_BTD`, and its gradient is scattered once, in float32.

  Args:
    h_BTD: states after the final norm.
    head_DV: float32 head matrix.
    target_BT: int32 next tokens.
    weight_BT: float32, 0 for targets that do not count.
    soft_cap: of the logits, see `embedding.soft_capped`.
    z_loss: weight of the squared log-normaliser (arXiv:2204.02311 section 5).
    tile_tokens: tokens per tile and device; 0 for as many as fit in
      `TILE_BYTES`, but at least `TILE_TOKENS`. Tiles are cut along the
      sequence, so each has tokens of every row.
  """

  def of_rows(rows, head_DV):
    h_BTD = rows[0]
    fits = TILE_BYTES // (4 * head_DV.shape[1])
    tile = tile_tokens or max(TILE_TOKENS, fits)
    tile = min(h_BTD.shape[1], max(1, tile // h_BTD.shape[0]))
    sums = _tiled((soft_cap, z_loss, tile), h_BTD, head_DV, *rows[1:])
    return jax.tree.map(lambda a: a[None], sums)

  cut = sharding.row_cut("D|V")
  with scopes.part(scopes.HEAD):
    sums = sharding.by_rows(of_rows, cut)(
      (h_BTD, target_BT, weight_BT), head_DV
    )
    return jax.tree.map(jnp.sum, sums)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _tiled(options, h_BTD, head_DV, target_BT, weight_BT) -> LossSums:
  soft_cap, z_loss, tile = options
  head_DV, _ = _gather(h_BTD, head_DV)
  wide = precision.wide(h_BTD.dtype)

  def add_tile(sums, xs):
    h_tile, target_tile, weight_tile = xs
    tile = _raise(h_tile, head_DV, target_tile, soft_cap)
    tile_sums = tile.sums(weight_tile, z_loss)
    return jax.tree.map(jnp.add, sums, tile_sums), None

  sums, _ = jax.lax.scan(
    add_tile, no_loss(wide), cut(tile, h_BTD, target_BT, weight_BT)
  )
  return sums


def _tiled_fwd(options, h_BTD, head_DV, target_BT, weight_BT):
  soft_cap, z_loss, tile = options
  head_DV, dim = _gather(h_BTD, head_DV)
  wide = precision.wide(h_BTD.dtype)

  def add_tile(carry, xs):
    sums, d_head_DV = carry
    h_tile, target_tile, weight_tile = xs
    tile = _raise(h_tile, head_DV, target_tile, soft_cap)
    tile_sums = tile.sums(weight_tile, z_loss)
    log_normaliser = tile.log_normaliser
    scale = weight_tile * (1 + 2 * z_loss * log_normaliser)
    raised = precision.widen(tile.raised)
    d_logits = raised * (scale / tile.total)[..., None]
    # Of a sure prediction, a rounded share is off by more than what it lacks.
    of_target = d_logits
    if tile.raised.dtype != wide:
      share = jnp.exp(tile.target - log_normaliser)
      of_target = (scale * share)[..., None]
    d_logits = jnp.where(
      _is_target(raised, target_tile),
      of_target - weight_tile[..., None],
      d_logits,
    )
    if soft_cap:
      tiny = jnp.finfo(raised.dtype).tiny
      logits = tile.shift[..., None] + jnp.log(jnp.maximum(raised, tiny))
      d_logits *= jnp.maximum(0, 1 - jnp.square(logits / soft_cap))
    d_h, d_head = linear.gradients(h_tile, head_DV, d_logits)
    sums = jax.tree.map(jnp.add, sums, tile_sums)
    return (sums, d_head_DV + d_head), d_h

  zeros = jnp.zeros(head_DV.shape, wide)
  (sums, d_head_DV), d_h = jax.lax.scan(
    add_tile, (no_loss(wide), zeros), cut(tile, h_BTD, target_BT, weight_BT)
  )
  d_h_BTD = jnp.moveaxis(d_h, 0, 1).reshape(h_BTD.shape[0], -1, d_h.shape[-1])
  gradients = (
    d_h_BTD[:, : h_BTD.shape[1]], sharding.sum_parts(d_head_DV, dim)
  )  # fmt: skip
  if dim is not None:
    # Else a TPU would keep the whole one until it has those of the trunk.
    gradients = jax.lax.optimization_barrier(gradients)
  return sums, gradients


def _tiled_bwd(options, gradients, cotangent: LossSums):
  del options
  d_h_BTD, d_head_DV = gradients
  # Only `total` is differentiated; nll and z are for logging.
  scale = cotangent.total
  return (
    (scale * precision.widen(d_h_BTD)).astype(d_h_BTD.dtype),
    scale * d_head_DV,
    None,
    None,
  )


_tiled.defvjp(_tiled_fwd, _tiled_bwd)


def _gather(h_BTD, head_DV) -> tuple[jax.Array, int | None]:
  """The whole head in the dtype of its product, and the axis of its shards."""
  dim = sharding.cut_dim(head_DV, 0, h_BTD.shape[-1])
  return sharding.gather_parts(head_DV, dim, h_BTD.dtype), dim


class _Tile(NamedTuple):
  """A tile of logits, of which only powers of e are an array.

  Attributes:
    raised: [B, T, V], exp(logits - shift) in the dtype of the states.
    total: [B, T], the sum of a row; this and what follows are float32.
    target: [B, T], the logits of the targets.
    shift: [B, T], zero or the largest logit of a row.
  """

  raised: jax.Array
  total: jax.Array
  target: jax.Array
  shift: jax.Array

  @property
  def log_normaliser(self) -> jax.Array:
    return self.shift + jnp.log(self.total)

  def sums(self, weight_BT: jax.Array, z_loss: float) -> LossSums:
    log_normaliser_BT = self.log_normaliser
    nll = jnp.sum(weight_BT * (log_normaliser_BT - self.target))
    z = jnp.sum(weight_BT * jnp.square(log_normaliser_BT))
    return LossSums(nll + z_loss * z, nll, z)


def _raise(h_BTD, head_DV, target_BT, soft_cap) -> _Tile:
  """The tile, without a shift if all sums of rows can be represented.

  So the fusion with the product can raise and add up, and nothing reads the
  logits. If a sum is too large or small, all is computed again, with shifts.

  Where nothing else is fused with the product if its logits have a second user,
  the logits of the targets are sums of their own; a TPU would copy the head.
  """
  return platforms.by_platform(
    (h_BTD, head_DV, target_BT),
    functools.partial(_raise_on, _target_of_column, soft_cap),
    tpu=functools.partial(_raise_on, _target_of_row, soft_cap),
  )


def _raise_on(target_logit, soft_cap, h_BTD, head_DV, target_BT) -> _Tile:
  wide = precision.wide(h_BTD.dtype)

  def logits_of(h):
    return embedding.soft_capped(linear.linear(h, head_DV, 1, wide), soft_cap)

  def raise_by(shift_BT):
    logits = logits_of(h_BTD)
    target = target_logit(logits, h_BTD, head_DV, target_BT, soft_cap)
    raised = jnp.exp(logits - shift_BT[..., None]).astype(h_BTD.dtype)
    if raised.dtype == wide:
      return _Tile(raised, jnp.sum(raised, axis=-1), target, shift_BT)
    # With the target's own share in float32, shares add up to one.
    others = jnp.where(
      _is_target(logits, target_BT), 0, precision.widen(raised)
    )
    total = jnp.sum(others, axis=-1) + jnp.exp(target - shift_BT)
    return _Tile(raised, total, target, shift_BT)

  tile = raise_by(jnp.zeros(target_BT.shape, wide))
  # Half of the range, so that no share of a row is lost.
  limit = jnp.sqrt(jnp.finfo(wide).max)
  lost = ~jnp.all((tile.total < limit) & (tile.total > 1 / limit))
  largest = lambda h_TD: jnp.max(logits_of(h_TD), axis=-1)
  with scopes.mean_trips(0):
    _, tile = jax.lax.while_loop(
      lambda carry: carry[0],
      # Row by row, so that no tile of float32 logits has to exist.
      lambda _: (False, raise_by(jax.lax.map(largest, h_BTD))),
      (lost, tile),
    )
  return tile


def _target_of_row(logits_BTV, h_BTD, head_DV, target_BT, soft_cap):
  return jnp.sum(
    jnp.where(_is_target(logits_BTV, target_BT), logits_BTV, 0), axis=-1
  )


def _target_of_column(logits_BTV, h_BTD, head_DV, target_BT, soft_cap):
  column_DBT = jnp.take(head_DV.astype(h_BTD.dtype), target_BT, axis=1)
  product_BTD = precision.widen(h_BTD) * jnp.moveaxis(
    precision.widen(column_DBT), 0, -1
  )
  return embedding.soft_capped(jnp.sum(product_BTD, axis=-1), soft_cap)


def _is_target(of_BTV, target_BT) -> jax.Array:
  return target_BT[..., None] == jnp.arange(of_BTV.shape[-1])[None, None]


def cut(tile: int, *arrays: jax.Array) -> tuple[jax.Array, ...]:
  """[B, T, ...] to [tiles, B, tile, ...], zero-padded (weight 0) at the end."""
  return tuple(layer_stacks.tiles(a, tile) for a in arrays)
