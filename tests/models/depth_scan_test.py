# SPDX-License-Identifier: Apache-2.0
"""One scan over depth blocks computes what the unrolled form computes."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnres_jax import config as config_lib
from attnres_jax import models
from attnres_jax import sharding
from attnres_jax import train_state
from attnres_jax.models import stack
from tests import jaxprs
from tests import tiny_network
from tests.models import trunks


@pytest.fixture(autouse=True)
def anything_in_new_arrays(monkeypatch):
  """As on a TPU; a CPU fills them with zeros, which would hide a read."""
  monkeypatch.setattr(
    jax.lax, "empty", lambda shape, dtype: jnp.full(shape, jnp.nan, dtype)
  )


def _value(layers, module, embedding, *, remat, depth_loop, kinds=None):
  kinds = kinds or [trunks.KINDS[l % 2] for l in range(module.num_sublayers)]
  return trunks.score(
    stack.run(
      layers, kinds, module, embedding, None,
      scan=True, remat=remat, depth_loop=depth_loop,
    )
  )  # fmt: skip


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(
  "name,num_sublayers,remat,fields",
  [
    # Blocks that begin in the middle of a pattern, and a shorter one.
    ("block_attnres", 13, "none", dict(block_size=3)),
    pytest.param(
      "block_attnres", 10, "full", dict(block_size=4), marks=pytest.mark.slow
    ),
    pytest.param(
      "full_attnres", 11, "none", dict(schedule_size=4), marks=pytest.mark.slow
    ),
    ("full_attnres", 6, "full", dict(schedule_size=2)),
    pytest.param(
      "block_attnres", 8, "dots", dict(block_size=2), marks=pytest.mark.slow
    ),
    # Nothing is open when a sublayer reads, or nothing is ever complete.
    pytest.param(
      "full_attnres", 6, "none", dict(schedule_size=1), marks=pytest.mark.slow
    ),
    pytest.param(
      "block_attnres", 6, "full", dict(block_size=1), marks=pytest.mark.slow
    ),
    pytest.param(
      "block_attnres", 6, "none", dict(block_size=9), marks=pytest.mark.slow
    ),
  ],
)
def test_scan_is_unrolled(name, num_sublayers, remat, fields):
  results, scans = _both_forms(name, num_sublayers, fields, remat=remat)
  # The unrolled form may have some, inside of blocks.
  assert scans[0] == 1
  _assert_equal(*results)


@pytest.mark.slow
@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("remat", ["none", "full"])
@pytest.mark.parametrize(
  "name,fields",
  [
    ("block_attnres", dict(block_size=4)),
    ("full_attnres", dict(schedule_size=4)),
  ],
)
def test_several_patterns(name, fields, remat):
  """Two loops, then sublayers that repeat nothing; blocks end within each."""
  mixer, mlp = trunks.KINDS
  kinds = [mlp, mlp, *([mixer, mlp, mixer] * 2), mixer, mlp]
  results, scans = _both_forms(name, 10, fields, remat=remat, kinds=kinds)
  assert scans[0] == 2
  _assert_equal(*results)


def _both_forms(name, num_sublayers, fields, **options):
  """Values and gradients of the scan and unrolled; how many scans there are."""
  layers, embedding = trunks.toy(num_sublayers)
  module = trunks.scheme(name, num_sublayers, **fields)
  results, scans = [], []
  for form in ("scan", "unrolled"):
    value = functools.partial(_value, depth_loop=form, **options)
    gradient = jax.jit(jax.value_and_grad(value, argnums=(0, 1, 2)))
    results.append(gradient(layers, module, embedding))
    scans.append(jaxprs.count(("scan",), value, layers, module, embedding))
  return results, scans


def _assert_equal(*results, atol=1e-12):
  for a, b in zip(*map(jax.tree.leaves, results), strict=True):
    scale = 1 + np.abs(np.asarray(b)).max()
    np.testing.assert_allclose(a, b, rtol=0, atol=atol * scale)


# Options of a read that change what goes through the bank.
READS: dict[str, dict[str, Any]] = {
  "heads": dict(heads=2),
  "rank": dict(rank=3),
  "null": dict(null="learned"),
  "value_query": dict(value_query=True),
  "scale": dict(scale="sum"),
}


@pytest.mark.slow
@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("option", READS)
@pytest.mark.parametrize(
  "name,fields",
  [
    ("block_attnres", dict(block_size=2)),
    ("full_attnres", dict(schedule_size=2)),
  ],
)
def test_options_of_reads(name, fields, option):
  read = config_lib.DepthReadConfig(**READS[option])
  results, _ = _both_forms(name, 6, dict(read=read, **fields), remat="none")
  _assert_equal(*results, atol=1e-11)


def _model(config):
  """With random queries; and more random numbers."""
  model, rng = models.build_model(config), np.random.default_rng(0)
  residual: Any = model.residual
  query = residual.queries.query
  query[...] = jnp.float32(0.5 * rng.standard_normal(query.shape))
  return model, rng


def _gradients(config, **changes):
  """The mean of a model's squared logits, and its gradients."""
  model, rng = _model(dataclasses.replace(config, **changes))
  tokens = jnp.int32(rng.integers(0, config.vocab_size, (2, 8)))
  documents = jnp.int32([[0] * 3 + [1] * 5, [0] * 8])

  def value(model):
    return jnp.mean(jnp.square(model(tokens, documents)))

  # JAX refuses to lower the gradient of tiled attention in bfloat16 otherwise.
  with jax.numpy_dtype_promotion("standard"):
    return jax.jit(jax.value_and_grad(value))(model)


def _far(a, b):
  """The distance of gradients, as a part of their size."""
  pairs = zip(*map(jax.tree.leaves, (a, b)), strict=True)
  found = [[np.float64(x).ravel() for x in pair] for pair in pairs]
  a, b = (np.concatenate(x) for x in zip(*found))
  return np.linalg.norm(a - b) / np.linalg.norm(b)


@pytest.mark.parametrize(
  "name",
  ["block_attnres", pytest.param("full_attnres", marks=pytest.mark.slow)],
)
@pytest.mark.parametrize(
  "dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)]
)
def test_networks(name, dtype):
  """In bfloat16, both forms are as far from float32."""
  fields = dict(block_size=2) if name == "block_attnres" else {}
  config = tiny_network.config(name, num_layers=3, schedule_size=2, **fields)
  scanned, unrolled = (
    _gradients(config, dtype=dtype, depth_loop=form)
    for form in ("scan", "unrolled")
  )
  if dtype == "float32":
    assert 0 < _far(scanned, unrolled) < 1e-5
    return
  exact = _gradients(config, depth_loop="unrolled")
  assert _far(scanned, exact) < 1.1 * _far(unrolled, exact)


@pytest.mark.parametrize("tokens", [8, pytest.param(7, marks=pytest.mark.slow)])
def test_meshes(tokens):
  """`tensor` divides the tokens of a row, or does not."""
  config = tiny_network.config(num_layers=2, block_size=1, depth_loop="scan")
  model, rng = _model(config)
  tokens_BT = jnp.int32(rng.integers(0, config.vocab_size, (4, tokens)))

  def value(model, tokens_BT):
    return jnp.mean(jnp.square(model(tokens_BT)))

  results = []
  for mesh in (dict(data=1), dict(data=2, tensor=2)):
    mesh = sharding.make_mesh(config_lib.MeshConfig(**mesh))
    given = jax.device_put((model, tokens_BT), sharding.replicated(mesh))
    with sharding.ambient(mesh):
      results.append(jax.device_get(jax.jit(jax.value_and_grad(value))(*given)))
  assert _far(results[1], results[0]) < 1e-5
  found, expected = (
    result[1].residual.queries.query[...] for result in results
  )
  assert np.abs(expected).max() > 1e-6
  np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-7)


@pytest.mark.parametrize(
  "name,fields",
  [
    ("block_attnres", dict(block_size=3)),
    ("full_attnres", dict(schedule_size=3)),
  ],
)
def test_a_training_step_does_not_grow_with_depth(name, fields):
  """Nor do its metrics, of which some are per layer."""
  sizes = []
  for num_layers in (4, 8):
    config = config_lib.RunConfig(
      model=tiny_network.config(
        name, num_layers=num_layers, depth_loop="scan", **fields
      ),
      data=config_lib.DataConfig(batch_size=1, sequence_length=4),
      mesh=config_lib.MeshConfig(data=1),
    )
    mesh = sharding.make_mesh(config.mesh)
    program = train_state.make_program(config, mesh)
    state = jax.eval_shape(program.init_state)
    batch = {"tokens": jax.ShapeDtypeStruct((1, 5), jnp.int32)}
    # Lowered, since what is traced also has kernels for other platforms.
    text = program.train_step.lower(state, batch).as_text()
    sizes.append(len(text.splitlines()))
  assert sizes[0] == sizes[1]


def test_what_is_kept():
  """Running states that are not in the bank."""
  shape = (1, 64, 32)
  kept = {}
  for name, fields in (
    ("full_attnres", dict(schedule_size=2)),
    ("block_attnres", dict(block_size=2)),
  ):
    model = jax.eval_shape(
      lambda name=name, fields=fields: tiny_network.model(
        name, width=32, num_layers=4, **fields
      )
    )

    def trunk(layers, residual, embedding, model=model):
      return stack.run(
        layers, model.config.sublayer_kinds, residual, embedding, None,
        scan=True, remat="full", depth_loop="scan",
      )  # fmt: skip

    embedding = jax.ShapeDtypeStruct(shape, jnp.float32)
    found = jaxprs.saved(trunk, model.sublayers, model.residual, embedding)
    kept[name] = sum(a.size for a in found if a.size >= 64 * 32) / (64 * 32)
  # Full: outputs and embedding. Block: the first sum of each block, the last
  # sum of all, the blocks, the embedding.
  assert kept == {"full_attnres": 8 + 1, "block_attnres": 4 + 1 + 4 + 1}


@pytest.mark.parametrize(
  "num_sublayers,fields,missing",
  [
    (5, dict(name="prenorm"), "PreNorm"),
    (2, dict(name="block_attnres", block_size=1), "no pattern .* repeats"),
    (5, dict(name="full_attnres", form="one_softmax"), "OneSoftmax"),
  ],
)
def test_scan_by_name_runs_or_raises(num_sublayers, fields, missing):
  module = trunks.scheme(fields.pop("name"), num_sublayers, **fields)
  layers, embedding = trunks.toy(num_sublayers)
  with pytest.raises(config_lib.ConfigError, match=f"depth_loop.*{missing}"):
    jax.eval_shape(
      functools.partial(_value, remat="none", depth_loop="scan"),
      layers, module, embedding,
    )  # fmt: skip
