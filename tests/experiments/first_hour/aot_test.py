# SPDX-License-Identifier: Apache-2.0
"""What the first hour runs on a TPU compiles for one."""

import functools
import re

import jax.numpy as jnp
import pytest

from attnres_kernels import problems
from experiments.first_hour import timing
from tests.kernels import tpu_aot_test

pytestmark = [pytest.mark.slow, pytest.mark.needs("libtpu")]


@pytest.mark.parametrize("name", ["depth_attention", "kda"])
def test_operators_stay_in_their_loop(name):
  operator = problems.OPERATORS[name]
  problem = operator.build(operator.check, "bfloat16", problems.draws(0))
  function = functools.partial(problem.function, "pallas_tpu")
  arguments = [((), jnp.int32), *((x.shape, x.dtype) for x in problem.arrays)]
  repeated = timing.repeated(function)
  text = tpu_aot_test.compile_for("v5e", repeated, arguments, None)
  body = re.search(r" while\(.*?body=%?([\w.]+)", text)
  assert body
  inside = text[text.index(f"%{body[1]} (") :].partition("\n}")[0]
  assert inside.count("tpu_custom_call") == len(operator.kernels["forward"])
  assert "tpu_custom_call" not in text.partition("ENTRY")[2]
