# SPDX-License-Identifier: Apache-2.0
"""Value residuals against their equation in NumPy, and under the trunk."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from attnres_jax import config as config_lib
from attnres_jax import models
from attnres_jax.models import segments
from attnres_jax.models.mixers import attention as attention_lib
from attnres_jax.models.mixers import probe
from attnres_jax.optimizer import qk_clip
from tests import compare
from tests import jaxprs
from tests import tiny_network
from tests.models import reference

CONFIG = tiny_network.config(
  "prenorm", vocab_size=12, width=8, num_layers=4, num_heads=4, num_kv_heads=2,
  init_std=0.4, rope_theta=100.0, value_residual=True,
)  # fmt: skip
TOKENS = np.random.default_rng(0).integers(0, 12, (2, 5), dtype=np.int32)


@functools.cache
def _network():
  return models.build_model(CONFIG)


def _with(**fields):
  """A network with other options and these parameters."""
  network = _network()
  config = dataclasses.replace(CONFIG, **fields)
  other = jax.eval_shape(lambda: models.build_model(config))
  leaves = jax.tree.leaves(network)
  return jax.tree.unflatten(jax.tree.structure(other), leaves)


@jax.jit
def _loss_and_gradient(network, tokens):
  def loss(network):
    logits = network(tokens)
    weight = jnp.sin(1.0 + jnp.arange(logits.size, dtype=logits.dtype))
    return jnp.sum(weight * logits.reshape(-1)), logits

  return jax.value_and_grad(loss, has_aux=True)(network)


def test_definition():
  network = _network()
  (_, logits), gradient = _loss_and_gradient(network, TOKENS)
  expected = reference.logits(network, TOKENS)
  np.testing.assert_allclose(logits, expected, atol=2e-4)
  assert np.abs(logits - jax.jit(_with(value_residual=False))(TOKENS)).max() > 1
  for path, leaf in jax.tree_util.tree_flatten_with_path(gradient)[0]:
    assert np.any(leaf), f"{jax.tree_util.keystr(path)} gets no gradient"
  # Nothing looks ahead.
  changed = TOKENS.copy()
  changed[:, -1] = (changed[:, -1] + 1) % CONFIG.vocab_size
  (_, others), _ = _loss_and_gradient(network, changed)
  np.testing.assert_allclose(others[:, :-1], logits[:, :-1], atol=1e-5)


def test_biases_and_probes():
  """Halves include biases, and probes hear the logits of every mixer."""
  config = dataclasses.replace(
    CONFIG, attention=config_lib.AttentionConfig(qkv_bias=True)
  )
  network = qk_clip.with_probes(models.build_model(config))
  attention = network.sublayers["attention"].core
  for name in ("query_bias", "key_bias", "value_bias"):
    bias = getattr(attention, name)
    bias[...] = jnp.sin(1.0 + jnp.arange(bias.size, dtype=bias.dtype)).reshape(
      bias.shape
    )
  (_, logits), gradient = _loss_and_gradient(network, TOKENS)
  expected = reference.logits(network, TOKENS)
  np.testing.assert_allclose(logits, expected, atol=2e-4)
  trace = jax.jit(lambda m: m.trace(TOKENS))(network)
  peaks_LN = gradient.sublayers["attention"].core.probe[...]
  for l, peaks_N in enumerate(peaks_LN):
    layer = jax.tree.map(lambda a, l=l: a[l], network.sublayers["attention"])
    query_BTNH, key_BTKH, _ = layer.core.project(layer.norm(trace.reads[2 * l]))
    turned = (
      attention_lib.apply_rope(a, config.rope_theta)
      for a in (query_BTNH, key_BTKH)
    )
    np.testing.assert_allclose(
      peaks_N, probe.largest_logits(*turned, None), rtol=1e-4
    )


def test_unrolled_with_checkpoints_nothing_changes():
  (_, logits), gradient = _loss_and_gradient(_network(), TOKENS)
  other = _with(scan_layers=False, remat="full")
  (_, again), same = _loss_and_gradient(other, TOKENS)
  np.testing.assert_allclose(again, logits, atol=1e-4)
  compare.trees(same, gradient, 3e-4, plus=1e-6)


def test_the_first_mixer_is_apart_in_a_scan():
  """The others see its values as a constant."""
  loops = [
    equation.params["length"]
    for equation in jaxprs.equations(jax.make_jaxpr(_network())(TOKENS).jaxpr)
    if equation.primitive.name == "scan"
  ]
  # Others are tiles of attention.
  assert loops.count(3) == 1 and 4 not in loops
  saved = jaxprs.saved(lambda m: m.hidden(TOKENS), _with(remat="full"))
  assert sum(a.shape == (*TOKENS.shape, 2, 2) for a in saved) == 1
  (segment,) = segments.plan(
    CONFIG.sublayer_kinds, _network().residual, 0, True, apart={0}
  )
  assert [(run.kinds, run.repeats) for run in segment.runs] == [
    (("attention",), 1), (("mlp", "attention"), 3), (("mlp",), 1)
  ]  # fmt: skip


def test_each_kind_has_its_first_values():
  network = models.build_model(
    dataclasses.replace(
      CONFIG, mixers=("kda", "mla"), num_kv_heads=0,
      **{kind: tiny_network.KINDS[kind] for kind in ("kda", "mla")},
    )
  )  # fmt: skip
  trace = jax.jit(lambda m: m.trace(TOKENS))(network)

  @jax.jit
  def halved(base, other, first_BTD, last_BTD):
    _, _, values = base.core.project(base.norm(first_BTD))
    x_BTD = other.norm(last_BTD)
    query, key, value = other.core.project(x_BTD)
    return other.core.finish(x_BTD, query, key, (values + value) / 2)

  for kind, first, last in (("kda", 0, 4), ("mla", 2, 6)):
    base, other = (
      jax.tree.map(lambda a, i=i: a[i], network.sublayers[kind]) for i in (0, 1)
    )
    expected = halved(base, other, trace.reads[first], trace.reads[last])
    np.testing.assert_allclose(trace.values[last + 1], expected, atol=1e-5)
