# SPDX-License-Identifier: Apache-2.0
"""What holds for the kernels of every operator."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnres_kernels import dispatch
from attnres_kernels import problems
from tests import compare
from tests.kernels import tpu_aot_test


@pytest.mark.needs("libtpu")
@pytest.mark.parametrize("chip", tpu_aot_test.MAIN_CHIPS)
@pytest.mark.parametrize(
  "dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("name", problems.OPERATORS)
def test_compiles(name, dtype, chip):
  """And so do its gradients, for every TPU."""
  operator = problems.OPERATORS[name]
  problem = operator.build(operator.check, dtype, problems.draws(0))
  compute = functools.partial(problems.results, problem, "pallas_tpu")
  arguments = [(x.shape, x.dtype) for x in problem.arrays]
  text = tpu_aot_test.compile_for(chip, compute, arguments, dtype)
  for kernel in operator.kernels["backward"]:
    assert re.search(rf"\b{kernel}\b", text), kernel


@pytest.mark.parametrize(
  "name",
  [
    # The kernels of heads are those of one head.
    pytest.param(name, marks=[pytest.mark.slow] * ("heads" in name))
    for name in problems.OPERATORS
  ],
)
def test_vmap_and_remat_change_nothing(name):
  """Two problems at once, each with its forward pass computed again."""
  operator = problems.OPERATORS[name]
  one, other = (
    operator.build(operator.short, "float32", problems.draws(seed))
    for seed in (0, 1)
  )

  def again(implementation, *arrays):
    function = functools.partial(one.function, implementation)
    return jax.checkpoint(function)(*arrays)

  def run(problem, *arrays):
    return problems.results(problem, "pallas_tpu", *arrays)

  recomputed = functools.partial(run, one._replace(function=again))
  with dispatch.interpreted():
    call = jax.jit(functools.partial(run, one))
    wanted = [call(*problem.arrays) for problem in (one, other)]
    both = map(jnp.stack, zip(one.arrays, other.arrays))
    found = jax.jit(jax.vmap(recomputed))(*both)
  compare.trees(found, jax.tree.map(lambda *a: np.stack(a), *wanted), 1e-5)


@pytest.mark.parametrize("name", problems.OPERATORS)
def test_automatic_choice_on_cpu_compiles_nothing_for_tpu(name):
  operator = problems.OPERATORS[name]
  problem = operator.build(operator.short, "float32", problems.draws(0))
  automatic = functools.partial(problem.function, None)
  text = jax.jit(automatic).lower(*problem.arrays).as_text()
  assert "tpu_custom_call" not in text
