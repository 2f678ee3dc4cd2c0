# SPDX-License-Identifier: Apache-2.0
"""Parameter arithmetic against published integers and real networks."""

import dataclasses
import math
import pathlib

import jax
import pytest

from attnres_jax import config as config_lib
from attnres_jax import models
from attnres_jax.flops import parameters
from attnres_jax.models import residuals

CONFIGS = pathlib.Path(__file__).parents[2] / "configs"
SIZES = ("194m", "241m", "296m", "436m", "528m", "48b")


def _load(spec, **overrides):
  config = config_lib.load_config(str(CONFIGS / spec), overrides)
  return config.model


def _name(path):
  name = jax.tree_util.keystr(path, simple=True, separator=".")
  return name.removesuffix(".value")


def _leaves(model):
  """{path: number of entries} of the network itself."""
  network = jax.eval_shape(lambda: models.build_model(model))
  leaves = jax.tree_util.tree_flatten_with_path(network)[0]
  return {_name(path): math.prod(a.shape) for path, a in leaves}


def _part_of(path):
  """The part of `parameters.of_parts` that a leaf belongs to."""
  names = path.split(".")
  if names[0] == "embedding":
    return {"table": "embedding", "head": "head"}[names[1]]
  if names[0] == "final_norm" or names[2:] == ["norm", "gain"]:
    return "norms"
  return "residual" if names[0] == "residual" else names[1]


def _real_parts(model):
  parts = {}
  for path, size in _leaves(model).items():
    part = _part_of(path)
    parts[part] = parts.get(part, 0) + size
  return parts


def _check_against_network(model):
  counted = {
    name: count.total
    for name, count in parameters.of_parts(model).items()
    if count.total
  }
  assert counted == _real_parts(model)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("experts", [256, 512])
def test_sizes_are_the_networks(size, experts):
  _check_against_network(_load(f"kimi_linear.py:size={size},experts={experts}"))


@pytest.mark.parametrize(
  "spec", ["lm.py:size=small", "kimi_k3_attnres.py", "kimi_linear.py:runlocal"]
)
def test_other_configs_are_the_networks(spec):
  _check_against_network(_load(spec))


@pytest.mark.parametrize("name", residuals.headline())
@pytest.mark.parametrize("tied", [False, True])
def test_schemes_are_the_networks(name, tied):
  model = _load("kimi_linear.py:runlocal")
  residual = config_lib.under(model.residual, name)
  _check_against_network(
    dataclasses.replace(model, residual=residual, tie_embeddings=tied)
  )


class Test48B:
  """The integers of the released model."""

  model = _load("kimi_linear.py:size=48b")
  parts = parameters.of_parts(model)

  def test_parts(self):
    assert self.model.sublayer_kinds.count("kda") == 20
    assert self.parts["kda"].total == 20 * 39_514_272
    assert self.parts["mla"].total == 7 * 29_114_880
    assert self.parts["mlp"].total == 63_700_992
    moe = parameters.of_modules(self.model, "moe")
    experts = [moe[name] for name in ("gate_and_up", "down")]
    assert sum(e.total for e in experts) == 26 * 256 * 7_077_888
    assert sum(e.active for e in experts) == 26 * 8 * 7_077_888
    assert moe["shared"].total == 26 * 7_077_888
    bias = moe["selection_bias"]
    assert moe["router"].total + bias.total == 26 * 590_080
    assert bias.state == bias.total == 26 * 256
    assert self.parts["residual"].total == 253_440

  def test_totals(self):
    apart = ("embedding", "head", "residual")
    count = parameters.total(self.parts, *apart)
    assert count.total == 48_367_707_008
    assert count.active == 2_729_485_184
    count = parameters.total(self.parts, "residual")
    assert round(count.total / 1e9, 3) == 49.123
    assert round(count.active / 1e9, 3) == 3.107

  def test_mla_is_every_fourth_mixer_and_the_last(self):
    mixers = self.model.sublayer_kinds[::2]
    places = [i + 1 for i, kind in enumerate(mixers) if kind == "mla"]
    assert places == [4, 8, 12, 16, 20, 24, 27]


def test_tied_head_is_active():
  model = _load("kimi_linear.py:runlocal")
  tied = dataclasses.replace(model, tie_embeddings=True)
  both, shared = (
    parameters.total(parameters.of_parts(m)) for m in (model, tied)
  )
  table = model.vocab_size * model.width
  assert both.total - shared.total == table
  assert both.active == shared.active
