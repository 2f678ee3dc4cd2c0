# SPDX-License-Identifier: Apache-2.0
"""The engine against the forward pass, and requests against each other."""

import jax
import numpy as np
import pytest

from attnres_jax import config as config_lib
from attnres_jax.common import sharding
from attnres_jax.inference import draw
from attnres_jax.inference import engine as engine_lib
from attnres_jax.inference import prepared
from attnres_jax.inference import programs
from tests import tiny_network
from tests.inference import texts

VOCAB, LENGTH, CHUNK, TOKENS = 16, 48, 16, 6
GREEDY = draw.Settings(temperature=0.0)


def _model(**fields):
  """Parameters away from their start; all kinds of states and experts."""
  fields = tiny_network.KINDS | dict(mixers=("kda", "attention")) | fields
  return tiny_network.moved(tiny_network.model(**fields), 0.3)


@pytest.fixture(scope="module")
def model():
  return _model()


@pytest.fixture(scope="module")
def prompts():
  """More than slots; shorter and longer than a chunk; two begin alike."""
  rng = np.random.default_rng(1)
  sizes = 3, 37, 16, 1, 20
  prompts = [rng.integers(0, VOCAB, n).tolist() for n in sizes]
  return [*prompts, [*prompts[1][:33], 1, 2]]


@pytest.fixture(scope="module")
def expected(model, prompts):
  """(ids, log-probabilities) of greedy text by the whole forward pass."""
  apply = jax.jit(lambda model, tokens_BT: jax.nn.log_softmax(model(tokens_BT)))
  rows, logprobs = [list(prompt) for prompt in prompts], [[] for _ in prompts]
  for _ in range(TOKENS):
    tokens_BT = np.zeros((len(rows), LENGTH), np.int32)
    for row, ids in zip(tokens_BT, rows):
      row[: len(ids)] = ids
    found_BTV = np.asarray(apply(model, tokens_BT))
    for found_TV, ids, values in zip(found_BTV, rows, logprobs):
      values.append(found_TV[len(ids) - 1].max())
      ids.append(int(found_TV[len(ids) - 1].argmax()))
  return [ids[-TOKENS:] for ids in rows], logprobs


@pytest.fixture(scope="module")
def engine(model):
  return engine_lib.Engine(model, slots=2, length=LENGTH, chunk=CHUNK)


def _run(engine, prompts):
  requests = [engine_lib.Request(prompt, TOKENS, GREEDY) for prompt in prompts]
  tokens = [[] for _ in prompts]
  for token in texts.run(engine, requests):
    tokens[token.request].append(token)
  return tokens


def _ids(requests):
  return [[token.id for token in tokens] for tokens in requests]


def _check(actual, expected):
  ids, logprobs = expected
  assert _ids(actual) == ids
  values = [[token.logprob for token in tokens] for tokens in actual]
  np.testing.assert_allclose(values, logprobs, rtol=0, atol=1e-4)
  assert len({tuple(row) for row in ids}) > 3


def test_greedy_is_the_argmax_of_every_prefix(engine, prompts, expected):
  """In chunks, in new slots and in reused ones."""
  first = _run(engine, prompts)
  _check(first, expected)
  count = programs.extend._cache_size(), programs.next_token._cache_size()
  for tokens in first:
    assert [token.finish for token in tokens] == [None] * (TOKENS - 1) + [
      "length"
    ]
  assert _run(engine, prompts) == first  # Bit for bit.
  again = programs.extend._cache_size(), programs.next_token._cache_size()
  assert again == count
  assert not engine.busy


def test_a_cancelled_request_leaves_its_slot(engine, prompts, expected):
  numbers = [
    engine.submit(engine_lib.Request(prompt, TOKENS, GREEDY))
    for prompt in (prompts[1], prompts[0])
  ]
  with pytest.raises(ValueError, match="no slot is free"):
    engine.submit(engine_lib.Request(prompts[2], TOKENS, GREEDY))
  ids = {number: [] for number in numbers}
  for token in engine.step():
    ids[token.request].append(token.id)
  engine.cancel(numbers[0])
  numbers.append(engine.submit(engine_lib.Request(prompts[4], TOKENS, GREEDY)))
  ids[numbers[2]] = []
  while engine.busy:
    for token in engine.step():
      ids[token.request].append(token.id)
  assert ids[numbers[1]] == expected[0][0]
  assert ids[numbers[2]] == expected[0][4]
  assert len(ids[numbers[0]]) < TOKENS


@pytest.mark.more
@pytest.mark.parametrize(
  "mesh",
  [
    dict(data=2, expert=2, tensor=2),
    pytest.param(dict(data=4, fsdp=2), marks=pytest.mark.slow),
    pytest.param(dict(tensor=2), marks=pytest.mark.slow),
    pytest.param(dict(expert=4), marks=pytest.mark.slow),
  ],
  ids=lambda mesh: "-".join(f"{axis}{n}" for axis, n in mesh.items()),
)
def test_on_a_mesh(mesh, model, prompts, expected):
  size = dict(data=1) | mesh
  devices = sharding.make_mesh(config_lib.MeshConfig(**size))
  on_mesh = engine_lib.Engine(
    model, slots=8, length=LENGTH, chunk=CHUNK, mesh=devices
  )
  _check(_run(on_mesh, prompts), expected)


@pytest.mark.parametrize(
  "prompt,num_tokens,message",
  [
    ([], 1, r"prompt: got '0 tokens', expected 1 to 47"),
    ([1] * 40, 9, r"prompt: got '40 tokens', expected 1 to 39"),
    ([1, VOCAB], 1, "prompt: got 16, expected ids below 16"),
    ([1], 0, "--num_tokens: got 0"),
    ([1], 10**9, "--num_tokens: got 10"),
  ],
)
def test_bad_requests(engine, prompt, num_tokens, message):
  with pytest.raises(config_lib.ConfigError, match=message):
    engine.submit(engine_lib.Request(prompt, num_tokens))
  assert not engine.busy


def test_weights_that_need_no_cast_are_not_copied(model, monkeypatch):
  monkeypatch.setattr(prepared, "SEPARATE_ON", ())
  engine = engine_lib.Engine(model, slots=1, length=8)
  ours, theirs = (
    [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(weights)]
    for weights in (engine._model, model)
  )
  assert ours == theirs


def test_slots_that_rows_do_not_divide(model):
  mesh = sharding.make_mesh(config_lib.MeshConfig(data=2))
  with pytest.raises(config_lib.ConfigError, match="slots: got 3.* 2 shards"):
    engine_lib.Engine(model, slots=3, mesh=mesh)
