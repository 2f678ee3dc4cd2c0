# SPDX-License-Identifier: Apache-2.0
"""docs/pipeline.md agrees with what its command accepts."""

import re
import shlex

from attnres_jax import config as config_lib
from attnres_jax.common import sharding
from attnres_jax.pipeline import __main__ as command
from attnres_jax.pipeline import spmd
from tests import tiny_run

TEXT = (tiny_run.ROOT / "docs" / "pipeline.md").read_text()
BLOCKS = re.findall(r"^```\n(.*?)^```$", TEXT, re.S | re.M)


def test_the_run():
  (words,) = [
    shlex.split(block.replace("\\\n", ""))
    for block in BLOCKS
    if "attnres_jax.main" in block
  ]
  flags = [word.removeprefix("--").split("=", 1) for word in words[4:]]
  (spec,) = [value for name, value in flags if name == "config"]
  config = config_lib.load_config(
    spec,
    {
      name.removeprefix("config."): int(value)
      for name, value in flags
      if name.startswith("config.")
    },
  )
  mesh = sharding.make_mesh(config.mesh)
  assert mesh.shape["stage"] == 4 and config.pipeline.virtual_stages == 2
  assert spmd.make_pipeline(config, mesh).microbatches == 16


def test_counts():
  (flags,) = re.findall(r"python\s-m attnres_jax\.pipeline([^`\n]*)", TEXT)
  assert command.counts(shlex.split(flags))


def test_fields_are_those_of_the_config():
  named = set(re.findall(r"`pipeline\.(\w+)`", TEXT))
  assert named == {*config_lib.PipelineConfig.__dataclass_fields__}
