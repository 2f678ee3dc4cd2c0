# SPDX-License-Identifier: Apache-2.0
"""The engine with rounded weights and caches."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnres_jax import config as config_lib
from attnres_jax import sharding
from attnres_jax.inference import draw
from attnres_jax.inference import engine as engine_lib
from tests import tiny_network
from tests.models import numpy_rounding

VOCAB, LENGTH, CHUNK, TOKENS = 16, 48, 16, 5
GREEDY = draw.Settings(temperature=0.0)
# Mixers, MLPs, experts and the head: path -> the axes that a product sums over.
SUMMED = {
  r"(attention|kda)/core/(query|key|value)": -3,
  r"(attention|kda|mla)/core/output": (-3, -2),
  r"mla/core/(query|expand)": -3,
  r"mla/core/compress": -2,
  r"(mlp|moe)/core(/shared)?/(gate|up|down)": -2,
  r"embedding/head": -2,
}


def _model(**fields):
  """Parameters away from their start; all kinds of states and experts."""
  fields = tiny_network.KINDS | dict(tie_embeddings=False) | fields
  model = tiny_network.model(**fields)
  rng = np.random.default_rng(0)

  def moved(a):
    return jnp.asarray(a + 0.3 * rng.standard_normal(a.shape), jnp.float32)

  return jax.tree.map(moved, model)


@pytest.fixture(scope="module")
def model():
  return _model(mixers=("kda", "mla", "attention"), num_layers=3)


@pytest.fixture(scope="module")
def prompts():
  """Shorter and longer than a chunk; two begin alike."""
  rng = np.random.default_rng(1)
  prompts = [rng.integers(0, VOCAB, n).tolist() for n in (3, 37)]
  return [*prompts, [*prompts[1][:33], 1, 2]]


def _run(engine, prompts):
  requests = [engine_lib.Request(p, TOKENS, GREEDY) for p in prompts]
  found = [[] for _ in prompts]
  for token in engine.run(requests):
    found[token.request].append((token.id, token.logprob))
  return found


def _rounded_by_numpy(model):
  """The network whose listed matrices are rounded, and how many these are."""
  used = []

  def one(path, a):
    name = jax.tree_util.keystr(path, simple=True, separator="/")
    for pattern, axes in SUMMED.items():
      if re.search(f"{pattern}/value$", name):
        used.append(name)
        return jnp.asarray(numpy_rounding.nearest(np.asarray(a), axes))
    return a

  return jax.tree_util.tree_map_with_path(one, model), used


def test_rounded_weights(model, prompts):
  """What the forward pass gives with weights that numpy has rounded."""
  by_numpy, used = _rounded_by_numpy(model)
  assert len(used) == 22
  engine = engine_lib.Engine(
    model, slots=2, length=LENGTH, chunk=CHUNK, weights="int8"
  )
  found = _run(engine, prompts[:2])
  apply = jax.jit(lambda model, tokens: jax.nn.log_softmax(model(tokens)))
  exact = 0.0
  for prompt, tokens in zip(prompts, found):
    ids = np.zeros((1, LENGTH), np.int32)
    whole = [*prompt, *(id for id, _ in tokens)]
    ids[0, : len(whole)] = whole
    rows = slice(len(prompt) - 1, len(whole) - 1)
    expected = apply(by_numpy, ids)[0, rows]
    logprobs = [logprob for _, logprob in tokens]
    np.testing.assert_allclose(logprobs, expected.max(-1), rtol=0, atol=2e-4)
    exact = max(exact, np.abs(apply(model, ids)[0, rows] - expected).max())
  assert exact > 0.02


def test_requests_and_prefixes_with_a_rounded_cache(model, prompts):
  """Bit for bit, whatever shares the batch, and with a known prefix."""
  engine = engine_lib.Engine(
    model, slots=2, length=LENGTH, chunk=CHUNK, prefix_bytes=10**7,
    weights="int8", cache="int8",
  )  # fmt: skip
  alone = [_run(engine, [prompt])[0] for prompt in prompts]
  assert len(engine.prefixes.find(prompts[2])) == 2
  assert _run(engine, prompts) == alone
  fresh = engine_lib.Engine(
    model, slots=2, length=LENGTH, chunk=CHUNK, weights="int8", cache="int8"
  )
  assert _run(fresh, prompts) == alone


@pytest.mark.parametrize(
  "mesh",
  [
    pytest.param(dict(fsdp=2, expert=2), marks=pytest.mark.slow),
    pytest.param(dict(data=2, expert=2, tensor=2), marks=pytest.mark.slow),
    pytest.param(dict(data=2, fsdp=2, tensor=2), marks=pytest.mark.slow),
  ],
  ids=lambda mesh: "-".join(f"{axis}{n}" for axis, n in mesh.items()),
)
def test_on_a_mesh(mesh, model, prompts):
  size = dict(data=1) | mesh
  devices = sharding.make_mesh(config_lib.MeshConfig(**size))
  both = [
    _run(
      engine_lib.Engine(
        model, slots=4, length=LENGTH, chunk=CHUNK, mesh=mesh,
        weights="int8", cache="int8",
      ),
      prompts,
    )
    for mesh in (None, devices)
  ]  # fmt: skip
  alone, found = (np.array(one) for one in both)
  np.testing.assert_array_equal(found[..., 0], alone[..., 0])
  # An entry of the cache between two codes may become either of them.
  np.testing.assert_allclose(found[..., 1], alone[..., 1], rtol=0, atol=2e-2)


@pytest.mark.parametrize("name", ["weights", "cache"])
def test_names_that_there_are_not(model, name):
  known = dict(weights="int8, model", cache="bfloat16, int8, model")[name]
  message = f"{name}: got 'int3', expected one of {known}"
  with pytest.raises(config_lib.ConfigError, match=message):
    engine_lib.Engine(model, slots=1, length=8, **{name: "int3"})
