# SPDX-License-Identifier: Apache-2.0
"""Layers in arrays of their own against layers in stacks."""

import jax
import numpy as np
import pytest

from attnres_jax.inference import draw
from attnres_jax.inference import engine as engine_lib
from attnres_jax.inference import programs
from tests import tiny_network
from tests.inference import texts


def _generate(engine, prompts):
  settings = draw.Settings(temperature=0.0)
  requests = [engine_lib.Request(prompt, 4, settings) for prompt in prompts]
  drawn = [[] for _ in prompts]
  for token in texts.run(engine, requests):
    drawn[token.request].append((token.id, token.logprob))
  return drawn


ALL_KINDS = tiny_network.KINDS | dict(
  mixers=("kda", "mla", "attention"), num_layers=6
)


@pytest.mark.more
@pytest.mark.parametrize(
  "fields",
  [
    dict(mixers=("attention",)),
    pytest.param(ALL_KINDS, marks=pytest.mark.slow),
  ],
)
def test_same_tokens(fields):
  """In chunks, in reused slots."""
  model = tiny_network.model("block_attnres", **fields)
  rng = np.random.default_rng(0)
  prompts = [rng.integers(0, 16, n).tolist() for n in (21, 3)]
  prompts += [[*prompts[0][:17], 1]]
  results = {}
  for separate in (False, True):
    engine = engine_lib.Engine(
      model, slots=2, length=32, chunk=16, separate=separate
    )
    arrays = len(jax.tree.leaves(engine._model.sublayers))
    results[separate] = arrays, _generate(engine, prompts)
  (few, expected), (many, actual) = results[False], results[True]
  assert many > few
  for a, b in zip(actual, expected, strict=True):
    assert [id for id, _ in a] == [id for id, _ in b]
    np.testing.assert_allclose(a, b, rtol=0, atol=1e-5)


@pytest.mark.more
def test_nothing_as_large_as_the_cache_is_copied():
  """Where a stack is: blocks of two sublayers leave no scan."""
  model = tiny_network.model("block_attnres", mixers=("attention",))
  length, temporary = 2**14, {}
  for separate in (False, True):
    engine = engine_lib.Engine(model, slots=2, length=length, separate=separate)
    state = engine._state
    step = programs.next_token.lower(
      engine._model, state, np.ones(2, bool), context=length, mesh=None,
    )  # fmt: skip
    memory = step.compile().memory_analysis()
    temporary[separate] = memory.temp_size_in_bytes
    cache = sum(a.nbytes for a in jax.tree.leaves(state.cache))
  assert temporary[False] > cache
  assert temporary[True] < cache / 2
