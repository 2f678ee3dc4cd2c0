# SPDX-License-Identifier: Apache-2.0
"""A network that is written reads as the same network, or is refused."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import pytest

from attnres_jax import config as config_lib
from attnres_jax import models
from attnres_jax.interop import attnres_keys
from attnres_jax.interop import config_table
from attnres_jax.interop import families
from tests import tiny_network
from tests.interop import small_checkpoint


def _read(values):
  return families.of_config_json(values)[1].read_config(values)


def _base(family):
  if family == "attnres":  # With all kinds of sublayers.
    base = tiny_network.config("block_attnres", **tiny_network.KINDS)
  else:
    fields = small_checkpoint.FIELDS[family]
    base = dataclasses.replace(small_checkpoint.CONFIG, **fields)
  # Fields that do not change the function are at their defaults.
  plain, flat = config_lib.ModelConfig(), _flat(base)
  usual = {
    name: config_table.get(plain, name) for name in config_table.EXECUTION
  }
  return config_table.build(flat | usual)


def _flat(config):
  return config_lib.flatten(dataclasses.asdict(config))


def _others(value):
  """Further values that a field may have."""
  if isinstance(value, bool):
    return [not value]
  if isinstance(value, int):
    return [value + 1, 2 * value, 0]
  if isinstance(value, float):
    return [1.5 * value + 0.25, 0.0]
  if isinstance(value, str):
    return [
      "mla", "silu", "situ", "llama3", "sum", "sqrt", "full_attnres",
      "prenorm", "postnorm",
    ]  # fmt: skip
  return []


def _changed(base):
  """(field, config) of all networks that differ in one field of ours."""
  flat = _flat(base)
  for field, value in flat.items():
    if field in config_table.EXECUTION:
      continue
    for other in _others(value):
      try:
        yield field, config_table.build(flat | {field: other})
      except (config_lib.ConfigError, TypeError, ValueError):
        pass  # No network has this value.


@functools.cache
def _program(config):
  """The computation of a network, as text without variables' sources."""
  network = jax.eval_shape(lambda: models.build_model(config))
  tokens = jnp.zeros((1, 8), jnp.int32)
  return str(jax.make_jaxpr(lambda network: network(tokens))(network))


def _is_same(read, config):
  """Whether a config that was read has the function of the one written."""
  differ = config_lib.differences(_flat(read), _flat(config))
  if not differ.keys() - set(config_table.EXECUTION):
    return True
  try:
    program = _program(config)
  except config_lib.ConfigError:
    return True  # There is no such network.
  return _program(read) == program


@pytest.mark.parametrize(
  "name,every",
  [
    pytest.param("attnres", 2, marks=pytest.mark.more),
    *(
      pytest.param(name, 1, marks=pytest.mark.slow)
      for name in families.FAMILIES
    ),
  ],
)
def test_every_field_comes_back_or_is_refused(name, every):
  """By default, every second change of our own exports."""
  family, base = families.FAMILIES[name], _base(name)
  start = {"model_type": name}
  assert _is_same(_read(start | family.write_config(base)), base)
  counts = {"written": 0, "refused": 0}
  for field, config in itertools.islice(_changed(base), 0, None, every):
    try:
      values = family.write_config(config)
    except config_lib.ConfigError:
      counts["refused"] += 1
      continue
    counts["written"] += 1
    assert _is_same(_read(start | values), config), field
  assert min(counts.values()) > 5, counts


def test_a_field_that_no_table_knows_is_refused(monkeypatch):
  """So is a new field of ModelConfig, until a family states it."""
  base, family = _base("attnres"), families.FAMILIES["attnres"]
  plain, networks = config_lib.ModelConfig(), {}
  for field, config in _changed(base):
    networks.setdefault(field, [base]).append(config)
  fields, refused = attnres_keys.FIELDS, set()
  for field in fields:
    others = tuple(name for name in fields if name != field)
    monkeypatch.setattr(attnres_keys, "FIELDS", others)
    for config in networks.get(field, [base]):
      normal = config_table.network(config)
      if config_table.get(normal, field) != config_table.get(plain, field):
        try:
          values = family.write_config(config)
        except config_lib.ConfigError:
          refused.add(field)
          continue
        # Its value follows from other fields.
        read = _read({"model_type": "attnres"} | values)
        assert _is_same(read, config), field
  assert len(refused) > 30, refused
