# SPDX-License-Identifier: Apache-2.0
"""Small pipelines, and what one device computes instead."""

import contextlib
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnres_jax import config as config_lib
from attnres_jax import models
from attnres_jax.common import precision
from attnres_jax.common import sharding
from attnres_jax.config import errors
from attnres_jax.models import loss as loss_lib
from attnres_jax.pipeline import spmd
from tests import compare
from tests import tiny_network

# Tokens that ranks cannot share equally.
VOCAB, WIDTH, LENGTH = 16, 16, 7
# Ranks, virtual stages, microbatches, sublayers, sublayers per block.
SMALL = (2, 2, 4, 4, 3)


# Experts are stored over all devices.
MOE = dataclasses.replace(tiny_network.KINDS["moe"], num_experts=8)


def config(shape, mesh=None, *, scheme="block_attnres", pipeline=None, **model):
  ranks, stages, microbatches, sublayers, block = shape
  mesh = config_lib.MeshConfig(**{"stage": ranks, "data": 1} | (mesh or {}))
  rows = microbatches * mesh.data * mesh.fsdp * mesh.expert
  return config_lib.RunConfig(
    model=tiny_network.config(
      scheme,
      vocab_size=VOCAB,
      width=WIDTH,
      num_layers=sublayers // 2,
      block_size=block,
      **model,
    ),
    data=config_lib.DataConfig(sequence_length=LENGTH, batch_size=rows),
    mesh=mesh,
    pipeline=config_lib.PipelineConfig(
      stages, microbatches, **(pipeline or {})
    ),
  )


@contextlib.contextmanager
def in_float64(config):
  """Results of the run in float64, which no config can request."""
  with (
    pytest.MonkeyPatch.context() as patch,
    jax.enable_x64(True),
    # Master weights are float32 where only shapes are asked for.
    jax.numpy_dtype_promotion("standard"),
  ):
    patch.setattr(errors, "check_in", lambda *_: None)
    model = dataclasses.replace(config.model, dtype="float64")
    yield dataclasses.replace(config, model=model)


def draw(config, seed=0):
  """A model of random numbers, and rows of which some count.

  The numbers are the same in float32 and in float64.
  """
  rng = np.random.default_rng(seed)
  dtype = precision.wide(config.model.dtype)

  def draw(path, leaf):
    is_gain = "gain" in jax.tree_util.keystr(path)
    drawn = 0.2 * rng.standard_normal(leaf.shape, np.float32)
    return (is_gain + drawn).astype(dtype)

  like = jax.eval_shape(lambda: models.build_model(config.model))
  model = jax.tree.map_with_path(draw, like)
  rows = config.data.batch_size
  tokens = rng.integers(0, VOCAB, (rows, LENGTH + 1), dtype=np.int32)
  weights = rng.integers(0, 2, (rows, LENGTH)).astype(np.float32)
  rows = (tokens[:, :-1], tokens[:, 1:], weights)
  return model, loss_lib.Examples(*rows, None)


@functools.cache
def on_one_device(config):
  def total(model, batch):
    sums = loss_lib.cross_entropy(
      model.hidden(batch.inputs),
      model.embedding.head_DV(),
      batch.targets,
      batch.weights,
      z_loss=config.loss.z_loss,
    )
    return sums.total, sums

  apply = jax.jit(jax.grad(total, has_aux=True))
  # Loss first, as a pipeline has it.
  return lambda *arguments: apply(*arguments)[::-1]


def unstaged(config):
  """The result of one device."""
  plain = config_lib.MeshConfig(data=1), config_lib.PipelineConfig()
  return dataclasses.replace(config, mesh=plain[0], pipeline=plain[1])


def make(config):
  return spmd.make_pipeline(config, sharding.make_mesh(config.mesh))


@functools.cache
def compile_step(config, method="value_and_grad"):
  model, batch = draw(config)
  apply = jax.jit(getattr(make(config), method))
  return apply.lower(model, batch).compile(), (model, batch)


def call(compiled, arguments):
  return compiled(*jax.device_put(arguments, compiled.input_shardings[0]))


def assert_equal(actual, expected, rounding):
  for a, b in zip(actual[0], expected[0]):
    np.testing.assert_allclose(a, b, rtol=rounding)
  # Sums of many terms, whose order differs.
  compare.trees(actual[1], expected[1], rounding, plus=0)


def assert_as_on_one_device(config):
  """In float64, where rounding cannot hide a mistake."""
  with in_float64(config) as config:
    compiled, arguments = compile_step(config)
    expected = on_one_device(unstaged(config))(*arguments)
    assert all(a.dtype == jnp.float64 for a in jax.tree.leaves(expected))
    assert_equal(call(compiled, arguments), expected, 1e-12)
  return compiled


def of_all_kinds(mesh, **fields):
  fields = tiny_network.KINDS | dict(last_mixer="mla", moe=MOE) | fields
  return config((2, 1, 2, 4, 2), mesh, **fields)
