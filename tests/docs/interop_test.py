# SPDX-License-Identifier: Apache-2.0
"""Every command of docs/interop.md exists, with the flags used there."""

import importlib
import re
import shlex

import pytest

from attnres_jax import config as config_lib
from attnres_jax.interop import families
from tests import tiny_run

TEXT = (tiny_run.ROOT / "docs" / "interop.md").read_text()
MAIN, HARNESS = "attnres_jax.main", "attnres_jax.interop.harness"


def _commands():
  # Blocks in Python are of another kind.
  fences = re.findall(r"^```(\w*)\n(.*?)^```$", TEXT, re.S | re.M)
  blocks = [text for kind, text in fences if not kind]
  lines = "".join(blocks).replace("\\\n", " ").splitlines()
  words = [shlex.split(line) for line in lines]
  return [(one[2], one[3:]) for one in words if one[:2] == ["python", "-m"]]


@pytest.mark.parametrize("module,arguments", _commands())
def test_commands_take_their_arguments(module, arguments, capsys):
  names = [argument.partition("=")[0] for argument in arguments]
  if module == MAIN:
    for name, argument in zip(names, arguments, strict=True):
      if name.startswith("--config."):
        text = argument.partition("=")[2]
        config_lib.parse_field(name.removeprefix("--config."), text)
      else:
        assert name in ("--config", "--workdir")
    return
  if module == HARNESS:
    # `harness_test` runs the command of the other page.
    paper = (tiny_run.ROOT / "docs" / "paper.md").read_text()
    assert all(f"{name}=" in paper.partition(HARNESS)[2] for name in names)
    return
  with pytest.raises(SystemExit):
    importlib.import_module(module).main(["--help"])
  known = set(re.findall(r"--\w+", capsys.readouterr().out))
  assert names and set(names) <= known


def test_every_family_is_listed():
  labels = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}
  labels |= {"kimi_linear": "Kimi Linear", "kimi_k3": "Kimi K3"}
  labels |= {"attnres": "Full and Block AttnRes"}
  assert labels.keys() == families.FAMILIES.keys()
  for label in labels.values():
    assert f"\n| {label}" in TEXT
