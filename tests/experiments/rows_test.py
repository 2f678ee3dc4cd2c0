# SPDX-License-Identifier: Apache-2.0
"""Committed rows say where they come from: a commit, a machine, versions."""

import pathlib
import subprocess

import pytest

from attnres_jax.common import csv_rows
from experiments.pages import readme
from tests.experiments import publish_test

ROOT = pathlib.Path(__file__).parents[2]
FILES = sorted(
  path.relative_to(ROOT).as_posix()
  for folder in ("experiments", "configs", "kernels/benchmarks/results")
  for path in (ROOT / folder).rglob("*.csv")
)
# What a row of a compiled program names in place of a machine.
_COMPILED_FOR = ("chip", "slice")
# Rows of this day and later name a commit without changed files.
_CLEAN_FROM = "2026-11-26"


def _git(*args):
  return subprocess.run(
    ["git", *args], cwd=ROOT, capture_output=True, text=True
  )


def _has_history():
  answer = _git("rev-parse", "--is-shallow-repository")
  return answer.returncode == 0 and answer.stdout.strip() == "false"


@pytest.mark.parametrize("file", FILES)
def test_rows_say_where_they_come_from(file):
  rows = csv_rows.read(ROOT / file)
  place = ("hardware", *_COMPILED_FOR)
  for row in rows:
    assert row.get("commit") and row.get("jax"), row
    assert any(row.get(name) for name in place), row
    if row.get("date", "") >= _CLEAN_FROM:
      assert not row["commit"].endswith("+"), row
  if _has_history():
    commits = {row["commit"].removesuffix("+") for row in rows}
    missing = [
      commit
      for commit in sorted(commits)
      if _git("cat-file", "-e", f"{commit}^{{commit}}").returncode
    ]
    assert not missing, f"not in the history: {missing}"


@pytest.mark.parametrize("name", publish_test.NAMES)
def test_documents_name_every_commit_of_their_rows(name):
  # A page may show rows of another experiment.
  folders = ("experiments", "kernels", "docs")
  pages = (page for folder in folders for page in (ROOT / folder).rglob("*.md"))
  named = "\n".join(page.read_text() for page in pages)
  published = readme.load(name)
  for file in {part.rows for part in published.parts}:
    if "/" in file or not file:
      continue
    commits = {row["commit"] for row in published.read(file)}
    missing = [commit for commit in sorted(commits) if commit not in named]
    assert not missing, f"{file}.csv: no page names {missing}"
