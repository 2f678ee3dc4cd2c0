# SPDX-License-Identifier: Apache-2.0
"""Constants, starts and norms of schemes with norms within the stream."""

import jax
import numpy as np
import pytest

from attnres_jax import config as config_lib
from attnres_jax.models import residuals
from attnres_jax.models import sublayer
from tests import tiny_network


@pytest.mark.parametrize(
  "blocks,alpha,beta",
  [(12, 2.2134, 0.3195), (24, 2.6321, 0.2686), (100, 3.7606, 0.1880)],
)
def test_constants(blocks, alpha, beta):
  deepnorm, keel = (
    residuals.abstract_residual(tiny_network.config(name, num_layers=blocks))
    for name in ("deepnorm", "keel")
  )
  assert round(deepnorm.alpha, 4) == alpha
  assert round(deepnorm.beta, 4) == beta
  assert keel.alpha == 2 * blocks


# Every kind of sublayer; a matrix or a part of one that DeepNorm scales.
KINDS = tiny_network.KINDS | dict(
  num_layers=3, mixers=("attention", "kda", "mla")
)
SCALED = {"value", "output", "gate", "up", "gate_and_up", "down"}


def _model(name):
  return tiny_network.model(name, **KINDS)


def test_deepnorm_scales_values_and_outputs():
  plain, deep = _model("postnorm"), _model("deepnorm")
  assert set(plain.config.sublayer_kinds) == set(sublayer.CORES)
  beta, met = deep.residual.beta, set()
  flat, _ = jax.tree_util.tree_flatten_with_path(plain.sublayers)
  for (path, a), b in zip(flat, jax.tree.leaves(deep.sublayers)):
    where = jax.tree_util.keystr(path, simple=True, separator="/")
    *_, name, _ = where.split("/")
    factor = np.full(a.shape[-1], beta if name in SCALED else 1.0, "float32")
    if name == "expand":
      factor[plain.config.mla.nope_width :] = beta
    met |= {name} & SCALED
    np.testing.assert_allclose(
      b, np.asarray(a) * factor, rtol=1e-6, err_msg=where
    )
  assert met == SCALED


def test_a_mixer_that_cannot_be_scaled_is_named(monkeypatch):
  class Bare(sublayer.CORES["attention"]):
    scale_values = property()

  monkeypatch.setitem(sublayer.CORES, "attention", Bare)
  with pytest.raises(
    config_lib.ConfigError,
    match=r"config\.model\.mixers: got 'attention', expected sublayers with",
  ):
    jax.eval_shape(lambda: _model("deepnorm"))


def test_only_hybridnorm_switches_norms_of_mixers_on():
  for name, count in (("postnorm", 0), ("hybridnorm", 3)):
    config = tiny_network.config(name, **KINDS)
    core = sublayer.abstract_core("attention", config)
    extra = len(jax.tree.leaves(core)) - 4
    assert extra == count
