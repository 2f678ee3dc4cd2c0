# SPDX-License-Identifier: Apache-2.0
"""Transfers against the paper's formulas and against simulated sets."""

import dataclasses
import itertools

import pytest

from attnres_jax.pipeline import schedule

# Ranks, virtual stages, chunks per block: exact vectors under naive, cached and
# minimum without the embedding, then with it, then the three closed forms.
TOTALS = [
  ((4, 2, 1), (28, 22, 18), (35, 25, 21), (28, 22, 18)),
  ((4, 2, 2), (12, 10, 8), (19, 13, 11), (14, 11, 9)),
  ((4, 4, 1), (120, 54, 42), (135, 57, 45), (120, 54, 42)),
  ((8, 4, 1), (496, 220, 196), (527, 227, 203), (496, 220, 196)),
  ((8, 4, 2), (240, 108, 96), (271, 115, 103), (248, 110, 98)),
]

# Fig. 3, P = 4, V = 2, a block every two chunks.
FIG3 = [
  # into, sender, receiver, naive, cached, minimum, partial
  (1, 0, 1, (0,), (0,), (0,), True),
  (2, 1, 2, (0, 1), (0, 1), (0, 1), False),
  (3, 2, 3, (0, 1), (0, 1), (0, 1), True),
  (4, 3, 0, (0, 1, 2), (1, 2), (1, 2), False),
  (5, 0, 1, (0, 1, 2), (1, 2), (2,), True),
  (6, 1, 2, (0, 1, 2, 3), (2, 3), (2, 3), False),
  (7, 2, 3, (0, 1, 2, 3), (2, 3), (3,), True),
]

# Aligned or not, blocks inside chunks, across them and beyond the network,
# chunks of one size and of several.
LAYOUTS = [
  schedule.Layout(ranks, stages, sizes, block)
  for ranks, stages in itertools.product((1, 2, 3, 4, 5), (1, 2, 3))
  for block in (None, 1, 2, 3, 4, 5, 6, 8, 100)
  for sizes in (2, 4, tuple(1 + (3 * c) % 4 for c in range(ranks * stages)))
]


def aligned(ranks, stages, chunks_per_block):
  return schedule.Layout(ranks, stages, 2, 2 * chunks_per_block)


@pytest.mark.parametrize("shape,plain,with_embedding,formulas", TOTALS)
def test_totals(shape, plain, with_embedding, formulas):
  ranks, stages, chunks_per_block = shape
  layout = aligned(*shape)
  for rule, a, b in zip(schedule.RULES, plain, with_embedding):
    assert layout.total_vectors(rule, embedding=False) == a
    assert layout.total_vectors(rule) == b
  closed = schedule.naive_total, schedule.cached_total, schedule.minimum_total
  per_chunk = 1 / chunks_per_block
  assert tuple(f(ranks, stages, per_chunk) for f in closed) == formulas


def test_fig3_transition_by_transition():
  layout = aligned(4, 2, 2)
  by_rule = [
    [tuple(layout.window(chunk, rule)) for chunk in range(1, 8)]
    for rule in schedule.RULES
  ]
  rows = [
    (
      chunk,
      layout.rank(chunk - 1),
      layout.rank(chunk),
      *windows,
      layout.has_partial(chunk),
    )
    for chunk, windows in enumerate(zip(*by_rule), 1)
  ]
  assert rows == FIG3
  # The figure's count of redundant transmissions.
  assert layout.total_vectors("naive") - layout.total_vectors("cached") == 6
  # The second virtual stage alone, per rank.
  second = [[*map(len, windows[3:])] for windows in by_rule]
  assert second == [[3, 3, 4, 4], [2, 2, 2, 2], [2, 1, 2, 1]]


@pytest.mark.parametrize(
  "ranks,stages", [(4, 2), (8, 2), (8, 4), (4, 4), (2, 2)]
)
@pytest.mark.parametrize("blocks_per_chunk", [1, 2, 3])
def test_closed_forms_are_exact_when_chunks_end_blocks(
  ranks, stages, blocks_per_chunk
):
  layout = schedule.Layout(ranks, stages, 2 * blocks_per_chunk, 2)
  closed = schedule.naive_total, schedule.cached_total, schedule.minimum_total
  chunks = ranks * stages
  extra = chunks - 1, ranks - 1, ranks - 1
  for rule, formula, embeddings in zip(schedule.RULES, closed, extra):
    expected = formula(ranks, stages, blocks_per_chunk)
    assert layout.total_vectors(rule, embedding=False) == expected
    assert layout.total_vectors(rule) == expected + embeddings
  peaks = [
    max(
      sum(block > 0 for block in layout.window(chunk, rule))
      for chunk in range(chunks)
    )
    for rule in schedule.RULES
  ]
  assert peaks == [n * blocks_per_chunk for n in (chunks - 1, ranks, ranks - 1)]
  saved = closed[1](ranks, stages, 1) - closed[2](ranks, stages, 1)
  assert saved == (stages - 1) * ranks


@pytest.mark.parametrize("rule", schedule.RULES)
def test_every_rank_has_the_history_it_reads(rule):
  for layout in LAYOUTS:
    _simulate_forward(layout, rule)


def test_partial_crosses_where_a_block_is_open():
  layout = schedule.Layout(4, 2, 4, 3)
  # Chunks end after 4, 8, 12, ... sublayers, blocks after 3, 6, 9, ...
  assert list(map(layout.has_partial, range(1, 8))) == [
    True, True, False, True, True, False, True,
  ]  # fmt: skip
  assert [layout.complete(c) for c in range(9)] == [1, 2, 3, 5, 6, 7, 9, 10, 12]
  assert layout.num_blocks == 11 and layout.num_sublayers == 32
  full = schedule.Layout(4, 2, 4, 1)
  assert not any(map(full.has_partial, range(8)))


def test_scheme_without_blocks_sends_one_state():
  layout = schedule.Layout(4, 2, 4)
  for rule in schedule.RULES:
    assert layout.total_vectors(rule) == 0
  assert all(map(layout.has_partial, range(1, 8)))


def test_a_stream_crosses_where_no_block_is_open():
  layout = schedule.Layout(2, 2, 4, 4)
  assert not any(map(layout.has_partial, range(5)))
  layout = dataclasses.replace(layout, stream=True)
  crosses = list(map(layout.has_partial, range(5)))
  assert crosses == [False, True, True, True, True]


def test_one_rank_sends_nothing():
  for layout in (schedule.Layout(1, 4, 2, 3), schedule.Layout(1, 4, 2)):
    for rule in schedule.RULES:
      assert not layout.total_vectors(rule)
      assert not any(layout.link_vectors(rule) + layout.link_partials())


def test_split_sublayers():
  assert schedule.split_sublayers(12, 4) == (3, 3, 3, 3)
  sizes = schedule.split_sublayers(54, 16)
  assert sum(sizes) == 54 and set(sizes) == {3, 4}
  layout = schedule.Layout(8, 2, sizes, 6)
  assert layout.num_blocks == 9 and layout.num_sublayers == 54


@pytest.mark.parametrize(
  "make,message",
  [
    (lambda: schedule.split_sublayers(6, 8), "num_chunks: got 8"),
    (lambda: schedule.split_sublayers(0, 3), "num_sublayers: got 0"),
    (lambda: schedule.Layout(0, 2, 4, 4), "num_ranks: got 0"),
    (lambda: schedule.Layout(4, 1.5, 4, 4), "num_virtual_stages: got 1.5"),
    (lambda: schedule.Layout(2, 2, (4, 4, 4), 4), "sublayers_per_chunk: got"),
    (lambda: schedule.Layout(2, 1, (4, 0), 4), "sublayers_per_chunk: got"),
    (lambda: schedule.Layout(2, 2, 4, 0), "block_size: got 0"),
    (lambda: schedule.Layout(2, 2, 4, 4).window(1, "best"), "rule: got 'best'"),
  ],
)
def test_bad_arguments_are_named(make, message):
  with pytest.raises(ValueError, match=f"^{message}"):
    make()


def _completion(layout):
  """{block: chunk that completes it}, from sublayers one by one."""
  chunk_of = [
    chunk
    for chunk, end in enumerate(layout.ends)
    for _ in range(end - (layout.ends[chunk - 1] if chunk else 0))
  ]
  last = len(chunk_of) - 1
  done = {0: -1}
  for block in range(layout.num_blocks):
    done[block + 1] = chunk_of[min((block + 1) * layout.block_size - 1, last)]
  return done


def _simulate_forward(layout, rule):
  """Moves blocks between sets; each rule keeps what its name says."""
  if layout.block_size is None:
    return
  done = _completion(layout)
  held = {rank: set() for rank in range(layout.num_ranks)}
  holding = {0}
  for chunk in range(layout.num_chunks):
    rank = chunk % layout.num_ranks
    if chunk and layout.num_ranks > 1:
      window = set(layout.window(chunk, rule))
      assert window <= holding, "the sender has what it sends"
      assert not window & held[rank], "nothing is sent that is kept"
      holding = window | held[rank]
      held[rank] |= set() if rule == "naive" else window
    complete = {b for b, c in done.items() if c < chunk}
    assert holding == complete, (layout, rule, chunk)
    made = {block for block, c in done.items() if max(c, 0) == chunk}
    holding = holding | made
    if rule == "minimum":
      held[rank] |= made
    elif rule == "cached" and chunk == 0:
      held[rank] |= {0}  # the embedding counts as received by its rank
