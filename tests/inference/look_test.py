# SPDX-License-Identifier: Apache-2.0
"""The figure of trained networks, and the numbers beside it."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

import attnres_jax
from attnres_jax import analysis
from attnres_jax.inference import look
from attnres_jax.inference import packaged
from tests.fuzz import laws

pytest.importorskip("matplotlib")
TEXT = "def reverse(items):"
BLOCK, PRENORM = (
  f"--workdir={packaged.PREFIX}{name}" for name in ("block_attnres", "prenorm")
)


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

  def run(*flags):
    status = look.main([f"--text={TEXT}", *flags])
    return status, capsys.readouterr()

  return run


def test_weights(run, tmp_path):
  output = tmp_path / "new" / "weights.svg"
  assert run(BLOCK, f"--output={output}")[0] == 0
  text = output.read_text()
  assert "Block AttnRes, pre-MLP" in text and "<dc:date>" not in text
  written = json.loads(output.with_suffix(".json").read_text())
  tokens_BT = jnp.asarray([[256, *TEXT.encode()]])  # It opens a document.
  model = attnres_jax.load_trained("block_attnres")
  expected = analysis.depth_weights(model, tokens_BT)
  actual = np.asarray(written["networks"]["block_attnres"]["mlp"], float)
  np.testing.assert_allclose(actual, expected.mlp, atol=1e-6)
  # What it wrote it may write again; somebody's file it leaves.
  output.write_text("<svg/>")
  status, captured = run(BLOCK, f"--output={output}")
  assert status == 2 and "weights.svg, which is there" in captured.err
  assert output.read_text() == "<svg/>"


@pytest.mark.more
def test_matrices_of_any_scheme(run, tmp_path):
  output = tmp_path / "a.svg"
  flags = PRENORM, BLOCK, "--draw=matrices", f"--output={output}"
  assert run(*flags)[0] == 0
  (first, second) = json.loads((tmp_path / "a.json").read_text())[
    "networks"
  ].items()
  assert (first[0], second[0]) == ("prenorm", "block_attnres")
  np.testing.assert_allclose(np.asarray(first[1])[-1], 1, atol=1e-5)


@pytest.mark.parametrize(
  "flags,message",
  [
    ([PRENORM], "expected a network that attends over depth"),
    ([BLOCK, "--draw=weight"], "--draw: got 'weight'"),
    ([BLOCK, "--output=a.png"], "expected a name such as a.svg"),
    ([f"{BLOCK}s"], "--workdir: got 'block_attnress'"),
  ],
)
def test_refusals(flags, message):
  status, _, err = laws.outcome(look.main, [f"--text={TEXT}", *flags])
  assert status == 2 and message in err
