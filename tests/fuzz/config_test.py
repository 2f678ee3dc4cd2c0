# SPDX-License-Identifier: Apache-2.0
"""Any field of a config with any value, as Python and as text of a flag."""

import json

from hypothesis import strategies as st
import jax

from attnres_jax import config as config_lib
from attnres_jax import main
from attnres_jax.common import command_line
from attnres_jax.common import sharding
from attnres_jax.train import train_state
from tests import tiny_run
from tests.fuzz import laws

SPEC = f"{tiny_run.ROOT}/configs/lm.py:size=micro"
FIELDS = sorted(config_lib.flatten(config_lib.default_config().to_dict()))
# The name of a section, and unknown names.
NAMES = [*FIELDS, "model", "model.residual", "modle.width", "seed.x", "", "."]

overrides = st.dictionaries(
  st.sampled_from(NAMES), laws.values, min_size=1, max_size=3
)


def _build(config):
  """Shapes of everything that a step of this config reads and writes."""
  config = config.with_vocab_size(max(config.model.vocab_size, 1))
  mesh = sharding.make_mesh(config.mesh, jax.devices()[:1])
  return train_state.make_program(config, mesh).abstract_state


def _check_config(config):
  assert config_lib.build_run_config(config_lib.to_dict(config)) == config
  text = json.dumps(config_lib.to_dict(config), allow_nan=False)
  assert config_lib.build_run_config(json.loads(text)) == config
  _build(config)


@laws.shares(150, 4000)
def test_fields(explore):
  def check(fields):
    laws.guarded(lambda: _check_config(config_lib.load_config(SPEC, fields)))

  explore("config fields", check, overrides)


@laws.shares(150, 4000)
def test_nested_values(explore):
  """As from JSON: sections replaced by values, and vice versa."""
  nested = st.dictionaries(
    st.sampled_from(["model", "data", "optim", "mesh", "seed", "x", "name"]),
    laws.values
    | st.dictionaries(
      st.sampled_from(sorted({name.rpartition(".")[2] for name in FIELDS})),
      laws.values,
      max_size=2,
    ),
    max_size=3,
  )

  def check(nested):
    laws.guarded(lambda: _check_config(config_lib.build_run_config(nested)))

  explore("nested configs", check, nested)


@laws.shares(150, 4000)
def test_flags(explore):
  def parse(argv):
    options = main.make_parser().parse_args(argv)
    return command_line.run(
      lambda: _build(command_line.load_config(options.config)) and 0
    )

  def check(given, joined):
    argv = [f"--config={SPEC}"]
    for name, value in given.items():
      flag = f"--config.{name}"
      argv += [f"{flag}={value}"] if joined else [flag, str(value)]
    laws.outcome(parse, argv)

  explore("config flags", check, overrides, st.booleans())
