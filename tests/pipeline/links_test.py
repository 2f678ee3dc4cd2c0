# SPDX-License-Identifier: Apache-2.0
"""Links carry, in the compiled program, what the plan says (Eq. 7, Eq. 8)."""

import re

import jax
import pytest

from attnres_jax.common import sharding
from attnres_jax.common import topology
from attnres_jax.pipeline import layout as layout_lib
from attnres_jax.pipeline import spmd
from attnres_jax.plan import hlo
from tests import tiers
from tests.pipeline import networks

RULES = layout_lib.RULES
VECTOR_BYTES = 4 * networks.WIDTH * networks.LENGTH
# P, V, K of the paper's Fig. 3, then shapes with other blocks.
FIG_3 = (4, 2, 2)
SHAPES = (FIG_3, (4, 2, 1), (4, 4, 1), (8, 4, 1), (8, 4, 2), (4, 1, 1),
          (8, 1, 2))  # fmt: skip
CASES = [
  pytest.param(s, marks=() if s == FIG_3 else pytest.mark.slow) for s in SHAPES
]


def _sent(text, ranks, copies=1):
  """Permutes of the loop over ticks, in both directions: vectors, their bytes.

  Args:
    text: of a compiled program.
    ranks: P, above 2; in a ring of two, both directions are the same.
    copies: devices that share a rank; their axes come after `stage`.
  """
  counts, sizes, directions = set(), set(), {1: 0, ranks - 1: 0}
  for count, instruction, _ in hlo.Program(text).instructions():
    if instruction.op.removesuffix("-start") == "collective-permute":
      pairs = re.search(
        r"source_target_pairs=\{(\{[\d,{}]*\})\}", instruction.attributes
      )
      ends = re.findall(r"\{(\d+),(\d+)\}", pairs[1])
      (step,) = {(int(b) // copies - int(a) // copies) % ranks for a, b in ends}
      directions[step] += len(ends)  # Along the ring, or there is no such key.
      counts.add(count)
      sizes.add(int(instruction.arrays[0].nbytes))
  assert len(counts) == 1, "more than one loop permutes"
  return directions[1], directions[ranks - 1], sizes


def _check(shape, rule, microbatches, devices=None, copies=1):
  """A tick carries the planned vectors, forward and backward."""
  ranks, stages, chunks_per_block = shape
  layout = layout_lib.Layout(ranks, stages, 1, chunks_per_block)
  config = networks.config(
    (ranks, stages, microbatches, ranks * stages, chunks_per_block),
    dict(data=copies), pipeline=dict(rule=rule),
  )  # fmt: skip
  mesh = sharding.make_mesh(config.mesh, devices)
  pipeline = spmd.make_pipeline(config, mesh)
  model, batch = jax.eval_shape(lambda: networks.draw(config))
  model = sharding.with_sharding(model, sharding.state_sharding(model, mesh))
  rows = sharding.batch_sharding(mesh)
  batch = jax.tree.map(lambda a: a.update(sharding=rows), batch)
  lowered = jax.jit(pipeline.value_and_grad).lower(model, batch)
  # What is sent does not depend on how fast the rest is.
  quick = None if devices else {"xla_backend_optimization_level": 0}
  forward, backward, sizes = _sent(
    lowered.compile(quick).as_text(), ranks, copies
  )
  planned = sum(layout.link_vectors(rule)) + sum(layout.link_partials())
  assert forward == backward == copies * planned
  assert sizes == {VECTOR_BYTES}


@tiers.parametrize("rule", RULES, first=["cached"])
@pytest.mark.parametrize("shape", CASES)
def test_links_carry_what_is_planned(shape, rule):
  ranks, stages, _ = shape
  _check(shape, rule, ranks if stages > 2 else 2 * ranks)


@pytest.mark.slow
@pytest.mark.needs("libtpu")
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("shape", [FIG_3, (4, 2, 1), (4, 1, 1), (8, 1, 2)])
def test_links_of_a_tpu_carry_what_is_planned(shape, rule):
  devices = topology.devices("v5e:2x4")
  _check(shape, rule, 2 * shape[0], devices, copies=8 // shape[0])
