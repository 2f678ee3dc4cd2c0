# SPDX-License-Identifier: Apache-2.0
"""Layers in arrays of their own against layers in stacks."""

import jax
import numpy as np
import pytest

from attnres_jax.inference import engine as engine_lib
from attnres_jax.inference import prepared
from attnres_jax.inference import programs
from tests import tiny_network


@pytest.mark.more
def test_nothing_as_large_as_the_cache_is_copied(monkeypatch):
  """Where a stack is: blocks of two sublayers leave no scan."""
  model = tiny_network.model("block_attnres", mixers=("attention",))
  length, temporary = 2**14, {}
  for separate in (False, True):
    monkeypatch.setattr(prepared, "SEPARATE_ON", ("cpu",) * separate)
    engine = engine_lib.Engine(model, slots=2, length=length)
    state = engine._state
    step = programs.next_token.lower(
      engine._model, state, np.ones(2, bool), context=length, mesh=None,
    )  # fmt: skip
    memory = step.compile().memory_analysis()
    temporary[separate] = memory.temp_size_in_bytes
    cache = sum(a.nbytes for a in jax.tree.leaves(state.cache))
  assert temporary[False] > cache
  assert temporary[True] < cache / 2
