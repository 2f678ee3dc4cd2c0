# SPDX-License-Identifier: Apache-2.0
"""Arms of a seed share all but the scheme; differences are taken in pairs."""

import dataclasses

import pytest

from attnres_jax import config as config_lib
from attnres_jax.interop import upcycle
from experiments.upcycle import report
from experiments.upcycle import run


@pytest.mark.parametrize("arm", run.ARMS)
def test_every_arm_begins_as_its_source(arm):
  source = config_lib.load_config(f"{run.SOURCE},runlocal").model
  residual = run.ARMS[arm][0]
  if residual.name == "block_attnres":
    read = dataclasses.replace(residual.read, scale="sum")
    residual = dataclasses.replace(residual, read=read)
  config = dataclasses.replace(source, residual=residual)
  upcycle.check_begins_as_prenorm(config)


def test_differences_are_those_of_pairs():
  rows = [
    dict(
      arm=arm, seed=seed, validation_loss=f"{2 + seed + shift * (1 + seed)}",
      source_loss="3", seconds="60", source_steps="8", steps="4",
      hardware="a machine", python="3", jax="0", commit="c",
    )
    for arm, shift in ((report.BASELINE, 0.0), ("delta", -0.1))
    for seed in range(2)
  ]  # fmt: skip
  text = report.results(rows)
  # Of -0.1 and -0.2: 6.3138 (t, one degree of freedom) times 0.05.
  assert "| delta | 2 | 2.3500 | −0.1500 ± 0.3157 |" in text
  assert "8 steps, then 4 more (1.0 minutes each)" in text
