# SPDX-License-Identifier: Apache-2.0
"""AttnRes against the paper: Fig. 2 and Eq. 1-4 of arXiv:2603.15031."""

import functools

import jax
import pytest

from attnres_jax import config as config_lib
from attnres_jax.models import residuals
from tests import compare
from tests import tiers
from tests.models import trunks

FORMS = ("two_phase", "one_softmax")


pytestmark = pytest.mark.usefixtures("float64")


_run = jax.jit(trunks.run)


def _check(name, num_sublayers, listing, **fields):
  """h_out against what `listing` makes of sublayers, u and the embedding."""
  layers, embedding = trunks.toy(num_sublayers)
  module = trunks.scheme(name, num_sublayers, **fields)
  sublayers = trunks.functions(layers, num_sublayers)
  expected = listing(sublayers, trunks.folded(module), embedding)
  compare.trees(_run(layers, module, embedding), expected, 1e-11)


@pytest.mark.parametrize("form", FORMS)
@tiers.parametrize(
  "listing,num_sublayers,size",
  [
    *((trunks.fig2, *shape) for shape in [(4, 2), (6, 4)]),
    # A boundary at any sublayer.
    *((trunks.fig2_per_sublayer, *shape) for shape in [(7, 3), (1, 1), (3, 9)]),
  ],
  first=3,
)
def test_outputs(listing, num_sublayers, size, form):
  blocks = functools.partial(listing, block_size=size)
  _check("block_attnres", num_sublayers, blocks, block_size=size, form=form)


def test_kimi_k3_has_these_sources():
  """The schedule of its released code, whose blocks have 12 layers of two."""
  model = config_lib.load_config("configs/kimi_k3_attnres.py").model
  scheme = residuals.abstract_residual(model)
  counts = [len(names) for names in scheme.source_labels()]
  # Attention reads before the boundary; the embedding is the first partial.
  assert counts[:186:2] == [1] + [-(-t // 12) + 1 for t in range(1, 93)]
  assert counts[1:186:2] == [t // 12 + 2 for t in range(93)]
  assert counts[186:] == [9]
  assert scheme.segments()[-1] == (168, 186)
  count = sum(leaf.size for leaf in jax.tree.leaves(scheme))
  assert count == 2 * 7168 * (2 * 93 + 1) == 2_680_832


@tiers.parametrize(
  "fields",
  [dict(form="one_softmax"), *(dict(schedule_size=n) for n in (1, 3, 9))],
  first=2,
)
def test_full_attnres_is_equations_1_to_4(fields):
  _check("full_attnres", 7, trunks.full_attnres, **fields)


@pytest.mark.parametrize("form", FORMS)
@tiers.parametrize(
  "name,num_sublayers,fields",
  [
    ("block_attnres", 4, dict(block_size=2)),
    ("block_attnres", 5, dict(block_size=3)),
    ("full_attnres", 5, dict(schedule_size=3)),
  ],
  first=["block_attnres"],
)
def test_gradients(name, num_sublayers, fields, form):
  def definition(module, sublayers, embedding):
    assert module.two_phase == (form == "two_phase")
    u = trunks.folded(module)
    if name == "full_attnres":
      return trunks.full_attnres(sublayers, u, embedding)
    return trunks.fig2_per_sublayer(sublayers, u, embedding, **fields)

  trunks.check_gradients(name, definition, num_sublayers, form=form, **fields)
