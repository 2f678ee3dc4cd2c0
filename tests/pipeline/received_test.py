# SPDX-License-Identifier: Apache-2.0
"""Devices receive, and links carry, what the plan says (Eq. 7, Eq. 8)."""

import pytest

from attnres_jax.common import topology
from attnres_jax.pipeline import layout as layout_lib
from attnres_jax.pipeline import transport
from tests import tiers
from tests.pipeline import labels

RULES = layout_lib.RULES
# P, V, K of the paper's Fig. 3, then shapes with other blocks.
FIG_3 = (4, 2, 2)
SHAPES = (
  FIG_3,
  (4, 2, 1),
  (4, 4, 1),
  (8, 4, 1),
  (8, 4, 2),
  (4, 1, 1),
  (8, 1, 2),
)


def make_layout(shape):
  ranks, stages, chunks_per_block = shape
  return layout_lib.Layout(ranks, stages, 1, chunks_per_block)


def slow(shapes):
  """Every shape; only Fig. 3 by default."""
  return [
    shape if shape == FIG_3 else pytest.param(shape, marks=pytest.mark.slow)
    for shape in shapes
  ]


@tiers.parametrize("rule", RULES, first=["cached"])
@pytest.mark.parametrize("shape", slow(SHAPES))
def test_devices_receive_and_links_carry_what_is_planned(shape, rule):
  layout = make_layout(shape)
  ranks, stages, _ = shape
  microbatches = ranks if stages > 2 else 2 * ranks
  arrivals, text = labels.receive(layout, rule, microbatches)
  expected = [
    (t.receiver, tuple(t.blocks), t.partial)
    for t in layout.transitions(rule)
    if t.blocks or t.partial
  ]
  paths = {index: [] for index in range(microbatches)}
  returned = returned_partials = 0
  for arrival in sorted(arrivals, key=lambda arrival: arrival.tick):
    if arrival.backward:
      returned += len(arrival.blocks)
      returned_partials += arrival.partial is not None
      continue
    vectors = [*arrival.blocks, *filter(None, [arrival.partial])]
    if vectors:
      ((index,),) = {(microbatch,) for microbatch, _ in vectors}
      blocks = tuple(block for _, block in arrival.blocks)
      paths[index].append((arrival.rank, blocks, arrival.partial is not None))
  assert all(path == expected for path in paths.values())
  assert returned == microbatches * layout.total_vectors(rule)
  assert returned_partials == microbatches * layout.total_partials()
  check_links(labels.sent(text, ranks), layout, rule)


def check_links(sent, layout, rule, copies=1):
  """A tick carries the planned vectors, forward and backward."""
  planned = sum(layout.link_vectors(rule)) + sum(layout.link_partials())
  assert sent.forward == sent.backward == copies * planned
  assert sent.vector_bytes == {labels.VECTOR_BYTES}


@pytest.mark.slow
@pytest.mark.needs("libtpu")
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("shape", [FIG_3, (4, 2, 1), (4, 1, 1), (8, 1, 2)])
def test_links_of_a_tpu_carry_what_is_planned(shape, rule):
  layout = make_layout(shape)
  copies = 8 // shape[0]
  config = labels.make_config(layout, rule, 2 * shape[0], copies)
  pipeline, lower = labels.lower(config, topology.devices("v5e:2x4"))
  text = lower(pipeline).compile().as_text()
  check_links(labels.sent(text, shape[0], copies), layout, rule, copies)


def test_a_wrong_vector_is_noticed(monkeypatch):
  message = transport.Transport.message

  def swapped(self, blocks=(), partial=None):
    return message(self, blocks[::-1], partial)

  monkeypatch.setattr(transport.Transport, "message", swapped)
  with pytest.raises(RuntimeError, match="wrong elements in the inputs"):
    labels.receive(make_layout((4, 1, 1)), "minimum", 4)
