# SPDX-License-Identifier: Apache-2.0
"""The first cell of the notebooks, in runtimes that are not here."""

import sys
import tomllib
import types

import pytest

from notebooks import colab
from tests import tiny_run

SMI = "| NVIDIA-SMI 550.54   Driver Version: 550.54   CUDA Version: 12.4     |"
OLD = {"jax": "0.7.2", "numpy": "2.0.2"}
# Colab's, when last seen.
CUDA12 = ("jax-cuda12-pjrt", "jax-cuda12-plugin")
Machine = colab.Machine


def _extras(plan):
  return plan.install.partition("[")[2].partition("]")[0]


@pytest.mark.parametrize(
  "machine,extras,gone,platform",
  [
    (Machine(), "plots", (), "cpu"),
    (Machine(plugins=CUDA12), "plots", CUDA12, "cpu"),
    (Machine(cuda=(12, 4), plugins=CUDA12), "plots,cuda12", (), "gpu"),
    (Machine(cuda=(13, 0), plugins=CUDA12), "plots,cuda13", CUDA12, "gpu"),
    (Machine(cuda=(11, 8)), "plots", (), "cpu"),
    (Machine(tpu=True), "plots,tpu", (), "tpu"),
  ],
)
def test_what_is_installed(machine, extras, gone, platform):
  plan = colab.make_plan(machine)
  assert _extras(plan) == extras and plan.uninstall == gone
  *before, install = colab.commands(plan)
  assert install[0] == "install" and "--upgrade" in install
  assert bool(before) == bool(gone)
  assert platform in colab.check(plan, [platform])
  if platform != "cpu":
    with pytest.raises(RuntimeError, match=r"sees only cpu. Try: pip install"):
      colab.check(plan, ["cpu"])


def test_an_installed_library_is_left_alone():
  plan = colab.make_plan(Machine(library=True, cuda=(12, 4), plugins=CUDA12))
  assert not plan.install and not plan.uninstall and plan.extra == "cuda12"


def test_restart_only_if_what_was_imported_changed():
  installed = {"jax": "0.10.2", "numpy": "2.0.2"}.get
  assert colab.needs_restart(OLD, installed) == "jax 0.7.2"
  assert not colab.needs_restart({"numpy": "2.0.2"}, installed)
  assert not colab.needs_restart({}, installed)


@pytest.mark.parametrize(
  "text,version",
  [
    (SMI, (12, 4)),
    ("| CUDA UMD Version: 13.1 |", (13, 1)),
    ("NVIDIA-SMI has failed", None),
    ("", None),
  ],
)
def test_version_of_cuda(text, version):
  assert colab.cuda_of(text) == version


class TestPrepare:
  @pytest.fixture
  def pip(self, monkeypatch):
    calls = []
    monkeypatch.setattr(
      colab.subprocess, "run", lambda command, check: calls.append(command[3:])
    )
    return calls

  def test_asks_for_a_restart_after_it_installed(self, pip, monkeypatch):
    machine = Machine(cuda=(12, 4), imported=OLD)
    monkeypatch.setattr(colab, "look", lambda: machine)
    with pytest.raises(SystemExit, match="jax 0.7.2 was replaced .* Restart"):
      colab.prepare()
    assert len(pip) == 1 and "plots,cuda12" in pip[0][-1]

  def test_shows_the_device(self, pip, monkeypatch, capsys):
    devices = [types.SimpleNamespace(platform="tpu")] * 4
    fake = types.SimpleNamespace(devices=lambda: devices)
    monkeypatch.setattr(colab, "look", lambda: Machine(tpu=True))
    monkeypatch.setitem(sys.modules, "jax", fake)
    colab.prepare("plots,hf")
    assert "plots,hf,tpu" in pip[0][-1]
    assert "4 device(s): tpu" in capsys.readouterr().out

  def test_here(self, pip, capsys):
    colab.prepare()
    assert not pip and "device(s): cpu" in capsys.readouterr().out


class TestPlay:
  CONTROLS = {"size": (3, 1, 9), "turn": (0.5, 0.0, 1.0), "rule": ["a", "b"]}

  def test_without_widgets_draws_the_first_values(self, monkeypatch):
    monkeypatch.setenv(colab.PLAIN, "1")
    calls = []
    colab.play(lambda **c: calls.append(c), **self.CONTROLS, text="x")
    assert calls == [{"size": 3, "turn": 0.5, "rule": "a", "text": "x"}]

  @pytest.mark.needs("ipywidgets")
  def test_draws_again_when_a_control_moves(self, monkeypatch):
    import ipywidgets

    made, calls = [], []
    monkeypatch.delenv(colab.PLAIN, raising=False)
    monkeypatch.setattr(
      ipywidgets, "interact", lambda draw, **controls: made.append(controls)
    )
    colab.play(lambda **c: calls.append(c), **self.CONTROLS, text="x")
    values = {name: widget.value for name, widget in made[0].items()}
    assert values == {"size": 3, "turn": 0.5, "rule": "a", "text": "x"}
    assert (made[0]["size"].min, made[0]["size"].max) == (1, 9)
    assert made[0]["rule"].options == ("a", "b")


def test_fetch_takes_the_file_of_a_clone():
  assert colab.fetch("README.md").read_text().startswith("# AttnRes-JAX")


def test_the_extras_exist():
  project = tomllib.loads((tiny_run.ROOT / "pyproject.toml").read_text())
  extras = project["project"]["optional-dependencies"]
  assert {e for e in colab._PLATFORMS if e} <= extras.keys()
  for name in ("cuda12", "cuda13"):
    assert extras[name] == [f"jax[{name}]"]
