# SPDX-License-Identifier: Apache-2.0
"""Figures show the numbers they are given."""

import numpy as np
import pytest

from attnres_jax.analysis import figures
from attnres_jax.models import residuals
from attnres_jax.scaling import fit
from attnres_jax.scaling import paper
from attnres_jax.scaling import plots

pytestmark = pytest.mark.usefixtures("canvas")


def our_runs():
  compute = np.geomspace(1e-7, 1e-5, 4)
  return {
    scheme: fit.Runs(compute, a * compute**-0.06, tuple("abcd"), (0,) * 4)
    for scheme, a in (("prenorm", 1.02), ("block_attnres", 1.0))
  }


def test_paper_panel_shows_table_2_and_the_printed_advantage():
  ax = plots.draw_paper("6nd")
  points = {
    tuple(line.get_ydata()) for line in ax.lines if line.get_marker() != "None"
  }
  for scheme in paper.PUBLISHED_LAWS:
    assert tuple(size.loss(scheme) for size in paper.TABLE_2) in points
  texts = [text.get_text() for text in ax.texts]
  assert any("1.25x compute" in text for text in texts)
  labels = [text.get_text() for text in ax.get_legend().get_texts()]
  assert labels[0].startswith("PreNorm: 1.891")
  assert ax.get_xlabel() == "PFLOP/s-days (6ND)"


def test_figure_4_has_both_panels():
  runs = our_runs()
  fits = fit.fit_schemes(runs, np.random.default_rng(0), num_samples=20)
  figure = plots.figure_4(runs, fits, "residual", title="ours")
  ours, theirs = figure.axes
  assert ours.get_title("left") == "ours"
  assert "depth attention" in ours.get_xlabel()
  assert "causal attention" in theirs.get_xlabel()
  assert len(ours.collections) == 2, "a band per scheme"
  figure.canvas.draw()


def test_figure_7():
  table = np.arange(25.0).reshape(5, 5) / 1000 + 1.8
  better = table - 0.02
  better[4, 4] = np.nan
  figure = plots.figure_7({"prenorm": table, "full_attnres": better})
  left, right = figure.axes[:2]
  assert [text.get_text() for text in left.texts[:2]] == ["1.800", "1.801"]
  assert (len(left.texts), len(right.texts)) == (25, 24)
  ours, printed = left.lines
  assert (ours.get_xdata()[0], round(ours.get_ydata()[0])) == (0, 0)
  # (60, 0.3) for the baseline and (45, 0.3) with depth attention.
  assert (printed.get_xdata()[0], round(printed.get_ydata()[0])) == (0, 3)
  assert round(right.lines[1].get_ydata()[0]) == 2
  figure.canvas.draw()


def test_bad_arguments_are_named():
  with pytest.raises(ValueError, match="^counting: got 'all', expected 6nd"):
    plots.draw_scaling(our_runs(), {}, "all")
  with pytest.raises(ValueError, match=r"^losses\['prenorm'\]: got \(2, 2\)"):
    plots.figure_7({"prenorm": np.zeros((2, 2))})


def test_schemes_look_different_everywhere():
  looks = [figures.look_of(scheme) for scheme in residuals.RESIDUALS]
  assert len({look.label for look in looks}) == len(looks)
  assert len({(x.colour, x.marker, str(x.line)) for x in looks}) == len(looks)
  assert not any(look.label in residuals.RESIDUALS for look in looks)
  assert figures.look_of("full_attnres").label == "Full AttnRes"
  assert figures.name_of("unheard_of") == "unheard_of"
