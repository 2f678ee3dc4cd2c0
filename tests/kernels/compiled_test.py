# SPDX-License-Identifier: Apache-2.0
"""Every operator and its gradients compile for every TPU."""

import functools
import re

import pytest

from attnres_kernels import problems
from tests.kernels import tpu_aot_test


@pytest.mark.needs("libtpu")
@pytest.mark.parametrize("chip", tpu_aot_test.MAIN_CHIPS)
@pytest.mark.parametrize(
  "dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("name", problems.OPERATORS)
def test_compiles(name, dtype, chip):
  operator = problems.OPERATORS[name]
  problem = operator.build(operator.check, dtype, problems.draws(0))
  compute = functools.partial(problems.results, problem, "pallas_tpu")
  arguments = [(x.shape, x.dtype) for x in problem.arrays]
  text = tpu_aot_test.compile_for(chip, compute, arguments, dtype)
  for kernel in operator.kernels["backward"]:
    assert re.search(rf"\b{kernel}\b", text), kernel
