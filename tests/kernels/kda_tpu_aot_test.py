# SPDX-License-Identifier: Apache-2.0
"""The KDA kernels compile for every TPU; needs libtpu but no TPU."""

import re

import jax
import jax.numpy as jnp
import pytest

from attnres_kernels import kda
from attnres_kernels.kda import shapes
from tests.kernels import tpu_aot_test

pytestmark = pytest.mark.needs("libtpu")
KERNELS = ("kda_forward", "kda_forward_saving", "kda_backward")


def kernels(chip, shape, dtype, save):
  """The kernels of forward and backward, through the public function."""

  def f(do, dstate, *arguments):
    def g(*arguments):
      *tokens, state = arguments
      return kda(*tokens, initial_state=state, save=save)

    values, vjp = jax.vjp(g, *arguments)
    return values, vjp((do, dstate))

  token = shape.batch, shape.tokens, shape.heads
  key, value = ((*token, shape.key), dtype), ((*token, shape.value), dtype)
  gate, rate = ((*token, shape.key), jnp.float32), (token, jnp.float32)
  state = (shape.batch, shape.heads, shape.key, shape.value), jnp.float32
  arguments = [value, state, key, key, value, gate, rate, state]
  text = tpu_aot_test.compile_for(chip, f, arguments, dtype)
  return [name for name in KERNELS if re.search(rf"\b{name}\b", text)]


# tests/kernels/operators_test.py compiles them for the other chips.
def test_chunks_are_found_once():
  shape = shapes.Shape("small", 1, 64, 1, 128, 128)
  assert kernels("v5p", shape, "bfloat16", "chunks") == [*KERNELS[1:]]


@pytest.mark.slow
@pytest.mark.parametrize("chip", tuple(tpu_aot_test.CHIPS))
@pytest.mark.parametrize("shape", shapes.NAMED)
@pytest.mark.parametrize("dtype", ("bfloat16", "float32"))
def test_named_shapes(chip, shape, dtype):
  assert kernels(chip, shape, dtype, "arguments") == [*KERNELS]
