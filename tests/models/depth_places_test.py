# SPDX-License-Identifier: Apache-2.0
"""Places of sublayers against segments that are counted one by one."""

import pytest

from attnres_jax.models import depth_places
from tests.models import trunks

KINDS = [trunks.KINDS[l % 2] for l in range(11)]
SIZE = 3


def _sources(name, l):
  """The embedding, and the outputs or whole blocks of l sublayers."""
  if name == "full_attnres":
    return 1 + l
  return 1 + sum(first + SIZE <= l for first in range(0, l, SIZE))


@pytest.mark.parametrize("start,stop", [(0, 11), (0, 4), (4, 9), (6, 11)])
@pytest.mark.parametrize("name", ["block_attnres", "full_attnres"])
def test_places(name, start, stop):
  module = trunks.scheme(name, 11, block_size=SIZE, schedule_size=SIZE)
  kinds = KINDS[start:stop]
  found = depth_places.places(kinds, module, start)
  begins = [l for l in range(start, stop) if l == start or l % SIZE == 0]
  assert len(found) == stop - start
  for l, at in enumerate(found, start):
    begin = max(b for b in begins if b <= l)
    earlier = max((b for b in begins if b < begin), default=begin)
    assert at.l == l - start
    assert at.index == kinds[: at.l].count(kinds[at.l])
    assert at.opens == (l == begin)
    assert at.closes == (l + 1 in (*begins, stop))
    assert at.first == (l % SIZE == 0)
    assert at.begin == begin - start
    assert at.sources == _sources(name, begin)
    assert at.before == _sources(name, earlier)
    assert at.kept == sum(k % SIZE != 0 for k in range(start, l))
    assert at.kept_next == at.kept + (l % SIZE != 0)


def test_patterns():
  module = trunks.scheme("block_attnres", 11, block_size=3)
  places = depth_places.places(KINDS, module, 0)
  pairs, last = depth_places.patterns(KINDS, places)
  assert pairs.kinds == trunks.KINDS
  assert [at.l for at in pairs.positions[1]] == [1, 3, 5, 7, 9]
  assert pairs.table_GPN.shape == (5, 2, len(depth_places.At._fields))
  assert last.kinds == ("mixer",)
  assert last.at == ((places[10],),)
