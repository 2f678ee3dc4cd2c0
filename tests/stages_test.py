# SPDX-License-Identifier: Apache-2.0
"""Mid-training and long context, as configs/kimi_linear.py has them."""

import pytest

from attnres_jax import config as config_lib
from attnres_jax import optimizer
from attnres_jax.train import loop
from tests import tiny_run

SPEC = f"{tiny_run.ROOT}/configs/kimi_linear.py"
STAGES = ("pre", "mid", "long")


def _configs(size):
  return [
    config_lib.load_config(f"{SPEC}:size={size},stage={stage}")
    for stage in STAGES
  ]


@pytest.mark.parametrize("size", ["48b", "48b_32m", "296m"])
def test_one_stage_ends_where_the_next_begins(size):
  configs = _configs(size)
  pre, mid, long = configs
  rates = [
    optimizer.make_schedule(c.optim, c.train.steps) for c in configs
  ]  # fmt: skip
  for before, rate, last in zip(configs, rates[1:], rates):
    end = float(last(before.train.steps - 1))
    assert float(rate(0)) == pytest.approx(end, rel=1e-3)
  slope = [
    float(rate(0) - rate(c.train.steps - 1)) / c.train.steps
    for rate, c in zip(rates[1:], configs[1:])
  ]
  # One line, per token.
  assert slope[0] == pytest.approx(slope[1], rel=0.02)
  assert float(rates[2](long.train.steps - 1)) == pytest.approx(
    0.035 * pre.optim.peak_lr, rel=1e-3
  )
  assert mid.train.start_from == f"runs/{pre.name}"
  assert long.train.start_from == f"runs/{mid.name}"
  assert mid.optim.balance_rate == long.optim.balance_rate == 0
  assert pre.model == mid.model == long.model


def test_lengths_of_the_48b_network():
  pre, mid, long = _configs("48b")
  for config, tokens in ((pre, 1e12), (mid, 400e9), (long, 60e9)):
    row = config.data.sequence_length
    trained = config.train.steps * config.data.batch_size * row
    assert trained == pytest.approx(tokens, rel=1e-3)
    assert config.data.batch_size * row == 8 * 2**20
  assert (mid.data.sequence_length, long.data.sequence_length) == (4096, 32_768)


@pytest.mark.slow
def test_all_three_on_a_laptop(tmp_path):
  """About three minutes, nearly all of them for compiling."""
  losses, before = [], None
  for stage, steps in (("pre", 20), ("mid", 10), ("long", 10)):
    fields = {
      "train.steps": steps, "train.depth_every": 0, "train.eval_every": 0,
      "optim.qk_clip": 5.0,
      # A row for each device of the tests.
      "data.batch_size": 8,
    }  # fmt: skip
    if before:
      fields["train.start_from"] = str(before)
    arguments = f"size=48b,residual=prenorm,runlocal,stage={stage}"
    config = config_lib.load_config(f"{SPEC}:{arguments}", fields)
    before = tmp_path / stage
    summary = loop.train_and_evaluate(config, before)
    assert summary["status"] == "finished" and summary["step"] == steps
    losses.append(summary["validation_loss"])
    rows = tiny_run.rows(before, "train")
    assert all(0 < row["max_logit"] < 50 for row in rows.values())
  assert losses[0] > losses[1] and losses[2] < losses[0]
  (event,) = tiny_run.events(before, "started from")
  assert event["run"] == str(tmp_path / "mid") and event["optimiser"]
