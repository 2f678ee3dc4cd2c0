# SPDX-License-Identifier: Apache-2.0
"""Magnitudes against sums written out in numpy."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from attnres_jax import analysis
from tests import tiers
from tests import tiny_network
from tests.analysis import networks

MOE = tiny_network.KINDS["moe"]


def _rms(array):
  return np.sqrt(np.mean(np.asarray(array, np.float64) ** 2, axis=-1)).mean()


@tiers.parametrize(
  "name", ["prenorm", "block_attnres"], first=["block_attnres"]
)
def test_against_the_definitions(name):
  model, tokens = networks.network(name), networks.tokens(2, 6)
  measured = analysis.magnitudes(model, tokens)
  values, reads = networks.trace(model, tokens[:, :-1])
  np.testing.assert_allclose(
    measured.output_rms, [_rms(v) for v in values[1:]], rtol=1e-5
  )
  np.testing.assert_allclose(
    measured.read_rms, [_rms(h) for h in reads[:-1]], rtol=1e-5
  )
  if name == "prenorm":  # the sum of everything so far
    states = [sum(values[: 2 * t + 1]) for t in (1, 2, 3)]
  else:  # blocks of four sublayers: the open block starts anew after t = 2
    states = [values[1] + values[2], sum(values[1:5]), values[5] + values[6]]
  np.testing.assert_allclose(
    measured.state_rms, [_rms(s) for s in states], rtol=1e-5
  )


@tiers.parametrize(
  "name,fields",
  [
    ("prenorm", {}),
    # The gradient of selection biases is a load, which is not in the norm.
    ("block_attnres", dict(moe=dataclasses.replace(MOE, dense_layers=0))),
    # Keys and values have norms of their own.
    ("mudd", {}),
  ],
  first=0,
)
def test_gradient_norm_per_block(name, fields):
  model, tokens = networks.network(name, **fields), networks.tokens(2, 6)
  measured = analysis.magnitudes(model, tokens)

  @jax.jit
  @jax.value_and_grad
  def loss(model):
    log_p_BTV = jax.nn.log_softmax(model(tokens[:, :-1]))
    targets_BT1 = jnp.asarray(tokens[:, 1:, None])
    return -jnp.mean(jnp.take_along_axis(log_p_BTV, targets_BT1, axis=-1))

  value, gradient = loss(model)
  np.testing.assert_allclose(measured.loss, value, rtol=1e-5)
  leaves = [
    leaf
    for path, leaf in jax.tree_util.tree_leaves_with_path(gradient.sublayers)
    if "selection_bias" not in jax.tree_util.keystr(path)
  ]
  for t in range(3):
    flat = [np.ravel(leaf[t]) for leaf in leaves]
    norm = np.linalg.norm(np.concatenate(flat))
    np.testing.assert_allclose(measured.grad_norm[t], norm, rtol=1e-4)


def test_gradient_by_an_output_is_that_of_the_sum_it_goes_into():
  model, tokens = networks.network("prenorm"), networks.tokens(2, 6)
  measured = analysis.magnitudes(model, tokens)
  assert measured.output_grad_rms.shape == (6,)

  # The last sublayer of a plain sum changes the readout alone.
  _, reads = networks.trace(model, tokens[:, :-1])

  def loss(h_BTD):
    logits_BTV = model.embedding.decode(model.final_norm(h_BTD))
    log_p_BTV = jax.nn.log_softmax(logits_BTV)
    targets_BT1 = jnp.asarray(tokens[:, 1:, None])
    return -jnp.sum(jnp.take_along_axis(log_p_BTV, targets_BT1, axis=-1))

  gradient = jax.grad(loss)(reads[-1])
  np.testing.assert_allclose(
    measured.output_grad_rms[-1], _rms(gradient), rtol=1e-4
  )
