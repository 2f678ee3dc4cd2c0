# SPDX-License-Identifier: Apache-2.0
"""Where a result comes from."""

import re
import shutil
import subprocess

import pytest

from attnres_jax import environment


@pytest.fixture
def repository(tmp_path, monkeypatch):
  """A repository with one commit, in which the package seems to lie."""
  if shutil.which("git") is None:
    pytest.skip("no git here")
  monkeypatch.setattr(environment, "_ROOT", tmp_path)
  (tmp_path / "file").write_text("one")
  who = ["-c", "user.name=a", "-c", "user.email=a@b"]
  for command in (["init"], ["add", "."], [*who, "commit", "-m", "one"]):
    subprocess.run(
      ["git", *command], cwd=tmp_path, check=True, capture_output=True
    )
  return tmp_path


def test_commit_says_whether_files_were_changed(repository):
  clean = environment.commit()
  assert re.fullmatch("[0-9a-f]{10}", clean)
  (repository / "file").write_text("two")
  assert environment.commit() == clean + "+"


def test_another_repository_is_not_ours(repository, monkeypatch):
  """That of a project whose environment the package is installed in."""
  (repository / "inner").mkdir()
  monkeypatch.setattr(environment, "_ROOT", repository / "inner")
  assert environment.commit() == "unknown"


def test_hardware_of_this_machine():
  assert re.search(r", \d+ cores?", environment.hardware())
