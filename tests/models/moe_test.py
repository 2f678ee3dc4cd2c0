# SPDX-License-Identifier: Apache-2.0
"""Moe against its definition; the router; the load."""

import contextlib
import math

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special

from attnres_jax import config as config_lib
from attnres_jax.common import sharding
from attnres_jax.common import topology
from attnres_jax.models import moe
from attnres_jax.plan import collectives
from attnres_jax.plan import hlo
from attnres_kernels import platforms
from tests import compare
from tests import jaxprs
from tests import tiers
from tests import tiny_network
from tests.models import cores

BATCH, TOKENS, WIDTH = 8, 5, 12
EXPERTS, TOP_K, HIDDEN, FACTOR = 8, 3, 4, 2.446


def _config(dtype="float32", activation="silu", **kwargs):
  shape = dict(num_experts=EXPERTS, top_k=TOP_K, expert_width=HIDDEN) | kwargs
  return tiny_network.config(
    width=WIDTH,
    num_layers=1,
    num_heads=1,
    init_std=WIDTH**-0.5,
    dtype=dtype,
    activation=config_lib.ActivationConfig(activation, 0.5, 0.7),
    moe=config_lib.MoeConfig(**shape),
  )


def _module(seed=3, **kwargs):
  return moe.Moe(_config(**kwargs), rngs=nnx.Rngs(params=seed))


def _inputs(dtype="float32", seed=1):
  x = jax.random.normal(jax.random.key(seed), (BATCH, TOKENS, WIDTH))
  return x.astype(dtype)


UNEVEN = np.linspace(-0.3, 0.3, EXPERTS, dtype="float32")


def _definition(module, x_BTD):
  """The outputs, and the experts of each token, from the formulas."""
  weights = cores.weights(module)

  def swiglu(x, gate, up, down):
    g, u = x @ gate, x @ up
    if module.activation.name == "situ":
      g_bounded, u = 0.5 * np.tanh(g / 0.5), 0.7 * np.tanh(u / 0.7)
      return (g_bounded * special.expit(g) * u) @ down
    return (g * special.expit(g) * u) @ down

  def one_token(x):
    score = special.expit(x @ weights["router"])
    biased = score + weights["selection_bias"]
    order = np.argsort(-biased, kind="stable")
    low = x @ weights["latent_down"] if "latent_down" in weights else x
    y = 0.0 * low
    for e in order[:TOP_K]:
      gate, up = np.swapaxes(weights["gate_and_up"][e], 1, 2)
      share = score[e] / score[order[:TOP_K]].sum()
      y = y + FACTOR * share * swiglu(low, gate, up, weights["down"][e])
    if "latent_norm" in weights:
      rms = np.sqrt((y**2).mean() + 1e-6)
      y = y / rms * weights["latent_norm"]["gain"]
    if "latent_up" in weights:
      y = y @ weights["latent_up"]
    if "shared" in weights:
      y = y + swiglu(x, **weights["shared"])
    return y, order[:TOP_K]

  flat = np.asarray(x_BTD, np.float64).reshape(-1, WIDTH)
  outputs, experts = zip(*map(one_token, flat))
  return np.reshape(outputs, x_BTD.shape), np.array(experts)


def _loss(module, x, segments=None):
  return jnp.sum(jnp.sin(module(x, segments)))


_gradient = jax.jit(jax.grad(_loss))
_value_and_gradients = jax.jit(jax.value_and_grad(_loss, argnums=(0, 1)))


K3 = dict(activation="situ", latent_width=8, latent_norm=True)
# All tokens go to the same experts.
PREFERRED = 2.0 * np.isin(np.arange(EXPERTS), (1, 3, 4))


@pytest.mark.parametrize(
  "kwargs,bias",
  [
    *((dict(num_shared=count), UNEVEN) for count in (0, 1, 2)),
    # Latents, and units with bounds that most of them reach.
    (K3, 0 * UNEVEN),
    (dict(activation="situ"), 0 * UNEVEN),
    (dict(latent_width=8, num_shared=0), 0 * UNEVEN),
    ({}, PREFERRED),
  ],
)
def test_is_its_definition(kwargs, bias):
  """No token is dropped."""
  module, x_BTD = _module(**kwargs), 3 * _inputs()
  if "latent_norm" in kwargs:
    module.latent_norm.gain[...] = jnp.linspace(0.5, 2.0, 8)
  module.selection_bias[...] = jnp.float32(bias)
  expected, experts = _definition(module, x_BTD)
  assert bias is not PREFERRED or set(experts.flat) == {1, 3, 4}
  cores.assert_close(cores.apply(module, x_BTD), expected)


def _dense(module, x_BTD):
  """Every expert for every token, and a mask: for gradients by autodiff."""
  weights = nnx.to_pure_dict(nnx.state(module))
  score_BTE = jax.nn.sigmoid(x_BTD @ weights["router"])
  biased_BTE = score_BTE + weights["selection_bias"][None, None]
  least_BT1 = jnp.sort(biased_BTE, axis=-1)[..., -TOP_K, None]
  chosen_BTE = jnp.where(biased_BTE >= least_BT1, score_BTE, 0.0)
  weight_BTE = FACTOR * chosen_BTE / chosen_BTE.sum(-1, keepdims=True)
  both_GBTEF = jnp.einsum("btd,egfd->gbtef", x_BTD, weights["gate_and_up"])
  y_BTD = jnp.einsum(
    "bte,btef,efd->btd",
    weight_BTE,
    jax.nn.silu(both_GBTEF[0]) * both_GBTEF[1],
    weights["down"],
  )
  return y_BTD + module.shared(x_BTD)


def test_gradients_are_those_of_the_dense_form():
  module, x_BTD = _module(), _inputs()
  module.selection_bias[...] = jnp.asarray(UNEVEN)
  dense = lambda module, x: jnp.sum(jnp.sin(_dense(module, x)))
  actual = jax.jit(jax.grad(_loss, argnums=(0, 1)))(module, x_BTD)
  expected = jax.jit(jax.grad(dense, argnums=(0, 1)))(module, x_BTD)
  for gradient in (actual[0], expected[0]):
    gradient.selection_bias[...] = jnp.zeros(EXPERTS)  # Tested below.
  compare.trees(actual, expected, 1e-5)


def test_ties_go_to_the_lower_index():
  module, x_UD = _module(), _inputs().reshape(-1, WIDTH)
  module.router[...] = jnp.zeros((WIDTH, EXPERTS))
  weight_UK, expert_UK = module.route(x_UD)
  np.testing.assert_array_equal(expert_UK, [list(range(TOP_K))] * len(x_UD))
  np.testing.assert_allclose(weight_UK, FACTOR / TOP_K, rtol=1e-6)


def test_router_is_float32():
  """Activations of half precision are scored unchanged."""
  module, x_UD = _module(), _inputs("bfloat16").reshape(-1, WIDTH)
  weight_UK, expert_UK = module.route(x_UD)
  expected_weight, expected_expert = module.route(x_UD.astype(jnp.float32))
  assert weight_UK.dtype == jnp.float32
  np.testing.assert_array_equal(weight_UK, expected_weight)
  np.testing.assert_array_equal(expert_UK, expected_expert)


def test_scores_in_three_parts():
  """The parts of the router add up to it, bit for bit; errors are float32's."""
  rng = np.random.default_rng(0)
  router_DE = jnp.asarray(rng.standard_normal((64, 24)) / 7, jnp.float32)
  in_parts = jax.jit(moe.logits_in_parts)
  powers = jnp.asarray(2.0 ** rng.integers(-5, 5, 64), jnp.bfloat16)
  actual = in_parts(jnp.diag(powers), router_DE)
  scale = powers.astype(jnp.float32)[:, None]
  np.testing.assert_array_equal(actual, scale * router_DE)
  x_UD = jnp.asarray(rng.standard_normal((512, 64)), jnp.bfloat16)
  exact = np.asarray(x_UD, np.float64) @ np.asarray(router_DE, np.float64)
  error = lambda logits: np.std(np.asarray(logits, np.float64) - exact)
  wide = error(jax.jit(moe.exact_logits)(x_UD, router_DE))
  assert error(in_parts(x_UD, router_DE)) < 1.5 * wide
  assert wide < error(x_UD @ router_DE.astype(x_UD.dtype)) / 1000


def test_checkpointing_keeps_the_choice():
  """The backward pass neither scores nor chooses again."""
  module, x_BTD = _module(num_shared=0), _inputs("bfloat16")
  routing = jax.checkpoint_policies.save_only_these_names(moe.ROUTING)
  for policy, count in ((routing, 1), (None, 2)):
    loss = jax.checkpoint(_loss, policy=policy)
    program = str(jax.make_jaxpr(jax.grad(loss))(module, x_BTD))
    assert program.count("top_k[") == count


def test_bfloat16():
  module, x_BTD = _module(), _inputs("bfloat16")
  expected, _ = _definition(module, x_BTD.astype(jnp.float32))
  cores.assert_rounds_activations_only(module, x_BTD, expected, 0.02)


def test_what_is_kept_for_backward():
  """No activation in float32, and one array of the experts' products."""
  module, x_BTD = _module(), _inputs("bfloat16")
  saved = jaxprs.saved(lambda module, x: module(x), module, x_BTD)
  assert not [a for a in saved if a.dtype == jnp.float32 and WIDTH in a.shape]
  pairs = BATCH * TOKENS * TOP_K
  assert len([a for a in saved if a.shape == (pairs, 2 * HIDDEN)]) == 1


def _load(module, x_BTD, counts=None):
  """Tokens per expert, counted by hand."""
  _, experts = _definition(module, x_BTD)
  if counts is not None:
    experts = experts[np.asarray(counts).reshape(-1)]
  return np.bincount(experts.flat, minlength=EXPERTS)


def _found_load(gradient):
  bias = gradient.selection_bias[...]
  assert bias.dtype == jnp.float32
  return bias


def test_load_is_the_gradient_of_the_bias():
  module, x_BTD = _module(), _inputs()
  gradient = _gradient(module, x_BTD)
  load = _load(module, x_BTD)
  assert load.sum() == BATCH * TOKENS * TOP_K and load.min() < load.max()
  np.testing.assert_array_equal(_found_load(gradient), load)
  # Whatever the loss is multiplied with.
  scaled = jax.jit(jax.grad(lambda *a: 0.0 * _loss(*a)))(module, x_BTD)
  np.testing.assert_array_equal(_found_load(scaled), load)


def test_padding_is_no_load():
  module, x_BTD = _module(), _inputs()
  segments = (jnp.arange(BATCH * TOKENS) % 3).reshape(BATCH, TOKENS)
  gradient = _gradient(module, x_BTD, segments)
  expected = _load(module, x_BTD, segments > 0)
  np.testing.assert_array_equal(_found_load(gradient), expected)
  np.testing.assert_array_equal(
    cores.apply(module, x_BTD, segments), cores.apply(module, x_BTD)
  )


def _mesh(**axes):
  return sharding.make_mesh(config_lib.MeshConfig(**dict(data=1) | axes))


def _over(mesh, ambient=True):
  """`_value_and_gradients` with rows and weights split over a mesh."""

  def loss(*arguments):
    with sharding.ambient(mesh) if ambient else contextlib.nullcontext():
      return _loss(*arguments)

  both = jax.value_and_grad(loss, argnums=(0, 1))  # Compiled once.

  def call(*arguments):
    rows = sharding.batch_sharding(mesh)
    shardings = _shardings(mesh, arguments[0]), *(rows for _ in arguments[1:])
    return jax.jit(both, in_shardings=shardings)(*arguments)

  return call


def _shardings(mesh, module):
  tree = dict(moe=dict(core=module))
  return sharding.state_sharding(tree, mesh)["moe"]["core"]


@tiers.parametrize(
  "axes,ambient,fields",
  [
    (dict(fsdp=2, tensor=2), True, {}),
    (dict(data=2, fsdp=2, expert=2), True, {}),
    (dict(expert=2, tensor=2), True, K3),
    pytest.param(dict(data=8), True, {}, marks=pytest.mark.slow),
    pytest.param(dict(expert=2), True, {}, marks=pytest.mark.slow),
    # Other pairs of axes are in tests/meshes_test.py, in whole networks.
    (dict(expert=2), False, {}),
  ],
)
def test_over_devices(axes, ambient, fields):
  """Rows and weights split: outputs, gradients and load of the whole batch."""
  module, x_BTD = _module(**fields), _inputs()
  segments = jnp.ones((BATCH, TOKENS), jnp.int32).at[3:, 1:].set(0)
  arguments = module, x_BTD, segments
  actual = _over(_mesh(**axes), ambient)(*arguments)
  expected = _value_and_gradients(*arguments)
  compare.trees(actual, expected, 1e-5)
  np.testing.assert_array_equal(
    _found_load(actual[1][0]), _load(module, x_BTD, segments > 0)
  )


def test_all_tokens_to_one_expert():
  """In as many pieces as it takes."""
  module, x_BTD = _module(num_experts=8, top_k=1), _inputs()
  module.selection_bias[...] = jnp.where(jnp.arange(8) == 5, 2.0, 0.0)
  actual = _over(_mesh(expert=8))(module, x_BTD)
  load = _found_load(actual[1][0])
  np.testing.assert_array_equal(load, 40 * (np.arange(8) == 5))
  expected = _value_and_gradients(module, x_BTD)
  compare.trees(actual, expected, 1e-5)


@pytest.mark.parametrize("uneven", [False, True])
def test_the_route_of_tpu_over_devices(uneven, monkeypatch):
  """Kernels, in interpret mode; of several pieces if experts are uneven."""
  monkeypatch.setattr(
    platforms, "by_platform", lambda args, default, *, tpu, **_: tpu(*args)
  )
  module, x_BTD = _module(num_experts=8, num_shared=0), _inputs()
  if uneven:
    module.selection_bias[...] = jnp.where(jnp.arange(8) < 3, 2.0, 0.0)
  call = _over(_mesh(expert=4, fsdp=2))
  with platforms.interpreted():
    result = call(module, x_BTD)
    program = str(jax.make_jaxpr(call)(module, x_BTD))
  for name in ("forward", "backward", "sum_rows"):
    assert f"experts_{name}" in program
  monkeypatch.undo()
  expected = _value_and_gradients(module, x_BTD)
  compare.trees(result, expected, 1e-5)


def test_pieces_hold_the_usual_number_of_rows():
  """Memory of rows does not grow with the devices that tokens come from."""
  tokens = jax.ShapeDtypeStruct((64, 4, WIDTH), jnp.float32)
  module = jax.eval_shape(lambda: _module(num_experts=32))
  for devices in (2, 8):
    jaxpr = jax.make_jaxpr(_over(_mesh(expert=devices)))(module, tokens)
    pairs = 64 // devices * 4 * TOP_K
    rows = {
      a.shape[0] for a in jaxprs.arrays(jaxpr) if a.shape[1:] == (HIDDEN,)
    }
    assert rows & {math.ceil(1.125 * pairs)} and max(rows) < 1.5 * pairs + 64


@pytest.mark.needs("libtpu")
def test_what_travels_on_tpu():
  """Tokens over `expert`, whole experts in bfloat16 over `fsdp`."""
  width, hidden, experts = 768, 128, 16
  config = tiny_network.config(
    width=width,
    dtype="bfloat16",
    moe=config_lib.MoeConfig(
      num_experts=experts, top_k=2, expert_width=hidden, num_shared=0
    ),
  )
  mesh = sharding.make_mesh(
    config_lib.MeshConfig(data=1, fsdp=2, expert=4), topology.devices("v5e:2x4")
  )
  module = jax.eval_shape(lambda: moe.Moe(config, rngs=nnx.Rngs(params=0)))
  placed = _shardings(mesh, module)
  rows = sharding.batch_sharding(mesh)

  def both(module, x):
    with sharding.ambient(mesh):
      y, pull = jax.vjp(lambda module, x: module(x), module, x)
      return pull(y)

  arguments = (
    sharding.with_sharding(module, placed),
    jax.ShapeDtypeStruct((8, 64, width), jnp.bfloat16, sharding=rows),
  )
  step = jax.jit(both, out_shardings=(placed, rows))
  compiled = step.lower(*arguments).compile()
  sent = [
    (op.kind, collectives.axes_of(op.group, mesh.shape), array)
    for op in collectives.of_program(hlo.Program(compiled.as_text()))
    for array in op.arrays
  ]
  rows = experts // 4 * hidden
  weights = {
    (kind, str(a))
    for kind, axes, a in sent
    if axes == "fsdp" and width in a.dims[1:]
  }
  assert weights == {
    ("all-gather", f"bf16[{rows},{width}]"),
    ("all-gather", f"bf16[{rows // 2},{width}]"),
    ("reduce-scatter", f"f32[{2 * rows},{width}]"),
    ("reduce-scatter", f"f32[{rows},{width}]"),
  }
  tokens = {(*place, a.dtype, math.prod(a.dims)) for *place, a in sent}
  assert ("all-gather", "expert", "bf16", 64 * width) in tokens
  assert ("reduce-scatter", "expert", "bf16", 4 * 64 * width) in tokens


def test_devices_share_the_work():
  """Each computes the rows it has: no gathering, one reduction of gradients."""
  mesh = _mesh(data=8)
  everywhere = sharding.replicated(mesh)

  def loss(module, x):
    with sharding.ambient(mesh):
      return _loss(module, x)

  gradient = jax.jit(
    jax.grad(loss),
    in_shardings=(everywhere, sharding.batch_sharding(mesh)),
    out_shardings=everywhere,
  )
  program = gradient.lower(_module(), _inputs()).compile().as_text()
  assert "all-reduce" in program
  assert "all-gather" not in program and "all-to-all" not in program
