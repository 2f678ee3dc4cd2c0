# SPDX-License-Identifier: Apache-2.0
"""What holds for the kernels of every operator."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attnres_kernels
from attnres_kernels import platforms
from attnres_kernels import problems
from attnres_kernels.depth_attention import shapes
from attnres_kernels.kda import shapes as kda_shapes
from tests import compare
from tests import tiers
from tests.kernels import tpu_aot_test


@pytest.mark.needs("libtpu")
@pytest.mark.parametrize("chip", tpu_aot_test.MAIN_CHIPS)
@pytest.mark.parametrize(
  "dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(
  "name,shape",
  [
    *((name, operator.check) for name, operator in problems.OPERATORS.items()),
    # Ragged tokens, values wider than keys.
    ("kda", kda_shapes.Shape("ragged", 2, 100, 1, 128, 256)),
  ],
)
def test_compiles(name, shape, dtype, chip):
  """And so do its gradients, for every TPU."""
  operator = problems.OPERATORS[name]
  problem = operator.build(shape, dtype, problems.draws(0))
  if name == "depth_merge_norm":
    problem = problem._replace(function=functools.partial(merges, None))
  compute = functools.partial(problems.results, problem, "pallas_tpu")
  arguments = [(x.shape, x.dtype) for x in problems.arguments(problem)]
  text = tpu_aot_test.compile_for(chip, compute, arguments, dtype)
  for kernel in operator.kernels["backward"]:
    assert re.search(rf"\b{kernel}\b", text), kernel


@tiers.parametrize(
  "name",
  [
    # The kernels of heads are those of one head.
    pytest.param(name, marks=[pytest.mark.slow] * ("heads" in name))
    for name in problems.OPERATORS
  ],
  first=["depth_attention", "depth_merge_norm"],
)
def test_vmap_and_remat_change_nothing(name):
  """Two problems at once, each with its forward pass computed again."""
  operator = problems.OPERATORS[name]
  problem, other = (
    operator.build(operator.short, "float32", problems.draws(seed))
    for seed in (0, 1)
  )

  def again(implementation, *arrays):
    function = functools.partial(problem.function, implementation)
    return jax.checkpoint(function)(*arrays)

  def run(problem, *arrays):
    return problems.results(problem, "pallas_tpu", *arrays)

  recomputed = functools.partial(run, problem._replace(function=again))
  with platforms.interpreted():
    call = jax.jit(functools.partial(run, problem))
    given = [problems.arguments(problem) for problem in (problem, other)]
    expected = [call(*arguments) for arguments in given]
    both = map(jnp.stack, zip(*given))
    actual = jax.jit(jax.vmap(recomputed))(*both)
  compare.trees(actual, jax.tree.map(lambda *a: np.stack(a), *expected), 1e-5)


def _heads(*sizes, heads=1, rank=None, dtype="bfloat16"):
  slow = [pytest.mark.slow] if sizes[2] > 3 else []
  shape = shapes.Shape("heads", *sizes, heads=heads, rank=rank)
  for name in ("depth_attention", "depth_merge_norm"):
    yield pytest.param(name, shape, dtype, marks=slow, id=f"{name}-{shape}")


@tiers.parametrize(
  "name,shape,dtype",
  [
    # Queries, sources, tokens, width. Registers have 128 columns: heads own
    # some, one, parts of one or of two; keys start at column 128, and before
    # and after.
    *_heads(2, 2, 3, 192, heads=3),
    *_heads(2, 2, 3, 192, rank=40),
    *_heads(2, 3, 9, 512, heads=2),
    *_heads(1, 2, 9, 160, heads=16),
    *_heads(3, 3, 9, 304, heads=2, dtype="float32"),
    *_heads(2, 18, 5, 256, heads=4),
    *_heads(2, 3, 9, 304, rank=140, dtype="float32"),
    *_heads(9, 2, 9, 256, rank=128),
  ], first=2)  # fmt: skip
def test_kernels_round_as_plain_jax_does(name, shape, dtype):
  """Interpreted, against the reference in float32."""
  operator = problems.OPERATORS[name]
  if name == "depth_merge_norm":
    shape = dataclasses.replace(shape, sources=1)
  problem = operator.build(shape, dtype, problems.draws(0))
  if name == "depth_merge_norm":
    problem = problem._replace(function=functools.partial(merges, shape.rank))

  arguments = problems.arguments(problem)

  def run(implementation, arguments=arguments):
    call = functools.partial(problems.results, problem, implementation)
    return jax.tree.leaves(jax.jit(call)(*arguments))

  exacts = run("reference", [x.astype("float32") for x in arguments])
  plain = run("xla")
  with platforms.interpreted():
    kernel = run("pallas_tpu")
  for a, other, exact in zip(kernel, plain, exacts, strict=True):
    assert a.dtype == other.dtype
    allowed = 1.2 * compare.error(other, exact) if dtype == "bfloat16" else 0
    assert compare.error(a, exact) < max(5e-6, allowed)


def merges(rank, implementation, out, lse, query, partial, gain):
  """With the norm, and alone."""
  fixed = dict(rank=rank, implementation=implementation)
  return (
    attnres_kernels.depth_merge_norm(out, lse, query, partial, gain, **fixed),
    attnres_kernels.depth_merge(out, lse, query, partial, **fixed),
  )


@pytest.mark.parametrize("name", problems.OPERATORS)
def test_automatic_choice_on_cpu_compiles_nothing_for_tpu(name):
  operator = problems.OPERATORS[name]
  problem = operator.build(operator.short, "float32", problems.draws(0))
  automatic = problem._replace(
    function=lambda _, *a: problem.function(None, *a)
  )
  step = jax.jit(functools.partial(problems.results, automatic, "automatic"))
  text = step.lower(*problems.arguments(problem)).as_text()
  assert "tpu_custom_call" not in text
