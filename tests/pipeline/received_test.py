# SPDX-License-Identifier: Apache-2.0
"""Links carry what the plan says (Eq. 7, Eq. 8), counted in compiled programs.

What arrives is right where a pipeline equals one device: tests/pipeline/
spmd_test.py.
"""

import re

import jax
import pytest

from attnres_jax.pipeline import layout as layout_lib
from attnres_jax.plan import hlo
from tests import tiers
from tests.pipeline import networks

# P, V, K: the smallest, the paper's Fig. 3, then shapes with other blocks.
SHAPES = (
  (4, 1, 1),
  *(
    pytest.param(shape, marks=pytest.mark.slow)
    for shape in ((4, 2, 2), (4, 2, 1), (4, 4, 1), (8, 4, 2), (8, 1, 2))
  ),
)


@tiers.parametrize("rule", layout_lib.RULES, first=["cached"])
@pytest.mark.parametrize("shape", SHAPES)
def test_links_carry_what_is_planned(shape, rule):
  """A tick carries the planned vectors, forward and backward."""
  ranks, stages, chunks_per_block = shape
  config = networks.config(
    (ranks, stages, 2 * ranks, ranks * stages, chunks_per_block),
    pipeline=dict(rule=rule),
  )
  lowered = jax.jit(networks.make(config).value_and_grad).lower(
    *networks.draw(config)
  )
  # Almost nothing is optimised; what is sent does not change.
  text = lowered.compile({"xla_backend_optimization_level": 0}).as_text()
  layout = layout_lib.Layout(ranks, stages, 1, chunks_per_block)
  vectors = sum(layout.link_vectors(rule)) + sum(layout.link_partials())
  vector_bytes = 4 * networks.WIDTH * networks.LENGTH
  assert sent(text, ranks) == (vectors, vectors, {vector_bytes})


def sent(text, num_ranks):
  """Vectors per tick to the next rank and to the previous one; their sizes."""
  counts, sizes = set(), set()
  # In a ring of two ranks, both directions would be the same.
  directions = {1: 0, num_ranks - 1: 0}
  for count, instruction, _ in hlo.Program(text).instructions():
    if instruction.op.removesuffix("-start") != "collective-permute":
      continue
    pairs = re.search(
      r"source_target_pairs=\{(\{[\d,{}]*\})\}", instruction.attributes
    )
    ends = re.findall(r"\{(\d+),(\d+)\}", pairs[1])
    (step,) = {(int(b) - int(a)) % num_ranks for a, b in ends}
    directions[step] += len(ends)
    counts.add(count)
    sizes.add(int(instruction.arrays[0].nbytes))
  assert len(counts) == 1, "permutes outside of the loop"
  return *directions.values(), sizes
