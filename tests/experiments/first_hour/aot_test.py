# SPDX-License-Identifier: Apache-2.0
"""The programs of the hour compile for a TPU, so that it does not begin so.

One of each kind, for v5e; needs libtpu but no TPU.
"""

import functools
import re

import jax
import jax.numpy as jnp
import pytest

from attnres_jax.aot import candidates
from attnres_jax.aot import report
from attnres_jax.aot import topology
from experiments.first_hour import checks
from experiments.first_hour import operators
from experiments.first_hour import steps
from experiments.first_hour import timing
from experiments.first_hour import training
from experiments.step_cost import programs

pytestmark = [pytest.mark.slow, pytest.mark.needs("libtpu")]


def compiled(function, *arguments):
  """The text of a program for one v5e chip."""
  place = jax.sharding.SingleDeviceSharding(topology.devices("v5e:2x2")[0])
  structs = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), arguments
  )
  return str(jax.jit(function).lower(*structs).compile().as_text())


# The other dtype takes the same paths, and twice as long to compile.
@pytest.mark.parametrize("dtype", ("bfloat16",))
@pytest.mark.parametrize("op", checks.OPS)
def test_checks(op, dtype):
  problem = checks.OPS[op]
  function, arrays = problem.build(dtype, False)
  text = compiled(functools.partial(function, "pallas_tpu"), *arrays)
  assert "tpu_custom_call" in text
  wide = jax.tree.map(checks._wide, arrays)
  with jax.default_matmul_precision("highest"):
    compiled(functools.partial(function, problem.reference), *wide)


@pytest.mark.parametrize("op", operators.KERNELS)
def test_operators_stay_in_their_loop(op):
  first = next(shape for name, shape in operators.cases() if name == op)
  function, structs = operators.case(op, first, "pallas_tpu")
  count = jax.ShapeDtypeStruct((), jnp.int32)
  text = compiled(timing.repeated(function), count, *structs)
  # Kernels are called in the body of the loop, and no operand is copied there.
  body = re.search(r" while\(.*?body=%?([\w.]+)", text)
  assert body
  inside = text[text.index(f"%{body[1]} (") :].partition("\n}")[0]
  assert inside.count("tpu_custom_call") == len(operators.KERNELS[op])
  entry = text.partition("ENTRY")[2]
  assert "tpu_custom_call" not in entry
  largest = max(structs, key=lambda x: x.size)
  shape = ",".join(map(str, largest.shape))
  assert not re.search(rf"\[{shape}\]\S* copy\(", inside)


@pytest.mark.parametrize("arm", ("prenorm", "block, kernels"))
def test_steps(arm):
  sizes = steps._sizes("training", 4, 2, 2, 256, 256, 512)
  step, structs = programs.training(arm, sizes)
  text = compiled(step, *structs)
  assert ("depth_attention_backward" in text) == (arm != "prenorm")


def test_identity_steps():
  sizes = steps._sizes("identity", 4, 2, 1, 256, 256)
  step, structs = programs.identity("block, kernels", sizes)
  with jax.numpy_rank_promotion("allow"):  # As in the command.
    assert "depth_merge_backward" in compiled(step, *structs)


def test_rates():
  x = jax.ShapeDtypeStruct((2**20,), jnp.float32)
  one = jax.ShapeDtypeStruct((1,), jnp.float32)
  count = jax.ShapeDtypeStruct((), jnp.int32)
  compiled(timing.repeated(lambda x, y: x + y), count, x, one)


def test_the_plan_of_the_network():
  devices = topology.devices("v5e:2x2")[:1]
  (best, *_), _ = candidates.plans(
    training.config_of("prenorm", False), devices
  )
  assert best.kept_bytes < 16 * 2**30
  small = training.config_of("block_attnres", True)
  (best, *_), _ = candidates.plans(small, devices)
  found = report.make_report(best.apply(small), devices)
  assert found["fits"] and found["step_seconds"] > 0
