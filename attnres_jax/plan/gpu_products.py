# SPDX-License-Identifier: Apache-2.0
"""Matrix products in a program for GPUs: `dot`, cuBLAS and attention."""

from collections.abc import Mapping
import math
import re

from attnres_jax.plan import instruction as instruction_lib

_BLAS = '="__cublas$'
_ATTENTION = '="__cudnn$fmhaSoftmax'
# Products of [T, S]: of scores and values; and their gradients, for which the
# scores are computed again.
_FORWARD, _BACKWARD = 2, 5


def is_library(instruction: instruction_lib.Instruction) -> bool:
  """Whether it calls a kernel of cuBLAS or cuDNN."""
  return any(mark in instruction.attributes for mark in (_BLAS, _ATTENTION))


def is_attention(instruction: instruction_lib.Instruction) -> bool:
  """Whether it calls cuDNN's attention."""
  return _ATTENTION in instruction.attributes


def is_backward(attention: instruction_lib.Instruction) -> bool:
  """Whether it computes gradients of attention."""
  return f'{_ATTENTION}Backward"' in attention.attributes


def product_flops(
  instruction: instruction_lib.Instruction,
  body: Mapping[str, instruction_lib.Instruction],
) -> float:
  """FLOPs of one execution; 0 for what multiplies no matrices.

  `body` has the instructions of its computation, by name. A causal mask counts:
  half of the products of attention are left out.
  """
  is_dot = instruction.op == "dot"
  if not is_dot and not is_library(instruction):
    return 0.0
  first, second = (body.get(name) for name in instruction.operands[:2])
  if first is None or second is None:
    return 0.0
  left, right = first.arrays[0].dims, second.arrays[0].dims
  if is_attention(instruction):  # [B, T, N, H] and [B, S, K, H]
    count = _BACKWARD if is_backward(instruction) else _FORWARD
    causal = 0.5 if '"mask_type": "CAUSAL"' in instruction.attributes else 1.0
    return 2.0 * count * causal * math.prod(left) * right[1]
  contracted = re.search(
    r"lhs_contracting_dim(?:s=\{|ensions\":\s*\[)([\d,\" ]*)",
    instruction.attributes,
  )
  axes = re.findall(r"\d+", contracted[1]) if contracted else ()
  summed = math.prod(left[int(axis)] for axis in axes)
  return 2.0 * math.prod(instruction.arrays[0].dims) * summed
