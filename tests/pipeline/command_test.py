# SPDX-License-Identifier: Apache-2.0
"""The command counts what a plan sends and holds, and names wrong flags."""

import pytest

from attnres_jax.pipeline import __main__ as command
from tests.fuzz import laws


def _rows(arguments):
  """The columns of each row, by its first word."""
  lines = command.counts(arguments).splitlines()
  return {line.split()[0]: line.split()[1:] for line in lines if line}


def test_the_figure_of_the_paper():
  """19 - 13 vectors are the six that its Fig. 3 calls redundant."""
  rows = _rows([])
  assert rows["naive"] == ["14", "12", "+", "7", "32"]
  assert rows["cached"] == ["11", "10", "+", "3", "20"]
  assert rows["minimum"] == ["9", "8", "+", "3", "18"]


def test_a_config_says_what_crosses_boundaries():
  """Schemes with a stream send it even where no block is open."""
  sent = [
    int(_rows([
      "--config=configs/pipeline.py:size=micro",
      f"--config.model.residual.name={name}",
    ])["minimum"][-1])
    for name in ("block_attnres", "delta_block")
  ]  # fmt: skip
  assert sent[0] < sent[1]


@pytest.mark.parametrize(
  "arguments,message",
  [
    (["--stage=0"], "--stage: got 0, expected a number above 0"),
    (["--microbatches=6"], "a multiple of num_ranks=4, such as 4 or 8"),
    (["--sublayers=7"], "num_chunks: got 8, expected at most 7"),
    (["--block_size=-1"], "block_size: got -1, expected"),
    # A table has a limit.
    (["--microbatches=100000"], "--microbatches: got 100000"),
    (["--stage=100000"], "--stage: got 100000"),
    (["--stage=100", "--microbatches=1000"], "--microbatches: got 1000, "),
  ],
)
def test_bad_arguments(arguments, message):
  status, _, err = laws.outcome(command.main, arguments)
  assert status == 2 and message in err
