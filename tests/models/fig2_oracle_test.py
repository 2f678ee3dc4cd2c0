# SPDX-License-Identifier: Apache-2.0
"""Block AttnRes against the paper's own listing (arXiv:2603.15031, Fig. 2)."""

import jax
import pytest

from attnres_jax import config as config_lib
from attnres_jax.models import residuals
from tests import compare
from tests.models import trunks

FORMS = ("two_phase", "one_softmax")


pytestmark = pytest.mark.usefixtures("float64")


_run = jax.jit(trunks.run)


def _network(num_sublayers, **fields):
  """Sublayers, a scheme and an embedding: the arguments of `_run`."""
  layers, embedding = trunks.toy(num_sublayers)
  module = trunks.scheme("block_attnres", num_sublayers, **fields)
  return layers, module, embedding


def _oracle(listing, block_size):
  """The listing as a function of what `_run` takes."""

  def run(layers, module, embedding):
    functions = trunks.functions(layers, module.num_sublayers)
    return listing(functions, trunks.folded(module), embedding, block_size)

  return run


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
  "listing,num_sublayers,block_size",
  [
    *((trunks.fig2, *shape) for shape in [(4, 2), (6, 4)]),
    # A boundary at any sublayer.
    *((trunks.fig2_per_sublayer, *shape) for shape in [(7, 3), (1, 1), (3, 9)]),
  ],
)
def test_outputs(listing, num_sublayers, block_size, form):
  network = _network(num_sublayers, block_size=block_size, form=form)
  compare.trees(_run(*network), _oracle(listing, block_size)(*network), 1e-11)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("num_sublayers,block_size", [(4, 2), (5, 3)])
def test_gradients(num_sublayers, block_size, form):
  network = _network(num_sublayers, block_size=block_size, form=form)
  output = _oracle(trunks.fig2_per_sublayer, block_size)
  oracle = lambda *network: trunks.score(output(*network))
  expected = oracle(*network), trunks.gradient(oracle, *network)
  found = trunks.value_and_grad(*network)
  assert jax.tree.structure(found) == jax.tree.structure(expected)
  compare.trees(found, expected, 1e-10)


def test_kimi_k3_has_these_sources():
  """The schedule of its released code, whose blocks have 12 layers of two."""
  model = config_lib.load_config("configs/kimi_k3_attnres.py").model
  scheme = residuals.abstract_residual(model)
  found = [len(names) for names in scheme.source_labels()]
  # Attention reads before the boundary; the embedding is the first partial.
  assert found[:186:2] == [1] + [-(-t // 12) + 1 for t in range(1, 93)]
  assert found[1:186:2] == [t // 12 + 2 for t in range(93)]
  assert found[186:] == [9]
  assert scheme.segments()[-1] == (168, 186)
  count = sum(leaf.size for leaf in jax.tree.leaves(scheme))
  assert count == 2 * 7168 * (2 * 93 + 1) == 2_680_832


def test_full_attnres_is_equations_1_to_4():
  layers, embedding = trunks.toy(7)
  for fields in (dict(form="one_softmax"), dict(schedule_size=3)):
    module = trunks.scheme("full_attnres", 7, **fields)
    expected = trunks.full_attnres(
      trunks.functions(layers, 7), trunks.folded(module), embedding
    )
    compare.trees(_run(layers, module, embedding), expected, 1e-11)
