# SPDX-License-Identifier: Apache-2.0
"""Fused causal attention, by kernels that are part of JAX.

A backend has a platform, `why_not` (a reason not to, or None), `forward` and
`backward`. Arrays are [B, T, heads, width], as in `softmax.causal_attention`,
on one device: splash attention for TPU, cuDNN for NVIDIA.
"""

import functools
from typing import Any

import jax
from jax.experimental.pallas.ops.tpu import splash_attention
from jax.experimental.pallas.ops.tpu.splash_attention import (
  splash_attention_kernel,
)
import jax.numpy as jnp

from attnres_jax import precision

# Queries and keys of a block, and keys of it that are taken at once. By the
# schedules of `kernels/benchmarks/flash_static.py`, larger blocks take fewer
# bundles per pair of tokens, by more than what the diagonal wastes.
_BLOCKS: tuple[int, ...] = (1024, 512, 256, 128)
_KEYS_AT_ONCE = 512


class Splash:
  """Splash attention, Pallas kernels of JAX for TPU."""

  platform = "tpu"

  @staticmethod
  def why_not(query_BTNH, key_BTKH, value_BTKV, segment_ids_BT) -> str | None:
    del key_BTKH, value_BTKV, segment_ids_BT
    if query_BTNH.dtype not in (jnp.bfloat16, jnp.float32):
      return f"takes bfloat16 and float32, not {query_BTNH.dtype}"
    return None

  @staticmethod
  def forward(query, key, value, segment_ids, *, interpret=False):
    """[B, T, N, V], and the float32 log-normalisers [B, N, T]."""
    length = query.shape[1]
    kernel, arrays, segments = _splash(
      query, key, value, segment_ids, save_residuals=True, interpret=interpret
    )
    out_BNTV, (lse_BNT,) = jax.vmap(kernel)(*arrays, segments)
    return jnp.swapaxes(out_BNTV, 1, 2)[:, :length], lse_BNT[..., :length]

  @staticmethod
  def backward(
    query, key, value, segment_ids, out, lse_BNT, dout, *, interpret=False
  ):
    """The gradients of queries, keys and values."""
    kernel, arrays, segments = _splash(
      query, key, value, segment_ids, save_residuals=False, interpret=interpret
    )
    padded = arrays[0].shape[2]
    missing = padded - lse_BNT.shape[2]
    lse_BNT = jnp.pad(lse_BNT, ((0, 0), (0, 0), (0, missing)))
    out, dout = (_heads_first(x, padded) for x in (out, dout))

    def one_row(heads, segments, out, lse, dout):
      residuals = (
        *heads, segments, None, out, lse,
        kernel.dq_mask_info, kernel.dkv_mask_info,
      )  # fmt: skip
      return splash_attention_kernel._splash_attention_bwd(
        **kernel.kwargs, res=residuals, do=dout
      )[3:6]

    gradients = jax.vmap(one_row)(arrays, segments, out, lse_BNT, dout)
    dquery, *rest = (
      jnp.swapaxes(g, 1, 2)[:, : query.shape[1]] for g in gradients
    )
    dquery = precision.widen(dquery) * _scale(query)
    return (dquery.astype(query.dtype), *rest)


class CuDnn:
  """CuDNN through `jax.nn.dot_product_attention`; on Hopper for any V <= H."""

  platform = "cuda"

  @staticmethod
  def why_not(query_BTNH, key_BTKH, value_BTKV, segment_ids_BT) -> str | None:
    if segment_ids_BT is not None:
      return "takes no segment ids, but a bias of all pairs of tokens"
    if query_BTNH.dtype not in (jnp.bfloat16, jnp.float16):
      return f"takes bfloat16 and float16, not {query_BTNH.dtype}"
    arrays = query_BTNH, key_BTKH, value_BTKV
    try:
      # JAX queries the library, which has to be installed.
      jax.eval_shape(functools.partial(_cudnn), *arrays)
    except (NotImplementedError, RuntimeError, ValueError) as error:
      return str(error)
    return None

  @staticmethod
  def forward(query, key, value, segment_ids):
    del segment_ids
    batch, length, heads, _ = query.shape
    lse_BNT = jnp.zeros((batch, heads, length), jnp.float32)
    return _cudnn(query, key, value), lse_BNT

  @staticmethod
  def backward(query, key, value, segment_ids, out, lse_BNT, dout):
    # The residuals that its own backward pass needs cannot be passed on.
    del segment_ids, out, lse_BNT
    return jax.vjp(_cudnn, query, key, value)[1](dout)


BACKENDS: dict[str, Any] = {"splash": Splash, "cudnn": CuDnn}


def block_sizes(length: int) -> splash_attention.BlockSizes:
  """The largest blocks that pad a sequence by an eighth of it at most."""
  few = (b for b in _BLOCKS if -length % b <= length // 8)
  block = next(few, _BLOCKS[-1])
  at_once = min(block, _KEYS_AT_ONCE)
  return splash_attention.BlockSizes(
    block_q=block,
    block_kv=block,
    block_kv_compute=at_once,
    block_q_dkv=block,
    block_kv_dkv=block,
    block_kv_dkv_compute=at_once,
    block_q_dq=block,
    block_kv_dq=block,
  )


def _splash(query, key, value, segment_ids, *, save_residuals, interpret):
  """The kernel and its arguments, [B, N, T, H], padded to blocks."""
  length, heads = query.shape[1:3]
  sizes = block_sizes(length)
  padded = sizes.block_q * -(-length // sizes.block_q)
  mask = splash_attention.CausalMask((padded, padded))
  kernel = splash_attention.make_splash_mha(
    splash_attention.MultiHeadMask([mask] * heads),
    block_sizes=sizes,
    save_residuals=save_residuals,
    head_shards=1,
    q_seq_shards=1,
    interpret=interpret,
  )
  # The kernel does not scale.
  query = (precision.widen(query) * _scale(query)).astype(query.dtype)
  arrays = [_heads_first(x, padded) for x in (query, key, value)]
  segments = None
  if segment_ids is not None:
    missing = ((0, 0), (0, padded - length))
    segment_ids = jnp.pad(segment_ids, missing, mode="edge")
    segments = splash_attention.SegmentIds(segment_ids, segment_ids)
  return kernel, arrays, segments


def _scale(query):
  return jnp.float32(query.shape[-1] ** -0.5)


def _heads_first(x_BTNH, padded):
  # Queries do not see later keys, so any padding will do.
  missing = padded - x_BTNH.shape[1]
  x_BTNH = jnp.pad(x_BTNH, ((0, 0), (0, missing), (0, 0), (0, 0)))
  return jnp.swapaxes(x_BTNH, 1, 2)


def _cudnn(query, key, value):
  # Values must be as wide as keys.
  width = value.shape[-1]
  missing = ((0, 0), (0, 0), (0, 0), (0, query.shape[-1] - width))
  return jax.nn.dot_product_attention(
    query,
    key,
    jnp.pad(value, missing),
    is_causal=True,
    implementation="cudnn",
  )[..., :width]
