# SPDX-License-Identifier: Apache-2.0
"""The command draws the tables, and a microbatch follows them."""

import re
import sys

import pytest

from attnres_jax.pipeline import __main__ as command
from attnres_jax.pipeline import layout as layout_lib
from attnres_jax.pipeline import life
from attnres_jax.pipeline import schedule as schedule_lib

SHAPES = [(4, 2, 8, 16, 4), (2, 3, 4, 12, 5), (4, 1, 4, 8, 2), (1, 2, 2, 4, 2)]


def _schedule(ranks, stages, microbatches, sublayers, block):
  sizes = layout_lib.split_sublayers(sublayers, ranks * stages)
  layout = layout_lib.Layout(ranks, stages, sizes, block)
  return schedule_lib.make_schedule(layout, microbatches)


def _rows(text):
  """Cells of all rows; columns start where the header's do."""
  head, *lines = text.splitlines()
  starts = [m.start() for m in re.finditer(r"\S+( \S+)*", head)]
  ends = [*starts[1:], None]
  return [
    [line[start:end].strip() for start, end in zip(starts, ends)]
    for line in lines
  ]


def _names(cell, prefix):
  pattern = rf"(?:^| ){prefix}(\d+)(?:@(\d+))?(?= |$)"
  return {int(b): slot for b, slot in re.findall(pattern, cell)}


@pytest.mark.parametrize("rule", layout_lib.RULES)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_block_is_there_when_it_is_read(shape, rule):
  plan = _schedule(*shape)
  layout, kept = plan.layout, {}
  rows = _rows(life.life_text(plan, 1, rule=rule))
  assert len(rows) == 2 * layout.num_chunks
  before, forward = None, 0
  for unit, tick, rank, arrives, finds, makes, sends in rows:
    stage, microbatch = re.fullmatch(r"[FB](\d+)\.(\d+)", unit).groups()
    assert microbatch == "1"
    chunk = int(stage) * layout.num_ranks + int(rank)
    slots = kept.setdefault(rank, {})
    if unit[0] == "F":
      assert plan.at(int(tick), int(rank))[0] == (chunk, 1)
      if before is not None:
        assert _names(before, "b").keys() == _names(arrives, "b").keys()
      found, given = _names(finds, "b"), _names(arrives, "b")
      assert {*found, *given} == {*layout.reads(chunk)}
      if rule != "naive":  # Which keeps a copy for each chunk.
        assert all(slots[b] == slot for b, slot in found.items())
      slots |= given | {b: s for b, s in _names(makes, "b").items() if s}
      forward += len(given)
    else:
      assert plan.at(int(tick), int(rank))[1] == (chunk, 1)
      assert _names(before, "db").keys() == _names(arrives, "db").keys()
      assert _names(finds, "b").keys() == {*layout.reads(chunk)}
    before = sends if sends != "-" else ""
  assert forward == layout.total_vectors(rule)


def test_a_config_says_what_crosses_boundaries():
  """Schemes with a stream send it even where no block is open."""
  config = ["--config=configs/pipeline.py:size=micro", "--show=transfers"]
  texts = {
    name: command.draw([*config, f"--config.model.residual.name={name}"])
    for name in ("block_attnres", "delta_block")
  }
  sums = [
    sum(line.split()[-1] == "yes" for line in text.splitlines())
    for text in texts.values()
  ]
  assert sums[0] < sums[1]


@pytest.mark.parametrize(
  "arguments,message",
  [
    (["--stage=0"], "stage: got 0, expected a whole number of at least 1"),
    (["--microbatches=6"], "a multiple of num_ranks=4, such as 4 or 8"),
    (["--sublayers=7"], "num_chunks: got 8, expected at most 7"),
    (["--block_size=-1"], "block_size: got -1, expected"),
    (["--microbatch=8"], "microbatch: got 8, expected 0 to 7"),
  ],
)
def test_bad_arguments(arguments, message, capsys):
  with pytest.raises(SystemExit) as error:
    sys.exit(command.main(arguments))
  assert error.value.code == 2
  assert message in capsys.readouterr().err
