# SPDX-License-Identifier: Apache-2.0
"""Draws against their definitions in NumPy."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnres_jax import config as config_lib
from attnres_jax.inference import draw

VOCAB, DRAWS = 12, 4000
LOGITS_V = np.random.default_rng(0).normal(scale=1.5, size=VOCAB)
LOGITS_V = LOGITS_V.astype(np.float32)

_draw = jax.jit(draw.draw)


def _rows(batch, **settings):
  rows = draw.Rows.empty(batch)
  values = {
    name: jnp.full(batch, value, getattr(rows, name).dtype)
    for name, value in settings.items()
  }
  return rows._replace(**values)


def _p(settings):
  """The probability of each token, one setting after the other."""
  logits_V = LOGITS_V.astype(np.float64) / settings.temperature
  order = sorted(range(VOCAB), key=lambda i: -logits_V[i])
  top = order[: settings.top_k or VOCAB]
  p = {i: math.exp(logits_V[i]) for i in top}
  p = {i: value / sum(p.values()) for i, value in p.items()}
  total, nucleus = 0.0, []
  for i in top:
    if total < settings.top_p or not nucleus:
      nucleus.append(i)
    total += p[i]
  p_V = np.zeros(VOCAB)
  for i in nucleus:
    p_V[i] = p[i] / sum(p[j] for j in nucleus)
  return p_V


@pytest.mark.parametrize(
  "settings",
  [
    dict(),
    dict(temperature=0.5),
    dict(top_k=4),
    dict(top_p=0.6),
    dict(top_p=0.0),
    dict(temperature=1.3, top_k=8, top_p=0.9),
  ],
  ids=lambda settings: "-".join(settings) or "plain",
)
def test_frequencies(settings):
  settings = draw.Settings(**settings)
  logits_BV = jnp.broadcast_to(LOGITS_V, (DRAWS, VOCAB))
  rows = _rows(DRAWS, **dataclasses.asdict(settings))
  drawn = _draw(logits_BV, rows, jnp.arange(DRAWS))
  found_V = np.bincount(drawn.token_B, minlength=VOCAB) / DRAWS
  p_V = _p(settings)
  assert np.all(found_V[p_V == 0] == 0)
  deviation_V = np.sqrt(p_V * (1 - p_V) / DRAWS)
  assert np.all(np.abs(found_V - p_V) <= 4.5 * deviation_V)
  if settings != draw.Settings():
    assert np.abs(p_V - _p(draw.Settings())).max() > 0.02


def test_logprobs_are_those_of_the_network():
  logits_BV = jnp.asarray(LOGITS_V)[None]
  logprob_V = LOGITS_V - np.log(np.exp(LOGITS_V).sum())
  rows = _rows(1, temperature=0.3)
  drawn = _draw(logits_BV, rows, jnp.zeros(1, jnp.int32))
  (token,) = drawn.token_B
  np.testing.assert_allclose(drawn.logprob_B, logprob_V[token], rtol=1e-5)


def test_a_draw_depends_on_seed_and_position_only():
  """Whatever else is in the batch, greedy rows and rows with cuts."""
  logits_BV = jnp.broadcast_to(LOGITS_V, (5, VOCAB))
  rows = _rows(5)._replace(
    seed=jnp.asarray([7, 7, 8, 7, 7], jnp.uint32),
    temperature=jnp.asarray([1.0, 1.0, 1.0, 0.0, 1.0]),
    top_k=jnp.asarray([0, 0, 0, 0, VOCAB], jnp.int32),
  )

  def tokens(rows, logits_BV, position_B):
    return [
      _draw(logits_BV, rows, position_B + i).token_B.tolist() for i in range(12)
    ]

  drawn = np.array(tokens(rows, logits_BV, jnp.asarray([3, 3, 3, 3, 3])))
  single = np.array(tokens(_rows(1, seed=7), logits_BV[:1], jnp.asarray([3])))
  for row in (0, 1, 4):
    np.testing.assert_array_equal(drawn[:, row], single[:, 0])
  assert np.any(drawn[:, 2] != single[:, 0])
  assert set(drawn[:, 3]) == {int(np.argmax(LOGITS_V))}
  assert len(set(single[:, 0])) > 2


def test_cuts_of_a_neighbour_leave_unlikely_tokens():
  """Though the rounded probability of those before them is one."""
  logits_BV = jnp.asarray([[0.0, -30.0], [0.0, -30.0]])
  rows = _rows(2)._replace(top_p=jnp.asarray([1.0, 0.5]))
  cut = jax.jit(draw._cut)(logits_BV, rows)
  np.testing.assert_array_equal(cut, [[0.0, -30.0], [0.0, -np.inf]])


@pytest.mark.parametrize(
  "bad",
  [
    dict(temperature=-1.0),
    dict(temperature=float("nan")),
    dict(temperature=float("inf")),
    dict(top_k=-1),
    dict(top_p=1.5),
    dict(seed=2**32),
    dict(seed=-1),
  ],
)
def test_bad_settings_are_named(bad):
  ((name, value),) = bad.items()
  with pytest.raises(config_lib.ConfigError, match=f"^--{name}: got {value}"):
    draw.Settings(**bad)
