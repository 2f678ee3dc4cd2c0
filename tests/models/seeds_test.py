# SPDX-License-Identifier: Apache-2.0
"""With one seed, networks share the parameters that are not their scheme's.

Comparisons of schemes in pairs of runs rely on it.
"""

import dataclasses

import jax
import numpy as np
import pytest

from attnres_jax import config as config_lib
from attnres_jax import models

MODEL = config_lib.ModelConfig(
  vocab_size=16, width=16, num_layers=2, num_heads=2, mlp_width=16,
  residual=config_lib.ResidualConfig(name="prenorm", block_size=2),
)  # fmt: skip


def _shared(seed, name, **read):
  residual = dataclasses.replace(
    MODEL.residual, name=name, read=config_lib.DepthReadConfig(**read)
  )
  model = models.build_model(
    dataclasses.replace(MODEL, residual=residual), seed
  )
  return {
    jax.tree_util.keystr(path): np.asarray(leaf)
    for part in (model.embedding, model.sublayers)
    for path, leaf in jax.tree_util.tree_leaves_with_path(part)
  }


@pytest.mark.parametrize(
  "scheme",
  [
    dict(name="block_attnres"),
    dict(name="full_attnres", query="input", query_init=0.1),
    dict(name="laurel_lr"),
    dict(name="mhc"),
    dict(name="mudd"),
  ],
  ids=lambda scheme: scheme["name"],
)
def test_all_schemes_start_from_the_same_weights(scheme):
  base, own = _shared(3, "prenorm"), _shared(3, **scheme)
  assert base.keys() == own.keys()
  for name, value in base.items():
    np.testing.assert_array_equal(own[name], value, name)


def test_another_seed_gives_other_weights():
  base, other = _shared(3, "prenorm"), _shared(4, "prenorm")
  same = [name for name in base if np.array_equal(base[name], other[name])]
  assert all("gain" in name for name in same) and len(same) < len(base)
