# SPDX-License-Identifier: Apache-2.0
"""The rows of Table 4 build at every scale, and pairs share all but the row."""

import pytest

from attnres_jax import config as config_lib
from attnres_jax.models import residuals
from attnres_jax.scaling import grid
from attnres_jax.sweep import folder as folder_lib
from experiments.ablations import config as ablations
from experiments.ablations import report

SPEC = "experiments/ablations/config.py"


def _configs(arg):
  return [
    (run.overrides, folder_lib.run_config(run))
    for run in grid.load(f"{SPEC}:{arg}")
  ]


@pytest.mark.parametrize("scale", ["laptop", "d768", "paper"])
def test_variants(scale):
  found = _configs(f"scale={scale}")
  first = config_lib.to_dict(found[0][1])
  for overrides, config in found:
    residuals.abstract_residual(config.with_vocab_size(257).model)
    differing = set(config_lib.differences(first, config_lib.to_dict(config)))
    if overrides["variant"] == "control":
      assert differing == {"name", "model.norm_eps"}
    elif not {"budget", "optim.peak_lr"} & set(overrides):
      assert all("residual" in f or f == "name" for f in differing), differing
  heads = dict((o["variant"], c) for o, c in found)["block_heads"]
  assert heads.model.residual.read.heads == 16
  assert heads.model.residual.block_size == 4


def test_the_paper_scale_is_the_row_of_table_2():
  model = _configs("scale=paper")[0][1].model
  assert (model.num_layers, model.width, model.num_heads) == (16, 1168, 16)


def test_seeds_continue():
  whole = _configs("seeds=2")
  parts = _configs("first=0,seeds=1") + _configs("first=1,seeds=1")
  key = lambda pair: str(pair)
  assert sorted(map(key, whole)) == sorted(map(key, parts))
  assert all(c.seed == c.data.seed for _, c in whole)


def test_report():
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
  lines = report.table(rows).rows
  assert [line[0] for line in lines] == ["PreNorm", "Block", "Full"]
  _, published, loss, difference, interval, pairs, speedup = lines[1]
  assert published == "1.746 (\N{MINUS SIGN}0.020)" and loss == "2.0500"
  assert difference == "\N{MINUS SIGN}0.0500" and pairs == "3"
  assert (
    interval.startswith("[\N{MINUS SIGN}0.0") and float(speedup.split()[0]) > 1
  )
  assert lines[2][-1] == ""  # One pair has no interval.
  assert [line[0] for line in report.rates(rows).rows] == ["0.003", "0.006"]
  assert len(report.figure(rows).axes[0].get_yticklabels()) == 2
  assert len(ablations.VARIANTS) == 13


def _row(variant, seed, loss, tokens, budget):
  return {
    "run": f"{variant}{seed}{tokens}", "variant": variant, "seed": str(seed),
    "validation_loss": loss, "tokens": tokens, "budget": budget,
    "compute_residual": str(tokens), "peak_lr": "3e-3", "optim.peak_lr": "",
  }  # fmt: skip
