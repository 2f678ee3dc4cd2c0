# SPDX-License-Identifier: Apache-2.0
"""Mla against its definition in float64, and its forms against each other."""

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special

from attnres_jax import config as config_lib
from attnres_jax.models import mixers
from attnres_jax.models.mixers import cache as cache_lib
from attnres_jax.models.residuals import base
from tests import tiny_network
from tests.models import cores
from tests.models import reference

BATCH, TOKENS, WIDTH, HEADS = 2, 12, 24, 3
RANK, OWN, SHARED, VALUE = 10, 6, 4, 5

# Options of Kimi K3.
OPTIONS = {
  "plain": {},
  "rank": dict(query_rank=7),
  "gate": dict(output_gate=True),
  "all": dict(query_rank=7, output_gate=True),
}


def _config(dtype="float32", qkv_norm=False, **mla):
  return tiny_network.config(
    width=WIDTH,
    num_layers=1,
    mixers=("mla",),
    num_heads=HEADS,
    init_std=WIDTH**-0.5,
    dtype=dtype,
    qkv_norm=qkv_norm,
    mla=config_lib.MlaConfig(
      latent_rank=RANK,
      nope_width=OWN,
      shared_width=SHARED,
      value_width=VALUE,
      **mla,
    ),
  )


def _module(**kwargs):
  module = mixers.Mla(_config(**kwargs), rngs=nnx.Rngs(params=3))
  module.latent_norm.gain[...] = jnp.linspace(0.5, 2.0, RANK)
  if rank := kwargs.get("query_rank"):
    module.query_latent_norm.gain[...] = jnp.linspace(2.0, 0.5, rank)
  if kwargs.get("qkv_norm"):
    module.query_norm.gain[...] = jnp.linspace(0.5, 2.0, OWN + SHARED)
    module.shared_norm.gain[...] = jnp.linspace(2.0, 0.5, SHARED)
  return module


def _inputs(dtype="float32"):
  x = jax.random.normal(jax.random.key(1), (BATCH, TOKENS, WIDTH))
  return (2 * x).astype(dtype)


def _definition(module, x_TD):
  """One sequence, directly from the formulas."""
  weights = cores.weights(module)
  x_TD = np.asarray(x_TD, np.float64)

  def norm(name, a_TC):
    if name not in weights:
      return a_TC
    rms_T1 = np.sqrt((a_TC**2).mean(1, keepdims=True) + 1e-6)
    return a_TC / rms_T1 * weights[name]["gain"]

  latent_TR, shared_TH = np.split(x_TD @ weights["compress"], [RANK], axis=1)
  latent_TR = norm("latent_norm", latent_TR)
  shared_TH = norm("shared_norm", shared_TH)
  asking_TC = x_TD
  if "query_down" in weights:
    asking_TC = norm("query_latent_norm", x_TD @ weights["query_down"])
  heads = []
  for n in range(HEADS):
    query_TH = norm("query_norm", asking_TC @ weights["query"][:, n])
    expanded_TC = latent_TR @ weights["expand"][:, n]
    key_TH = np.concatenate([expanded_TC[:, :OWN], shared_TH], axis=1)
    heads.append((query_TH, key_TH, expanded_TC[:, OWN:]))
  stacked = [np.stack(parts, axis=1)[None] for parts in zip(*heads)]
  (mixed_TNV,) = reference.attend(*stacked, np.zeros((1, len(x_TD))))
  if "gate" in weights:
    gate_TNV = np.einsum("td,dnv->tnv", x_TD, weights["gate"])
    mixed_TNV = mixed_TNV * special.expit(gate_TNV)
  return np.einsum("tnv,nvd->td", mixed_TNV, weights["output"])


@jax.jit
def _extend(module, x_BTD, cache, chunk):
  """The outputs, and the cache after the chunk."""
  y_BTD, added = module.extend(x_BTD, cache, chunk)
  layer = lambda tree: jax.tree.map(lambda a: a[None], tree)
  stacked = cache_lib.append(
    cache_lib.Cache(chunk.start_B, layer(cache)),
    cache_lib.Added(chunk, layer(added)),
  )
  return y_BTD, jax.tree.map(lambda a: a[0], stacked.states)


@pytest.mark.parametrize(
  "options", [*OPTIONS.values(), dict(qkv_norm=True)], ids=[*OPTIONS, "norms"]
)
def test_is_its_definition(options):
  """At once, and as the first tokens of a cache."""
  module, x_BTD = _module(**options), _inputs()
  expected = np.stack([_definition(module, x_TD) for x_TD in x_BTD])
  cores.assert_close(cores.apply(module, x_BTD), expected)
  for heads in (False, True):
    # They need no cache, which may be full at once.
    cache = module.init_cache(
      BATCH, TOKENS if "qkv_norm" in options else 0, heads
    )
    actual, _ = _extend(module, x_BTD, cache, cores.chunk(0, TOKENS))
    cores.assert_close(actual, expected)


def test_packed_documents_do_not_meet():
  module, x_BTD = _module(), _inputs()
  segments_T = np.array([1] * 6 + [2] + [3] * 5)
  cores.assert_documents_apart(module, x_BTD, segments_T, _definition)


@pytest.mark.parametrize(
  "pieces,option",
  [
    ([12], "plain"), ([5, 1, 1, 5], "plain"), ([1] * 12, "plain"),
    ([5, 1, 1, 5], "all"),
  ],
)  # fmt: skip
@pytest.mark.parametrize("heads", [False, True])
def test_absorbed_is_expanded(pieces, heads, option):
  """A cache with extra room, filled in pieces; or one of keys and values."""
  module, x_BTD = _module(**OPTIONS[option]), _inputs()
  cache = module.init_cache(BATCH, TOKENS + 3, heads)
  if not heads:
    assert cache.arrays[0].shape == (BATCH, 1, TOKENS + 3, RANK + SHARED)
  cores.assert_pieces(_extend, module, x_BTD, cache, pieces)


def test_latents_cannot_stand_for_several_inputs():
  module, x_BTD = _module(), _inputs()
  different = base.QKV(x_BTD, x_BTD, 2 * x_BTD)
  with pytest.raises(ValueError, match=r"need init_cache\(heads=True\)"):
    module.extend(
      different, module.init_cache(BATCH, 1), cores.chunk(0, TOKENS)
    )


def test_bfloat16():
  module, wide = _module(dtype="bfloat16"), _module()
  x_BTD = _inputs("bfloat16")
  expected = cores.apply(wide, x_BTD.astype(jnp.float32))
  cores.assert_rounds_activations_only(module, x_BTD, expected, 0.02)
  cache = module.init_cache(BATCH, TOKENS)
  y, cache = _extend(module, x_BTD, cache, cores.chunk(0, TOKENS))
  assert y.dtype == cache.arrays[0].dtype == jnp.bfloat16
  cores.assert_close(y.astype(jnp.float32), expected, 0.02)
