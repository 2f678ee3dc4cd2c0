# SPDX-License-Identifier: Apache-2.0
"""Schedules by numbers, the decay table, and AdamW as written in its paper."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from attnres_jax import config as config_lib
from attnres_jax import models
from attnres_jax import optimizer


def _config(**fields):
  return config_lib.OptimConfig(**fields)


# Step s is the s+1-th update. Peak 2, final 0.2.
@pytest.mark.parametrize(
  "schedule,warmup,expected",
  [
    ("constant", 10, {0: 0.2, 4: 1.0, 9: 2.0, 10: 2.0, 99: 2.0}),
    ("constant", 0, {0: 2.0, 1: 2.0, 99: 2.0}),
    ("cosine", 10, {0: 0.2, 4: 1.0, 9: 2.0, 54: 1.1, 99: 0.2, 150: 0.2}),
    (
      "cosine",
      0,
      {0: 1.1 + 0.9 * math.cos(math.pi / 100), 49: 1.1, 99: 0.2},
    ),
    (
      "cosine",
      10,
      {
        10: 1.1 + 0.9 * math.cos(math.pi * 1 / 90),
        39: 1.1 + 0.9 * math.cos(math.pi * 30 / 90),
        98: 1.1 + 0.9 * math.cos(math.pi * 89 / 90),
      },
    ),
  ],
)
def test_schedule_at_its_joins(schedule, warmup, expected):
  config = _config(
    schedule=schedule,
    peak_lr=2.0,
    warmup_steps=warmup,
    final_lr_fraction=0.1,
  )
  rate = optimizer.make_schedule(config, 100)
  for step, value in expected.items():
    np.testing.assert_allclose(rate(step), value, rtol=1e-6)
    np.testing.assert_allclose(rate(jnp.int32(step)), value, rtol=1e-6)


def test_warmup_longer_than_the_run():
  message = r"config\.optim\.warmup_steps: got 7, .*fewer than train\.steps=7"
  with pytest.raises(config_lib.ConfigError, match=message):
    optimizer.make_schedule(_config(warmup_steps=7), 7)


@pytest.mark.parametrize("field", ["name", "schedule"])
def test_unknown_names(field):
  message = rf"config\.optim\.{field}: got 'adamv', expected one of"
  with pytest.raises(config_lib.ConfigError, match=message):
    config = _config(**{field: "adamv"}, warmup_steps=1)
    optimizer.make_schedule(config, 7)
    optimizer.make_optimizer(config)


def _model(name, tie=False):
  residual = config_lib.ResidualConfig(name=name, block_size=2)
  return models.build_model(
    config_lib.ModelConfig(
      vocab_size=7,
      width=8,
      num_layers=2,
      num_heads=2,
      mlp_width=8,
      tie_embeddings=tie,
      residual=residual,
    )
  )


@pytest.mark.parametrize("name", ["prenorm", "full_attnres", "block_attnres"])
def test_decay_table(name):
  mask = jax.tree_util.tree_flatten_with_path(optimizer.decays(_model(name)))[0]
  table = {
    ".".join(str(k.name) for k in path if hasattr(k, "name")): decays
    for path, decays in mask
  }
  expected = {"embedding.table": True, "embedding.head": True}
  expected |= {f"sublayers.mlp.core.{n}": True for n in ("gate", "up", "down")}
  names = ("query", "key", "value", "output")
  expected |= {f"sublayers.attention.core.{n}": True for n in names}
  norms = ("sublayers.attention.norm", "sublayers.mlp.norm", "final_norm")
  expected |= {f"{n}.gain": True for n in norms}
  if name != "prenorm":
    expected |= {f"residual.queries.{n}": False for n in ("query", "gain")}
  assert {k.removesuffix(".value"): v for k, v in table.items()} == expected


def test_decay_alone():
  """Without a gradient only decay is left, and only where it applies."""
  model = _model("block_attnres")
  transform = optimizer.make_optimizer(_config(weight_decay=0.25))
  zeros = jax.tree.map(jnp.zeros_like, model)
  updates, _ = transform.update(zeros, transform.init(model), model)
  for found, params in (
    (updates.sublayers, model.sublayers),
    (updates.embedding, model.embedding),
    (updates.final_norm, model.final_norm),
  ):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(params)):
      np.testing.assert_allclose(a, 0.25 * b, rtol=1e-6)
  for leaf in jax.tree.leaves(updates.residual):
    np.testing.assert_array_equal(leaf, 0.0)


@pytest.mark.parametrize("clip_norm", [0.0, 0.5, 100.0])
def test_clipping_then_adamw(clip_norm):
  b1, b2, eps, decay = 0.8, 0.9, 1e-3, 0.01
  config = _config(
    b1=b1, b2=b2, eps=eps, weight_decay=decay, clip_norm=clip_norm
  )
  rng = np.random.default_rng(0)
  params = {"w": rng.standard_normal((3, 2)), "v": rng.standard_normal(4)}
  transform = optimizer.make_optimizer(config)
  state = transform.init(jax.tree.map(jnp.float32, params))
  m = {k: 0.0 for k in params}
  v = {k: 0.0 for k in params}
  for t in range(1, 4):
    gradient = {k: rng.standard_normal(p.shape) for k, p in params.items()}
    updates, state = transform.update(
      jax.tree.map(jnp.float32, gradient),
      state,
      jax.tree.map(jnp.float32, params),
    )
    norm = np.sqrt(sum(np.sum(g**2) for g in gradient.values()))
    assert 0.5 < norm < 100
    factor = min(1.0, clip_norm / norm) if clip_norm else 1.0
    for k, g in gradient.items():
      g = factor * g
      m[k] = b1 * m[k] + (1 - b1) * g
      v[k] = b2 * v[k] + (1 - b2) * g**2
      step = m[k] / (1 - b1**t) / (np.sqrt(v[k] / (1 - b2**t)) + eps)
      np.testing.assert_allclose(
        updates[k], step + decay * params[k], rtol=1e-4, atol=1e-6
      )


def test_state_is_an_optax_state():
  model = _model("prenorm")
  state = optimizer.make_optimizer(_config()).init(model)
  (moments,) = (
    s
    for s in jax.tree.leaves(
      state, is_leaf=lambda s: isinstance(s, optax.ScaleByAdamState)
    )
    if isinstance(s, optax.ScaleByAdamState)
  )
  assert jax.tree.structure(moments.mu) == jax.tree.structure(model)
