# SPDX-License-Identifier: Apache-2.0
"""The GPU benchmark without a GPU: its rules, and its driver on a CPU."""

import re
from unittest import mock

from benchmarks import gpu
import jax.numpy as jnp
import numpy as np
import pytest

from attnres_jax.common import csv_rows

_BOTH = gpu.Read("read", 2, 3, 40, 32, "forward+backward")


def test_interval_of_the_median():
  rng = np.random.default_rng(1)
  widths = []
  for number in (20, 2000):
    samples = rng.normal(5.0, 1.0, number)
    median, low, high = gpu.median_interval(samples)
    assert median == np.median(samples)
    assert low <= 5.0 <= high
    widths.append(high - low)
  # As one over the root of the number: ten times, roughly.
  assert 5 <= widths[0] / widths[1] <= 20


def test_bytes_of_a_read():
  slab = 5 * 7 * 2
  forward = [slab] * (3 + 2)
  # Sources and output gradients in, source gradients out.
  backward = [slab] * (3 + 2) + [slab] * 3
  problem = gpu.Read("read", 2, 3, 5, 7, "forward")
  assert problem.moved_bytes == sum(forward)
  problem = gpu.Read("read", 2, 3, 5, 7, "forward+backward")
  assert problem.moved_bytes == sum(forward + backward)


@pytest.mark.parametrize("how", ["rounded", "scaled", "nan", "one"])
def test_errors(how):
  rng = np.random.default_rng(0)
  exact = {"out": rng.normal(size=(64, 32)), "d": rng.normal(size=32)}
  results = {k: np.float64(jnp.bfloat16(v)) for k, v in exact.items()}
  if how == "scaled":
    results["out"] *= 1.01
  elif how == "nan":
    results["out"][3, 3] = np.nan
  elif how == "one":
    results["d"][0] += 0.1
  error, stored = gpu.errors(results, exact)
  if how == "rounded":
    assert 0.9 <= error / stored <= 1.1
  else:
    assert not error <= 2 * stored


def test_missing_output():
  with pytest.raises(ValueError, match=r"d is None, not \(32,\)"):
    gpu.errors({}, {"d": np.zeros(32)})


@pytest.mark.more
def test_exact_in_pieces():
  inputs = _BOTH.draw(0)
  once, pieces = _BOTH.exact(inputs, 40), _BOTH.exact(inputs, 16)
  for name in once:
    wanted = once[name] if name == "dquery" else once[name][..., :16, :]
    np.testing.assert_allclose(pieces[name], wanted, rtol=1e-12, err_msg=name)


def test_needs_a_gpu():
  with pytest.raises(SystemExit) as caught:
    gpu.main([])
  assert re.search("^gpu.py: needs a GPU, .*$", str(caught.value))


@pytest.mark.parametrize("suite", ["read", "phase1"])
def test_suite_on_cpu(suite, tmp_path):
  with mock.patch.object(gpu, "_TABLE", tmp_path / "gpu.csv"):
    rows = gpu.main(["--platform=cpu", "--rounds=2", f"--suite={suite}"])
  assert not list(tmp_path.iterdir())
  assert len(rows) == 2 * (2 + len(gpu.peers()))
  for row in rows:
    assert tuple(row) == gpu.FIELDS
    if row["arm"] in ("reference", "xla"):
      assert row["status"] == gpu.OK, row["reason"]
      assert float(row["low_ms"]) <= float(row["high_ms"])
      assert 0 < float(row["median_ms"])
    if row["arm"] == "xla":
      assert row["to_xla"] == "1.000"
    # Peers that cannot run are listed with the reason.
    assert (row["status"] == gpu.OK) == (row["reason"] == "")


def test_rows_of_other_gpus_and_suites_stay(tmp_path, monkeypatch):
  table = tmp_path / "gpu.csv"
  monkeypatch.setattr(gpu, "_TABLE", table)
  monkeypatch.setattr(gpu, "Machine", lambda _: None)
  monkeypatch.setattr(gpu.jax, "default_backend", lambda: "gpu")
  monkeypatch.setattr(gpu, "problems_of", lambda suite, _: [suite])
  rows = [
    dict.fromkeys(gpu.FIELDS, "") | {"suite": suite, "hardware": hardware}
    for hardware in ("H100", "H200")
    for suite in ("read", "phase1")
  ]
  for row in [rows[0] | {"commit": "old"}, *rows[1:], rows[0]]:
    monkeypatch.setattr(gpu, "compare", lambda *_, row=row: [row])
    gpu.main([f"--suite={row['suite']}"])
  assert csv_rows.read(table) == [*rows[1:], rows[0]]


@pytest.mark.needs("torch")
def test_torch_agrees():
  rows = list(gpu.compare(_BOTH, gpu.Machine("cpu"), 1))
  (row,) = [row for row in rows if row["arm"] == "torch.compile"]
  assert row["status"] == gpu.OK, row["reason"]


def test_a_wrong_arm_stays_as_failed():
  right = _BOTH.arm("xla")

  def wrong(*inputs):
    outputs = right(*inputs)
    return outputs | {"dquery": outputs["dquery"] * 1.05}

  def broken(*inputs):
    raise RuntimeError("no such kernel")

  more = {"wrong": wrong, "broken": broken}
  rows = {
    row["arm"]: row for row in gpu.compare(_BOTH, gpu.Machine("cpu"), 1, more)
  }
  assert rows["xla"]["status"] == gpu.OK
  for arm, reason in (("wrong", "off by"), ("broken", "no such")):
    assert rows[arm]["status"] == gpu.FAILED
    assert reason in rows[arm]["reason"]
    assert rows[arm]["median_ms"] == ""
