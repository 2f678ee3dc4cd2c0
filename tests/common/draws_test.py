# SPDX-License-Identifier: Apache-2.0
"""A seed gives the same weights and samples in any environment."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnres_jax import models
from attnres_jax.common import draws
from attnres_jax.inference import draw
from tests import compare
from tests import tiny_network


def test_a_key_is_the_one_of_jax():
  for seed in (0, 7, 2**32 - 1):
    mine, theirs = (
      jax.random.key_data(key)
      for key in (draws.key(seed), jax.random.key(np.uint32(seed)))
    )
    np.testing.assert_array_equal(mine, theirs)


def outcome():
  """A weight of each layer, and tokens drawn from equal logits."""
  jax.clear_caches()
  network = models.build_model(tiny_network.config("block_attnres"), seed=3)
  rows = draw.Rows.empty(4)._replace(seed=jnp.arange(4, dtype=jnp.uint32))
  drawn_B = jax.jit(draw._random)(jnp.zeros((4, 97)), rows, jnp.arange(4))
  return [*jax.tree.leaves(network), drawn_B]


@pytest.mark.parametrize(
  "setting",
  [
    lambda: jax.default_prng_impl("rbg"),
    lambda: jax.threefry_partitionable(False),
  ],
  ids=["generator", "partitionable"],
)
def test_seeds_do_not_depend_on_the_environment(setting):
  plain = outcome()
  with setting():
    assert (
      not np.array_equal(
        jax.random.normal(jax.random.key(0), (9,)),
        jax.random.normal(draws.key(0), (9,)),
      )
      or not jax.config.jax_threefry_partitionable
    )
    other = outcome()
  compare.trees(other, plain, 0)
