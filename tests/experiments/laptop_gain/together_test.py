# SPDX-License-Identifier: Apache-2.0
"""Seeds that train together learn what ordinary runs learn."""

import pytest

from attnres_jax import config as config_lib
from attnres_jax.common import csv_rows
from attnres_jax.train import loop
from experiments.laptop_gain import config
from experiments.laptop_gain import together
from tests import tiny_run


def test_seeds_train_as_in_runs_of_their_own(tmp_path, monkeypatch):
  monkeypatch.setattr(config, "SEEDS", (200, 201))
  monkeypatch.setattr(config, "BUDGET", 1.0)
  out = tmp_path / "gain.csv"
  arguments = [
    "--part=gain", "--runlocal", "--only=block", f"--out={out}",
    f"--data={tmp_path / 'gain.npz'}",
  ]  # fmt: skip
  assert together.main(arguments) == 0
  rows = csv_rows.read(out)
  assert [row["seed"] for row in rows] == ["200", "201"]
  assert {row["arm"] for row in rows} == {"block"}
  (arg,) = {row["arguments"] for row in rows}
  own = dict.fromkeys(("seed", "data.seed"), 201) | {"mesh.data": 1}
  summary = loop.train_and_evaluate(
    config_lib.load_config(f"{together.FILE}:{arg}", own), tmp_path / "run"
  )
  assert float(rows[1]["validation_loss"]) == pytest.approx(
    summary["validation_loss"], abs=1e-5
  )
  assert rows[0]["validation_loss"] != rows[1]["validation_loss"]
  evaluated = tiny_run.rows(tmp_path / "run", "validation")
  *earlier, _ = [evaluated[step]["loss"] for step in sorted(evaluated)]
  assert [
    float(rows[1][f"loss_{place}"]) for place in config.PLACES
  ] == pytest.approx(earlier, abs=1e-5)
  # Nothing is trained again.
  written = out.read_text()
  assert together.main(arguments) == 0
  assert out.read_text() == written
