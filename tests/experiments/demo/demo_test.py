# SPDX-License-Identifier: Apache-2.0
"""The demo's page on made-up runs, and its command to its end."""

import html.parser
import re

import numpy as np
import pytest

from attnres_jax import analysis
from attnres_jax.common import csv_rows
from attnres_jax.scaling import grid
from attnres_jax.sweep import cli
from attnres_jax.sweep import folder as folder_lib
from attnres_jax.sweep import monitor
from attnres_jax.sweep import state as state_lib
from experiments.demo import report
from experiments.demo import run as run_lib
from tests import tiny_run
from tests.sweep import tiny_sweep

SPEC = "experiments/demo/config.py"
LOSSES = {"prenorm": 1.5, "control": 1.5, "full": 1.4, "block": 1.42}


def make_look(folder, run):
  weights = None
  if run.overrides["variant"] in ("full", "block"):
    rows = np.array([[1, np.nan, np.nan], [0.25, 0.75, np.nan]])
    weights = analysis.DepthWeights(
      attention=rows,
      mlp=rows,
      output=np.array([0.5, 0.5]),
      columns=("embedding", "block 1", "block 2"),
      output_columns=("embedding", "block 1"),
      attention_entropy=np.zeros(2),
      mlp_entropy=np.zeros(2),
      output_entropy=0.7,
    )
  magnitudes = analysis.Magnitudes(*[np.array([0.1, 0.4])] * 5, loss=1.5)
  return report.Look(weights, magnitudes)


def leave(folder):
  """A finished demo."""
  runs = folder_lib.prepare(folder, grid.load(SPEC), SPEC)
  for run in runs:
    loss = LOSSES[run.overrides["variant"]] + 0.01 * run.overrides["seed"]
    tiny_sweep.leave(folder, run, loss)
  return runs


def test_page_is_one_well_formed_file_that_loads_nothing(tmp_path, monkeypatch):
  monkeypatch.setattr(report, "look", make_look)
  leave(tmp_path)
  page = report.render(tmp_path, monitor.of_folder(tmp_path))
  checker = _Checker()
  checker.feed(page)
  assert not checker.open_tags
  # Training, weights of two schemes and kinds of sublayers, two magnitudes.
  assert page.count("<svg") == 1 + 4 + 2
  loads = r'<(link|use|image)[^>]* href="(?!#|data:)|(src|data)="(?!#|data:)'
  assert not re.search(loads, page)
  ids = re.findall(r' id="([^"]*)"', page)
  assert len(ids) == len(set(ids)) > 0
  assert "\N{MINUS SIGN}0.0800 \N{PLUS-MINUS SIGN} 0.0000" in page
  assert "Block AttnRes ends <b>0.080 ± 0.000</b> nats per token below" in page
  assert "http-equiv" not in page
  assert not re.search(r"\$\{?[a-z]", page), "an unfilled placeholder"


def test_networks_are_opened_when_all_runs_are_done(tmp_path, monkeypatch):
  monkeypatch.setattr(report, "look", None)
  last = leave(tmp_path)[-1]
  tiny_sweep.leave(tmp_path, last, status=state_lib.RUNNING)
  page = report.render(tmp_path, monitor.of_folder(tmp_path))
  assert "47/48 done" in page and "Where sublayers look" not in page


@pytest.mark.slow
def test_the_command_trains_and_reports(tmp_path, monkeypatch):
  for name, value in tiny_run.environment().items():
    monkeypatch.setenv(name, value)
  flags = [f"--config={SPEC}:runlocal", f"--workdir={tmp_path}"]
  assert cli.main(run_lib.EXPERIMENT, flags) == 0
  assert cli.main(run_lib.EXPERIMENT, ["collect", *flags]) == 0
  # Four schemes with twelve seeds.
  assert len(csv_rows.read(tmp_path / "rows.csv")) == 48
  page = (tmp_path / "report.html").read_text()
  assert "Block AttnRes, pre-MLP" in page and "Magnitudes" in page


class _Checker(html.parser.HTMLParser):
  """Tags that are open; the page leaves none to close by itself."""

  VOID = {"meta", "br", "link", "img", "input", "hr"}

  def __init__(self):
    super().__init__()
    self.open_tags = []

  def handle_starttag(self, tag, attrs):
    if tag not in self.VOID:
      self.open_tags.append(tag)

  def handle_startendtag(self, tag, attrs):
    pass

  def handle_endtag(self, tag):
    assert self.open_tags.pop() == tag
