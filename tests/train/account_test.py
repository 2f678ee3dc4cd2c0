# SPDX-License-Identifier: Apache-2.0
"""The lines with which a run begins and ends."""

from attnres_jax import config as config_lib
from attnres_jax.train import account
from tests import tiny_run

SPEC = f"{tiny_run.ROOT}/configs/lm.py:size=micro"


def test_six_lines():
  config = config_lib.load_config(SPEC, {"train.steps": 50})
  lines = account.start_lines(config, "runs/x", 123456, [12_800])
  assert lines == [
    "scheme:     Block AttnRes (block_attnres)",
    "blocks:     4 of 2 sublayers; 8 sublayers",
    "parameters: 123,456",
    "tokens:     51,200 in 50 steps: 4 epochs of 12,800",
    "warm-up:    10 of 50 steps, to a rate of 0.003",
    "folder:     runs/x",
  ]
  fields = {"num_layers": 4, "residual.num_blocks": 0, "residual.block_size": 3}
  fields = {f"model.{name}": value for name, value in fields.items()}
  config = config_lib.load_config(SPEC, fields)
  lines = account.start_lines(config, "x", 1, [1000])
  assert lines[1].endswith(" 3 of 3 sublayers, the last of 2; 8 sublayers")
