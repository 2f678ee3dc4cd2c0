# SPDX-License-Identifier: Apache-2.0
"""The recipe of docs/architecture.md makes an experiment that runs."""

import os
import re
import shutil
import subprocess
import sys

from attnres_jax import csv_rows
from tests import tiny_run
from tests.sweep import tiny_sweep

TEXT = (tiny_run.ROOT / "docs" / "architecture.md").read_text()


def test_recipe(tmp_path):
  """Its commands, as they are written, from the template to a filled README."""
  section = TEXT.partition("### Add an experiment\n")[2].partition("\n#")[0]
  commands = re.search(r"^```\n(.*?)^```$", section, re.S | re.M)[1]
  assert commands.count("python -m experiments.") == 3
  template = tiny_run.ROOT / "experiments" / "TEMPLATE"
  shutil.copytree(template, tmp_path / "experiments" / "TEMPLATE")
  environment = tiny_sweep.environment()
  # The rest of `experiments`, and `configs`, is where it always is.
  environment["PYTHONPATH"] = (
    f"{tmp_path}{os.pathsep}{environment['PYTHONPATH']}"
  )
  environment["PATH"] = f"{tmp_path}{os.pathsep}{environment['PATH']}"
  python = tmp_path / "python"
  python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
  python.chmod(0o755)
  result = subprocess.run(
    ["bash", "-euc", commands], cwd=tmp_path, env=environment, timeout=300,
    capture_output=True, text=True, check=False,
  )  # fmt: skip
  assert result.returncode == 0, result.stdout + result.stderr
  assert "2/2 done" in result.stdout and not result.stderr
  mine = tmp_path / "experiments" / "mine"
  rows = csv_rows.read(mine / "results.csv")
  assert [row["residual"] for row in rows] == ["prenorm", "block_attnres"]
  losses = [f"{float(row['validation_loss']):.4f}" for row in rows]
  readme = (mine / "README.md").read_text()
  assert "TEMPLATE" not in readme and "<!-- results: " in readme
  table = "| setting | N | PreNorm | Block AttnRes |"
  assert (
    f"{table}\n" in readme and f" | {losses[0]} | {losses[1]} (**" in readme
  )
  assert "2 runs, seed 0, " in readme
  page = (tmp_path / "runs" / "try" / "report.html").read_text()
  assert "2/2 done" in page and losses[1] in page


def test_a_run_is_a_few_lines():
  """An experiment needs only a few files."""
  folder = tiny_run.ROOT / "experiments" / "TEMPLATE"
  files = {path.name for path in folder.iterdir() if path.is_file()}
  assert files == {"README.md", "config.py", "run.py"}
  assert len((folder / "run.py").read_text().splitlines()) < 15
  named = set(re.findall(r"`([a-z_]+/[a-z_/]+\.py)`", TEXT.partition(
    "### Add an experiment\n")[2].partition("\n#")[0]))  # fmt: skip
  library = {name for name in named if not name.startswith("experiments/")}
  assert 0 < len(library) <= 5
  for name in named:
    roots = (tiny_run.ROOT, tiny_run.ROOT / "attnres_jax")
    assert any((root / name).is_file() for root in roots), name
