# SPDX-License-Identifier: Apache-2.0
"""The table of parameter groups against all parameters."""

import math

import jax
import numpy as np
import pytest

from attnres_jax import config as config_lib
from attnres_jax import models
from attnres_jax.models import residuals
from attnres_jax.models import sublayer
from attnres_jax.optimizer import groups

KIMI = config_lib.ModelConfig(
  vocab_size=7,
  width=8,
  num_layers=4,
  num_heads=2,
  mlp_width=12,
  mixers=("attention", "kda"),
  last_mixer="mla",
  kda=config_lib.KdaConfig(head_width=4, gate_rank=3),
  mla=config_lib.MlaConfig(
    latent_rank=6, nope_width=4, shared_width=2, value_width=5
  ),
  moe=config_lib.MoeConfig(
    num_experts=4, top_k=2, expert_width=10, dense_layers=1
  ),
  residual=config_lib.ResidualConfig(num_blocks=2),
)


def _parameters(**fields):
  """{path: (row, shape)} of a model's parameters."""
  config = config_lib.ModelConfig(**{**vars(KIMI), **fields})
  model = jax.eval_shape(lambda: models.build_model(config))
  leaves = jax.tree_util.tree_flatten_with_path(model)[0]
  return {
    groups.path_name(path): (groups.row_of(path), leaf.shape)
    for path, leaf in leaves
  }


def test_this_model_has_every_kind_of_sublayer():
  assert set(KIMI.sublayer_kinds) == set(sublayer.CORES)


@pytest.mark.parametrize("name", sorted(residuals.RESIDUALS))
def test_every_parameter_has_one_row(name):
  residual = config_lib.ResidualConfig(name=name, num_blocks=2)
  found = _parameters(residual=residual)
  assert len(found) > 30
  # Their axes fit, too.
  for row, shape in found.values():
    if row.axes:
      groups.as_matrices(np.zeros(shape), row.axes)


def test_every_row_has_a_parameter():
  used = {row.path for row, _ in _parameters().values()}
  assert {row.path for row in groups.TABLE} == used


def test_a_parameter_without_a_row_is_named(monkeypatch):
  rows = tuple(row for row in groups.TABLE if not row.path.endswith("router"))
  monkeypatch.setattr(groups, "TABLE", rows)
  message = r"sublayers\.moe\.core\.router has 0 rows in .*groups\.TABLE"
  with pytest.raises(ValueError, match=message):
    _parameters()


def test_muon_trains_all_matrices_but_embedding_and_head():
  """The number of parameters in each group, by hand."""
  found = _parameters()
  muon = sum(math.prod(shape) for row, shape in found.values() if row.axes)
  # Two of attention, one KDA, one MLA, one dense MLP, three MoE; H = 4.
  attention = 2 * 4 * (8 * 8)
  kda = 4 * (8 * 8) + 2 * (8 * 3 + 3 * 8) + 8 * 2
  mla = 8 * 2 * 6 + 8 * 8 + 6 * 2 * 9 + 2 * 5 * 8
  moe = 3 * (8 * 4 + (4 + 1) * 3 * 8 * 10)
  assert muon == attention + kda + mla + 3 * 8 * 12 + moe
  adamw = {path: shape for path, (row, shape) in found.items() if not row.axes}
  assert adamw == {
    "embedding.table": (7, 8),
    "embedding.head": (8, 7),
    "final_norm.gain": (8,),
    "residual.queries.query": (9, 8),
    "residual.queries.gain": (9, 8),
    "sublayers.attention.norm.gain": (2, 8),
    "sublayers.kda.norm.gain": (1, 8),
    "sublayers.kda.core.query_conv": (1, 4, 2, 4),
    "sublayers.kda.core.key_conv": (1, 4, 2, 4),
    "sublayers.kda.core.value_conv": (1, 4, 2, 4),
    "sublayers.kda.core.a_log": (1, 2),
    "sublayers.kda.core.dt_bias": (1, 2, 4),
    "sublayers.kda.core.out_norm.gain": (1, 4),
    "sublayers.mla.norm.gain": (1, 8),
    "sublayers.mla.core.latent_norm.gain": (1, 6),
    "sublayers.mlp.norm.gain": (1, 8),
    "sublayers.moe.norm.gain": (3, 8),
    "sublayers.moe.core.selection_bias": (3, 4),
  }


def test_what_does_not_decay():
  rows = {path: row for path, (row, _) in _parameters().items()}
  assert {path for path, row in rows.items() if not row.decays} == {
    "residual.queries.query",
    "residual.queries.gain",
    "sublayers.kda.core.a_log",
    "sublayers.kda.core.dt_bias",
    "sublayers.moe.core.selection_bias",
  }
  assert {path for path, row in rows.items() if row.load} == {
    "sublayers.moe.core.selection_bias"
  }


def test_trained_leaves_out_nothing_but_selection_biases():
  model = jax.eval_shape(lambda: models.build_model(KIMI))

  def paths(tree):
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {groups.path_name(path) for path, _ in leaves}

  left_out = paths(model) - paths(groups.trained(model))
  assert left_out == {"sublayers.moe.core.selection_bias"}


@pytest.mark.parametrize(
  "axes,shape,expected",
  [
    ("L|D|NH", (2, 3, 4, 5), (2, 3, 20)),
    ("L|NH|D", (2, 4, 5, 3), (2, 20, 3)),
    ("LE|D|F", (2, 3, 4, 5), (2, 3, 4, 5)),
    ("|D|F", (4, 5), (4, 5)),
  ],
)
def test_matrices(axes, shape, expected):
  x = np.arange(math.prod(shape)).reshape(shape)
  found = groups.as_matrices(x, axes)
  assert found.shape == expected
  np.testing.assert_array_equal(found.ravel(), x.ravel())


@pytest.mark.parametrize("ndim", [3, 5])
def test_axes_that_do_not_fit(ndim):
  with pytest.raises(ValueError, match=r"axes 'L\|D\|NH' do not fit .* shape"):
    groups.as_matrices(np.zeros((2,) * ndim), "L|D|NH")
