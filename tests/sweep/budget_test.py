# SPDX-License-Identifier: Apache-2.0
"""Prices of sweeps, and refusals."""

import functools
import re

import pytest

from attnres_jax.common import csv_rows
from attnres_jax.common import plans as plans_lib
from attnres_jax.scaling import grid
from attnres_jax.sweep import budget
from attnres_jax.sweep import cli
from attnres_jax.sweep import folder as folder_lib
from attnres_jax.sweep import state as state_lib
from experiments.scaling_law import run as scaling_law
from tests import tiny_run

SPEC = f"{tiny_run.ROOT}/configs/scaling.py:scale=pod,planned"
TEXT = {
  "data.source": "tokens",
  "data.path": "gs://B/text",
  "data.tokenizer": "ids",
}
# Of a v3-8, whose eight devices are four chips, and of a v5e-8.
SECONDS = {"64m": 0.5, "124m": 1.0, "231m": 4.0, "381m": 16.0}


@functools.cache
def _runs():
  return grid.load(SPEC, TEXT)


def plans_file(path, sizes=tuple(SECONDS), slices=("v5e-8",)):
  rows = {}
  kinds = {
    "v5e-8": "TPU v5 lite", "v5e:2x4": "TPU v5 lite", "v3-8": "TPU v3",
    "h100-8": "NVIDIA H100 80GB HBM3",
  }  # fmt: skip
  for run in _runs():
    size = run.overrides["size"]
    for name in slices if size in sizes else ():
      hashed = plans_lib.config_hash(folder_lib.run_config(run))
      rows[hashed, name] = {
        "config_hash": hashed, "device_kind": kinds[name], "devices": "8",
        "step_seconds": str(SECONDS[size]), "slice": name,
      }  # fmt: skip
  csv_rows.write(path, list(rows.values()))
  return str(path)


def prices(runs, path):
  return budget.prices(runs, plans_lib.rows(path))


def hours(size, num_chips=8):
  """Chip-hours of all schemes and seeds."""
  run = next(run for run in _runs() if run.overrides["size"] == size)
  return 9 * run.config["train"]["steps"] * SECONDS[size] * num_chips / 3600


def test_runs_are_priced_by_their_plans(tmp_path):
  path = plans_file(tmp_path / "p.csv", ("64m", "124m"), ("v5e-8", "v3-8"))
  first, second = prices(_runs(), path)
  assert (first.slice_name, second.slice_name) == ("v5e-8", "v3-8")
  assert len(first.hours) == len(first.missing) == 18
  assert first.total == pytest.approx(hours("64m") + hours("124m"))
  assert second.total == pytest.approx(first.total / 2)
  text = budget.to_text(_runs(), [first, second])
  assert f"{budget.tokens(_runs()):,} tokens" in text
  assert re.search(r"v5e-8 +18 of 36", text)


def test_a_slice_has_one_price_under_both_of_its_names(tmp_path):
  for size, name in (("64m", "v5e-8"), ("124m", "v5e:2x4")):
    plans_file(tmp_path / size, (size,), (name,))
  rows = [r for s in ("64m", "124m") for r in plans_lib.rows(tmp_path / s)]
  (price,) = budget.prices(_runs(), rows)
  assert price.slice_name == "v5e-8" and len(price.hours) == 18


def test_runs_with_a_mesh_of_their_own_have_no_price(tmp_path):
  runs = grid.load(SPEC.replace(",planned", ""), TEXT)
  assert not prices(runs, plans_file(tmp_path / "p.csv"))
  assert "chip-hours unknown" in budget.to_text(runs, [])
  assert not prices(_runs(), tmp_path / "absent.csv")


def test_what_fits_is_the_cheapest(tmp_path):
  (price,) = prices(_runs(), plans_file(tmp_path / "p.csv"))
  most = hours("64m") + hours("124m") + 1
  pattern, total = budget.fitting(price, most)
  selected = grid.select(_runs(), pattern)
  assert {run.overrides["size"] for run in selected} == {"64m", "124m"}
  assert total == pytest.approx(most - 1)
  assert budget.fitting(price, 0.1) == ("", 0.0)


@pytest.mark.parametrize(
  "settings,has_plans",
  [
    ("slurm gpus=8", True),
    ("slurm gpus=4 nodes=2", True),
    ("slurm gpus=4", False),
    ("slurm", False),
    ("ray accelerator=gpu gpus=8", True),
    ("ray accelerator=gpu workers=2", False),
    ("skypilot slice=h100-8", True),
    ("skypilot slice=h200-8", False),
    ("tpu_vm zone=z slice=v5e-8", True),
    ("tpu_vm zone=z slice=v5e:2x4", True),
    ("tpu_vm zone=z slice=v3-8", False),
    ("jobset image=i slice=v5e-8", True),
    ("jobset image=i slice=v5e-8 slices=2", False),
  ],
)
def test_a_launch_needs_plans_for_its_slice(
  settings, has_plans, tmp_path, capsys
):
  """Otherwise the script would start runs that refuse; prices are printed."""
  launcher, *settings = settings.split()
  name = "v5e-8" if launcher in ("tpu_vm", "jobset") else "h100-8"
  path = plans_file(tmp_path / "p.csv", ("64m",), (name,))
  line = [f"--config.{name}={value}" for name, value in TEXT.items()]
  line += ["--workdir=gs://B/x", "--only=^64m", "--dry_run", f"--plans={path}"]
  line += [f"--launcher={launcher}", *(f"--set={text}" for text in settings)]
  planned = [f"--config={SPEC}", *line]
  assert cli.main(scaling_law.EXPERIMENT, planned) == 2 * (not has_plans)
  out, err = capsys.readouterr()
  if has_plans:
    assert f"{hours('64m'):,.1f}" in out and name in out
  else:
    assert err.count("\n") == 1 and "expected a slice with plans" in err
    assert f"{name}; 9 of 9 have none there, such as 64m-" in err
  if launcher == "tpu_vm":
    by_hand = [f"--config={SPEC.removesuffix(',planned')}", *line]
    assert cli.main(scaling_law.EXPERIMENT, by_hand) == 0


def test_workers_record_the_chips_that_they_hold(tmp_path, monkeypatch):
  workdir = tmp_path / "run"

  def hold(seconds, num_chips):
    with monkeypatch.context() as patch:
      patch.setattr(state_lib.account, "num_chips", lambda _: num_chips)
      attempt = state_lib.begin(workdir)
      ends = state_lib.read(workdir).started + seconds
      patch.setattr(state_lib.time, "time", lambda: ends)
      attempt.end(state_lib.STOPPED)

  hold(10.0, 8)
  hold(20.0, 4)
  state = state_lib.read(workdir)
  assert state.seconds == pytest.approx(30)
  assert state.chip_seconds == pytest.approx(10 * 8 + 20 * 4)
