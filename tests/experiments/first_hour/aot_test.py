# SPDX-License-Identifier: Apache-2.0
"""What the first hour runs on a TPU compiles for one."""

import functools
import re

import jax
import jax.numpy as jnp
import pytest

from attnres_jax.common import topology
from attnres_kernels import problems
from experiments.first_hour import timing

pytestmark = [pytest.mark.slow, pytest.mark.needs("libtpu")]


def compiled(function, *arguments):
  """The text of a program for one v5e chip."""
  place = jax.sharding.SingleDeviceSharding(topology.devices("v5e:2x2")[0])
  structs = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), arguments
  )
  return str(jax.jit(function).lower(*structs).compile().as_text())


@pytest.mark.parametrize("name", ["depth_attention", "kda"])
def test_operators_stay_in_their_loop(name):
  operator = problems.OPERATORS[name]
  problem = operator.build(operator.check, "bfloat16", problems.draws(0))
  function = functools.partial(problem.function, "pallas_tpu")
  count = jax.ShapeDtypeStruct((), jnp.int32)
  text = compiled(timing.repeated(function), count, *problem.arrays)
  body = re.search(r" while\(.*?body=%?([\w.]+)", text)
  assert body
  inside = text[text.index(f"%{body[1]} (") :].partition("\n}")[0]
  assert inside.count("tpu_custom_call") == len(operator.kernels["forward"])
  assert "tpu_custom_call" not in text.partition("ENTRY")[2]
