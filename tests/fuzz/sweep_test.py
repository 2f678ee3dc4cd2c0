# SPDX-License-Identifier: Apache-2.0
"""Any damage to any file of a sweep, with every command."""

import json
import shutil

from hypothesis import strategies as st
import pytest

from attnres_jax.common import csv_rows
from attnres_jax.sweep import cli
from attnres_jax.sweep import worker
from attnres_jax.sweep.launchers import local
from experiments.arch_sweep import report
from tests.fuzz import laws
from tests.sweep import tiny_sweep

RUN = ("run.json", "state.json", "metrics.jsonl", "summary.json", "data.json")
VALUES = (None, -1, 0, "x", [], {}, 1e308, True, "../x", float("nan"), 10**30)


def _places(value):
  """(container, key) of every value in one that was JSON."""
  pairs = ()
  if isinstance(value, dict | list):
    keys = value if isinstance(value, dict) else range(len(value))
    pairs = [(value, key) for key in list(keys)]
  for container, key in pairs:
    yield container, key
    yield from _places(container[key])


def _edited(data, share, change):
  """One line, or the only object, with a value changed."""
  lines = data.split(b"\n") if b"}\n{" in data else [data]
  index = int(share * (len(lines) - 1))
  try:
    values = json.loads(lines[index])
    places = list(_places(values))
    change(*places[int(share * (len(places) - 1))])
  except (ValueError, IndexError):
    return data
  lines[index] = json.dumps(values).encode()
  return b"\n".join(lines)


def _damaged(data, way, share, value):
  """A damaged file; None if it is deleted."""
  at = int(share * len(data))
  match way:
    case "empty":
      return b""
    case "cut":
      return data[:at]
    case "flip":
      at = min(at, len(data) - 1)
      return data[:at] + bytes([data[at] ^ (1 << at % 8)]) + data[at + 1 :]
    case "longer":
      return data + b"garbage\n" + data[:at]
    case "nested":
      return b"[" * 50_000
    case "value":
      return _edited(data, share, lambda x, key: x.__setitem__(key, value))
    case "key":
      return _edited(data, share, lambda x, key: x.__delitem__(key))
  return None


@pytest.fixture(scope="module")
def base(tmp_path_factory):
  return tiny_sweep.finished(tmp_path_factory.mktemp("base"))


ways = st.sampled_from(
  ("delete", "folder", "empty", "cut", "flip", "longer", "nested")
  + 3 * ("value", "key")
)
damages = st.tuples(
  st.sampled_from(RUN), ways, st.floats(0, 1), st.sampled_from(VALUES)
)


@laws.shares(6, 1000)
def test_damaged_sweeps(base, tmp_path, monkeypatch, explore):
  """Other runs keep their rows, whatever happens to the damaged one."""
  # A worker that fails immediately: nothing is trained here.
  monkeypatch.setattr(worker, "command", lambda *_, **__: ["false"])
  monkeypatch.setattr(local, "_HELD_SECONDS", 0.01)
  monkeypatch.setattr(local, "_TICK_SECONDS", 0.002)
  folder, source = tmp_path / "sweep", base[1]
  experiment = cli.Experiment("sweep", "", "", "", report.render)

  def check(found):
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(base[0], folder)
    bad, *good = sorted(path.name for path in folder.glob("seed*"))
    for file, way, share, value in found:
      path = folder / bad / file
      left = _damaged(path.read_bytes(), way, share, value)
      path.unlink()
      if left is not None:
        path.write_bytes(left)
      elif way == "folder":
        path.mkdir()
    for action in ("status", "collect", "report", "run", "collect"):
      arguments = [action, f"--config={source}", f"--workdir={folder}"]
      status, out, _ = laws.outcome(
        cli.main, experiment, arguments, per_run=True
      )
      # Trying a damaged run again is useless: then 2, from the launcher alone.
      assert status < 2 or action == "run", out
    rows = csv_rows.read(folder / cli.ROWS)
    assert [row["run"] for row in rows if row["run"] != bad] == good

  explore(
    "damaged files of sweeps",
    check,
    st.lists(damages, min_size=1, max_size=3, unique_by=lambda one: one[0]),
  )
