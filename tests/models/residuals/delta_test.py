# SPDX-License-Identifier: Apache-2.0
"""Delta AttnRes and its conversion of PreNorm, against loops."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnres_jax import config as config_lib
from tests import tiny_network
from tests.models import trunks

FORMS = ("two_phase", "one_softmax")
BLOCKS = ("delta_block", "delta_mh")
ALL = ("delta_attnres", *BLOCKS)


def _module(name, form="two_phase", gate="own", **options):
  heads = 2 if name.startswith("delta_mh") else 0
  options = dict(heads=heads) | options
  module = trunks.scheme(
    name, 6, form=form, schedule_size=2, gate=gate,
    block_size=2 if name in BLOCKS else 0,
    read=config_lib.DepthReadConfig(**options),
  )  # fmt: skip
  if module.gate is not None:
    start = np.random.default_rng(4).standard_normal(module.gate.shape)
    module.gate = module.gate.replace(jnp.asarray(start))
  return module


def _alpha(module, l, gate):
  """The factor of the mixture that sublayer l reads."""
  if gate == "one":
    return 1.0
  alpha = np.asarray(module.gate[l])
  return alpha if gate == "zero" else 1 / (1 + np.exp(-alpha))


def _expected(name, module, values, gate="own"):
  """h_1, ..., h_6, h_out."""
  if gate == "own":
    gate = "zero" if "mh" in name else "one"
  values = [np.asarray(value) for value in values]
  x, reads, sources = values[0], [], []
  for l in range(6):
    if name == "delta_attnres":
      sources = values[: l + 1]
    h = x
    if l and sources:
      mixture, _ = trunks.read_by_loops(module, sources, l)
      h = x + _alpha(module, l, gate) * mixture
    reads.append(h)
    if name in BLOCKS and l % 2 == 0:
      # The stream as it was read, less what the blocks hold already.
      held = sum(sources) if sources else 0
      sources = [*sources, x - held]
    x = x + values[l + 1]
  return [*reads, x]


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(
  "name,gate,options",
  [
    *((name, "own", {}) for name in ALL),
    ("delta_attnres", "vector", dict(heads=2)),
    ("delta_block", "scalar", dict(heads=2)),
    ("delta_block", "vector", dict(heads=2)),
    ("delta_mh", "one", dict(heads=2)),
  ],
)
def test_reads_are_the_definition(name, gate, options):
  values = trunks.outputs(6)
  for form in FORMS:
    module = _module(name, form, gate, **options)
    assert module.two_phase == (form == "two_phase")
    reads = trunks.reads(module, values)
    expected = _expected(name, module, values, gate)
    for h, read in zip(reads, expected, strict=True):
      np.testing.assert_allclose(h, read, atol=1e-12)
    weights, labels = module.depth_weights(values), module.source_labels()
    assert [len(w) for w in weights] == [len(names) for names in labels]
    np.testing.assert_array_equal(weights[-1], 0)
    total = np.sum(weights[-2], axis=0)
    assert np.all(total < 1 if "mh" in name else abs(total - 1) < 1e-12)


TOKENS = np.random.default_rng(0).integers(0, 16, (2, 5), dtype=np.int32)


def _network(name, **fields):
  return tiny_network.model(name, block_size=2, init_std=0.3, **fields)


_logits = jax.jit(lambda model: model(TOKENS))


def test_gates_start_where_they_should():
  plain = _network("prenorm")
  for name in ("delta_attnres", "delta_block"):
    model = _network(name, gate="zero")
    query = model.residual.queries.query
    query[...] = np.random.default_rng(1).standard_normal(query.shape)
    np.testing.assert_array_equal(_logits(model), _logits(plain))
  for gate, shape in (("scalar", (4,)), ("vector", (4, 16))):
    scheme = _network("delta_block", gate=gate).residual
    assert scheme.gate.shape == shape
    alpha = np.asarray(scheme.gates(0, 4))
    np.testing.assert_array_equal(alpha[0], 0)
    np.testing.assert_allclose(alpha[1:], 0.11920292, rtol=1e-6)
