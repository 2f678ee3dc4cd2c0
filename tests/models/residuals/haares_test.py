# SPDX-License-Identifier: Apache-2.0
"""HAARES against loops over blocks and halves."""

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnres_jax import config as config_lib
from tests import tiny_network
from tests.models import trunks

pytestmark = pytest.mark.usefixtures("float64")

LAST = 7  # sublayers, in blocks of 3: the last has one.


def _module(**options):
  read = config_lib.DepthReadConfig(**options)
  module = trunks.scheme("haares", LAST, block_size=3, read=read)
  drawn = np.random.default_rng(3).standard_normal(LAST + 1)
  module.bias = nnx.Param(jnp.asarray(drawn))
  return module


def _read(module, values, l):
  """h_{l+1} from v_0, ..., v_l."""
  bias, heads = float(module.bias[l]), module.options.heads
  u = np.asarray(module.queries.query[l] * module.queries.gain[l])
  h = np.zeros_like(values[0])
  part = trunks.WIDTH // heads
  for b, t in np.ndindex(h.shape[:2]):
    sources, biases = [values[0][b, t]], [0]
    for start in range(0, l, 3):
      size = min(3, LAST - start)
      total, difference = 0, 0
      for i in range(start, min(start + 3, l)):
        v = values[i + 1][b, t]
        total = total + v
        difference = difference + (v if i - start < size / 2 else -v)
      rms = lambda x: np.sqrt(np.mean(x**2) + trunks.EPS)
      sources += [total, difference * rms(total) / rms(difference)]
      biases += [0, bias]
    for k in range(heads):
      mine = slice(k * part, (k + 1) * part)
      e = np.exp([
        u[mine] @ s[mine] / np.sqrt(np.mean(s**2) + trunks.EPS) + c
        for s, c in zip(sources, biases)
      ])  # fmt: skip
      h[b, t, mine] = e / e.sum() @ np.stack(sources)[:, mine]
  return h


@pytest.mark.parametrize("heads", [1, 3])
def test_reads_are_the_definition(heads):
  module, values = _module(heads=heads), trunks.outputs(LAST)
  for l, h in enumerate(trunks.reads(module, values)):
    np.testing.assert_allclose(h, _read(module, values, l), atol=1e-12)


def test_ratios_have_no_gradient():
  """The gradient of a detail equals a fixed multiple of the difference's."""
  module, values = _module(), trunks.outputs(LAST)

  def detail(y_BTD):
    carry, slots = module.open(module.init(values[0]), 0, 3)
    for l, y in enumerate((values[1], y_BTD, values[3])):
      slot = jax.tree.map(lambda a, l=l: a[l], slots)
      carry = module.write(carry, slot, y)
    return jnp.sum(module.close(None, carry, 3).sources[2] * values[4])

  total = values[1] + values[2] + values[3]
  difference = values[1] + values[2] - values[3]
  mean = lambda x: np.mean(x**2, axis=-1, keepdims=True) + trunks.EPS
  expected = values[4] * np.sqrt(mean(total) / mean(difference))
  np.testing.assert_allclose(jax.grad(detail)(values[2]), expected, atol=1e-12)


def test_labels_weights_and_start():
  module, values = _module(), trunks.outputs(LAST)
  weights, labels = module.depth_weights(values), module.source_labels()
  assert labels[4] == (
    "embedding", "block 1", "detail 1", "block 2", "detail 2",
  )  # fmt: skip
  for weight, names in zip(weights, labels, strict=True):
    assert len(weight) == len(names)
    np.testing.assert_allclose(np.sum(weight, axis=0), 1, atol=1e-12)
  fresh = tiny_network.model("haares").residual
  np.testing.assert_array_equal(fresh.bias[...], np.full(5, -4.0, np.float32))
