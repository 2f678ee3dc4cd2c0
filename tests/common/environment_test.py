# SPDX-License-Identifier: Apache-2.0
"""Facts about the origin of a result."""

import re
import shutil
import subprocess

import jax
import pytest

from attnres_jax import config as config_lib
from attnres_jax.common import environment
from attnres_jax.common import sharding
from attnres_jax.train import train_state
from tests import tiny_network


def _size(**fields):
  run = config_lib.RunConfig(model=tiny_network.config("prenorm", **fields))
  mesh = sharding.make_mesh(run.mesh, jax.devices()[:1])
  environment.check_size(train_state.make_program(run, mesh).abstract_state)


def test_a_size_that_cannot_be_meant():
  _size()
  message = "^config.model: got 'a state of [0-9,]+ GiB', expected at most the"
  for fields in (dict(vocab_size=2**31 - 1), dict(mlp_width=2**31 - 1)):
    with pytest.raises(config_lib.ConfigError, match=message):
      _size(**fields)


@pytest.fixture
def repository(tmp_path, monkeypatch):
  """A repository with one commit that seems to contain the package."""
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
  (repository / "rows.csv").write_text("added,by,a,command")
  assert environment.commit() == clean
  (repository / "file").write_text("two")
  assert environment.commit() == clean + "+"


@pytest.mark.needs("libtpu")
def test_a_process_keeps_the_commit_of_its_estimates(repository):
  environment.compiled.cache_clear()
  clean = environment.compiled()
  assert clean["jax"] == jax.__version__
  assert clean["commit"] == environment.commit()
  # As by the table that the process writes.
  (repository / "file").write_text("two")
  assert environment.compiled() == clean
  environment.compiled.cache_clear()


def test_another_repository_is_not_ours(repository, monkeypatch):
  """The commit of a project in whose environment the package is installed."""
  (repository / "inner").mkdir()
  monkeypatch.setattr(environment, "_ROOT", repository / "inner")
  assert environment.commit() == "unknown"
