# SPDX-License-Identifier: Apache-2.0
"""QK-clip against its definition, in float64 NumPy."""

import dataclasses

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnres_jax import config as config_lib
from attnres_jax.common import sharding
from attnres_jax.models import mixers
from attnres_jax.models.mixers import causal_attention
from attnres_jax.models.mixers import probe
from attnres_jax.optimizer import qk_clip
from attnres_jax.train import train_state

MLA = config_lib.MlaConfig(
  latent_rank=8, nope_width=6, shared_width=4, value_width=6
)
MODEL = config_lib.ModelConfig(
  vocab_size=32, width=16, num_layers=2, num_heads=4,
  mixers=("attention", "mla"),
  mla=MLA, init_std=0.3,
  residual=config_lib.residual_config(name="prenorm", num_blocks=2),
)  # fmt: skip
BIASED = config_lib.AttentionConfig(qkv_bias=True)
MIXERS = {
  "attention": (mixers.Attention, {}),
  "biased": (mixers.Attention, {"attention": BIASED}),
  "grouped": (mixers.Attention, {"num_kv_heads": 2}),
  "mla": (mixers.Mla, {}),
}


def _mixer(name):
  make, fields = MIXERS[name]
  config = dataclasses.replace(MODEL, **fields)
  mixer = make(config, rngs=nnx.Rngs(params=0))
  return jax.tree.map(lambda a: a if jnp.any(a) else a + 0.1, mixer)


def _logits(query_BTNH, key_BTKH, segment_ids_BT=None):
  """[B, N, T, S], with -inf where attention may not look."""
  query, key = np.float64(query_BTNH), np.float64(key_BTKH)
  key = np.repeat(key, query.shape[2] // key.shape[2], axis=2)
  logits = np.einsum("btnh,bsnh->bnts", query, key) / query.shape[3] ** 0.5
  sees = np.tril(np.ones(logits.shape[-2:], bool))[None]
  if segment_ids_BT is not None:
    sees = sees & (segment_ids_BT[:, :, None] == segment_ids_BT[:, None])
  return np.where(sees[:, None], logits, -np.inf)


def _peaks(*arrays):
  return _logits(*arrays).max(axis=(0, 2, 3))


@pytest.mark.parametrize("tile", [4, 512])
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("documents", [False, True])
def test_largest_logits(monkeypatch, tile, kv_heads, documents):
  monkeypatch.setattr(causal_attention, "TILE", tile)
  rng = np.random.default_rng(0)
  # A large offset makes all logits negative: padding must not count.
  query = rng.normal(size=(3, 10, 4, 5)).astype(np.float32) - 3
  key = rng.normal(size=(3, 10, kv_heads, 5)).astype(np.float32) + 3
  segment_ids = rng.integers(1, 3, (3, 10)) if documents else None
  if documents:
    segment_ids = np.sort(segment_ids, axis=1).astype(np.int32)
  largest = jax.jit(probe.largest_logits)(query, key, segment_ids)
  expected = _peaks(query, key, segment_ids)
  assert expected.max() < 0
  np.testing.assert_allclose(largest, expected, rtol=1e-5)


@pytest.mark.parametrize("name", MIXERS)
class TestMixer:
  @pytest.fixture
  def x_BTD(self):
    return jax.random.normal(jax.random.key(1), (2, 7, MODEL.width))

  def _heads(self, core, x_BTD):
    query, key, _ = core.project(x_BTD)
    if isinstance(core, mixers.Attention):
      rope = mixers.attention.apply_rope
      query, key = (rope(a, core.rope_theta) for a in (query, key))
    return query, key

  def test_the_gradient_of_a_probe(self, name, x_BTD):
    core = _mixer(name)
    total = lambda core: jnp.sum(jnp.square(core(x_BTD)))
    plain = jax.jit(jax.grad(total))(core)
    core.probe = probe.LogitProbe(jnp.zeros(4), axes="N")
    gradient = jax.jit(jax.grad(total))(core)
    expected = _peaks(*self._heads(core, x_BTD))
    np.testing.assert_allclose(gradient.probe[...], expected, rtol=1e-5)
    for weight in ("query", "output"):
      np.testing.assert_allclose(
        getattr(gradient, weight)[...], getattr(plain, weight)[...], rtol=1e-6
      )

  def test_logits_follow_the_factors(self, name, x_BTD):
    core, scaled = _mixer(name), _mixer(name)
    factor_N = np.array([1.0, 0.25, 0.5, 0.9], np.float32)
    scaled.scale_logits(jnp.asarray(factor_N))
    before = _logits(*self._heads(core, x_BTD))
    after = _logits(*self._heads(scaled, x_BTD))
    sees = np.isfinite(before)
    expected = before * factor_N[None, :, None, None]
    np.testing.assert_allclose(
      after[sees], expected[sees], rtol=2e-5, atol=1e-6
    )
    # The rest of the mixer is as it was.
    np.testing.assert_array_equal(core.output[...], scaled.output[...])
    for variant in (core, scaled):
      variant.values = variant.project(x_BTD)[2]
    np.testing.assert_allclose(core.values, scaled.values, rtol=1e-6)


def _program(parts=1, clip=0.0, devices=1, **fields):
  config = config_lib.RunConfig(
    model=MODEL,
    data=config_lib.DataConfig(sequence_length=8, batch_size=4),
    optim=config_lib.OptimConfig(
      name="muon", accumulate_steps=parts, qk_clip=clip, warmup_steps=0,
      peak_lr=0.02,
    ),
  )  # fmt: skip
  config = dataclasses.replace(config, **fields)
  mesh_fields = config_lib.MeshConfig(data=devices)
  mesh = sharding.make_mesh(mesh_fields, jax.devices()[:devices])
  return train_state.make_program(config, mesh)


def _peaks_of(program, state, batch):
  """Peaks of the whole network: kind -> [L, N]."""
  examples = train_state.loss_lib.Examples.of(batch)
  probed = qk_clip.with_probes(state.model)
  _, gradient = jax.jit(program.network.value_and_grad)(probed, examples)
  return qk_clip.take_peaks(gradient, state.model)[1]


def _step(program, batch):
  return program.train_step(program.init_state(), batch)


@pytest.fixture(scope="module")
def batch():
  return {"tokens": jax.random.randint(jax.random.key(3), (4, 9), 0, 32)}


@pytest.mark.more
def test_a_step(batch):
  plain, plain_metrics = _step(_program(), batch)
  program = _program()
  peaks = _peaks_of(program, program.init_state(), batch)
  assert {kind: a.shape for kind, a in peaks.items()} == {
    "attention": (1, 4), "mla": (1, 4)
  }  # fmt: skip
  largest = max(float(jnp.max(a)) for a in peaks.values())
  # Above every logit it changes nothing, and nothing else is different.
  same, metrics = _step(_program(clip=2 * largest), batch)
  assert float(metrics["max_logit"]) == pytest.approx(largest, rel=1e-6)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7),
    same.model, plain.model,
  )  # fmt: skip
  assert "max_logit" not in plain_metrics
  # Below some logits it scales the updated weights, by their definition.
  tau = 0.6 * largest
  clipped, _ = _step(_program(clip=tau), batch)
  expected = jax.tree.map(lambda a: a, plain.model)
  for kind in ("attention", "mla"):
    (peak_N,) = np.asarray(peaks[kind])
    factor_N = np.where(peak_N > tau, tau / peak_N, 1.0).astype(np.float32)
    core = expected.sublayers[kind].core
    layer = jax.tree.map(lambda a: a[0], core)
    layer.scale_logits(jnp.asarray(factor_N))
    expected.sublayers[kind].core = jax.tree.map(lambda a: a[None], layer)
  changed = 0
  for a, b, old in zip(
    *(jax.tree.leaves(m) for m in (clipped.model, expected, plain.model)),
    strict=True,
  ):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)
    changed += bool(np.any(np.abs(np.subtract(b, old)) > 1e-3))
  assert changed >= 2


@pytest.mark.more
def test_frozen_weights_are_not_scaled(batch):
  optim = config_lib.OptimConfig(qk_clip=0.01, freeze=("core/query$",))
  program = _program(optim=optim)
  state = program.init_state()
  before = jax.tree.map(np.array, state.model.sublayers)
  after, metrics = program.train_step(state, batch)
  assert metrics["max_logit"] > 0.1
  for kind in ("attention", "mla"):
    old, new = before[kind].core, after.model.sublayers[kind].core
    np.testing.assert_array_equal(new.query[...], old.query[...])
    assert np.any(new.output[...] != old.output[...])


@pytest.mark.slow
def test_microbatches_and_devices_find_the_same_logits(batch):
  _, plain = _step(_program(clip=0.1), batch)
  _, two = _step(_program(clip=0.1, parts=2), batch)
  _, cut = _step(_program(clip=0.1, parts=2, devices=2), batch)
  for other in (two, cut):
    np.testing.assert_allclose(
      other["max_logit"], plain["max_logit"], rtol=1e-5
    )
