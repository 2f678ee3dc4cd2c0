# SPDX-License-Identifier: Apache-2.0
"""The options of depth reads against loops over heads and sources."""

import numpy as np
import pytest

from attnres_jax import config as config_lib
from attnres_jax.models.residuals import base
from tests import compare
from tests import tiers
from tests import tiny_network
from tests.models import reference
from tests.models import trunks

pytestmark = pytest.mark.usefixtures("float64")

Read = config_lib.DepthReadConfig
FORMS = ("two_phase", "one_softmax")


def _scheme(name, form="one_softmax", spread=1.0, **options):
  return trunks.scheme(
    name, 3, form=form, schedule_size=2, scale=spread,
    block_size=2 if name == "block_attnres" else 0, read=Read(**options),
  )  # fmt: skip


CASES = [
  ("block_attnres", {}),
  ("full_attnres", {}),
  ("block_attnres", dict(heads=2, null="learned", value_query=True)),
  ("full_attnres", dict(heads=3, null="zero", logit_scale=0.5)),
  ("block_attnres", dict(rank=2, null="learned", logit_scale=2.0)),
  ("full_attnres", dict(rank=4, value_query=True)),
  ("block_attnres", dict(query="input", heads=2, key_norm=False, window=1)),
  ("block_attnres", dict(query="static", null="zero", window=1)),
  ("full_attnres", dict(query="static", score="sigmoid", logit_scale=0.5)),
  ("full_attnres", dict(score="sigmoid", heads=3, value_query=True, window=2)),
  ("block_attnres", dict(score="sigmoid")),
  ("full_attnres", dict(key_norm=False)),
  ("block_attnres", dict(scale="sum", heads=2, value_query=True)),
  ("full_attnres", dict(scale="sum")),
  ("full_attnres", dict(scale="sum", window=1)),
]


@pytest.mark.parametrize("name,options", CASES, ids=str)
def test_reads_and_weights_are_the_definition(name, options):
  values, with_query = trunks.outputs(3), []
  forms = FORMS if Read(**options).batched else FORMS[1:]
  modules = [_scheme(name, form, **options) for form in forms]
  assert [m.two_phase for m in modules] == [
    form == "two_phase" for form in forms
  ]
  weights = modules[-1].depth_weights(values)
  labels = modules[-1].source_labels()
  size = 2 if name == "block_attnres" else 1
  sources = [reference.sources(values[: l + 1], size) for l in range(4)]
  answer = [trunks.read_by_loops(modules[0], sources[l], l) for l in range(4)]
  for module in modules:
    for l, h in enumerate(trunks.reads(module, values)):
      np.testing.assert_allclose(base.query_input(h), answer[l][0], atol=1e-12)
      if 0 < l < 3:
        assert isinstance(h, base.QKV) == module.options.value_query
      if isinstance(h, base.QKV) and l % 2 == 0:
        other, _ = trunks.read_by_loops(module, sources[l], l, value=True)
        np.testing.assert_allclose(h.value, other, atol=1e-12)
        with_query.append(l)
  assert bool(with_query) == modules[0].options.value_query
  for l, weight in enumerate(weights):
    mean = answer[l][1].mean(-1)[modules[0].options.null != "none" :]
    seen = np.asarray(weight)
    assert len(seen) == len(labels[l])
    hidden = len(labels[l]) - len(mean)
    np.testing.assert_allclose(seen[:1], mean[:1], atol=1e-12)
    np.testing.assert_allclose(seen[1 + hidden :], mean[1:], atol=1e-12)
    np.testing.assert_array_equal(seen[1 : 1 + hidden], 0)


@tiers.parametrize(
  "name,options", CASES[2:6:3], ids=str, first=["block_attnres"]
)
def test_gradients_of_two_phases_are_those_of_the_definition(name, options):
  layers, embedding = trunks.toy(3)
  results = []
  for form in FORMS:
    module = _scheme(name, form, **options)
    results.append(trunks.value_and_grad(layers, module, embedding))
  compare.trees(*results, 1e-11)


def test_queries_and_null_sources_start_at_zero():
  options = dict(value_query=True, null="learned")
  for init, low, high in ((0.0, 0.0, 0.0), (0.02, 0.017, 0.023)):
    read = Read(query_init=init, **options)
    queries = tiny_network.model(width=64, read=read).residual.queries
    np.testing.assert_array_equal(queries.gain[...], 1)
    np.testing.assert_array_equal(queries.null[...], 0)
    for query in (queries.query, queries.value_query):
      assert low <= np.std(query[...]) <= high
