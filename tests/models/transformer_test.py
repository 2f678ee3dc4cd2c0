# SPDX-License-Identifier: Apache-2.0
"""Whole transformers against a definition in numpy, and their properties."""

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnres_jax import config as config_lib
from attnres_jax import models
from attnres_jax.models import residuals
from attnres_kernels import platforms
from tests import jaxprs
from tests import tiers
from tests import tiny_network
from tests.models import reference

VOCAB = 16
SCHEMES = ("prenorm", "rescaled", "full_attnres", "block_attnres")
FIELDS = dict(num_layers=3, num_heads=4, num_kv_heads=2, init_std=0.4)
# What published networks have; at 40 tokens, one of two frequencies is scaled.
VARIANTS = dict(
  attention=config_lib.AttentionConfig(
    qkv_bias=True, output_bias=True, qk_norm=True
  ),
  rope=config_lib.RopeConfig(scaling="llama3", original_length=40),
  rope_theta=10.0,
)
# mla mlp, kda moe, mla moe.
MIXED = tiny_network.KINDS | dict(mixers=("mla", "kda", "mla"), num_kv_heads=0)


def _model(name="block_attnres", **fields):
  """A model whose every parameter is random, gains and queries included."""
  model = tiny_network.model(name, seed=1, **FIELDS | fields)
  rng = np.random.default_rng(7)
  noise = lambda a: (
    a + np.float32(0.3) * rng.standard_normal(a.shape, "float32")
  )
  vector = lambda a: a.ndim <= 2 or not jnp.any(a)  # Biases start at zero.
  return jax.tree.map(lambda a: noise(a) if vector(a) else a, model)


def _tokens(rows=2, length=9, seed=0):
  rng = np.random.default_rng(seed)
  return rng.integers(0, VOCAB, (rows, length), dtype=np.int32)


_logits = jax.jit(lambda model, *args: model(*args))
_trace = jax.jit(lambda model, tokens: model.trace(tokens))
_core = jax.jit(lambda part, h: part.core(part.norm(h), None))


@tiers.parametrize(
  "name,documents,fields",
  [
    ("prenorm", False, {}),
    ("prenorm", True, VARIANTS),
    ("rescaled", True, dict(num_kv_heads=1, qkv_norm=True)),
    ("full_attnres", False, dict(rope_theta=0.0, head_width=3, num_kv_heads=0)),
    ("block_attnres", True, dict(tie_embeddings=True, rope_theta=100.0)),
    ("block_attnres", False, dict(logit_soft_cap=2.0, num_heads=2)),
  ],
  first=["full_attnres", "block_attnres"],
)
def test_logits_are_those_of_the_definition(name, documents, fields):
  model, tokens, segments = _model(name, **fields), _tokens(), []
  if documents:
    rows = [[1] * 4 + [2] * 5, [3, 3, 3, 7, 7, 7, 7, 0, 0]]
    segments = [np.array(rows, np.int32)]
  logits = _logits(model, tokens, *segments)
  assert logits.dtype == jnp.float32
  expected = reference.logits(model, tokens, *segments)
  assert expected.std() > 0.3
  np.testing.assert_allclose(logits, expected, rtol=0, atol=2e-4)


def test_bfloat16_computes_with_float32_weights():
  model, tokens = _model(dtype="bfloat16"), _tokens()
  exact = _logits(_model(), tokens)
  narrow = _logits(model, tokens)
  assert narrow.dtype == jnp.float32
  error = jnp.sqrt(jnp.mean((narrow - exact) ** 2)) / jnp.std(exact)
  assert 1e-4 < error < 0.05


def test_half_precision_does_not_round_running_sums():
  """Small outputs on a large stream survive: the sum is kept in float32."""
  for name in ("prenorm", "block_attnres"):
    config = tiny_network.config(
      name, num_blocks=1, num_layers=3, dtype="bfloat16"
    )
    scheme = residuals.build_residual(config, rngs=nnx.Rngs(params=0))
    large = jnp.full((1, 1, 16), 256.0, jnp.bfloat16)
    small = jnp.full((1, 1, 16), 0.5, jnp.bfloat16)
    carry, slots = scheme.open(scheme.init(large * 0), 0, 6)
    for l in range(6):
      slot = jax.tree.map(lambda a, l=l: a[l], slots)
      carry = scheme.write(carry, slot, large if l == 0 else small)
    (total,) = jax.tree.leaves(carry)
    assert total.dtype == jnp.float32
    np.testing.assert_array_equal(total, 256.0 + 5 * 0.5)


@tiers.parametrize(
  "name,kinds", [*((name, {}) for name in SCHEMES), ("prenorm", MIXED)], first=4
)
def test_trace_is_what_the_network_did(name, kinds):
  model, tokens = _model(name, **kinds), _tokens()
  trace = _trace(model, tokens)
  assert len(trace.values) == len(trace.reads) == 7
  np.testing.assert_allclose(
    model.embedding.decode(model.final_norm(trace.reads[-1])),
    _logits(model, tokens),
    rtol=0,
    atol=1e-4,
  )
  seen = dict.fromkeys(model.sublayers, 0)
  for l, kind in enumerate(model.config.sublayer_kinds):
    index, seen[kind] = seen[kind], seen[kind] + 1
    part = jax.tree.map(lambda a, i=index: a[i], model.sublayers[kind])
    output = _core(part, trace.reads[l])
    np.testing.assert_allclose(trace.values[l + 1], output, rtol=0, atol=1e-4)


def test_another_seed_is_another_model():
  a, b, again = (tiny_network.model(seed=seed) for seed in (0, 1, 0))
  np.testing.assert_array_equal(
    a.embedding.table[...], again.embedding.table[...]
  )
  assert jnp.abs(a.embedding.table[...] - b.embedding.table[...]).max() > 0.1


def test_initial_scale_and_independent_layers():
  model = tiny_network.model(width=64, mlp_width=96, init_std=0.02)
  attention, mlp = model.sublayers.attention, model.sublayers.mlp
  for leaf in map(np.asarray, jax.tree.leaves((attention.core, mlp.core))):
    assert abs(np.std(leaf) / 0.02 - 1) < 0.1
    assert abs(np.mean(leaf)) < 0.002
    assert np.abs(leaf[0] - leaf[1]).max() > 0.02
  for gain in jax.tree.leaves((mlp.norm, model.final_norm)):
    np.testing.assert_array_equal(gain, 1.0)
  np.testing.assert_array_equal(model.residual.queries.query[...], 0.0)
  np.testing.assert_array_equal(model.residual.queries.gain[...], 1.0)
  assert model.residual.queries.query.shape == (5, 64)


def test_a_network_needs_a_vocabulary():
  message = r"config\.model\.vocab_size: got 0, expected the token"
  with pytest.raises(config_lib.ConfigError, match=message):
    models.build_model(tiny_network.config(vocab_size=0))


def test_layers_are_no_copies_on_gpus(monkeypatch):
  """There, a slice of a stack and its cast are one instruction."""
  model = tiny_network.model("prenorm", dtype="bfloat16", scan_layers=False)
  tokens = jnp.arange(16).reshape(2, 8)

  def barriers():
    # Another function each time, since the choice is made while tracing.
    hidden = lambda model, tokens: model.hidden(tokens)
    return jaxprs.count(("optimization_barrier",), hidden, model, tokens)

  before = barriers()
  monkeypatch.setattr(platforms, "is_for_gpu", lambda: True)
  assert barriers() < before
