# SPDX-License-Identifier: Apache-2.0
"""Rates and contrasts, from rows with known answers."""

import math

import numpy as np
import pytest

from attnres_jax.sweep.pages import losses as losses_lib
from experiments.laptop_gain import config
from experiments.laptop_gain import report


def test_each_arm_trains_at_its_best_rate():
  runs = losses_lib.frame(report.PUBLISHED.read("rates"))
  means = losses_lib.means(runs, "arm", "rate")
  assert {arm: by_rate.idxmin() for arm, by_rate in means.iterrows()} == dict(
    config.RATES
  )
  # An arm that is best at an edge of the first four has tried one rate more.
  for arm, by_rate in means.iterrows():
    four, tried = config.TRIED_RATES[arm][:4], config.TRIED_RATES[arm]
    best = min(four, key=by_rate.get)
    assert (best in (four[0], four[-1])) == (len(tried) == 5)
    assert by_rate.count() == len(tried)


def test_holm():
  # 4 x 0.01, then 3 x 0.02, then no less than before; the last is itself.
  assert report.holm([0.03, 0.01, 0.02, 0.5]) == pytest.approx(
    [0.06, 0.04, 0.06, 0.5]
  )
  assert report.holm([0.9, 0.8]) == [1.0, 1.0] and report.holm([]) == []


def _rows(**losses):
  return [
    {"arm": arm, "seed": str(seed), "validation_loss": str(loss)}
    for arm, arm_losses in losses.items()
    for seed, loss in enumerate(arm_losses)
  ]


def test_a_contrast_is_a_paired_t_test():
  base = np.array([1.40, 1.45, 1.38, 1.50])
  apart = np.array([-0.02, -0.03, -0.01, -0.02])
  rows = _rows(prenorm=base, block=base + apart, full=base[:1])
  ((names, contrast),) = report.contrasts(rows).items()
  assert names == ("block", "prenorm") and len(contrast.apart.by_seed) == 4
  # t = mean / (deviation / sqrt(4)), with 3 degrees of freedom.
  error = apart.std(ddof=1) / 2
  assert math.isclose(contrast.apart.mean, -0.02, rel_tol=1e-9)
  assert math.isclose(contrast.apart.margin, 3.1824463 * error, rel_tol=1e-6)
  assert math.isclose(contrast.p, 0.016275, rel_tol=1e-3)
  assert "| gains |" in report.results(rows)
  assert report.results(_rows(prenorm=base)) == "Not run yet."
