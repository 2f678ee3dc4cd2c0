# SPDX-License-Identifier: Apache-2.0
"""Runs the recipe of docs/architecture.md; extension_test runs the others."""

import re

import jax.numpy as jnp
import numpy as np

from attnres_jax.models.residuals import definition
from tests import tiers
from tests import tiny_network
from tests import tiny_run
from tests.models import reference


def run(page, heading, **names):
  """Executes the Python blocks of a section in turn; returns their names."""
  text = (tiny_run.ROOT / "docs" / page).read_text()
  section = text.partition(f"## {heading}\n")[2]
  section = re.split(r"^##", section, maxsplit=1, flags=re.M)[0]
  blocks = re.findall(r"^```python\n(.*?)^```$", section, re.S | re.M)
  assert blocks, heading
  for block in blocks:
    exec(block, names)
  return names


@tiers.parametrize("name", ["block_attnres", "full_attnres"])
def test_one_function_changes_the_weighting(monkeypatch, name):
  network = tiny_network.model(name, form="one_softmax")
  tokens_BT = np.arange(6, dtype=np.int32)[None]
  before_BTD = network.hidden(tokens_BT)
  scheme = network.residual
  # At zero queries, every weighting that sums to one is a mean.
  scheme.queries.query[...] += 0.5
  softmax_BTD = network.hidden(tokens_BT)
  monkeypatch.setattr(definition, "weigh", definition.weigh)
  run("architecture.md", "Change the weighting")
  values = network.trace(tokens_BT).values
  weights = scheme.depth_weights(values)
  for l, weights_MBT in enumerate(weights):
    np.testing.assert_allclose(jnp.sum(weights_MBT, axis=0), 1, rtol=1e-5)
    sources = reference.sources(values[: l + 1], scheme.block_size)
    mixture_BTD = sum(
      weight_BT[..., None] * source_BTD
      for weight_BT, source_BTD in zip(weights_MBT, sources, strict=True)
    )
    np.testing.assert_allclose(
      network.trace(tokens_BT).reads[l], mixture_BTD, atol=1e-5
    )
  assert np.any(np.abs(network.hidden(tokens_BT) - softmax_BTD) > 1e-4)
  scheme.queries.query[...] *= 0
  np.testing.assert_allclose(network.hidden(tokens_BT), before_BTD, atol=1e-5)
