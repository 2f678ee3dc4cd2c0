# SPDX-License-Identifier: Apache-2.0
"""Decoding against the forward pass of the whole sequence.

One batch has every split: row b of a padded chunk counts b + 1 tokens, the next
chunk has one token of each row, and the last one up to two.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnres_jax import config as config_lib
from attnres_jax import models
from attnres_jax.models import layer_stacks
from attnres_jax.models import residuals
from attnres_jax.models import sublayer
from attnres_jax.models.mixers import cache as cache_lib
from tests import jaxprs
from tests import tiers
from tests import tiny_network

TOKENS, VOCAB = 7, 16
ROWS = TOKENS - 3
KINDS = {name: k for name, k in tiny_network.KINDS.items() if name != "mixers"}
# Different computations between tokens or between sublayers.
MAIN = "prenorm", "block_attnres", "full_attnres", "mhc", "mrla_light"
SCHEMES = [
  pytest.param(name, marks=() if name in MAIN else pytest.mark.slow)
  for name in residuals.RESIDUALS
]
SLOW = pytest.mark.slow


def _model(name="block_attnres", **fields):
  """Every parameter away from its start, where it may have no effect."""
  fields = dict(mixers=("attention",), rope_theta=100.0) | KINDS | fields
  return tiny_network.moved(tiny_network.model(name, **fields), 0.2)


@pytest.fixture(scope="module")
def tokens_T():
  return np.random.default_rng(1).integers(0, VOCAB, TOKENS, dtype=np.int32)


def _chunks(tokens_T):
  """Tokens [B, T], how many count, and how many there are before."""
  start_B = np.zeros(ROWS, np.int32)
  rng = np.random.default_rng(2)
  for length_B, size in (
    (1 + np.arange(ROWS), ROWS),
    (np.ones(ROWS, int), 1),
    (1 + np.arange(ROWS) % 2, 2),
  ):
    length_B = length_B.astype(np.int32)
    tokens_BT = rng.integers(0, VOCAB, (ROWS, size), dtype=np.int32)
    for b, (start, length) in enumerate(zip(start_B, length_B)):
      tokens_BT[b, :length] = tokens_T[start : start + length]
    yield tokens_BT, start_B, length_B
    start_B = start_B + length_B


def _decoded(model, tokens_T, separate=False):
  """Of each row of each chunk, its hidden states and the whole sequence's."""
  chunks = list(_chunks(tokens_T))

  @jax.jit
  def run(model):
    whole_TD = model.hidden(tokens_T[None])[0]
    cache, hidden = model.init_cache(ROWS, TOKENS), []
    if separate:
      model = jax.tree.map(lambda a: a, model)
      model.sublayers = layer_stacks.separated(model.sublayers)
      cache = cache_lib.separated(cache)
    for i, (tokens_BT, _, length_B) in enumerate(chunks):
      # The first tokens do not read a cache.
      context = 0 if i == 0 else None
      out = model.extend(
        tokens_BT, cache, jnp.asarray(length_B), context=context
      )
      cache = cache_lib.append(cache, out.added)
      hidden.append(out.hidden_BTD)
    return whole_TD, hidden, cache.length_B

  whole_TD, hidden, end_B = jax.device_get(run(model))
  for decoded_BTD, (_, start_B, length_B) in zip(hidden, chunks):
    for decoded_TD, start, length in zip(decoded_BTD, start_B, length_B):
      span = slice(start, start + length)
      yield [
        np.asarray(a, float) for a in (decoded_TD[:length], whole_TD[span])
      ]
  np.testing.assert_array_equal(end_B, start_B + length_B)


def _check(model, tokens_T, tolerance=2e-5, separate=False):
  """Every hidden state that counts equals the whole sequence's."""
  pairs = list(_decoded(model, tokens_T, separate))
  atol = tolerance * max(np.abs(whole_TD).max() for _, whole_TD in pairs)
  for ours, whole_TD in pairs:
    np.testing.assert_allclose(ours, whole_TD, rtol=0, atol=atol)


@tiers.parametrize("name", SCHEMES, first=["block_attnres"])
@pytest.mark.parametrize(
  "dtype,tolerance",
  # Roundings have another order.
  [("float32", 2e-5), pytest.param("bfloat16", 0.1, marks=SLOW)],
)
def test_every_scheme(name, dtype, tolerance, tokens_T):
  model = _model(name, moe=config_lib.MoeConfig(), dtype=dtype)
  _check(model, tokens_T, tolerance)


@pytest.mark.more
def test_a_read_may_change_the_carry(tokens_T, monkeypatch):
  class Halving(residuals.RESIDUALS["prenorm"]):
    def read(self, carry, slot, norm):
      return super().read(carry, slot, norm)[0], 0.5 * carry

  monkeypatch.setitem(residuals.RESIDUALS, "halving", Halving)
  _check(_model("halving"), tokens_T)


Read, Attention = config_lib.DepthReadConfig, config_lib.AttentionConfig
MIXERS = dict(mixers=("kda", "mla", "attention"), num_layers=3)
EXPERTS = dict(moe=config_lib.MoeConfig(), num_layers=3)
CASES = {
  # With grouped queries, and experts after the first two.
  "mixers": MIXERS | dict(num_kv_heads=1),
  "heads": dict(read=Read(heads=2), **EXPERTS),
  # Of upcycled networks.
  "sum": dict(read=Read(scale="sum"), scan_layers=False),
  # Values that are read separately, or come from earlier mixers.
  "mudd": dict(name="mudd", mixers=("kda", "mla")),
  "value_residual": dict(value_residual=True),
  "biases_norms_positions": dict(
    name="prenorm",
    attention=Attention(qkv_bias=True, output_bias=True, qk_norm=True),
    rope=config_lib.RopeConfig(scaling="llama3", original_length=40),
  ),
  "latent_queries": dict(
    mixers=("mla",), mla=dataclasses.replace(KINDS["mla"], query_rank=6)
  ),
}
SLOW_CASES = {
  "value_query": dict(name="full_attnres", read=Read(value_query=True)),
  "window": dict(name="full_attnres", read=Read(window=2), **EXPERTS),
  "value_query_of_latents": dict(mixers=("mla",), read=Read(value_query=True)),
  "value_residuals": dict(mixers=("kda", "mla"), value_residual=True),
  # All kinds of caches, and the cache of a scheme that looks back.
  "separate": MIXERS | dict(separate=True),
  "separate_mrla": MIXERS | dict(name="mrla_light", separate=True),
}


@pytest.mark.more
@pytest.mark.parametrize(
  "fields",
  [
    *CASES.values(),
    *(pytest.param(fields, marks=SLOW) for fields in SLOW_CASES.values()),
  ],
  ids=[*CASES, *SLOW_CASES],
)
def test_options(fields, tokens_T):
  separate = fields.get("separate", False)
  model = _model(**{k: v for k, v in fields.items() if k != "separate"})
  _check(model, tokens_T, separate=separate)


@pytest.mark.slow
def test_bfloat16_errs_no_more_than_a_forward_pass(tokens_T):
  exact, bfloat16 = (
    list(_decoded(_model(dtype=dtype, **CASES["mixers"]), tokens_T))
    for dtype in ("float32", "bfloat16")
  )
  decoding, forward = (
    np.concatenate([np.ravel(b[i] - e[1]) for b, e in zip(bfloat16, exact)])
    for i in (0, 1)
  )
  rms = lambda errors: np.mean(errors**2) ** 0.5
  assert 0 < rms(decoding) < 1.3 * rms(forward) < 0.1
  assert np.abs(decoding).max() < 1.3 * np.abs(forward).max()


def test_a_context_is_what_is_read(tokens_T):
  model, half = _model("prenorm", num_layers=1), TOKENS // 2
  extend = jax.jit(
    lambda model, tokens, cache, context: model.extend(
      tokens, cache, context=context
    ),
    static_argnames="context",
  )
  cache = model.init_cache(1, TOKENS)
  out = extend(model, tokens_T[None, :half], cache, 0)
  cache = cache_lib.append(cache, out.added)
  all_of_it = extend(model, tokens_T[None, half:], cache, None).hidden_BTD
  enough = extend(model, tokens_T[None, half:], cache, half).hidden_BTD
  np.testing.assert_allclose(enough, all_of_it, rtol=0, atol=1e-5)
  less = extend(model, tokens_T[None, half:], cache, half - 1).hidden_BTD
  assert np.abs(less - all_of_it).max() > 1e-3


def test_a_mixer_that_cannot_decode(monkeypatch):
  monkeypatch.setitem(sublayer.CORES, "plain", sublayer.CORES["mlp"])
  model = models.build_model(tiny_network.config(mixers=("plain",)))
  message = "config.model.mixers: got 'plain', expected mixers with"
  with pytest.raises(config_lib.ConfigError, match=message):
    model.init_cache(1, 1)


@pytest.mark.parametrize("name", ["prenorm", "block_attnres"])
def test_a_prompt_keeps_sums_rather_than_all_outputs(name):
  """Each sublayer reads a carry from memory; single tokens need no memory."""
  model = _model(name)
  cache = model.init_cache(1, TOKENS)

  def barriers(tokens):
    tokens_BT = jnp.zeros((1, tokens), jnp.int32)
    extended = lambda: model.extend(tokens_BT, cache).hidden_BTD
    return jaxprs.count(("optimization_barrier",), extended)

  assert (barriers(1), barriers(2)) == (0, len(model.config.sublayer_kinds))
