# SPDX-License-Identifier: Apache-2.0
"""The recipe of docs/extend.md makes an experiment that runs."""

import re
import runpy
import shlex
import shutil
import subprocess
import sys
import warnings

import pytest

from attnres_jax.common import csv_rows
from tests import tiny_run

TEXT = (tiny_run.ROOT / "docs" / "extend.md").read_text()


@pytest.mark.more
def test_recipe(tmp_path, monkeypatch, capfd):
  """Its printed commands, from the template to a filled README."""
  section = TEXT.partition("## Add an experiment\n")[2].partition("\n#")[0]
  commands = re.search(r"^```\n(.*?)^```$", section, re.S | re.M)[1]
  template = tiny_run.ROOT / "experiments" / "TEMPLATE"
  shutil.copytree(template, tmp_path / "experiments" / "TEMPLATE")
  for name, value in tiny_run.environment().items():
    monkeypatch.setenv(name, value)  # Of the workers.
  monkeypatch.chdir(tmp_path)
  # The rest of `experiments`, and `configs`, is where it always is.
  monkeypatch.syspath_prepend(tmp_path)
  statuses = [_run(line, monkeypatch) for line in commands.splitlines()]
  assert statuses == ["shell", "shell", 0, 0, 0]
  out, err = capfd.readouterr()
  assert "2/2 done" in out and not err
  mine = tmp_path / "experiments" / "mine"
  rows = csv_rows.read(mine / "results.csv")
  assert [row["residual"] for row in rows] == ["prenorm", "block_attnres"]
  losses = [f"{float(row['validation_loss']):.4f}" for row in rows]
  readme = (mine / "README.md").read_text()
  assert "TEMPLATE" not in readme and "<!-- results: " in readme
  table = "| setting | N | PreNorm | Block AttnRes |"
  assert f"{table}\n" in readme and f" | {losses[0]} | {losses[1]} (" in readme
  assert "2 runs, seed 0, " in readme
  page = (tmp_path / "runs" / "try" / "report.html").read_text()
  assert "2/2 done" in page and losses[1] in page


def _run(line, monkeypatch):
  """One command; Python ones run here, where everything is imported."""
  words = shlex.split(line)
  if words[:2] != ["python", "-m"]:
    subprocess.run(["bash", "-euc", line], check=True)
    return "shell"
  monkeypatch.setattr(sys, "argv", words[2:])
  with pytest.raises(SystemExit) as end, warnings.catch_warnings():
    # Another test may have imported it.
    warnings.filterwarnings("ignore", ".* found in sys.modules", RuntimeWarning)
    runpy.run_module(words[2], run_name="__main__", alter_sys=True)
  return end.value.code
