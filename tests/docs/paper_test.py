# SPDX-License-Identifier: Apache-2.0
"""Every command of docs/paper.md runs, as small as it gets.

Networks are small, sweeps say what they would start, and no committed file is
written. `tests/interop/scores_test.py` runs the command of Table 3.
"""

import os
import re
import shlex
import subprocess

import numpy as np
import pytest

from attnres_jax.common import csv_rows
from experiments.looks import run as looks
from experiments.pages import readme
from notebooks import execute
from tests import tiny_network
from tests import tiny_run
from tests.docs import pages

TEXT = (tiny_run.ROOT / "docs" / "paper.md").read_text()
# Of the paper: what a row has to name.
ITEMS = (
  *(f"Fig. {n}" for n in range(2, 10)), *(f"Table {n}" for n in range(1, 6)),
  "Eq. 2-6", "Eq. 7", "Eq. 8", "Alg. 1",
)  # fmt: skip
COMMAND = re.compile(r"`((?:make|python -m) [^`]+)`")
SWEEPS = ("demo", "scaling_law", "ablations", "block_size", "arch_sweep")
# What makes a command small, by its module.
SMALL = {
  "attnres_jax.pipeline": [],
  "attnres_jax.flops": [],
  "notebooks.execute": [],
  "experiments.looks.run": [],
  "experiments.residual_zoo.run": ["--schemes=prenorm"],
  "experiments.cost.run": ["--out={}/rows.csv", "--rounds=1"],
} | {f"experiments.{n}.run": ["--dry_run", "--workdir={}"] for n in SWEEPS}


def rows():
  """The items of each row of the table, and its commands."""
  table = TEXT.partition("\n|---|---|\n")[2].partition("\n\n")[0]
  cells = [line.strip("| ").split(" | ", 1) for line in table.splitlines()]
  return [(items, COMMAND.findall(rest)) for items, rest in cells]


def commands():
  """Modules and arguments; targets of the Makefile as what they run."""
  # `make test` exports its own flags and arguments, which are not these.
  exported = ("ARGS", "MAKEFLAGS", "MAKELEVEL")
  environment = {k: v for k, v in os.environ.items() if k not in exported}
  listed = {}
  for command in [c for _, some in rows() for c in some]:
    words = shlex.split(command)
    if words[0] == "make":
      make = ["make", "--dry-run", "--always-make", *words[1:]]
      done = subprocess.run(
        make, cwd=tiny_run.ROOT, env=environment, capture_output=True,
        text=True, check=True,
      )  # fmt: skip
      words = shlex.split(done.stdout.splitlines()[-1])
    listed[words[2], *words[3:]] = None
  return list(listed)


def test_every_item_has_a_command():
  for item in ITEMS:
    some = [c for items, c in rows() if re.search(rf"{item}\b", items)]
    assert some, item
    assert any(some) or item == "Table 3", item
  assert " lm_eval --model=hf " in TEXT.partition("## Table 3")[2]


@pytest.mark.more
@pytest.mark.parametrize("words", commands(), ids=lambda words: words[0])
def test_commands(words, tmp_path, monkeypatch, capfd):
  module, *arguments = words
  if module == "pytest":  # As this test.
    paths = [a for a in arguments if a.startswith("tests/")]
    assert paths and all((tiny_run.ROOT / path).is_dir() for path in paths)
    return
  monkeypatch.chdir(tiny_run.ROOT)
  _shrink(module, monkeypatch)
  small = [flag.format(tmp_path / "out") for flag in SMALL[module]]
  if "step" in arguments:
    small += ["--networks=tiny", "--arms=prenorm"]
  assert pages.main(module)([*arguments, *small]) == 0
  assert any(capfd.readouterr())


def _shrink(module, monkeypatch):
  """Puts small networks in place of trained ones, and writes no rows."""
  if module in ("experiments.looks.run", "experiments.residual_zoo.run"):
    monkeypatch.setattr(readme.Published, "write", lambda published: None)
    monkeypatch.setattr(csv_rows, "write", lambda path, rows: None)
  if module == "experiments.looks.run":
    network = looks.Network(
      "full", 0, tiny_network.model("full_attnres", num_layers=3),
      np.random.default_rng(0).integers(0, 16, (20, 9), dtype=np.int32),
    )  # fmt: skip
    monkeypatch.setattr(looks, "finished", lambda *_: [network[:3]])
    monkeypatch.setattr(looks, "load", lambda *_: network)
  if module == "notebooks.execute":
    load = execute.load

    def loaded(path):
      notebook = load(path)
      cells = [c for c in notebook.cells if c.cell_type == "code"]
      first = next(
        i for i, c in enumerate(cells) if "make_schedule" in c.source
      )
      notebook.cells = [*cells[:2], cells[first]]
      return notebook

    monkeypatch.setattr(execute, "load", loaded)
