# SPDX-License-Identifier: Apache-2.0
"""Weights that are kept in bfloat16, with an optimiser in float32."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnres_jax import config as config_lib
from attnres_jax import models
from attnres_jax.common import sharding
from attnres_jax.interop import huggingface
from attnres_jax.train import train_state
from tests import tiny_network
from tests.interop import small_checkpoint

# What stays float32: vectors, scores of experts, gates in exponents.
WIDE = (
  r"gain|_conv|a_log|dt_bias|selection_bias|router|beta|_down|(gate|decay)_up"
)


def _run(parameter_dtype, microbatches, mixers):
  model = tiny_network.config(
    **tiny_network.KINDS | dict(mixers=mixers, parameter_dtype=parameter_dtype)
  )
  run = config_lib.RunConfig(
    model=model,
    data=config_lib.DataConfig(sequence_length=6, batch_size=8),
    # Updates are about proportional to gradients, so that rounding stays small.
    optim=config_lib.OptimConfig(
      peak_lr=1.0, eps=1.0, warmup_steps=0, accumulate_steps=microbatches
    ),
    train=config_lib.TrainConfig(steps=3),
    mesh=config_lib.MeshConfig(data=1),
  )
  return train_state.make_program(run, sharding.make_mesh(run.mesh))


def _batch():
  rng = np.random.default_rng(0)
  return {"tokens": rng.integers(0, 16, (8, 7), dtype=np.int32)}


def _kinds(tree):
  return {
    jax.tree_util.keystr(path): leaf.dtype
    for path, leaf in jax.tree.leaves_with_path(tree)
  }


@pytest.mark.more
@pytest.mark.parametrize(
  "microbatches,mixers",
  [
    (1, ("attention",)),
    (2, ("kda", "mla")),
    pytest.param(1, ("kda", "mla"), marks=pytest.mark.slow),
  ],
)
def test_a_step_is_that_of_float32_but_for_rounding(microbatches, mixers):
  narrow = _run("bfloat16", microbatches, mixers)
  wide = _run("float32", microbatches, mixers)
  state = narrow.init_state()
  dtypes = _kinds(state.model)
  for name, dtype in dtypes.items():
    small = re.search(WIDE, name) or "residual" in name
    assert dtype == (jnp.float32 if small else jnp.bfloat16), name
  assert set(dtypes.values()) == {jnp.dtype("float32"), jnp.dtype("bfloat16")}
  moments = [a for a in jax.tree.leaves(state.opt_state) if a.ndim]
  assert moments and {a.dtype for a in moments} == {jnp.dtype("float32")}

  other = wide.init_state()
  same = jax.tree.unflatten(
    jax.tree.structure(other.model),
    [a.astype(jnp.float32) for a in jax.tree.leaves(state.model)],
  )
  other = dataclasses.replace(other, model=same)
  before = jax.device_get(same)
  state, metrics = narrow.train_step(state, _batch())
  other, expected = wide.train_step(other, _batch())
  assert _kinds(state.model) == dtypes
  np.testing.assert_allclose(metrics["loss"], expected["loss"], rtol=1e-5)
  np.testing.assert_allclose(
    metrics["grad_norm"], expected["grad_norm"], rtol=1e-2
  )
  moved = 0.0
  for a, b, c in zip(*map(jax.tree.leaves, (state.model, other.model, before))):
    a, b = np.asarray(a, np.float32), np.asarray(b)
    # Half a unit in the last place, and rounded gradients.
    room = 2.0**-8 * np.abs(b) + 2.0**-6 * np.abs(b - c).max() + 1e-6
    assert (np.abs(a - b) <= room).all()
    moved = max(moved, np.abs(b - c).max())
  assert moved > 0.005


@pytest.mark.more
def test_imported_weights_stay_as_they_are(tmp_path):
  small_checkpoint.write(tmp_path, "kimi_linear", dtype="BF16")
  source = huggingface.read(tmp_path)
  wide = huggingface.load(source)
  config = dataclasses.replace(source.config, parameter_dtype="bfloat16")
  narrow = huggingface.load(dataclasses.replace(source, config=config))
  halves = 0
  for a, b in zip(jax.tree.leaves(narrow), jax.tree.leaves(wide), strict=True):
    np.testing.assert_array_equal(np.asarray(a, np.float32), b)
    halves += a.dtype == jnp.bfloat16
  assert halves > 10
  # Activations are float32: only weights could differ, and do not.
  tokens = np.arange(12, dtype=np.int32)[None]
  run = jax.jit(lambda model: model(tokens))
  np.testing.assert_array_equal(run(narrow), run(wide))


def test_a_token_that_occurs_often_loses_no_gradient():
  """A row of the table's gradient is a sum over 4096 tokens."""
  config = tiny_network.config(parameter_dtype="bfloat16", vocab_size=16)
  model = models.build_model(config)
  tokens = jnp.zeros((1, 4096), jnp.int32)
  gradient = jax.grad(
    lambda m: jnp.sum(m.embedding.encode(tokens).astype(jnp.float32))
  )(model)
  assert float(gradient.embedding.table[0, 0]) == 4096


@pytest.mark.parametrize(
  "fields,words",
  [
    (
      dict(train=config_lib.TrainConfig(average_last=0.1)),
      "train.average_last",
    ),
    (dict(optim=config_lib.OptimConfig(qk_clip=1.0)), "optim.qk_clip"),
    (dict(mesh=config_lib.MeshConfig(stage=2)), "a pipeline"),
  ],
)
def test_what_needs_float32(fields, words):
  model = config_lib.ModelConfig(parameter_dtype="bfloat16")
  message = f"parameter_dtype: got 'bfloat16', expected 'float32' with {words}"
  with pytest.raises(config_lib.ConfigError, match=message):
    config_lib.RunConfig(model=model, **fields)
