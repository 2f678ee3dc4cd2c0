# SPDX-License-Identifier: Apache-2.0
"""Losses of rounded networks, and what the README says of planted costs."""

import jax
import jax.numpy as jnp
import numpy as np

from attnres_jax.models import rounded
from experiments.quantisation import config
from experiments.quantisation import losses
from experiments.quantisation import report
from tests import tiny_network


def test_the_loss_of_a_rounded_network():
  """Token by token as at once, with the weights that an engine would have."""
  model = tiny_network.model(mixers=("attention",), tie_embeddings=False)
  tokens_BT = np.random.default_rng(0).integers(0, 16, (3, 9), dtype=np.int32)
  dense = losses._as_rounded(model, 8)

  @jax.jit
  def at_once(model):
    log_p_BTV = jax.nn.log_softmax(model(tokens_BT[:, :-1]))
    picked = jnp.take_along_axis(log_p_BTV, tokens_BT[:, 1:, None], axis=-1)
    return -jnp.mean(picked, axis=(1, 2))

  expected = at_once(rounded.round_weights(model))
  found = losses._of_rows(dense, tokens_BT, cache="model")
  np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)
  assert np.abs(at_once(model) - expected).max() > 1e-4


def test_planted_costs():
  """Of seeds that all variants have; Full costs a tenth of a nat more."""
  rows = [
    dict(
      variant=variant, seed=str(seed), dtype=dtype, bits=bits, cache=cache,
      cost=str(0.001 * seed + 0.1 * (variant == "full")), error="0.001",
      hardware="a machine", python="3", jax="1", commit="c",
    )
    for variant in config.VARIANTS
    for seed in ((0, 1, 2) if variant == "full" else (0, 1))
    for dtype, bits, cache in report.FORMS
  ]  # fmt: skip
  lines = report.table(rows).splitlines()
  assert "+0.50 (0 to +1.00)" in lines[2]
  weights = [line for line in lines if line.startswith("| weights int8")]
  assert weights[1] == "| weights int8 | 0 ± 0.00 | +100.00 ± 0.00 | 0 ± 0.00 |"
