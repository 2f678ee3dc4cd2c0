# SPDX-License-Identifier: Apache-2.0
"""Rows of a sweep as runs of a fit."""

import pathlib

import pytest

from attnres_jax import config as config_lib
from attnres_jax import scaling
from attnres_jax.common import csv_rows
from attnres_jax.scaling import fit
from attnres_jax.sweep import rows as rows_lib
from tests import tiny_network

ROOT = pathlib.Path(__file__).parents[2]


def test_schemes_of_one_size_are_pairs():
  """Also where schemes have more parameters, or rows other columns."""
  rows = csv_rows.read(ROOT / "experiments" / "scaling_law" / "results.csv")
  counts = {row["active_params"] for row in rows if row["size"] == "s"}
  assert len(counts) > 1
  runs = rows_lib.by_scheme(rows, "6nd")
  pairs = {name: [*zip(arm.size, arm.seed)] for name, arm in runs.items()}
  assert pairs["prenorm"] == pairs["block_attnres"] == pairs["full_attnres"]
  assert len(set(runs["prenorm"].size)) == 4
  control = set(pairs["rescaled"])
  assert len(control) == 3 and control < set(pairs["prenorm"])


def test_a_rate_for_each_scheme_is_no_size():
  """Else nothing would be paired; two rates of one scheme are refused."""
  rows = csv_rows.read(ROOT / "experiments" / "scaling_law" / "results.csv")
  before = rows_lib.by_scheme(rows, "6nd")
  rates = {"prenorm": "0.003", "block_attnres": "0.006"}

  def tuned(row):
    rate = {"optim.peak_lr": rates.get(row["residual"], "0.001")}
    return {"run": row["run"]} | rate | row

  after = rows_lib.by_scheme([tuned(row) for row in rows], "6nd")
  for scheme, arm in before.items():
    assert arm.size == after[scheme].size
  block, _ = fit.without_failed(after["block_attnres"])
  scaling.effective_speedup(after["prenorm"], block)
  rates = {"prenorm": "0.012"}
  with pytest.raises(config_lib.ConfigError, match="^seed: got"):
    rows_lib.by_scheme([*rows, *map(tuned, rows)], "6nd")


def test_budgets_are_sizes():
  common = {"residual": "prenorm", "seed": "0", "active_params": "9"}
  more = {"tokens": "4", "compute_6nd": "1.0", "validation_loss": "2.0"}
  rows = [
    {"run": "a", "budget": budget, "data.seed": "0"} | common | more
    for budget in ("", "0.5")
  ]
  assert rows_lib.by_scheme(rows, "6nd")["prenorm"].size == (
    (),
    ("budget=0.5",),
  )


def test_compute_with_a_vocabulary_that_only_files_know():
  """With `data.tokenizer=ids`, run.json has no size; a head does not count."""
  unknown, sized = (
    rows_lib.compute_of(
      config_lib.RunConfig(
        model=tiny_network.config(
          "prenorm", value_residual=True, vocab_size=size
        )
      )
    )
    for size in (0, 16)
  )
  assert unknown == sized and sized["compute_attention"] > 0


def test_step_bytes_are_those_of_the_program_that_ran():
  def compiled(function, **sizes):
    return {"event": "compiled", "function": function} | sizes

  first = compiled("train_step", argument_bytes=5, temporary_bytes=3)
  last = compiled("train_step", argument_bytes=50, temporary_bytes=30)
  other = compiled("evaluate", argument_bytes=1, temporary_bytes=1)
  assert rows_lib.step_bytes([first, last, other]) == 80
  unknown = compiled("train_step", argument_bytes=5, temporary_bytes=None)
  assert rows_lib.step_bytes([unknown]) is None
  assert rows_lib.step_bytes([other]) is None
