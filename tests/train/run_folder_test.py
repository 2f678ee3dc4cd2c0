# SPDX-License-Identifier: Apache-2.0
"""A run reads its folder before it starts."""

from etils import epath
import pytest

from attnres_jax import config as config_lib
from attnres_jax.train import run_folder


@pytest.mark.parametrize("name", ["checkpoints", "checkpoints_set_aside"])
def test_a_file_in_the_place_of_checkpoints_is_refused(name, tmp_path):
  """At the start, not at the first save."""
  (tmp_path / name).write_text("a file of somebody")
  with pytest.raises(config_lib.ConfigError, match=f"^--workdir: .*{name}"):
    run_folder.refuse_foreign("--workdir", epath.Path(tmp_path))
