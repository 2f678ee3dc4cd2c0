# SPDX-License-Identifier: Apache-2.0
"""What kernels tell the compiler that they compute, against their products."""

import functools
import math

import jax
import jax.numpy as jnp
import pytest

from attnres_kernels.experts import pallas_tpu as experts
from attnres_kernels.kda import pallas_tpu as kda
from tests import jaxprs


def _products(function, *args, tile=128):
  """(FLOPs of a grid step in whole tiles, the estimate, the grid)."""
  for call in jaxprs.equations(jax.make_jaxpr(function)(*args)):
    if call.primitive.name == "pallas_call":
      flops = 0
      for dot in jaxprs.equations(call.params["jaxpr"]):
        if dot.primitive.name == "dot_general":
          (contracted, _), _ = dot.params["dimension_numbers"]
          inner = [dot.invars[0].aval.shape[i] for i in contracted]
          sizes = (*dot.outvars[0].aval.shape, *inner)
          flops += 2 * math.prod(-(-n // tile) * tile for n in sizes)
      estimate = call.params["cost_estimate"].flops
      yield flops, estimate, call.params["grid_mapping"].grid


@pytest.mark.parametrize("name", ["forward", "backward"])
def test_of_experts(name):
  """Counts the rows of groups, and a tile more for all but one group."""
  rows, groups, hidden, width, filled = 1152, 4, 264, 328, 8 / 9
  x = jax.ShapeDtypeStruct((rows, width), jnp.bfloat16)
  weight = jax.ShapeDtypeStruct((rows,), jnp.float32)
  sizes = jax.ShapeDtypeStruct((groups,), jnp.int32)
  both = jax.ShapeDtypeStruct((groups, 2, hidden, width), jnp.bfloat16)
  down = jax.ShapeDtypeStruct((groups, hidden, width), jnp.bfloat16)
  more = (x,) if name == "backward" else ()
  function = functools.partial(
    getattr(experts, name), units=lambda gate, up: gate * up, filled=filled
  )
  ((flops, estimate, _),) = _products(
    function, x, weight, sizes, both, down, *more
  )
  assert estimate == flops * (1024 // 128 + groups - 1)


def test_of_sums_of_rows():
  rows = jax.ShapeDtypeStruct((2304, 328), jnp.bfloat16)
  token = jax.ShapeDtypeStruct((2304,), jnp.int32)
  function = functools.partial(experts.sum_rows, tokens=512, filled=8 / 9)
  ((flops, estimate, _),) = _products(function, rows, token)
  # The matrix of zeros and ones is two tiles wide; columns are not padded.
  assert estimate == flops * (2048 // 256 + 512 // 128 - 1) * 328 / 384


@pytest.mark.more
def test_of_kda():
  """At the usual sizes of chunks and heads."""
  heads = jax.ShapeDtypeStruct((2, 256, 16, 128), jnp.bfloat16)
  decay = jax.ShapeDtypeStruct(heads.shape, jnp.float32)
  beta = jax.ShapeDtypeStruct(heads.shape[:3], jnp.float32)
  state = jax.ShapeDtypeStruct((2, 16, 128, 128), jnp.float32)
  forward = functools.partial(
    kda.forward, scale=1.0, chunk_size=64, chunks=True
  )
  backward = functools.partial(kda.backward, scale=1.0, chunk_size=64)
  arguments = heads, heads, heads, decay, beta, state
  o, last, chunks = jax.eval_shape(forward, *arguments)
  for function, args in (
    (forward, arguments),
    (backward, (heads, heads, decay, beta, chunks, o, last)),
  ):
    ((flops, estimate, grid),) = _products(function, *args, tile=1)
    assert estimate == math.prod(grid) * flops
