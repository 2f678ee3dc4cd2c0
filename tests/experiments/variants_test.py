# SPDX-License-Identifier: Apache-2.0
"""Studies: variants build at every scale, and pairs share all the rest."""

import pytest

from attnres_jax import config as config_lib
from attnres_jax.common import csv_rows
from attnres_jax.common import plans
from attnres_jax.models import residuals
from attnres_jax.scaling import grid
from attnres_jax.sweep import folder as folder_lib
from experiments import variants
from experiments.ablations import config as ablations
from experiments.block_size import config as block_size
from experiments.demo import config as demo
from experiments.depth_heads import config as depth_heads
from experiments.pages import variants as report
from experiments.residual_zoo import config as residual_zoo
from experiments.residual_zoo import report as zoo_report
from tests import tiers

STUDIES = {
  study.STUDY.name: study.STUDY
  for study in (ablations, block_size, demo, depth_heads, residual_zoo)
}


def _runs(study, arg):
  spec = f"experiments/{study}/config.py:{arg}"
  return [
    (run.overrides, folder_lib.run_config(run)) for run in grid.load(spec)
  ]


@tiers.parametrize("scale", ["demo", "laptop", "deep", "paper"], first=["demo"])
@pytest.mark.parametrize("name", STUDIES)
def test_variants(name, scale):
  spec = f"experiments/{name}/config.py:scale={scale}"
  first = config_lib.to_dict(config_lib.load_config(spec))
  runs = _runs(name, f"scale={scale},seeds=1")
  for overrides, config in runs:
    residuals.abstract_residual(config.with_vocab_size(257).model)
    differing = set(config_lib.differences(first, config_lib.to_dict(config)))
    if overrides["variant"] == variants.CONTROL:
      # The demo's control is PreNorm's function under another scheme.
      field = "model.residual.name" if name == "demo" else "model.norm_eps"
      assert differing == {"name", field}
    elif not {"budget", "optim.peak_lr"} & set(overrides):
      slow = overrides["variant"].startswith("input_query_slow")
      more = {"optim.rates"} if slow else set()
      fields = differing - more
      assert all("residual" in f or f == "name" for f in fields), differing
  trained = {
    overrides["variant"] for overrides, _ in runs if "budget" not in overrides
  }
  left = set(STUDIES[name].variants) - trained
  study = STUDIES[name]
  left_out = {
    "demo": {*study.deep, *study.deeper},
    "laptop": {*study.shared, *study.deeper}, "deep": set(),
    "paper": {variants.CONTROL},
  }[scale]  # fmt: skip
  assert left == left_out & set(study.variants)


def test_what_is_shared_is_the_same_run():
  """By the hash of its config, which names it."""
  for name in ("block_size", "depth_heads", "residual_zoo"):
    study = STUDIES[name]
    assert (
      {"prenorm", "block"} < set(study.shared) < set(ablations.STUDY.variants)
    )
    for variant in study.shared:
      ours, other = (
        grid.collect(
          lambda add, variant=variant: add(variant=variant, seed=3),
          grid.config_resolver(f"experiments/{of}/config.py"),
        )
        for of in (name, "ablations")
      )
      assert ours[0].name == other[0].name


def test_planned_runs_leave_their_mesh_to_a_plan():
  plain, other = (
    _runs("block_size", f"scale=paper{arg}")[0][1] for arg in ("", ",planned")
  )
  assert other.optim.accumulate_steps == 0 < plain.optim.accumulate_steps
  assert other.mesh == config_lib.MeshConfig() != plain.mesh
  assert plans.config_hash(other) == plans.config_hash(plain)


def test_blocks_of_all_32_sublayers():
  """Only where there are so many; learning rates of PreNorm only there, too."""
  for scale, layers, rates in (("laptop", 8, 0), ("deep", 16, 2)):
    runs = _runs("block_size", f"scale={scale}")
    assert all(config.model.num_layers == layers for _, config in runs)
    sizes = {config.model.residual.block_size for _, config in runs}
    assert (32 in sizes) == (scale == "deep")
    assert sum("optim.peak_lr" in overrides for overrides, _ in runs) == rates


def test_more_seeds_begin_with_the_same_runs():
  two, first = (_runs("ablations", f"seeds={seeds}") for seeds in (2, 1))
  assert len(two) > len(first) and all(run in two for run in first)
  assert all(c.seed == c.data.seed for _, c in two)


def _rows():
  rows = [
    _row("prenorm", seed, 2.0 + 0.1 * seed, tokens, budget)
    for seed in range(3)
    for tokens, budget in ((100, ""), (50, "0.5"), (200, "2.0"))
  ]
  for row in rows:
    row["validation_loss"] -= 0.1 * (row["tokens"] / 100 - 1)
  rows += [_row("block", seed, 1.95 + 0.1 * seed, 100, "") for seed in range(3)]
  rows += [_row("full", 0, 1.9, 100, "")]
  rows += [
    _row("prenorm", 0, 2.2, 100, "")
    | {"optim.peak_lr": "6e-3", "peak_lr": 6e-3}
  ]
  return rows


def test_rows_of_the_other_study(tmp_path, monkeypatch):
  """Fill the gaps of a study, and nothing else."""
  monkeypatch.setattr(report, "_EXPERIMENTS", tmp_path)
  study = block_size.STUDY
  rows = [_row("size2", 0, 1.96, 100, "")]
  assert report.compare(study, rows).rows == rows
  (tmp_path / "ablations").mkdir()
  csv_rows.write(
    tmp_path / "ablations" / "results.csv",
    [*_rows(), _row("mhc", 0, 1.9, 100, "")],
  )
  lines = report.table(report.compare(study, rows)).rows
  assert [line[0] for line in lines] == ["PreNorm", "S = 1", "S = 2", "S = 4"]
  assert lines[2][3] == "\N{MINUS SIGN}0.0400 \N{PLUS-MINUS SIGN} 0.0000"
  # A row of a sweep is paired with rows of a file.
  assert float(lines[2][5].split()[0]) > 1
  axes = report.forest(study, rows).axes[0]
  labels = [label.get_text() for label in axes.get_yticklabels()]
  assert labels == ["S = 1", "S = 2", "S = 4"]


def _commit(tmp_path, monkeypatch, **rows):
  """Puts rows in the place of the committed ones, under other names."""
  monkeypatch.setattr(report, "_EXPERIMENTS", tmp_path)
  for name, lines in rows.items():
    (tmp_path / name).mkdir()
    renamed = [row | {"run": f"old{row['run']}"} for row in lines]
    csv_rows.write(tmp_path / name / "results.csv", renamed)


@pytest.mark.parametrize("name", ["data", "tokens", "peak_lr", "compute_6nd"])
def test_rows_of_another_protocol_are_not_compared(name, tmp_path, monkeypatch):
  """Such as the paper's scale, or the text of another Python."""
  _commit(tmp_path, monkeypatch, ablations=_rows())
  rows = [row | {name: "7"} for row in _rows()]
  compared = report.compare(block_size.STUDY, rows)
  assert compared.rows == rows
  table = report.table(compared)
  pairs = list(table.header).index("pairs")
  assert [line[pairs] for line in table.rows] == [3, 1, 3]


def test_the_spread_is_of_one_text_and_counts_a_run_once(tmp_path, monkeypatch):
  """A run may be trained again, under another name."""
  _commit(tmp_path, monkeypatch)
  spread = report.compare(ablations.STUDY, _rows()).spread
  losses = enumerate((1.9, 2.2))
  old = [_row("size2", seed, loss, 100, "") for seed, loss in losses]
  rows = [row | {"data": "new"} for row in _rows()]
  _commit(tmp_path, monkeypatch, ablations=rows, block_size=old)
  assert report.compare(ablations.STUDY, rows).spread == spread


def test_the_zoo(tmp_path, monkeypatch):
  """Has every scheme, some of them with twice the steps."""
  monkeypatch.setattr(report, "_EXPERIMENTS", tmp_path)
  study = residual_zoo.STUDY
  assert len(study.variants) == len(residuals.RESIDUALS)
  twice = [
    config
    for _, config in _runs("residual_zoo", "seeds=1")
    if config.train.steps == 2880
  ]
  assert len(twice) == len(study.longer)
  rows = [*_rows(), _row("elmo", 0, 1.8, 100, "")]
  axes = zoo_report.differences(rows).axes[0]
  labels = [label.get_text() for label in axes.get_yticklabels()]
  assert labels[0] == "ELMo readout"


def _row(variant, seed, loss, tokens, budget):
  return {
    "run": f"{variant}{seed}{tokens}", "variant": variant, "seed": str(seed),
    "validation_loss": loss, "tokens": tokens, "budget": budget,
    "compute_residual": str(tokens), "peak_lr": "3e-3", "optim.peak_lr": "",
    "step_seconds": "0.1", "seconds": "10", "data": "d", "hardware": "h",
    "python": "3", "jax": "0", "commit": "c",
  }  # fmt: skip
