# SPDX-License-Identifier: Apache-2.0
"""The report of a sweep shows the results of its runs."""

import re

import jax
import pytest

from attnres_jax import config as config_lib
from attnres_jax.scaling import compute as compute_lib
from attnres_jax.scaling import grid
from attnres_jax.sweep import folder as folder_lib
from attnres_jax.sweep import monitor
from attnres_jax.sweep import rows as rows_lib
from attnres_jax.sweep import state as state_lib
from attnres_jax.sweep.pages import losses as losses_lib
from experiments.scaling_law import report
from tests.sweep import tiny_sweep

SPEC = "configs/scaling.py"
GAPS = {"prenorm": 0.0, "rescaled": 1e-4, "block_attnres": -0.01}
GAPS["full_attnres"] = -0.02


def _law(compute, gap, seed):
  return 3.0 * (compute / 1e-9) ** -0.1 + gap + 1e-3 * seed


def _page(folder):
  return report.render(folder, monitor.of_folder(folder))


def _leave(folder, run, *, finished=True):
  """The files of training, with losses that follow a law."""
  config = folder_lib.run_config(run)
  row = rows_lib.compute_of(config)
  loss = _law(
    row["compute_attention"],
    GAPS[config.model.residual.name] + config.optim.peak_lr,
    config.seed,
  )
  status = state_lib.DONE if finished else state_lib.RUNNING
  tiny_sweep.leave(folder, run, loss, status)


@pytest.fixture
def laptop(tmp_path):
  """The laptop's sweep, nothing of it done."""
  folder = tmp_path / "sweep"
  return folder, folder_lib.prepare(folder, grid.load(SPEC), SPEC)


@pytest.mark.more
def test_whole_sweep(laptop):
  folder, runs = laptop
  for run in runs:
    _leave(folder, run)
  text = _page(folder)
  assert "39/39 done" in text
  assert "http-equiv" not in text, "nothing more to wait for"
  # The page loads nothing from elsewhere.
  assert not re.search(r'(?:src|href)="(?!#|https://arxiv)', text)
  rows = monitor.rows(monitor.of_folder(folder))
  assert len(rows) == 39
  runs, fits = report.fits(rows, "attention")
  # Rescaled has one size, and no law.
  assert set(fits) == {"prenorm", "block_attnres", "full_attnres"}
  for scheme, fit in fits.items():
    assert len(runs[scheme].loss) == 12
    low, high = fit.exponent()[1:]
    assert low < 0.1 < high or fit.law.exponent == pytest.approx(0.1, rel=0.02)
  assert f"{fits['prenorm'].law.exponent:.4f}<small>[" in text
  # Full AttnRes is 0.02 below PreNorm everywhere.
  assert text.count("<small>(\N{MINUS SIGN}0.0200 ±") == 4
  for label in compute_lib.COUNTINGS:
    assert f"<td>{report.COUNTS[label]}</td>" in text


@pytest.mark.more
def test_unfinished_sweep_reloads_itself(laptop, monkeypatch):
  """And starts no device."""
  monkeypatch.setattr(
    jax, "devices", lambda *_: pytest.fail("asks for devices")
  )
  folder, runs = laptop
  text = _page(folder)
  assert "0/39 done" in text and 'http-equiv="refresh"' in text
  assert "Laws appear once" in text
  for run in runs[:5]:
    _leave(folder, run)
  _leave(folder, runs[5], finished=False)
  text = _page(folder)
  assert "5/39 done" in text and "interrupted" in text
  # PreNorm has two sizes, Full AttnRes one that is done.
  fits = report.fits(monitor.rows(monitor.of_folder(folder)), "6nd")[1]
  assert set(fits) == {"prenorm", "block_attnres"}
  assert text.startswith("<!DOCTYPE html>")


def test_schemes_at_different_rates_are_pairs():
  """At its own rate, Block needs 1.25 times less compute at every size."""
  rows = []
  for compute, size in enumerate("sml", 1):
    for scheme, best, faster in (
      ("prenorm", 0.01, 1.0), ("block_attnres", 0.02, 1.25),
    ):  # fmt: skip
      for rate in (0.01, 0.02):
        row = {"residual": scheme, "size": size, "optim.peak_lr": rate}
        row |= {"seed": 0, "active_params": 1, "peak_lr": rate}
        row |= {f"compute_{name}": compute for name in compute_lib.COUNTINGS}
        loss = 3.0 * (faster * compute) ** -0.1 + (rate != best)
        rows.append(row | {"validation_loss": loss})
  chosen = losses_lib.rows_at_their_best(rows, "peak_lr")
  text = report.laws(chosen).markdown()
  # By the laws, and over all pairs.
  assert text.count("| 1.25 [1.25, 1.25] | 1.25 [1.25, 1.25] |") == 3


def test_laptop_sweep_is_what_it_says():
  runs = grid.load(SPEC)
  assert len(runs) == 4 * 3 * 3 + 3
  shared = {}
  for run in runs:
    config = folder_lib.run_config(run)
    assert config.data.seed == config.seed == run.overrides["seed"]
    # Within a size and seed, schemes differ in nothing else.
    values = config_lib.flatten(config_lib.to_dict(config))
    for name in [n for n in values if n.startswith("model.residual.")]:
      if name != "model.residual.block_size":
        values.pop(name)  # The name, and options of its own.
    values.pop("name")
    key = (run.overrides["size"], run.overrides["seed"])
    assert shared.setdefault(key, values) == values
    assert config.train.steps % 20 == 0
  controls = [run for run in runs if run.overrides["residual"] == "rescaled"]
  assert {run.overrides["size"] for run in controls} == {"s"}
  assert len(controls) == 3
