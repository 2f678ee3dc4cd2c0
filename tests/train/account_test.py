# SPDX-License-Identifier: Apache-2.0
"""The lines with which a run begins and ends."""

import dataclasses

import pytest

from attnres_jax import config as config_lib
from attnres_jax.train import account
from tests import tiny_run

SPEC = f"{tiny_run.ROOT}/configs/lm.py:size=micro"


def test_six_lines():
  config = config_lib.load_config(SPEC, {"train.steps": 50})
  found = account.start_lines(config, "runs/x", 123456, [12_800])
  assert found == [
    "scheme:     Block AttnRes (block_attnres)",
    "blocks:     4 of 2 sublayers; 8 sublayers",
    "parameters: 123,456",
    "tokens:     51,200 in 50 steps: 4 epochs of 12,800",
    "warm-up:    10 of 50 steps, to a rate of 0.003",
    "folder:     runs/x",
  ]


@pytest.mark.parametrize(
  "size,layers,expected",
  [
    (3, 4, "3 of 3 sublayers, the last of 2; 8 sublayers"),
    (4, 4, "2 of 4 sublayers; 8 sublayers"),
    (8, 4, "1 of 8 sublayers; 8 sublayers"),
  ],
)
def test_blocks(size, layers, expected):
  residual = {"model.residual.num_blocks": 0, "model.residual.block_size": size}
  config = config_lib.load_config(SPEC, residual | {"model.num_layers": layers})
  found = account.start_lines(config, "x", 1, [1000])
  assert found[1].removeprefix("blocks:").strip() == expected


def test_epochs_of_a_mixture_are_those_of_its_busiest_path():
  config = config_lib.load_config(SPEC, {"train.steps": 50})
  own = dataclasses.replace(
    config.data, source="text", paths=("a", "b"), weights=(0.75, 0.25)
  )
  config = dataclasses.replace(config, data=own)
  found = account.start_lines(config, "x", 1, [9600, 100_000])
  assert "4 epochs of 109,600" in found[3]


@pytest.mark.parametrize(
  "hours,text", [(0.01234, "0.0123"), (12.34, "12.3"), (1234.5, "1,234")]
)
def test_the_last_line(hours, text):
  summary = {"chip_hours": hours, "tokens": 51_200}
  assert account.end_line(summary) == f"cost: {text} chip-hours, 51,200 tokens"
