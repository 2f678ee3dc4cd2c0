# SPDX-License-Identifier: Apache-2.0
"""PyTorch computes the same as ours, and both are timed."""

import functools

import pytest

from attnres_jax import config as config_lib
from experiments.cost import networks
from experiments.cost import run
from experiments.cost import twins

pytestmark = pytest.mark.needs("torch")


@pytest.fixture(autouse=True)
def small(monkeypatch):
  llama = functools.partial(networks._llama, 64, 2, 96, 64)
  dense = functools.partial(
    networks._dense, 32, 2, 2, 2, 16, num_heads=2, mlp_width=48,
    vocab_size=256, dtype="float32",
  )  # fmt: skip
  both = {"512-bytes": llama, "large": dense}
  monkeypatch.setattr(networks, "NETWORKS", both)
  monkeypatch.setattr(twins, "STEPS", 5)


@pytest.mark.parametrize("what,programs", [
  ("decode", {"prefill", "decode"}), ("step", {"gradient"}),
])  # fmt: skip
def test_both_libraries_agree(what, programs):
  name = {"decode": "512-bytes", "step": "large"}[what]
  network = networks.load(name)._replace(batch=2, tokens=16)
  arm = {"decode": "prenorm", "step": "block_attnres"}[what]
  rows = list(run.beside_torch(what, network, [arm], 1))
  assert {row["program"] for row in rows} == programs
  assert {row["arm"] for row in rows} == {arm, f"{arm} in torch"}
  for row in rows:
    assert row["baseline"] == f"{arm} in torch" and row["torch"]
    assert row["seconds"] > 0 and row["ratio"] > 0


def test_a_difference_is_an_error(monkeypatch):
  other = lambda *_: lambda: ([0.0, 0.0], {})
  monkeypatch.setattr(twins, "_our_step", other)
  network = networks.load("large")
  with pytest.raises(config_lib.RunError, match="the libraries differ"):
    list(twins.step(network, "prenorm", 1))
