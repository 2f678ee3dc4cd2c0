# SPDX-License-Identifier: Apache-2.0
"""Runs of sublayers cover the depth in order, and find what repeats."""

import itertools

from flax import nnx
import jax.numpy as jnp
import pytest

from attnres_jax.models import layer_stacks
from tests import compare
from tests import tiny_network


def _spelled(runs):
  return "".join("".join(run.kinds) * run.repeats for run in runs)


@pytest.mark.parametrize(
  "kinds,expected",
  [
    ("", []),
    ("a", [("a", 1)]),
    ("ab", [("a", 1), ("b", 1)]),
    ("aa", [("a", 2)]),
    ("ababab", [("ab", 3)]),
    ("aaaaaa", [("a", 6)]),
    ("ababa", [("ab", 2), ("a", 1)]),
    ("babab", [("ba", 2), ("b", 1)]),
    # The whole stacks twice rather than its first pair twice.
    ("ababcdababcd", [("ababcd", 2)]),
    ("xababcb", [("x", 1), ("ab", 2), ("c", 1), ("b", 1)]),
  ],
)
def test_examples(kinds, expected):
  runs = layer_stacks.find_runs(kinds)
  assert [("".join(run.kinds), run.repeats) for run in runs] == expected


def test_runs_cover_every_sequence():
  for length in range(8):
    for kinds in itertools.product("abc", repeat=length):
      for runs in (layer_stacks.find_runs(kinds), layer_stacks.no_runs(kinds)):
        assert _spelled(runs) == "".join(kinds)
        assert sum(run.length for run in runs) == length
        for kind in "abc":
          count = sum(run.count(kind) for run in runs)
          assert count == kinds.count(kind)


def test_the_48b_pattern_compiles_few_sublayers():
  kinds = tiny_network.full_size().sublayer_kinds
  assert len(kinds) == 54
  runs = layer_stacks.find_runs(kinds)
  assert [(len(run.kinds), run.repeats) for run in runs] == [
    (1, 1), (1, 1), (8, 6), (1, 1), (1, 1), (1, 1), (1, 1),
  ]  # fmt: skip
  blocks = [layer_stacks.find_runs(kinds[i : i + 6]) for i in range(0, 54, 6)]
  bodies = sum(len(run.kinds) for runs in blocks for run in runs)
  assert bodies < 54


def test_separate_layers_are_split_like_their_stack():
  arrays = jnp.arange(12.0).reshape(6, 2), jnp.arange(6.0)
  stack = nnx.Dict(w=nnx.Param(arrays[0]), b=nnx.Param(arrays[1]))
  layers = layer_stacks.separated({"a": stack})["a"]
  assert layer_stacks.first(layers)["w"].shape == (1, 2)
  sizes = [1, 3, 0, 2]
  parts = layer_stacks.split(layers, sizes)
  assert list(map(len, parts)) == sizes
  expected = layer_stacks.split(stack, sizes)
  for i in (0, 1, 3):
    part = layer_stacks.joined({"a": parts[i]})["a"]
    compare.trees(part, expected[i], 0)
  compare.trees(layer_stacks.joined({"a": layers})["a"], stack, 0)
