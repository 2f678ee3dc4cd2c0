# SPDX-License-Identifier: Apache-2.0
"""Laws of Attention Residuals that hold for whole networks, in float64.

Laws of the operator alone are in `tests/kernels`, laws of real transformers at
initialisation in `zero_query_test.py`.
"""

import numpy as np
import pytest

from tests import compare
from tests.models import reference
from tests.models import trunks

FORMS = ("two_phase", "one_softmax")


pytestmark = pytest.mark.usefixtures("float64")


def _reads(module, values):
  """In NumPy, where comparing compiles nothing."""
  return [np.asarray(h) for h in trunks.reads(module, values)]


# The last block is shorter than others of 2 or 3.
DEPTH = 5
# (scheme, its block size in the oracle, fields)
SCHEMES = [
  pytest.param(
    "full_attnres", 0, dict(form=form, schedule_size=3), id=f"{form}"
  )
  for form in FORMS
] + [
  pytest.param("block_attnres", size, dict(form=form, block_size=size))
  for form in FORMS
  for size in (1, 2, 3)
]


@pytest.mark.parametrize("name,size,fields", SCHEMES)
class TestReads:
  """The inputs of sublayers, from recorded outputs."""

  def test_long_queries_read_the_best_source(self, name, size, fields):
    module, values = (
      trunks.scheme(name, DEPTH, scale=1e6, **fields),
      trunks.outputs(DEPTH),
    )
    queries = trunks.parameters(module).queries
    u = queries.query * queries.gain
    for l, h in enumerate(_reads(module, values)):
      source = np.stack(reference.sources(values[: l + 1], size or 1))
      key = trunks.rms_norm(source, trunks.EPS)
      best = np.argmax(np.sum(key * u[l], -1), axis=0)
      chosen = np.take_along_axis(source, best[None, ..., None], axis=0)[0]
      compare.trees(h, chosen, 1e-12)

  def test_labels_say_what_the_sources_are(self, name, size, fields):
    labels = trunks.scheme(name, DEPTH, **fields).source_labels()
    for l, names in enumerate(labels):
      expected = ["embedding"]
      for n, start in enumerate(range(0, l, size or 1)):
        complete = start + size <= l or l == DEPTH
        block = f"block {n + 1}" if complete else "partial"
        expected.append(block if size else f"sublayer {start + 1}")
      assert names == tuple(expected)


@pytest.mark.parametrize(
  "num_sublayers,num_blocks,size,lengths",
  [
    (6, 1, 6, [6]),
    (12, 4, 3, [3, 3, 3, 3]),
    (12, 5, 3, [3, 3, 3, 3]),
    (14, 4, 4, [4, 4, 4, 2]),
    (7, 3, 3, [3, 3, 1]),
    (6, 9, 1, [1] * 6),
    (54, 9, 6, [6] * 9),
  ],
)
def test_block_count_rounds_the_size_up(
  num_sublayers, num_blocks, size, lengths
):
  module = trunks.scheme("block_attnres", num_sublayers, num_blocks=num_blocks)
  assert module.block_size == size
  assert [b - a for a, b in module.segments()] == lengths
  assert len(module.source_labels()[-1]) == len(lengths) + 1
