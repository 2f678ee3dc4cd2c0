# SPDX-License-Identifier: Apache-2.0
"""Rows of schemes whose numbers are known, and what a README shows of them."""

import dataclasses

import pytest

from attnres_jax import config as config_lib
from attnres_jax.scaling import grid
from attnres_jax.sweep import folder as folder_lib
from attnres_jax.sweep import monitor
from experiments.residual_zoo import run
from experiments.residual_zoo import train
from tests.sweep import tiny_sweep


@pytest.fixture(scope="module")
def rows():
  small = dataclasses.replace(
    run.SMALL,
    width=16,
    num_layers=3,
    mlp_width=24,
    residual=config_lib.residual_config(block_size=2),
  )
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(run, "SMALL", small)
    facts = [run.facts(name) for name in ("prenorm", "full_attnres", "ddl")]
  return [
    {name: str(value) for name, value in row.items()}
    | {"python": "3", "jax": "1", "commit": "c"}
    for row in facts
  ]


@pytest.mark.more
def test_numbers_of_known_schemes(rows):
  plain, full, delta = rows
  # A sum: one vector of state; read it, add an output to it.
  assert plain["parameters"] == "0" and plain["residual_flops"] == "0"
  assert (plain["moved_vectors"], plain["state_vectors"]) == ("3.000", "1.000")
  assert (plain["rank"], plain["starts_as_prenorm"]) == ("1", "True")
  assert plain["norms"] == plain["matrix"]
  # All 25 values; a query and a gain for each of 25 reads.
  assert full["parameters"] == str(2 * 25 * 512)
  assert full["state_vectors"] == "25.000"
  assert (full["rank"], full["starts_as_prenorm"]) == ("3", "True")
  # Its products mix channels, so that it has no rank.
  assert (delta["rank"], delta["starts_as_prenorm"]) == ("", "False")
  assert delta["norms"] != delta["matrix"]


def test_the_report_of_a_sweep_has_differences_from_prenorm(tmp_path):
  spec = "experiments/residual_zoo/config.py:scale=demo,seeds=1"
  runs = grid.select(grid.load(spec), "^(prenorm|postnorm)-seed")
  for new in folder_lib.prepare(tmp_path, runs, spec):
    tiny_sweep.leave(tmp_path, new, 1.5 if "prenorm" in new.name else 1.4)
  page = train.EXPERIMENT.render(tmp_path, monitor.of_folder(tmp_path))
  assert "\N{MINUS SIGN}0.1000" in page
