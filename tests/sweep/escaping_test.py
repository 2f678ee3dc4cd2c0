# SPDX-License-Identifier: Apache-2.0
"""Nothing that a run or a config file says is markup on a page."""

import dataclasses
import html.parser

import jinja2
import pandas as pd
import pytest

from attnres_jax.scaling import grid
from attnres_jax.sweep import folder as folder_lib
from attnres_jax.sweep import monitor
from attnres_jax.sweep.pages import curves
from attnres_jax.sweep.pages import page
from attnres_jax.sweep.pages import sweep_page
from experiments.arch_sweep import report as arch_report
from experiments.scaling_law import report as law_report
from tests import tiers
from tests.sweep import tiny_sweep

HOSTILE = """<script>alert('x')</script>"><img src=x onerror="y">&{{ body }}"""
SPECS = {
  "laws": ("configs/scaling.py", law_report.render),
  "rates": ("configs/scaling.py:scale=laptop_lr", law_report.render),
  "shapes": ("configs/arch_sweep.py", arch_report.PUBLISHED.render),
  "any": ("configs/scaling.py", sweep_page.render),
}


class _Tags(html.parser.HTMLParser):
  def __init__(self):
    super().__init__()
    self.tags, self.attributes, self.text = set(), set(), []

  def handle_starttag(self, tag, attrs):
    self.tags.add(tag)
    self.attributes |= {name for name, _ in attrs}

  def handle_data(self, data):
    self.text.append(data)


def _assert_harmless(text, times):
  tags = _Tags()
  tags.feed(text)
  assert "<script" not in text.lower() and "script" not in tags.tags
  assert "img" not in tags.tags and "onerror" not in tags.attributes
  # It is there, as text.
  assert "".join(tags.text).count("alert('x')") >= times


def _is_number(text):
  try:
    float(text)
    return True
  except ValueError:
    return False


def _spoiled(values, but=()):
  """Every text of a mapping that is not a number."""
  return {
    name: HOSTILE + value
    if isinstance(value, str) and not _is_number(value) and name not in but
    else value
    for name, value in values.items()
  }


@tiers.parametrize("kind", SPECS, first=["any"])
def test_reports_of_sweeps(tmp_path, kind):
  spec, render = SPECS[kind]
  runs = folder_lib.prepare(tmp_path, grid.load(spec)[:8], HOSTILE)
  for run in runs:
    tiny_sweep.leave(tmp_path, run)
  progress = [
    dataclasses.replace(
      p,
      name=HOSTILE,
      error=HOSTILE,
      # Schemes are looked up; all others come from files.
      row=_spoiled(p.row, but=("residual",)),
      run=dataclasses.replace(
        p.run, overrides=_spoiled(p.run.overrides, but=("residual",))
      ),
    )
    for p in monitor.of_folder(tmp_path)
  ]
  bad = monitor.Progress(HOSTILE, HOSTILE, HOSTILE, HOSTILE)
  _assert_harmless(render(tmp_path, [*progress, bad]), times=18)


def test_unknown_schemes(tmp_path):
  (run,) = folder_lib.prepare(tmp_path, grid.load("configs/scaling.py")[:1], "")
  tiny_sweep.leave(tmp_path, run)
  (p,) = monitor.of_folder(tmp_path)
  row = _spoiled(p.row)
  assert row["residual"].startswith(HOSTILE)
  p = dataclasses.replace(p, residual=row["residual"], row=row)
  _assert_harmless(sweep_page.render(tmp_path, [p], HOSTILE), times=5)


def test_intervals():
  assert page.interval(1.234, 1.0, 2.0) == page.Cell("1.23", "[1.00, 2.00]")
  assert str(page.interval(1.2, 1, 2, 1, page.RANGE)) == "1.2 (1.0 to 2.0)"
  assert str(page.interval(1.25, None, None)) == "1.25"


def test_curves_differ_where_both_arms_have_points():
  seeds = {0: [3.0, 2.0, 1.0], 1: [3.0, 2.0, float("nan")]}
  arm = pd.DataFrame(seeds, index=[10, 20, 30])
  other = pd.DataFrame({1: [1.0, 1.5], 2: [0.0, 0.0]}, index=[20, 40])
  apart = curves.differences(arm, other)
  assert apart.to_dict() == {1: {20: 1.0}}


def test_text_becomes_html_in_one_place():
  once = page.fill("{{ x }}", x="<")
  assert once == "&lt;"
  assert page.fill("<p>{{ x }}</p>", x=once) == "<p>&lt;</p>"
  assert page.bold("**<** & **b**") == "<b>&lt;</b> &amp; <b>b</b>"
  table = page.Table(["a", "<"], [["<b>", page.Cell("<", "(<)", ["<"])]])
  assert table.html().count("&lt;") == 5
  assert table.html().count("<td>") == table.html().count("<th scope=row>") == 1
  assert table.markdown().splitlines()[-1] == "| <b> | < (<) |"
  # A template without one of its parts is an error, not a gap.
  with pytest.raises(jinja2.UndefinedError, match="'x' is undefined"):
    page.fill("{{ x }}")
