# SPDX-License-Identifier: Apache-2.0
"""Causal softmax attention over projected heads.

For TPUs it is splash attention, Pallas kernels of JAX, and for NVIDIA GPUs
cuDNN where it takes the arguments. Everywhere else it runs in tiles: a tile of
queries attends to the keys before its end, so that the half of all pairs which
causality excludes is mostly not computed. A tile is checkpointed: autodiff
stores its arguments and computes its scores again, so that memory is linear in
the number of tokens.

Decoding (`extend`) attends to a cache and to new tokens in one softmax.

  w_ts = exp(q_t . k_s / sqrt(H) - max),  y_t = sum_s w_ts v_s / sum_s w_ts
"""

from collections.abc import Callable, Sequence
import functools
import importlib
import math
from typing import Any, NamedTuple

import jax
from jax import ad_checkpoint
from jax.experimental.pallas.ops.tpu import splash_attention
import jax.numpy as jnp

from attnres_jax.common import precision
from attnres_jax.common import sharding
from attnres_jax.models import layer_stacks
from attnres_jax.models import linear
from attnres_jax.models.mixers import cache as cache_lib
from attnres_kernels import platforms

# The name by which activation checkpointing recognises the outputs of attention
# (and, of splash attention, their log-normalisers).
ATTENTION = "attention"
# Queries per tile: products large enough for a matrix unit, and never all
# pairs of a long sequence at once. Smaller tiles than the second number save
# fewer pairs than their products lose.
TILE, _SMALLEST = 512, 64
# Tiles are grouped into n spans, and see keys up to the end of their span. This
# costs 1 + 1/n times as much as exact causality, for n programs; one span would
# cost twice as much.
_SPANS = 4
# Queries and keys of a block of splash attention, and keys of it that are taken
# at once. By the schedules in dev/LOG.md, larger blocks take fewer bundles per
# pair of tokens, by more than what the diagonal wastes.
_BLOCKS: tuple[int, ...] = (1024, 512, 256, 128)
_KEYS_AT_ONCE = 512
# Documents of a row that cuDNN takes; a batch with more in a row runs in tiles.
_DOCUMENTS = 32


class Tile(NamedTuple):
  """Queries, and what belongs to each of them."""

  query_BTNH: jax.Array
  position_1T: jax.Array
  segment_BT: jax.Array | None = None


class Keys(NamedTuple):
  """Keys and values of K heads, and which of them [B, T, S] a tile sees."""

  key_BKSH: jax.Array
  value_BKSV: jax.Array
  seen_BTS: Callable[[Tile], jax.Array]


def attend(
  query_BTNH: jax.Array, key_BTKH: jax.Array, value_BTKV: jax.Array,
  segment_ids_BT: jax.Array | None = None, *, kernel: str = "auto",
  tile: int = 0,
) -> jax.Array:  # fmt: skip
  """Attends to positions s <= t, within a document if segment ids are given.

  Args:
    query_BTNH: queries of N heads.
    key_BTKH: keys of K heads, a divisor of N; scores are q . k / sqrt(H).
    value_BTKV: values, of any width V.
    segment_ids_BT: document numbers of packed rows.
    kernel: a value of `model.attention_kernel`.
    tile: queries per tile without a kernel; does not change the function. 0
      chooses by T.

  Returns:
    [B, T, N, V] in the dtype of the values; the softmax is in float32.

  Raises:
    NotImplementedError: the named kernel does not take these arguments, or
      (when the program is lowered) does not run on that platform.
  """
  arrays = query_BTNH, key_BTKH, value_BTKV, segment_ids_BT
  specs = *[sharding.HEADS] * 3, sharding.SEQUENCES
  *tokens_and_heads, width = query_BTNH.shape
  num_queries, value_width = math.prod(tokens_and_heads), value_BTKV.shape[-1]
  # Causal: half of all pairs count, even if a kernel computes more.
  pairs = num_queries * query_BTNH.shape[1] / 2
  flops = 2 * pairs * (width + value_width)
  attention = functools.partial(_by_kernel, kernel, tile)
  return linear.counted(
    sharding.by_shards(attention, specs, sharding.HEADS), *arrays,
    part="attention", flops=flops,
    outs=jax.ShapeDtypeStruct(
      (*tokens_and_heads, value_width), value_BTKV.dtype
    ),
  )  # fmt: skip


def extend(
  query_BTNH: jax.Array, key_BTKH: jax.Array, value_BTKV: jax.Array,
  cache: cache_lib.Tokens | cache_lib.Open, chunk: cache_lib.Chunk, *,
  kernel: str = "auto",
) -> tuple[jax.Array, cache_lib.Tokens | cache_lib.Stored]:  # fmt: skip
  """`attend` of new tokens, which also attend to the tokens of a cache.

  With a cache that has no room, they are the first tokens, and `kernel` counts.
  Returns [B, T, N, V], and what the cache should add.
  """
  new = cache_lib.Tokens(
    (jnp.swapaxes(key_BTKH, 1, 2), jnp.swapaxes(value_BTKV, 1, 2))
  )
  before, added = cache_lib.opened(cache, new, chunk)
  if not before.room:
    return attend(query_BTNH, key_BTKH, value_BTKV, kernel=kernel), added
  scale = query_BTNH.shape[-1] ** -0.5
  return attend_after(query_BTNH, before, new, chunk, scale), added


def attend_after(
  query_BTNH: jax.Array, cache: cache_lib.Tokens, new: cache_lib.Tokens,
  chunk: cache_lib.Chunk, scale: float,
) -> jax.Array:  # fmt: skip
  """Attends to a cache and, causally, to new tokens, in one softmax.

  More queries than `TILE` are in tiles of so many: the scores of a long chunk
  over a long cache would not fit.

  A cache has keys and values, or one array that is both, and so have the new
  tokens. `scale` is a factor of the scores.
  """
  dtype, length = query_BTNH.dtype, query_BTNH.shape[1]
  before_B1S = jnp.arange(cache.room)[None, None] < chunk.start_B[:, None, None]
  of_new = functools.partial(earlier, new.room, None)
  parts = [
    Keys(tokens.arrays[0].astype(dtype), tokens.arrays[-1].astype(dtype), seen)
    for tokens, seen in ((cache, lambda _: before_B1S), (new, of_new))
  ]
  tiles = Tile(query_BTNH, jnp.arange(length)[None])
  return by_tiles(lambda tile: _mix(tile, parts, scale), tiles, TILE)


def _tiled(
  query_BTNH: jax.Array, key_BTKH: jax.Array, value_BTKV: jax.Array,
  segment_ids_BT: jax.Array | None, *, tile: int,
) -> jax.Array:  # fmt: skip
  """`attend` in plain JAX."""
  length = query_BTNH.shape[1]
  tile = tile or min(TILE, max(_SMALLEST, -(-length // _SPANS)))
  step = tile * -(-length // (tile * _SPANS))
  position_1T = jnp.arange(length)[None]
  tiles = Tile(query_BTNH, position_1T, segment_ids_BT)
  # Autodiff adds up their gradients over tiles in this dtype.
  key_BKTH, value_BKTV = (
    jnp.swapaxes(precision.widen(x), 1, 2) for x in (key_BTKH, value_BTKV)
  )
  parts = []
  for start in range(0, length, step):
    stop = min(start + step, length)
    ids = None if segment_ids_BT is None else segment_ids_BT[:, :stop]
    keys = key_BKTH[:, :, :stop], value_BKTV[:, :, :stop], ids
    mix = functools.partial(_mix_earlier, *keys)
    span = jax.tree.map(lambda x, a=start, b=stop: x[:, a:b], tiles)
    parts.append(by_tiles(mix, span, tile))
  mixed_BTNV = parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=1)
  return mixed_BTNV.astype(value_BTKV.dtype)


@jax.checkpoint
def _mix_earlier(
  key_BKSH: jax.Array, value_BKSV: jax.Array, segment_BS: jax.Array | None,
  tile: Tile,
) -> jax.Array:  # fmt: skip
  """The output of a tile that sees all keys up to its own positions."""
  dtype, width = tile.query_BTNH.dtype, tile.query_BTNH.shape[-1]
  seen_BTS = functools.partial(earlier, key_BKSH.shape[2], segment_BS)
  keys = Keys(key_BKSH.astype(dtype), value_BKSV.astype(dtype), seen_BTS)
  return _mix(tile, [keys], width**-0.5)


def earlier(room: int, segment_BS: jax.Array | None, tile: Tile) -> jax.Array:
  """Which of `room` keys from position 0 on a tile sees: [B or 1, T, S]."""
  position_11S = jnp.arange(room)[None, None]
  seen_BTS = tile.position_1T[:, :, None] >= position_11S
  if segment_BS is not None and tile.segment_BT is not None:
    seen_BTS &= tile.segment_BT[:, :, None] == segment_BS[:, None]
  return seen_BTS


def _mix(tile: Tile, parts: Sequence[Keys], scale: float) -> jax.Array:
  """The output [B, T, N, V] of a tile: one softmax over all parts of keys.

  Joined in one array, scores of parts would be copied into another layout and
  back, which takes longer than attention over a long cache.
  """
  dtype = tile.query_BTNH.dtype
  wide = precision.wide(dtype)
  product = functools.partial(jnp.einsum, preferred_element_type=wide)
  logits = [masked_logits(tile, part, scale) for part in parts]
  # The output does not depend on it, so no gradient passes through it.
  top_BKGT1 = jax.lax.stop_gradient(
    functools.reduce(
      jnp.maximum, [jnp.max(x, axis=-1, keepdims=True) for x in logits]
    )
  )
  weights = [jnp.exp(x - top_BKGT1) for x in logits]
  total_BKGT1 = sum(jnp.sum(x, axis=-1, keepdims=True) for x in weights)
  mixed_BKGTV: Any = sum(
    product("BKGTS,BKSV->BKGTV", weight_BKGTS.astype(dtype), part.value_BKSV)
    for weight_BKGTS, part in zip(weights, parts)
  )
  mixed_BTKGV = jnp.moveaxis((mixed_BKGTV / total_BKGT1).astype(dtype), 3, 1)
  return jax.lax.collapse(mixed_BTKGV, 2, 4)


def masked_logits(tile: Tile, part: Keys, scale: float) -> jax.Array:
  """Scaled scores [B, K, G, T, S], very low where a tile does not see a key."""
  wide = precision.wide(tile.query_BTNH.dtype)
  query_BKGTH = _by_kv_head(tile.query_BTNH, part.key_BKSH.shape[1])
  logits_BKGTS = scale * _scores(query_BKGTH, part.key_BKSH, wide)
  seen_B11TS = part.seen_BTS(tile)[:, None, None]
  return jnp.where(seen_B11TS, logits_BKGTS, jnp.finfo(wide).min)


def _by_kv_head(x_BTNM: jax.Array, kv_heads: int) -> jax.Array:
  """[B, K, G, T, M], with the G heads that share keys."""
  batch, length, _, last = x_BTNM.shape
  return jnp.moveaxis(x_BTNM.reshape(batch, length, kv_heads, -1, last), 1, 3)


def _scores(
  query_BKGTH: jax.Array, key_BKSH: jax.Array, dtype: jnp.dtype
) -> jax.Array:
  """Products of queries and keys: [B, K, G, T, S]."""
  product = functools.partial(jnp.einsum, preferred_element_type=dtype)
  if query_BKGTH.shape[3] > 1:
    return product("BKGTH,BKSH->BKGTS", query_BKGTH, key_BKSH)
  # For one row, compilers for CPUs would transpose all keys.
  scores_BKSGT = product("BKSH,BKGTH->BKSGT", key_BKSH, query_BKGTH)
  return jnp.moveaxis(scores_BKSGT, 2, 4)


def by_tiles(
  function: Callable[[Tile], jax.Array], tiles: Tile, size: int
) -> jax.Array:
  """Applies a function of a tile to all tiles of [B, T, ...], one by one.

  `tiles` has all of T as one tile. Of it, the function gets tiles of at most
  `size` queries, the last one padded with zeros.
  """
  length = tiles.query_BTNH.shape[1]
  if length <= size:
    return function(tiles)
  cut = functools.partial(layer_stacks.tiles, size=size)
  out_XBC = jax.lax.map(function, jax.tree.map(cut, tiles))
  return jax.lax.collapse(jnp.moveaxis(out_XBC, 0, 1), 1, 3)[:, :length]


def _splash(
  query_BTNH: jax.Array, key_BTKH: jax.Array, value_BTKV: jax.Array,
  segment_ids_BT: jax.Array | None,
) -> jax.Array:  # fmt: skip
  """`attend` by splash attention, on one device."""
  length, heads, width = query_BTNH.shape[1:]
  sizes = block_sizes(length)
  missing = -length % sizes.block_q
  mask = splash_attention.CausalMask((length + missing,) * 2)
  kernel = splash_attention.make_splash_mha(
    splash_attention.MultiHeadMask([mask] * heads),
    block_sizes=sizes,
    head_shards=1,
    q_seq_shards=1,
    residual_checkpoint_name=ATTENTION,
    interpret=platforms.interpret_params() is not None,
  )

  def heads_first(x_BTNH: jax.Array) -> jax.Array:
    # Queries do not see later keys, so any padding will do.
    x_BTNH = jnp.pad(x_BTNH, ((0, 0), (0, missing), (0, 0), (0, 0)))
    return jnp.swapaxes(x_BTNH, 1, 2)

  # The kernel does not scale.
  scaled_BTNH = precision.widen(query_BTNH) * jnp.float32(width**-0.5)
  scaled_BTNH = scaled_BTNH.astype(query_BTNH.dtype)
  segments = None
  if segment_ids_BT is not None:
    segment_ids_BT = jnp.pad(
      segment_ids_BT, ((0, 0), (0, missing)), mode="edge"
    )
    segments = splash_attention.SegmentIds(segment_ids_BT, segment_ids_BT)
  mixed_BNTV: Any = jax.vmap(kernel)(
    *map(heads_first, (scaled_BTNH, key_BTKH, value_BTKV)), segments
  )
  return jnp.swapaxes(mixed_BNTV, 1, 2)[:, :length]


def _splash_why_not(query_BTNH: jax.Array, *_: Any) -> str | None:
  if query_BTNH.dtype not in (jnp.bfloat16, jnp.float32):
    return f"takes bfloat16 and float32, not {query_BTNH.dtype}"
  return None


def block_sizes(length: int) -> splash_attention.BlockSizes:
  """The largest blocks that pad a sequence by an eighth of it at most."""
  few = (b for b in _BLOCKS if -length % b <= length // 8)
  block = next(few, _BLOCKS[-1])
  at_once = min(block, _KEYS_AT_ONCE)
  return splash_attention.BlockSizes(
    block_q=block, block_kv=block, block_kv_compute=at_once,
    block_q_dkv=block, block_kv_dkv=block, block_kv_dkv_compute=at_once,
    block_q_dq=block, block_kv_dq=block,
  )  # fmt: skip


def _cudnn(
  query_BTNH: jax.Array, key_BTKH: jax.Array, value_BTKV: jax.Array,
  segment_ids_BT: jax.Array | None = None,
) -> jax.Array:  # fmt: skip
  """`attend` by cuDNN; on Hopper for any V <= H, and for packed documents."""
  # Values must be as wide as keys.
  width = value_BTKV.shape[-1]
  missing = query_BTNH.shape[-1] - width
  value_BTKH = jnp.pad(value_BTKV, ((0, 0), (0, 0), (0, 0), (0, missing)))
  arrays = query_BTNH, key_BTKH, value_BTKH
  if segment_ids_BT is None:
    mixed_BTNH = jax.nn.dot_product_attention(
      *arrays, is_causal=True, implementation="cudnn"
    )
  else:
    length_BM, start_BM, fit = documents(segment_ids_BT, _DOCUMENTS)
    tiled = functools.partial(_tiled, segment_ids_BT=segment_ids_BT, tile=0)
    packed = functools.partial(_cudnn_packed, length_BM, start_BM)
    mixed_BTNH = jax.lax.cond(fit, packed, jax.checkpoint(tiled), *arrays)
  return mixed_BTNH[..., :width]


def _cudnn_packed(
  length_BM: jax.Array, start_BM: jax.Array, *arrays: jax.Array
) -> jax.Array:
  # `jax.nn` does not pass documents on.
  cudnn = importlib.import_module("jax._src.cudnn.fused_attention_stablehlo")
  lengths, starts = [length_BM] * 2, [start_BM] * 2
  return cudnn.dot_product_attention(
    *arrays, None, None, *lengths, *starts,
    scale=arrays[0].shape[-1] ** -0.5, mask_type=cudnn.MaskType.CAUSAL,
  )  # fmt: skip


def documents(
  segment_ids_BT: jax.Array, most: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Where the documents of packed rows are, as cuDNN takes it.

  Returns:
    Lengths [B, M] and starts [B, M + 1], int32, -1 for documents that a row
    does not have; and whether no row has more than M = `most`.
  """
  differs_BT = segment_ids_BT[:, 1:] != segment_ids_BT[:, :-1]
  number_BT = jnp.pad(jnp.cumsum(differs_BT, axis=1), ((0, 0), (1, 0)))
  count_B1 = number_BT[:, -1:] + 1
  number_M = jnp.arange(most + 1)
  before_BMT = number_BT[:, None] < number_M[None, :, None]
  start_BM = jnp.sum(before_BMT, axis=-1, dtype=jnp.int32)
  exists_BM = number_M[None] < count_B1
  length_BM = jnp.where(exists_BM[:, :-1], jnp.diff(start_BM), -1)
  return (
    length_BM,
    jnp.where(exists_BM, start_BM, -1),
    jnp.all(count_B1 <= most),
  )


def _cudnn_why_not(query_BTNH: jax.Array, *others: Any) -> str | None:
  if query_BTNH.dtype not in (jnp.bfloat16, jnp.float16):
    return f"takes bfloat16 and float16, not {query_BTNH.dtype}"
  try:
    # JAX queries the library, which has to be installed, and for packed
    # documents the GPU.
    jax.eval_shape(_cudnn, query_BTNH, *others)
  except (NotImplementedError, RuntimeError, ValueError) as error:
    return str(error)
  return None


class _Kernel(NamedTuple):
  """A fused kernel of JAX.

  Attributes:
    platform: that it runs on.
    call: `attend` of the arrays of one device.
    why_not: why it does not take these arrays, or None.
  """

  platform: str
  call: Callable[..., jax.Array]
  why_not: Callable[..., str | None]


KERNELS: dict[str, _Kernel] = {
  "splash": _Kernel("tpu", _splash, _splash_why_not),
  "cudnn": _Kernel("cuda", _cudnn, _cudnn_why_not),
}


def _by_kernel(kernel: str, tile: int, *arrays: Any) -> jax.Array:
  """The named kernel, or one for the platform that this is lowered for."""

  def tiled(*arrays: Any) -> jax.Array:
    # Spans would store the keys that each of them sees.
    mix = jax.checkpoint(functools.partial(_tiled, tile=tile))
    return ad_checkpoint.checkpoint_name(mix(*arrays), ATTENTION)

  if kernel == "tiled":
    return tiled(*arrays)
  if kernel == "auto":
    fused = {
      fused_kernel.platform: _jitted(fused_kernel)
      for fused_kernel in KERNELS.values()
      if fused_kernel.why_not(*arrays) is None
    }
    return platforms.by_platform(arrays, tiled, **fused)
  named = KERNELS[kernel]
  name = f"model.attention_kernel={kernel!r}"
  reason = named.why_not(*arrays)
  if reason is not None:
    raise NotImplementedError(f"{name}: {reason}")
  if platforms.interpret_params() is not None:
    return named.call(*arrays)
  return _jitted(named)(
    *platforms.require_platform(arrays, name, named.platform)
  )


@functools.cache
def _jitted(kernel: _Kernel) -> Callable[..., jax.Array]:
  """One jitted function each: equal calls are traced once."""
  return jax.jit(kernel.call)
