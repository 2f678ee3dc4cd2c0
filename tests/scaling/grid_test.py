# SPDX-License-Identifier: Apache-2.0
"""Sweeps: names, hashes, and what changes them."""

import copy
import hashlib
import json

import pytest

from attnres_jax import config
from attnres_jax.scaling import grid

CONFIG_FILE = """
from attnres_jax import config as config_lib

def get_config(arg=None):
  arg = config_lib.parse_arg(arg, size="s", residual="prenorm")
  config = config_lib.default_config()
  config.model.width = {"s": 32, "m": 64}[arg.size]
  config.model.residual.name = arg.residual
  config.model.residual.block_size = 4
  return config

def sweep(add):
  from attnres_jax.scaling import grid
  for overrides in grid.product(
    size=("s", "m"), residual=("prenorm", "block_attnres"), seed=range(3)
  ):
    add(**overrides)
"""


@pytest.fixture
def resolve(tmp_path):
  path = tmp_path / "scaling.py"
  path.write_text(CONFIG_FILE)
  return grid.config_resolver(str(path))


def tiny_resolve(overrides):
  return {"name": "run", "lr": 1e-3, "model": {"width": 8}} | dict(overrides)


def test_sweep_of_a_config_file(resolve):
  namespace = {}
  exec(CONFIG_FILE, namespace)
  runs = grid.collect(namespace["sweep"], resolve)
  assert len(runs) == 2 * 2 * 3 == len({run.name for run in runs})
  run = runs[-1]
  assert run.name.startswith("m-block_attnres-seed2-")
  assert run.overrides == {"size": "m", "residual": "block_attnres", "seed": 2}
  built = config.build_run_config(run.config)
  assert (built.model.width, built.seed) == (64, 2)
  assert built.model.residual.name == "block_attnres"
  # It is data: it survives JSON, and its hash with it.
  again = json.loads(json.dumps(run.config))
  assert run.name.endswith(grid.config_hash(again))


def test_later_arguments_win(tmp_path):
  path = tmp_path / "scaling.py"
  path.write_text(CONFIG_FILE)
  resolve = grid.config_resolver(f"{path}:size=m,residual=rescaled")
  resolved = resolve({"size": "s"})
  assert resolved["model"]["width"] == 32
  assert resolved["model"]["residual"]["name"] == "rescaled"


def test_hash_covers_every_field_but_the_name(resolve):
  base = resolve({})
  digest = grid.config_hash(base)
  assert grid.config_hash(base | {"name": "other"}) == digest
  reordered = dict(reversed(base.items()))
  assert grid.config_hash(reordered) == digest
  changed = 0
  for name, value in config.flatten(base).items():
    other = copy.deepcopy(base)
    *parents, leaf = name.split(".")
    node = other
    for parent in parents:
      node = node[parent]
    node[leaf] = not value if isinstance(value, bool) else f"{value}x"
    assert (grid.config_hash(other) == digest) == (name in grid.UNHASHED), name
    changed += 1
  assert changed > 40


def test_hash_is_fixed():
  # If this changes, running sweeps lose their runs.
  values = {"b": [1, 2.5, 1e-05, 1e22, 0.1], "a": {"x": None, "y": True}}
  text = b'{"a":{"x":null,"y":true},"b":[1,2.5,1e-05,1e+22,0.1]}'
  digest = hashlib.sha256(text).hexdigest()
  assert grid.config_hash(values) == digest[:8] == "44f77a0e"
  with pytest.raises(ValueError, match="not JSON compliant"):
    grid.config_hash({"a": float("nan")})


def test_the_same_config_twice_is_refused():
  def sweep(add):
    add(lr=2e-3)
    add(lr=2e-3, name="elsewhere")

  with pytest.raises(ValueError, match="overrides.*another config than"):
    grid.collect(sweep, tiny_resolve)


@pytest.mark.parametrize(
  "overrides,slug",
  [
    ({}, ""),
    ({"size": "s", "seed": 0}, "s-seed0"),
    ({"model.residual.name": "full_attnres"}, "full_attnres"),
    ({"optim.peak_lr": 1e-3}, "peak_lr0.001"),
    ({"optim.peak_lr": 3e-5}, "peak_lr3e-05"),
    ({"data.segment_ids": True, "scan": False}, "segment_ids-no_scan"),
    ({"data.path": "gs://b/x y"}, "gs_b_x_y"),
    ({"data.path": ""}, "no_path"),
    ({"seed": -1}, "seed-1"),
    # Everything once.
    ({"seed": 1, "data.seed": 1}, "seed1"),
    ({"seed": 1, "data.seed": 2}, "seed1-seed2"),
  ],
)
def test_slugs(overrides, slug):
  assert grid.slug_of(overrides) == slug


def test_names_are_fit_for_folders():
  def sweep(add):
    add(path="../" * 200 + "a b", tag="ü/%")
    add()

  named, bare = grid.collect(sweep, tiny_resolve)
  assert len(named.name) <= grid.MAX_SLUG + 1 + grid.HASH_DIGITS
  assert "/" not in named.name and not named.name.startswith((".", "-"))
  assert len(bare.name) == grid.HASH_DIGITS


def test_select():
  sweep = grid.of_axes({"size": ("s", "m"), "tag": ("seed0", "seed1")})
  runs = grid.collect(sweep, tiny_resolve)
  names = [run.name[:7] for run in grid.select(runs, "^m-.*seed1")]
  assert names == ["m-seed1"]
  with pytest.raises(ValueError, match=r"^--only: got '\(', expected a reg"):
    grid.select(runs, "(")
  with pytest.raises(ValueError, match="^--only: got 'xl-', which matches no"):
    grid.select(runs, "xl-")


def test_bad_overrides_are_named(resolve):
  for overrides, words in (
    ({"optim.peak_lrr": 1.0}, "peak_lrr.*did you mean"),
    ({"sizes": "s"}, "'sizes': unknown, expected"),
  ):
    with pytest.raises(config.ConfigError, match=words):
      grid.collect(lambda add, given=overrides: add(**given), resolve)


def test_load_gives_a_sweep_its_argument(tmp_path):
  path = tmp_path / "scaling.py"
  path.write_text(CONFIG_FILE)
  assert len(grid.load(str(path))) == 12
  path.write_text(
    CONFIG_FILE.replace("def sweep(add):", "def sweep(add, arg):")
    .replace("range(3)", "range(3 if arg == 'more' else 1)")
    .replace('residual="prenorm")', 'residual="prenorm", more=False)')
  )
  assert len(grid.load(str(path))) == 4
  assert len(grid.load(f"{path}:more")) == 12
  # An argument that every run replaces has no effect.
  with pytest.raises(config.ConfigError, match="expected no size, which the"):
    grid.load(f"{path}:more,size=m")
  # The sweep may hand one on.
  path.write_text(path.read_text().replace("(**over", "(more=True, **over"))
  assert len(grid.load(f"{path}:more")) == 12


def test_a_field_has_to_act_in_some_run(tmp_path):
  """A sweep compares schemes, of which some have no blocks."""
  path = tmp_path / "scaling.py"
  path.write_text(CONFIG_FILE)
  for run in grid.load(str(path), {"model.residual.block_size": "2"}):
    assert run.config["model"]["residual"]["block_size"] == 2
  for name, value in (
    ("model.moe.top_k", "2"),
    ("model.residual.schedule_size", "2"),
  ):
    with pytest.raises(config.ConfigError, match=f"^config.{name}: got 2"):
      grid.load(str(path), {name: value})
