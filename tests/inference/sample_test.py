# SPDX-License-Identifier: Apache-2.0
"""Sampling against a loop that calls the network on growing prefixes."""

import importlib

import jax
import numpy as np
import pytest

from attnres_jax import config as config_lib
from attnres_jax import data
from attnres_jax.inference import sample
from tests import tiny_network

WINDOW = 6


@pytest.fixture(scope="module")
def model():
  return tiny_network.model(vocab_size=257, init_std=0.5)


_logits = jax.jit(lambda model, tokens_BT: model(tokens_BT))


def test_greedy_is_the_argmax_of_every_prefix(model):
  prompt = [5, 9, 2, 6]
  ids, expected = list(prompt), []
  for _ in range(8):
    visible = np.asarray([ids[-WINDOW:]], np.int32)
    expected.append(int(np.argmax(_logits(model, visible)[0, -1])))
    ids.append(expected[-1])
  found = sample.sample(
    model, np.asarray(prompt), num_tokens=8, window=WINDOW, temperature=0.0
  )
  assert found.tolist() == expected
  assert len(set(expected)) > 1


def test_frequencies_follow_the_tempered_distribution(model):
  prompt = np.asarray([3, 1, 4, 1], np.int32)
  logits_V = np.asarray(_logits(model, prompt[None])[0, -1], np.float64) / 0.5
  p_V = np.exp(logits_V - logits_V.max())
  p_V /= p_V.sum()
  draws = [
    sample.sample(
      model, prompt, num_tokens=1, window=WINDOW, temperature=0.5, seed=seed
    )[0]
    for seed in range(600)
  ]
  likeliest = int(np.argmax(p_V))
  p = p_V[likeliest]
  assert 0.05 < p < 0.95
  deviation = np.sqrt(p * (1 - p) / 600)
  assert abs(np.mean(np.equal(draws, likeliest)) - p) < 4 * deviation


def test_seeds_and_long_prompts(model):
  kwargs = dict(num_tokens=12, window=WINDOW, temperature=1.0)
  prompt = np.arange(20)
  first = sample.sample(model, prompt, seed=1, **kwargs)
  again = sample.sample(model, prompt[-WINDOW:], seed=1, **kwargs)
  other = sample.sample(model, prompt, seed=2, **kwargs)
  assert first.tolist() == again.tolist() != other.tolist()
  with pytest.raises(ValueError, match="at least one token"):
    sample.sample(model, np.zeros(0), **kwargs)


@pytest.mark.parametrize(
  "bad",
  [
    dict(temperature=-1.0),
    dict(temperature=float("nan")),
    dict(temperature=float("inf")),
    dict(num_tokens=0),
    dict(num_tokens=10**9),
    dict(seed=2**32),
    dict(seed=-1),
  ],
)
def test_bad_arguments_are_named(model, bad):
  kwargs = dict(num_tokens=3, window=WINDOW, temperature=1.0) | bad
  ((name, value),) = bad.items()
  with pytest.raises(config_lib.ConfigError, match=f"^--{name}: got {value}"):
    sample.sample(model, np.arange(3), **kwargs)


def test_text_opens_a_document(model):
  tokenizer = data.make_tokenizer(config_lib.DataConfig())
  text = sample.sample_text(
    model, tokenizer, "ab", num_tokens=4, window=WINDOW, temperature=0.0
  )
  ids = sample.sample(
    model,
    np.asarray([tokenizer.separator_id, 97, 98]),
    num_tokens=4,
    window=WINDOW,
    temperature=0.0,
  )
  assert text == tokenizer.decode(ids)


def test_imports_beside_the_other_commands():
  # Both are commands with a --workdir, and tests and notebooks import both.
  importlib.import_module("attnres_jax.main")
  importlib.reload(sample)
