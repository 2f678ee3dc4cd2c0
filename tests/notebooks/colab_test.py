# SPDX-License-Identifier: Apache-2.0
"""The first cell of the notebooks, in runtimes that are not here."""

import sys
import tomllib
import types

import pytest

from notebooks import colab
from tests import tiny_run

SMI = "| NVIDIA-SMI 550.54   Driver Version: 550.54   CUDA Version: 12.4     |"
# Colab's, when last seen.
CUDA12 = ("jax-cuda12-pjrt", "jax-cuda12-plugin")


@pytest.mark.parametrize(
  "text,extra",
  [
    (SMI, "cuda12"), (SMI.replace("12.4", "11.8"), ""),
    ("| CUDA UMD Version: 13.1 |", "cuda13"), ("NVIDIA-SMI has failed", ""),
  ],
)  # fmt: skip
def test_extra_of_a_driver(text, extra):
  assert colab.extra_of(text) == extra


@pytest.mark.parametrize(
  "extra,chosen,gone",
  [
    ("", "plots", CUDA12), ("cuda12", "plots,cuda12", ()),
    ("cuda13", "plots,cuda13", CUDA12), ("tpu", "plots,tpu", CUDA12),
  ],
)  # fmt: skip
def test_what_is_installed(extra, chosen, gone, monkeypatch):
  monkeypatch.setattr(colab, "_version", lambda name: "1" * (name in CUDA12))
  *before, install = colab.commands(extra, "plots")
  assert install[0] == "install" and "--upgrade" in install
  assert f"[{chosen}]" in install[-1]
  assert [tuple(command[3:]) for command in before] == ([gone] if gone else [])


class TestPrepare:
  @pytest.fixture
  def pip(self, monkeypatch):
    """A runtime without the library, whose pip brings jax 0.10.2."""
    calls, versions = [], {"jax": "0.7.2", "numpy": "2.0.2"}
    find_spec = colab.importlib.util.find_spec

    def run(command, check):
      calls.append(command[3:])
      versions["jax"] = "0.10.2"

    monkeypatch.setattr(colab.subprocess, "run", run)
    monkeypatch.setattr(colab, "_version", lambda name: versions.get(name, ""))
    monkeypatch.setattr(
      colab.importlib.util, "find_spec",
      lambda name: None if name == "attnres_jax" else find_spec(name),
    )  # fmt: skip
    return calls

  def test_asks_for_a_restart_after_it_installed(self, pip, monkeypatch):
    monkeypatch.setattr(colab, "find_extra", lambda: "cuda12")
    with pytest.raises(SystemExit, match="jax 0.7.2 was replaced .* Restart"):
      colab.prepare()
    assert len(pip) == 1 and "plots,cuda12" in pip[0][-1]

  def test_names_what_jax_sees(self, pip, monkeypatch, capsys):
    devices = [types.SimpleNamespace(platform="tpu")] * 4
    fake = types.SimpleNamespace(devices=lambda: devices)
    monkeypatch.setitem(sys.modules, "jax", fake)
    monkeypatch.setattr(colab, "_version", lambda name: "1")
    for extra in ("tpu", "cuda12"):
      monkeypatch.setattr(colab, "find_extra", lambda extra=extra: extra)
      if extra == "tpu":
        colab.prepare("plots,hf")
        assert "plots,hf,tpu" in pip[-1][-1]
        assert "4 device(s): tpu" in capsys.readouterr().out
        continue
      with pytest.raises(RuntimeError, match="sees only tpu.* Try: pip inst"):
        colab.prepare()

  def test_a_clone_is_left_alone(self, capsys):
    colab.prepare()
    assert "device(s): cpu" in capsys.readouterr().out


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


def test_the_extras_exist():
  project = tomllib.loads((tiny_run.ROOT / "pyproject.toml").read_text())
  extras = project["project"]["optional-dependencies"]
  assert {extra for extra in colab.EXTRAS if extra} <= extras.keys()
  for name in ("cuda12", "cuda13"):
    assert extras[name] == [f"jax[{name}]"]
