# SPDX-License-Identifier: Apache-2.0
"""Kda against its definition, token by token in float64."""

import dataclasses

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special

from attnres_jax import config as config_lib
from attnres_jax.models import mixers
from tests import jaxprs
from tests import tiny_network
from tests.kernels import kda_test
from tests.kernels import short_conv_test
from tests.models import cores
from tests.models import trunks

BATCH, TOKENS, WIDTH, HEADS, HEAD = 2, 12, 24, 3, 8
EPS = 1e-5


def _config(dtype="float32", chunk_size=4, qkv_norm=False, **kda):
  return tiny_network.config(
    width=WIDTH,
    num_layers=1,
    mixers=("kda",),
    num_heads=HEADS,
    norm_eps=EPS,
    init_std=WIDTH**-0.5,
    dtype=dtype,
    qkv_norm=qkv_norm,
    kda=config_lib.KdaConfig(
      head_width=HEAD, gate_rank=5, chunk_size=chunk_size, **kda
    ),
  )


def _module(**kwargs):
  module = mixers.Kda(_config(**kwargs), rngs=nnx.Rngs(params=3))
  # The gain starts at one, where it could be missing.
  gain = jnp.linspace(0.5, 2.0, HEAD)
  module.out_norm.gain[...] = gain
  if kwargs.get("qkv_norm"):
    module.value_norm.gain[...] = gain[::-1]
  return module


def _inputs(dtype="float32"):
  return jax.random.normal(jax.random.key(1), (BATCH, TOKENS, WIDTH), dtype)


def _definition(module, x_TD):
  """One sequence, directly from the formulas."""
  weights = cores.weights(module)
  x_TD = np.asarray(x_TD, np.float64)

  def feature(name, unit):
    raw_TNH = np.einsum("td,dnh->tnh", x_TD, weights[name])
    before, ids = np.zeros((1, 3, HEADS, HEAD)), np.zeros((1, len(x_TD)))
    taps_KNH = weights[f"{name}_conv"]
    return short_conv_test.oracle(raw_TNH[None], taps_KNH, before, ids, unit)[0]

  q_TNH, k_TNH = feature("query", True), feature("key", True)
  v_TNH = feature("value", False)
  if "value_norm" in weights:
    v_TNH = trunks.rms_norm(v_TNH, EPS) * weights["value_norm"]["gain"]
  low_TR = x_TD @ weights["decay_down"]
  raw_TNH = np.einsum("tr,rnh->tnh", low_TR, weights["decay_up"])
  raw_TNH, rate_N1 = raw_TNH + weights["dt_bias"], np.exp(weights["a_log"])
  rate_N1 = rate_N1[:, None]
  log_TNH = -rate_N1 * np.log1p(np.exp(raw_TNH))
  if bound := module.decay_bound:
    log_TNH = -bound * special.expit(rate_N1 * raw_TNH)
  beta_TN = special.expit(x_TD @ weights["beta"])
  if "gate" in weights:
    gate_TNH = np.einsum("td,dnh->tnh", x_TD, weights["gate"])
  else:
    gate_TR = x_TD @ weights["gate_down"]
    gate_TNH = np.einsum("tr,rnh->tnh", gate_TR, weights["gate_up"])
  gate_TNH = special.expit(gate_TNH)
  row = (a[None] for a in (q_TNH, k_TNH, v_TNH, log_TNH, beta_TN))
  (o_TNH,), _ = kda_test.oracle(*row, np.zeros((1, HEADS, HEAD, HEAD)))
  o_TNH = trunks.rms_norm(o_TNH, EPS) * weights["out_norm"]["gain"]
  return np.einsum("tnh,nhd->td", gate_TNH * o_TNH, weights["output"])


_extend = jax.jit(
  lambda module, x, state, chunk: module.extend(x, state, chunk)
)


@pytest.mark.parametrize(
  "chunk_size,qkv_norm", [(1, False), (5, True), (16, False)]
)
def test_is_its_definition(chunk_size, qkv_norm):
  module = _module(chunk_size=chunk_size, qkv_norm=qkv_norm)
  x_BTD = _inputs()
  expected = np.stack([_definition(module, x_TD) for x_TD in x_BTD])
  cores.assert_close(cores.apply(module, x_BTD), expected)


def test_the_gates_of_k3():
  module = _module(full_rank_gate=True, decay_bound=5.0)
  # Far enough from the middle of the sigmoid that the bound matters.
  module.decay_up[...] = 20 * module.decay_up[...]
  x_BTD = _inputs()
  expected = np.stack([_definition(module, x_TD) for x_TD in x_BTD])
  cores.assert_close(cores.apply(module, x_BTD), expected)
  module.decay_bound = 4.0
  assert np.abs(cores.apply(module, x_BTD) - expected).max() > 1e-3


def test_packed_documents_do_not_meet():
  module, x_BTD = _module(), _inputs()
  # The second document is shorter than the convolution.
  segments_T = np.array([1] * 6 + [2] * 2 + [3] * 4)
  cores.assert_documents_apart(module, x_BTD, segments_T, _definition)


@pytest.mark.parametrize("pieces", [[12], [1] * 12, [2, 1, 7, 2], [9, 3]])
def test_any_cut_of_a_sequence_is_the_same(pieces):
  module, x_BTD = _module(), _inputs()
  state = module.init_cache(BATCH)
  state = cores.assert_pieces(_extend, module, x_BTD, state, pieces)
  assert state.memory_BNHV.dtype == jnp.float32
  assert state.key_BKNH.shape == (BATCH, 3, HEADS, HEAD)


@pytest.mark.more
def test_bfloat16():
  module, wide = _module(dtype="bfloat16"), _module()
  x_BTD = _inputs("bfloat16")
  expected = cores.apply(wide, x_BTD.astype(jnp.float32))
  cores.assert_rounds_activations_only(module, x_BTD, expected, 0.03)
  y, state = _extend(
    module, x_BTD[:, :1], module.init_cache(BATCH), cores.chunk(0, 1)
  )
  cores.assert_close(y.astype(jnp.float32), expected[:, :1], 0.03)
  assert state.query_BKNH.dtype == jnp.bfloat16


def test_what_is_kept_for_backward():
  """Float32 activations: the decay, and what it is made of."""
  module, x_BTD = _module(dtype="bfloat16"), _inputs("bfloat16")
  saved = jaxprs.saved(lambda module, x: module(x), module, x_BTD)
  wide = [
    a
    for a in saved
    if a.dtype == jnp.float32 and a.size >= BATCH * TOKENS * HEADS * HEAD
  ]
  assert len(wide) == 2


def test_initial_gates_are_in_their_ranges():
  config = tiny_network.config(mixers=("kda",), num_heads=64)
  module = mixers.Kda(config, rngs=nnx.Rngs(params=0))
  rate = np.exp(module.a_log[...])
  assert 1 <= rate.min() < 3 and 14 < rate.max() <= 16
  step = jax.nn.softplus(module.dt_bias[...])
  assert 0.99e-3 < step.min() < 1.01e-3 and 0.099 < step.max() < 0.1001
  # Log-uniform: as many below the geometric mean as above.
  np.testing.assert_allclose(np.mean(np.log(step)), np.log(1e-2), atol=0.05)


@pytest.mark.more
def test_save_reaches_the_kernels():
  def kernels(save):
    config = _config(chunk_size=16, save=save)
    kda = dataclasses.replace(config.kda, head_width=128)  # As kernels need it.
    module = mixers.Kda(
      dataclasses.replace(config, kda=kda), rngs=nnx.Rngs(params=3)
    )
    graph, state = nnx.split(module)
    gradient = jax.grad(lambda s, x: jnp.sum(nnx.merge(graph, s)(x)))
    names = [
      equation.params["name"]
      for equation in jaxprs.equations(
        jax.make_jaxpr(gradient)(state, _inputs())
      )
      if equation.primitive.name == "pallas_call"
    ]
    return sorted(name for name in names if "kda" in name)

  assert kernels("chunks") == ["kda_backward", "kda_forward_saving"]
  assert kernels("arguments") == [
    "kda_backward", "kda_forward", "kda_forward_saving",
  ]  # fmt: skip
