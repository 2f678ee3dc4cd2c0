# SPDX-License-Identifier: Apache-2.0
"""Requests on meshes against the forward pass on one device.

One network has grouped queries, latents, KDA and experts. The schemes differ in
what they carry between sublayers: a sum, blocks, all outputs, streams.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnres_jax import config as config_lib
from attnres_jax.common import sharding
from attnres_jax.inference import draw
from attnres_jax.inference import engine as engine_lib
from tests import tiny_network

VOCAB, LENGTH, CHUNK, TOKENS = 16, 48, 16, 4
GREEDY = draw.Settings(temperature=0.0)
MESHES = (dict(data=4, fsdp=2), dict(tensor=2), dict(expert=4))
SCHEMES = "prenorm", "block_attnres", "full_attnres", "mhc"
# Roundings of activations differ, as between any two orders of a sum.
TOLERANCES = {"float32": 1e-4, "bfloat16": 0.25}


def _model(name, dtype):
  """Every parameter away from its start, where it may have no effect."""
  fields = tiny_network.KINDS | dict(mixers=("kda", "mla", "attention"))
  model = tiny_network.model(
    name, num_layers=3, num_heads=4, num_kv_heads=2, dtype=dtype, **fields
  )
  rng = np.random.default_rng(0)

  def moved(a):
    return jnp.asarray(a + 0.2 * rng.standard_normal(a.shape), jnp.float32)

  return jax.tree.map(moved, model)


def _prompts():
  """Shorter and longer than a chunk; two begin alike."""
  rng = np.random.default_rng(1)
  prompts = [rng.integers(0, VOCAB, n).tolist() for n in (3, 37, 17)]
  return [*prompts, [*prompts[1][:33], 1, 2]]


def _run(engine, prompts):
  requests = [engine_lib.Request(p, TOKENS, GREEDY) for p in prompts]
  found = [[] for _ in prompts]
  for token in engine.run(requests):
    found[token.request].append((token.id, token.logprob))
  return found


def _check(model, prompts, found, tolerance):
  """Drawn tokens are the most likely ones, with the right probabilities."""
  apply = jax.jit(lambda model, tokens: jax.nn.log_softmax(model(tokens)))
  ids_BT = np.zeros((len(prompts), LENGTH), np.int32)
  for row, prompt, tokens in zip(ids_BT, prompts, found):
    ids = [*prompt, *(id for id, _ in tokens)]
    row[: len(ids)] = ids
  logprob_BTV = np.asarray(apply(model, ids_BT))
  for logprob_TV, prompt, tokens in zip(logprob_BTV, prompts, found):
    assert len(tokens) == TOKENS
    for logprob_V, (id, logprob) in zip(logprob_TV[len(prompt) - 1 :], tokens):
      assert abs(logprob - logprob_V[id]) < tolerance
      assert logprob_V[id] > logprob_V.max() - tolerance


@pytest.mark.slow
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize(
  "mesh",
  MESHES,
  ids=lambda mesh: "-".join(f"{axis}{n}" for axis, n in mesh.items()),
)
def test_on_a_mesh(mesh, name, dtype):
  """In new slots, then in reused ones.

  Prompts that are computed together read as much of a cache as the longest one
  needs.
  """
  model, prompts = _model(name, dtype), _prompts()
  size = dict(data=1) | mesh
  devices = sharding.make_mesh(config_lib.MeshConfig(**size))
  engine = engine_lib.Engine(
    model, slots=8, length=LENGTH, chunk=CHUNK, mesh=devices
  )
  first = _run(engine, prompts)
  _check(model, prompts, first, TOLERANCES[dtype])
  again = _run(engine, prompts)
  _check(model, prompts, again, TOLERANCES[dtype])
  if dtype == "float32":
    ids = [[[id for id, _ in row] for row in run] for run in (first, again)]
    assert ids[0] == ids[1]
