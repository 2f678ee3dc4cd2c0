# SPDX-License-Identifier: Apache-2.0
"""Both libraries continue the same prompts alike."""

import numpy as np
import pytest

from experiments.decode_vs_transformers import report
from experiments.decode_vs_transformers import run


@pytest.mark.needs("torch")
def test_the_same_tokens(tmp_path, monkeypatch):
  monkeypatch.setitem(run.NETWORKS, "tiny", (32, 2, 2, 48, 64))
  monkeypatch.setattr(run, "STEPS", 5)
  run._write("tiny", tmp_path)
  prompts = np.random.default_rng(0).integers(0, 64, (2, run.PROMPT))
  found = [
    make("tiny", tmp_path, threads=1)(prompts)
    for make in run._LIBRARIES.values()
  ]
  for ids, first, seconds in found:
    assert ids.shape == (2, 5) and len(seconds) == 5
    assert first > 0 and min(seconds) > 0
  np.testing.assert_array_equal(found[0][0], found[1][0])


def test_the_table():
  rows = [
    dict(
      network="a", batch="1", library=library, threads="1", round=str(i),
      tokens_per_second=str(speed + i), slowest=str(speed), fastest="30",
      least_step_ms=str(100 / speed), first_token_ms="7", hardware="machine",
      python="3", jax="1", commit="c",
    )
    for library, speed in (("transformers", 10.0), ("ours", 20.0))
    for i in range(3)
  ]  # fmt: skip
  lines = report.table(rows).splitlines()
  expected = "| a | 1 | 11.0 (10.0–30.0) | 21.0 (20.0–30.0) | 1.91 | 10.00 |"
  assert lines[2] == f"{expected} 5.00 | 2.00 | 7 | 7 |"
