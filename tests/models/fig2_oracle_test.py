# SPDX-License-Identifier: Apache-2.0
"""AttnRes against the paper: Fig. 2 and Eq. 1-4 of arXiv:2603.15031."""

import jax
import pytest

from attnres_jax import config as config_lib
from attnres_jax.models import residuals
from tests import tiers
from tests.models import trunks

FORMS = ("two_phase", "one_softmax")


pytestmark = pytest.mark.usefixtures("float64")


def _of(listing, **fields):
  """The definition that a listing is, of u_l = w_l * g_l."""
  return lambda sublayers, p, embedding: listing(
    sublayers, p.queries.query * p.queries.gain, embedding, **fields
  )


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
  fields = dict(block_size=size)
  definition = _of(listing, **fields)
  trunks.check("block_attnres", definition, num_sublayers, form=form, **fields)


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
  trunks.check("full_attnres", _of(trunks.full_attnres), 7, **fields)


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
  definition = _of(trunks.full_attnres)
  if name == "block_attnres":
    definition = _of(trunks.fig2_per_sublayer, **fields)
  trunks.check_gradients(name, definition, num_sublayers, form=form, **fields)
