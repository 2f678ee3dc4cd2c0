# SPDX-License-Identifier: Apache-2.0
"""Depth memories against their equations in NumPy, and under the trunk."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnres_jax import config as config_lib
from attnres_jax import flops
from attnres_jax import models
from attnres_jax.common import sharding
from attnres_jax.flops import parameters
from attnres_jax.models import memory
from attnres_jax.models import trunk
from attnres_jax.models.mixers import causal_attention
from tests import jaxprs
from tests import tiny_network
from tests.models import reference

NAMES = tuple(memory.DEPTH_MEMORY)
CONFIG = tiny_network.config(
  "prenorm", vocab_size=12, width=8, num_layers=4, num_heads=4, num_kv_heads=2,
  init_std=0.4, rope_theta=100.0,
)  # fmt: skip
TOKENS = np.random.default_rng(0).integers(0, 12, (2, 5), dtype=np.int32)


def _config(name, **fields):
  return dataclasses.replace(CONFIG, depth_memory=name, **fields)


@functools.cache
def _network(name):
  """A network whose memory is away from its start."""
  network = models.build_model(_config(name))
  rng = np.random.default_rng(1)
  network.depth_memory = jax.tree.map(
    lambda a: a + 0.3 * rng.standard_normal(a.shape).astype(a.dtype),
    network.depth_memory,
  )
  return network


class _ValueResidual(reference.Hook):
  def __init__(self, own):
    self.own = own

  def weights(self, n):
    del n
    return 0.5, 0.5

  def mixer(self, n, query, key, value):
    if n == 0:
      self.first = value
      return value, []
    first, own = self.weights(n)
    return first * self.first + own * value, []


class _Learned(_ValueResidual):
  def weights(self, n):
    return reference.array(self.own.weight)[n - 1]


class _SvFormer(reference.Hook):
  def __init__(self, own):
    self.projection = reference.array(own.value)

  def mixer(self, n, query, key, value):
    if n == 0:  # Without a projection of its own, it is the mixer's input.
      self.first = np.einsum("btd,dkh->btkh", value, self.projection)
    return self.first, []


class _DepthAttention(reference.Hook):
  def __init__(self, own):
    self.stride = own.stride or 2  # of four mixers
    self.keys, self.values = [], []

  def mixer(self, n, query, key, value):
    batch, length, heads, width = query.shape
    kv_heads = key.shape[2]
    self.keys.append(reference.rms_norm(key))
    self.values.append(value)
    reached = range(n, -1, -self.stride)
    mixed = np.zeros_like(value)
    for b, t, k in np.ndindex(batch, length, kv_heads):
      group = range(k * heads // kv_heads, (k + 1) * heads // kv_heads)
      mean = np.mean(
        [reference.rms_norm(query[b, t, i]) for i in group], axis=0
      )
      score = [mean @ self.keys[j][b, t, k] / width**0.5 for j in reached]
      weight = np.exp(score) / np.exp(score).sum()
      for w, j in zip(weight, reached):
        mixed[b, t, k] += w * self.values[j][b, t, k]
    self.values[n] = mixed
    return mixed, []


class _Moda(reference.Hook):
  def __init__(self, own):
    self.own, self.kept = own, []

  def mixer(self, n, query, key, value):
    group = query.shape[2] // key.shape[2]
    scale = query.shape[3] ** -0.5
    columns = [
      (scale * np.einsum("btnh,btnh->btn", query, np.repeat(k, group, 2)), v)
      for k, v in self.kept
    ]
    self.kept.append((key, value))
    return value, columns

  def mlp(self, n, x):
    if n < CONFIG.num_layers - 1:
      self.kept.append(
        tuple(
          np.einsum("btd,dkh->btkh", x, reference.array(w)[n])
          for w in (self.own.key, self.own.value)
        )
      )


# Name -> its equations, for all but "none".
HOOKS = {
  "value_residual": _ValueResidual,
  "value_residual_learned": _Learned,
  "svformer": _SvFormer,
  "depth_attention": _DepthAttention,
  "moda": _Moda,
}


def _loss(network, tokens):
  logits = network(tokens)
  weight = jnp.sin(1.0 + jnp.arange(logits.size, dtype=logits.dtype))
  return jnp.sum(weight * logits.reshape(-1)), logits


_loss_and_gradient = jax.jit(jax.value_and_grad(_loss, has_aux=True))


def _with(network, **fields):
  """The same parameters in a network with other options."""
  config = dataclasses.replace(network.config, **fields)
  other = jax.eval_shape(lambda: models.build_model(config))
  leaves = jax.tree.leaves(network)
  return jax.tree.unflatten(jax.tree.structure(other), leaves)


@pytest.mark.parametrize("name", HOOKS)
def test_definition(name):
  network = _network(name)
  (_, logits), gradient = _loss_and_gradient(network, TOKENS)
  hook = HOOKS[name](network.depth_memory)
  want = reference.logits(network, TOKENS, hook=hook)
  np.testing.assert_allclose(logits, want, atol=2e-4)
  flat, _ = jax.tree_util.tree_flatten_with_path(gradient)
  for path, a in flat:
    assert np.any(a), f"{jax.tree_util.keystr(path)} gets no gradient"
  # Nothing looks ahead.
  changed = TOKENS.copy()
  changed[:, -1] = (changed[:, -1] + 1) % CONFIG.vocab_size
  (_, others), _ = _loss_and_gradient(network, changed)
  np.testing.assert_allclose(others[:, :-1], logits[:, :-1], atol=1e-5)


@pytest.mark.parametrize(
  "name",
  [
    # The trunk is the same for all kinds.
    pytest.param(name, marks=() if name == "moda" else pytest.mark.slow)
    for name in HOOKS
  ],
)
def test_unrolled_with_checkpoints_nothing_changes(name):
  network = _network(name)
  (_, logits), gradient = _loss_and_gradient(network, TOKENS)
  other = _with(network, scan_layers=False, remat="full")
  (_, again), same = _loss_and_gradient(other, TOKENS)
  np.testing.assert_allclose(again, logits, atol=1e-4)
  flat, _ = jax.tree_util.tree_flatten_with_path(gradient)
  for (path, a), b in zip(flat, jax.tree.leaves(same), strict=True):
    where, size = jax.tree_util.keystr(path), 1e-6 + np.abs(a).max()
    np.testing.assert_allclose(b, a, rtol=0, atol=3e-4 * size, err_msg=where)


@pytest.mark.parametrize("name", NAMES)
def test_trace_sees_the_network(name):
  network = _with(
    _network(name), residual=config_lib.ResidualConfig("rescaled")
  )

  @jax.jit
  def both(network):
    trace = network.trace(TOKENS)
    return trace.reads[-1], network.hidden(TOKENS), trace.reads

  last, hidden, reads = both(network)
  np.testing.assert_allclose(network.final_norm(last), hidden, atol=1e-5)
  assert len(reads) == CONFIG.num_sublayers + 1


def _runs(name):
  network = jax.eval_shape(lambda: models.build_model(_config(name)))
  (segment,) = trunk._plan(
    CONFIG.sublayer_kinds, network.residual, network.depth_memory, 0, True
  )
  return [(run.kinds, run.repeats) for run in segment.runs]


def test_scans():
  attention, mlp = ("attention",), ("mlp",)
  assert _runs("none") == [(("attention", "mlp"), 4)]
  # The first mixer apart; the others see its values as a constant.
  for name in ("value_residual", "svformer"):
    assert _runs(name) == [
      (attention, 1), (("mlp", "attention"), 3), (mlp, 1)
    ]  # fmt: skip
  for name in ("depth_attention", "moda"):
    assert _runs(name) == 4 * [(attention, 1), (mlp, 1)]


def test_checkpoints_keep_each_head_once():
  counts = {}
  for name in NAMES:
    network = _with(_network(name), remat="full")
    kept = jaxprs.saved(lambda m: m.hidden(TOKENS), network)
    counts[name] = sum(a.shape == (*TOKENS.shape, 2, 2) for a in kept)
  assert counts == {
    "none": 0,
    "value_residual": 1,
    "value_residual_learned": 1,
    "svformer": 1,
    "depth_attention": 2 * 2,  # keys and values of the first two mixers
    "moda": 2 * (3 + 3),  # of three mixers and three MLPs
  }


def test_shared_values_have_one_norm():
  network = jax.eval_shape(
    lambda: models.build_model(_config("svformer", qkv_norm=True))
  )
  jax.eval_shape(lambda m: m.hidden(TOKENS), network)
  assert network.depth_memory.value_norm.gain.shape == (2,)
  core = network.sublayers["attention"].core
  assert not jax.tree.leaves((core.value, core.value_norm))
  assert core.key_norm.gain.shape == (4, 2)


# Options of mixers.
KDA, MLA = tiny_network.KINDS["kda"], tiny_network.KINDS["mla"]


def test_each_kind_has_its_first_values():
  config = _config(
    "value_residual",
    mixers=("kda", "mla"),
    num_kv_heads=0,
    kda=KDA,
    mla=MLA,
  )
  network = models.build_model(config)
  trace = jax.jit(lambda m: m.trace(TOKENS))(network)

  @jax.jit
  def halved(one, other, first_BTD, last_BTD):
    _, _, values = one.core.project(one.norm(first_BTD))
    x_BTD = other.norm(last_BTD)
    query, key, own = other.core.project(x_BTD)
    return other.core.finish(x_BTD, query, key, (values + own) / 2)

  for kind, first, last in (("kda", 0, 4), ("mla", 2, 6)):
    one, other = (
      jax.tree.map(lambda a, i=i: a[i], network.sublayers[kind]) for i in (0, 1)
    )
    want = halved(one, other, trace.reads[first], trace.reads[last])
    np.testing.assert_allclose(trace.values[last + 1], want, atol=1e-5)


def test_a_long_stride_is_plain_attention():
  plain = _network("none")
  far = _with(plain, depth_memory="depth_attention", depth_stride=4)
  near = _with(plain, depth_memory="depth_attention", depth_stride=3)
  a, b, c = (jax.jit(lambda m: m(TOKENS))(m) for m in (plain, far, near))
  np.testing.assert_allclose(a, b, atol=1e-6)
  assert np.abs(a - c).max() > 1e-3


class TestColumns:
  query, key, value = (
    np.random.default_rng(n).standard_normal((2, 7, heads, 4), np.float32)
    for n, heads in enumerate((4, 2, 2))
  )

  def _attend(self, columns):
    attend = functools.partial(causal_attention.attend, kernel="tiled", tile=3)
    return jax.jit(attend)(self.query, self.key, self.value, columns=columns)

  def test_a_copy_of_the_own_token_adds_log_two(self):
    keys = jnp.repeat(self.key, 2, axis=2)
    logits = 0.5 * jnp.einsum("BTNH,BTNH->BTN", self.query, keys)
    columns = causal_attention.Columns(
      logits[..., None], self.value[:, :, :, None]
    )
    pairs = 0.5 * jnp.einsum("BTNH,BSNH->BNTS", self.query, keys)
    pairs = pairs + jnp.log(2.0) * jnp.eye(7)[None, None]
    pairs = jnp.where(jnp.tri(7, dtype=bool)[None, None], pairs, -jnp.inf)
    want = jnp.einsum(
      "BNTS,BSNH->BTNH", jax.nn.softmax(pairs), jnp.repeat(self.value, 2, 2)
    )
    np.testing.assert_allclose(self._attend(columns), want, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_cost(name):
  config = _config(name)
  network = jax.eval_shape(lambda: models.build_model(config))
  count = sum(a.size for a in jax.tree.leaves(network))
  assert parameters.total(parameters.of_parts(config)).total == count
  D, KH, L, length, plain = 8, 2 * 2, 4, 6, _config("none")
  found, base = (flops.flops_per_token(c, length) for c in (config, plain))
  # MoDA: each of 4 mixers and 4 heads attends to its 2n earlier sublayers.
  columns = 4 * 2 * sum(2 * n for n in range(L))
  assert (
    found.forward - base.forward
    == {
      "none": 0,
      "value_residual": 0,
      "value_residual_learned": 0,
      "svformer": -2 * (L - 1) * D * KH,
      # Two mixers of two sources: a score and a sum for each.
      "depth_attention": 2 * 2 * 2 * 2 * KH,
      "moda": 2 * (2 * (L - 1) * D * KH) + 4 * columns,
    }[name]
  )


@pytest.mark.parametrize(
  "name,mixers",
  [
    *((name, ("attention",)) for name in NAMES),
    *((name, ("kda", "mla")) for name in ("depth_attention", "moda")),
  ],
)
def test_bfloat16_and_letters(name, mixers):
  fields = dict(num_kv_heads=0, kda=KDA, mla=MLA)
  config = _config(name, dtype="bfloat16", mixers=mixers, **fields)
  network = jax.eval_shape(lambda: models.build_model(config))
  leaves = jax.tree.leaves(network)
  assert {leaf.dtype for leaf in leaves} == {jnp.dtype("float32")}
  mesh = sharding.make_mesh(config_lib.MeshConfig(data=1, fsdp=2, tensor=2))
  shardings = sharding.state_sharding(network, mesh)
  assert len(jax.tree.leaves(shardings)) == len(leaves)
  h_BTD = jax.eval_shape(lambda m: m.hidden(TOKENS), network)
  assert h_BTD.dtype == jnp.bfloat16


@pytest.mark.parametrize(
  "fields,message",
  [
    (dict(depth_memory="svformr"), "depth_memory: got 'svformr'"),
    (dict(depth_memory="moda", num_layers=1), "depth_memory: got 'moda'"),
    (dict(depth_memory="depth_attention", mixers=("kda",)), "mla.*kda"),
    (dict(depth_memory="moda", mixers=("attention", "mla")), "got 'moda'"),
    (dict(depth_memory="moda", attention_kernel="splash"), "got 'splash'"),
  ],
)
def test_refusals(fields, message):
  fields = dict(residual=config_lib.ResidualConfig("prenorm")) | fields
  config = dataclasses.replace(CONFIG, **fields)
  with pytest.raises(config_lib.ConfigError, match=message):
    jax.eval_shape(lambda: models.build_model(config))
