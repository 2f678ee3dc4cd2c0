# SPDX-License-Identifier: Apache-2.0
"""What follows from the letters of a parameter's axes, against two tables.

The tables say by path how each parameter of each config is cut over a mesh and
trained. They are the ones that checkpoints and published runs were made with,
and so they do not follow the code: add rows for new parameters, change none.
(Experts were cut along D, with gate and up apart.)
"""

import dataclasses
import pathlib
import re

from flax import nnx
import jax
import jax.numpy as jnp
import pytest

from attnres_jax import config as config_lib
from attnres_jax import models
from attnres_jax import optimizer
from attnres_jax.common import sharding
from attnres_jax.models import residuals
from attnres_jax.models import sublayer
from tests import tiny_network

FSDP, TENSOR, EXPERT = sharding.FSDP, sharding.TENSOR, sharding.EXPERT
# The end of a path -> the mesh axis that cuts each dimension but the stacked
# ones. What no row matches is whole.
PARTITIONS = (
  (r"embedding/table", (TENSOR, FSDP)),
  (r"embedding/head", (FSDP, TENSOR)),
  (r"(attention|kda|mla)/core/(query|key|value)", (FSDP, TENSOR, None)),
  (r"(attention|kda|mla)/core/output", (TENSOR, None, FSDP)),
  (r"kda/core/(decay|gate)_down", (FSDP, None)),
  (r"kda/core/(decay|gate)_up", (None, TENSOR, None)),
  (r"kda/core/beta", (FSDP, TENSOR)),
  (r"mla/core/(compress|query_down)", (FSDP, None)),
  (r"mla/core/expand", (None, TENSOR, None)),
  (r"moe/core/router", (FSDP, None)),
  (r"moe/core/gate_and_up", ((EXPERT, FSDP), None, TENSOR, None)),
  (r"moe/core/down", ((EXPERT, FSDP), TENSOR, None)),
  (r"(mlp/core|moe/core/shared)/(gate|up)", (FSDP, TENSOR)),
  (r"(mlp/core|moe/core/shared)/down", (TENSOR, FSDP)),
)
# A path -> (axes of Muon's matrices, empty for AdamW; decays; load).
TRAINING = (
  (r"embedding/(table|head)", "", True, False),
  (r"final_norm/gain", "", True, False),
  (r"residual/queries/(query|gain)", "", False, False),
  (r"sublayers/\w+/norm/gain", "", True, False),
  (r"sublayers/attention/core/(query|key|value)", "L|D|NH", True, False),
  (r"sublayers/attention/core/output", "L|NH|D", True, False),
  (r"sublayers/kda/core/(query|key|value)", "L|D|NH", True, False),
  (r"sublayers/kda/core/(decay|gate)_down", "L|D|R", True, False),
  (r"sublayers/kda/core/(decay|gate)_up", "L|R|NH", True, False),
  (r"sublayers/kda/core/beta", "L|D|N", True, False),
  (r"sublayers/kda/core/output", "L|NH|D", True, False),
  (r"sublayers/kda/core/(query|key|value)_conv", "", True, False),
  (r"sublayers/kda/core/out_norm/gain", "", True, False),
  (r"sublayers/kda/core/(a_log|dt_bias)", "", False, False),
  (r"sublayers/\w+/core/(query|key|value|shared)_norm/gain", "", True, False),
  (r"sublayers/mla/core/query", "L|D|NH", True, False),
  (r"sublayers/mla/core/(compress|query_down)", "L|D|R", True, False),
  (r"sublayers/mla/core/expand", "L|R|NH", True, False),
  (r"sublayers/mla/core/output", "L|NH|D", True, False),
  (r"sublayers/mla/core/latent_norm/gain", "", True, False),
  (r"sublayers/(mlp/core|moe/core/shared)/(gate|up)", "L|D|F", True, False),
  (r"sublayers/(mlp/core|moe/core/shared)/down", "L|F|D", True, False),
  (r"sublayers/moe/core/router", "L|D|E", True, False),
  (r"sublayers/moe/core/gate_and_up", "LEG|F|D", True, False),
  (r"sublayers/moe/core/down", "LE|F|D", True, False),
  (r"sublayers/moe/core/selection_bias", "", False, True),
)

ALL = tiny_network.KINDS | dict(
  num_layers=4,
  num_kv_heads=1,
  mixers=("attention", "kda"),
  last_mixer="mla",
  qkv_norm=True,
)
KINDS = tiny_network.config(**ALL)


def _networks():
  for name in residuals.headline():
    yield tiny_network.config(name, **ALL)
  yield tiny_network.config(tie_embeddings=True, **ALL)
  for file in sorted(
    (pathlib.Path(__file__).parents[1] / "configs").glob("*.py")
  ):
    yield str(file)
  yield "configs/kimi_linear.py:size=48b"


def _described(function, tree):
  """{path: what `function` says about the parameter}."""
  described = {}

  def describe(parameter):
    described[parameter.name] = function(parameter)
    return parameter.value

  sharding.map_parameters(describe, tree)
  return described


@pytest.mark.parametrize("config", list(_networks()))
def test_letters_say_what_the_tables_say(config):
  if isinstance(config, str):  # A file, which takes a while to load.
    config = config_lib.load_config(config).model
  config = dataclasses.replace(config, vocab_size=config.vocab_size or 257)
  model = jax.eval_shape(lambda: models.build_model(config))
  names = _described(lambda p: p, model)
  assert len(names) == len(jax.tree.leaves(model))
  specs = _described(sharding.at_rest, model)
  muon, decays, loads = (
    _flags(tree(model))
    for tree in (optimizer.matrices, optimizer.decays, optimizer.loads)
  )
  for name, parameter in names.items():
    cut = next((c for p, c in PARTITIONS if re.search(rf"/?{p}$", name)), ())
    stacked = [None] * (parameter.value.ndim - len(cut)) if cut else []
    at_rest = [
      {FSDP: (FSDP, "stage"), (EXPERT, FSDP): (EXPERT, FSDP, "stage")}.get(
        axis, axis
      )
      for axis in cut
    ]
    assert specs[name] == jax.P(*stacked, *at_rest), name
    ((axes, decay, load),) = [
      rest for p, *rest in TRAINING if re.fullmatch(p, name)
    ]
    assert (muon[name], decays[name], loads[name]) == (
      bool(axes), decay, load,
    ), name  # fmt: skip
    letters = parameter.axes.replace("|", "")
    assert len(letters) + name.startswith("sublayers") == parameter.value.ndim
    if axes:
      assert parameter.axes.replace("|", "").replace("K", "N") == (
        axes.replace("|", "").removeprefix("L")
      )


def _flags(tree):
  leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
  return {
    jax.tree_util.keystr(path, simple=True, separator="/").removesuffix(
      "/value"
    ): flag
    for path, flag in leaves
  }


def test_this_network_has_every_kind_of_sublayer():
  assert set(KINDS.sublayer_kinds) == set(sublayer.CORES)


def test_every_row_has_a_parameter():
  model = jax.eval_shape(lambda: models.build_model(KINDS))
  names = _described(lambda p: p, model)
  for pattern, *_ in (*PARTITIONS, *TRAINING):
    assert any(re.search(rf"/?{pattern}$", name) for name in names), pattern


@pytest.mark.parametrize("params", [{"w": jnp.zeros(2)}, {"w": nnx.Param(1.0)}])
def test_a_parameter_without_letters_is_named(params):
  with pytest.raises(ValueError, match="^w has no axes; name them where"):
    optimizer.decays(params)
