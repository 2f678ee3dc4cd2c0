# SPDX-License-Identifier: Apache-2.0
"""The GPU benchmark without a GPU: its rules, and its driver on tiny shapes."""

import csv
import pathlib
import re
import tempfile
from unittest import mock

from benchmarks import gpu
from benchmarks import gpu_problems as problems
from benchmarks import gpu_protocol as protocol
from benchmarks import gpu_sass
from benchmarks import gpu_static
import jax
import jax.numpy as jnp
import numpy as np
import pytest


class TestStatistics:
  def test_interval_of_the_median(self):
    rng = np.random.default_rng(1)
    widths = []
    for number in (20, 2000):
      samples = rng.normal(5.0, 1.0, number)
      median, low, high = protocol.median_interval(samples)
      assert median == np.median(samples)
      assert low <= 5.0 <= high
      assert low <= median <= high
      widths.append(high - low)
    # As one over the root of the number: ten times, roughly.
    assert 5 <= widths[0] / widths[1] <= 20
    assert protocol.median_interval([2.0] * 9) == (2.0, 2.0, 2.0)

  def test_alternating_order_cancels_a_drift(self):
    order = protocol.turns(["a", "b", "c"], 4)
    assert order[:6] == ["a", "b", "c", "c", "b", "a"]
    places = {name: [] for name in "abc"}
    for place, name in enumerate(order):
      places[name].append(place)
    assert {len(x) for x in places.values()} == {4}
    assert len({sum(x) for x in places.values()}) == 1

  @pytest.mark.parametrize("seconds,calls", [(1e-3, 5), (1.0, 1), (1e-9, 50)])
  def test_calls_per_sample(self, seconds, calls):
    assert protocol.calls_per_sample(seconds) == calls

  def test_rotating_inputs_exceed_the_cache(self):
    assert protocol.input_sets(10, 100) == 30
    assert protocol.input_sets(1000, 100) == 1


class TestBytes:
  def test_read(self):
    queries, sources, tokens, width = 2, 3, 5, 7
    slab = tokens * width * 2
    forward = [slab] * sources + [slab] * queries
    # Sources and output gradients in, source gradients out.
    backward = [slab] * (sources + queries) + [slab] * sources
    args = (queries, sources, tokens, width, 2)
    assert protocol.read_bytes(*args, "forward") == sum(forward)
    assert protocol.read_bytes(*args, "forward+backward") == sum(
      forward + backward
    )

  @pytest.mark.parametrize("sublayers,block", [(5, 2), (4, 4), (3, 1)])
  def test_stack(self, sublayers, block):
    moved, sources, done = 0, 1, 0
    while done < sublayers:
      size = min(block, sublayers - done)
      moved += sources + size  # Phase 1: reads, writes.
      moved += (sources + size) + sources  # And back.
      for i in range(size):
        if i:  # Mixture, sum, update in; sum, input out.
          moved += 3 + 2
          moved += 3 + 2
      done, sources = done + size, sources + 1
    moved += sources + 1 + (sources + 1) + sources
    assert (
      protocol.stack_bytes(sublayers, block, 1, 1, 1, "forward+backward")
      == moved
    )


class TestGate:
  @pytest.fixture(autouse=True)
  def set_up(self):
    rng = np.random.default_rng(0)
    self.exact = {"out": rng.normal(size=(64, 32)), "d": rng.normal(size=32)}

  def rounded(self):
    return {k: np.asarray(jnp.bfloat16(v)) for k, v in self.exact.items()}

  def test_rounding_passes(self):
    verdict = protocol.judge(self.rounded(), self.exact)
    assert verdict.passed, verdict.reason
    assert 1e-3 <= verdict.error <= 3e-3
    assert 0.9 <= verdict.error / verdict.stored <= 1.1

  @pytest.mark.parametrize("how", ["scaled", "nan", "missing", "shape", "one"])
  def test_wrong_fails(self, how):
    results = self.rounded()
    if how == "scaled":
      results["out"] = np.float32(results["out"]) * 1.01
    elif how == "nan":
      results["out"] = np.float32(results["out"])
      results["out"][3, 3] = np.nan
    elif how == "missing":
      del results["d"]
    elif how == "shape":
      results["d"] = results["d"][None]
    else:
      results["d"] = np.float32(results["d"])
      results["d"][0] += 0.1
    verdict = protocol.judge(results, self.exact)
    assert not verdict.passed
    assert ("out" if how in ("scaled", "nan") else "d") in verdict.reason


class TestRow:
  common = {
    "suite": "read",
    "shape": "Q1",
    "mode": "forward",
    "device": "NVIDIA H200",
    "jax": "1",
    "torch": "",
    "commit": "abc",
  }

  def test_numbers(self):
    line = protocol.row(
      self.common,
      "xla",
      protocol.OK,
      verdict=protocol.Verdict(True, 1e-3, 2e-3, ""),
      seconds=(2e-3, 1e-3, 3e-3),
      baseline_seconds=1e-3,
      moved_bytes=4 * 10**9,
      copy_bandwidth=4e12,
    )
    assert tuple(line) == protocol.FIELDS
    assert line["median_ms"] == "2.0000"
    assert line["to_baseline"] == "2.000"
    assert line["GB_per_s"] == "2000"
    assert line["of_copy"] == "0.500"

  def test_reason_is_one_line(self):
    line = protocol.row(self.common, "x", protocol.NOT_RUN, reason="a\n  b")
    assert line["reason"] == "a b"
    with pytest.raises(ValueError, match="colour"):
      protocol.row(self.common | {"colour": 1}, "x", protocol.OK)

  def test_table_is_for_gpus(self):
    line = protocol.row(self.common, "x", protocol.OK)
    with tempfile.TemporaryDirectory() as folder:
      path = pathlib.Path(folder) / "gpu.csv"
      with pytest.raises(ValueError, match="for GPUs, not for cpu"):
        gpu.write([line, line | {"device": "cpu"}], path)
      assert not path.exists()
      gpu.write([line], path)
      with open(path, newline="") as file:
        assert list(csv.DictReader(file)) == [line]


class TestStatic:
  def test_report(self):
    text = """
ptxas info    : Function properties for kernel
ptxas  .  0 bytes stack frame, 8 bytes spill stores, 4 bytes spill loads
ptxas info    : Used 107 registers, used 2 barriers, 17 bytes smem
"""
    # 112 registers of 128 threads, four times in 65536.
    wanted = {"registers": 107, "spill_bytes": 12, "blocks": 4}
    assert gpu_static.report(text) == wanted
    # 228 KiB hold two blocks of 100 KiB.
    assert gpu_static.report(text, 100 * 2**10)["blocks"] == 2

  def test_modules(self):
    text = r"""a {module = "ML\EF\22b\\", x = 1} b {module = "c"}"""
    assert gpu_static.modules(text) == [b'ML\xef"b\\', b"c"]


SASS = """
        /*0000*/                   LDC R1, c[0x0][0x28] ;
.L_x_9:
        /*0010*/                   BAR.SYNC.DEFER_BLOCKING 0x0 ;
.L_x_0:
        /*0020*/                   LD.E.64 R2, desc[UR26][R12.64] ;
        /*0030*/                   IADD3 R10, P1, P2, R47, UR6, R68 ;
        /*0040*/              @!P2 FFMA R39, R2, R11.reuse, R39 ;
        /*0050*/               @P0 BRA `(.L_x_0) ;
.L_x_1:
        /*0060*/                   MUFU.EX2 R1, R2 ;
        /*0070*/               @P0 BRA `(.L_x_1) ;
        /*0080*/               @P0 BRA `(.L_x_9) ;
        /*0090*/                   EXIT ;
.L_x_4:
        /*00a0*/                   BRA `(.L_x_4);
"""
# A loop over tokens with one over chunks, which has one over spans, where one
# warp starts a copy; and a barrier that is tried again behind the exit.
CLUSTER = """
.L_x_1:
        /*0010*/                   FADD R1, R2, R3 ;
.L_x_4:
        /*0020*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R2], R3 ;
        /*0030*/              @!P0 BRA `(.L_x_5) ;
.L_x_2:
        /*0040*/                   HGMMA.64x64x16.F32 R24, gdesc[UR8], R24 ;
        /*0050*/               @P2 BRA `(.L_x_3) ;
        /*0060*/                   UIADD3 UR4, UR4, 0x8, URZ ;
        /*0070*/                   UTMALDG.4D [UR8], [UR6] ;
.L_x_3:
        /*0080*/               @P1 BRA `(.L_x_2) ;
        /*0090*/               @P1 BRA `(.L_x_4) ;
.L_x_6:
        /*00a0*/                   FMUL R1, R2, R3 ;
        /*00b0*/               @P1 BRA `(.L_x_6) ;
        /*00c0*/               @P3 BRA `(.L_x_1) ;
        /*00d0*/                   EXIT ;
.L_x_5:
        /*00e0*/               @P0 BRA `(.L_x_2) ;
"""


class TestMachineCode:
  def test_loops(self):
    _, loops = gpu_sass.parse(SASS)
    found = {one.what: (one.start, one.stop) for one in loops}
    # The branch to itself at the end is no loop.
    assert found == {"tiles": (2, 5), "slots": (6, 7), "tokens": (1, 8)}

  def test_counts_of_a_token(self):
    kinds, places = gpu_sass.per_token(SASS, tiles=4, sources=3)
    assert places == {"tiles": 16, "slots": 6, "straight": 2}
    assert kinds == {
      "multiply-add": 4, "add": 3, "convert": 0, "global memory": 4,
      "matrix unit": 0, "bulk copy": 0, "address": 4, "exchange": 1,
      "other": 8,
    }  # fmt: skip

  def test_counts_of_a_cluster(self):
    kinds, places = gpu_sass.per_token_of_cluster(
      CLUSTER, chunks=5, spans=3, scale=2 / 8
    )
    # Two thread blocks for eight tokens, with five chunks of three spans.
    assert kinds["add"] == 2 / 8
    assert kinds["matrix unit"] == 2 / 8 * 5 * 3
    # The copy is on one of four warps.
    assert kinds["bulk copy"] == 2 / 8 * 5 * (1 + 3 / 4)
    assert kinds["multiply-add"] == 2 / 8 * 3
    assert places == {
      "tiles": 2 / 8 * 5 * (3 + 3 * 3.5),
      "slots": 2 / 8 * 3 * 2,
      "straight": 2 / 8 * 2,
    }

  def test_what_binds(self):
    kinds, places = {"add": 10.0}, {"tiles": 10.0}
    cells = gpu_sass.columns(kinds, places, 80.0)
    # Four warps with ten instructions each.
    assert cells["per_byte"] == "0.500"
    seconds = 40 / (4 * 132 * 1.755e9), 80 / 3.35e12
    ratio = float(cells["issue_over_memory_H100"])
    assert ratio == pytest.approx(seconds[0] / seconds[1], abs=0.01)

  def test_bytes_of_a_read(self):
    assert gpu_sass.read_bytes(2, 3, 10, False) == 100
    assert gpu_sass.read_bytes(2, 3, 10, True) == 160


class TestDriver:
  def test_needs_a_gpu(self):
    with pytest.raises(SystemExit) as caught:
      gpu.main([])
    assert re.search("^gpu.py: needs a GPU, .*$", str(caught.value))

  @pytest.mark.parametrize(
    "suite",
    [
      "read",
      "phase1",
      pytest.param("stack", marks=pytest.mark.slow),
      pytest.param("step", marks=pytest.mark.slow),
    ],
  )
  def test_suite_on_cpu(self, suite):
    # What jax lowers its own attention to is promoted, when it is lowered.
    with (
      tempfile.TemporaryDirectory() as folder,
      jax.numpy_dtype_promotion("standard"),
    ):
      table = pathlib.Path(folder) / "gpu.csv"
      with mock.patch.object(gpu, "_TABLE", table):
        rows = gpu.main(["--platform=cpu", "--rounds=2", f"--suite={suite}"])
      assert not table.exists()
    ours = [row for row in rows if row["arm"] in ("reference", "xla")]
    modes = {row["mode"] for row in rows}
    assert len(ours) == 2 * len(modes)
    for row in ours:
      assert row["status"] == protocol.OK, row["reason"]
      assert float(row["low_ms"]) <= float(row["high_ms"])
      assert 0 < float(row["median_ms"])
      assert row["device"] == "cpu"
    baseline = "prenorm" if suite == "step" else "xla"
    assert {row["to_baseline"] for row in rows if row["arm"] == baseline} == {
      "1.000"
    }
    if suite != "step":
      # Peers that cannot run are listed with the reason.
      peers = [row for row in rows if row["arm"].startswith("fla ")]
      assert len(peers) == len(modes)
      assert "" not in [row["reason"] for row in peers]

  @pytest.mark.parametrize(
    "problem",
    [
      problems.Read("read", 1, 3, 40, 32, "forward+backward"),
      pytest.param(problems.Stack(5, 2, 40, 32), marks=pytest.mark.slow),
    ],
  )
  def test_a_wrong_arm_stays_as_failed(self, problem):
    right = problem.arm("xla")

    def wrong(query, x, dout):
      out, dquery, dx = right(query, x, dout)
      return out, dquery * 1.05, dx

    def broken(query, x, dout):
      raise RuntimeError("no such kernel")

    rows = gpu.compare(
      problem,
      gpu.Machine("cpu"),
      2,
      only="xla,wrong,broken",
      extra={"wrong": wrong, "broken": broken},
    )
    by_arm = {row["arm"]: row for row in rows}
    assert list(by_arm) == ["xla", "wrong", "broken"]
    assert by_arm["xla"]["status"] == protocol.OK
    for arm, reason in (("wrong", "dquery is off"), ("broken", "no such")):
      assert by_arm[arm]["status"] == protocol.FAILED
      assert reason in by_arm[arm]["reason"]
      assert by_arm[arm]["median_ms"] == ""

  def test_unknown_suite(self):
    with pytest.raises(SystemExit), mock.patch("sys.stderr"):
      gpu.main(["--platform=cpu", "--suite=reads"])
