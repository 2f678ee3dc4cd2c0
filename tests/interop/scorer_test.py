# SPDX-License-Identifier: Apache-2.0
"""Scores of texts do not depend on their batch."""

import jax
import numpy as np
import pytest

from attnres_jax import config as config_lib
from attnres_jax.common import sharding
from attnres_jax.interop import scorer
from tests import tiny_network

LENGTH = 24
VOCABULARY = 16


def _texts(count=40, seed=0):
  """Of many lengths; some share inputs, and some are as long as can be."""
  rng = np.random.default_rng(seed)
  texts = []
  for i in range(count):
    size = LENGTH + 1 if i % 13 == 0 else rng.integers(2, LENGTH + 1)
    ids = rng.integers(0, VOCABULARY, size).tolist()
    if i % 4 == 3:
      # Other ends of the same inputs, whose scores begin elsewhere.
      ids = [*texts[-1].ids[:-1], ids[-1]]
    count = int(rng.integers(1, len(ids)))
    texts.append(scorer.Text(tuple(ids), count))
  # One of all tokens is the most likely one.
  inputs = texts[0].ids[:5]
  ends = [scorer.Text((*inputs, i), 1) for i in range(VOCABULARY)]
  return [*texts, *ends]


def _alone(model, texts):
  """By definition, from the logits of each text in a batch of one."""
  logits_of = jax.jit(lambda model, x_BT: jax.nn.log_softmax(model(x_BT)))
  found = []
  for ids, count in texts:
    # Padded, so that one program does: later tokens have no effect.
    inputs_BT = np.zeros((1, LENGTH), np.int32)
    inputs_BT[0, : len(ids) - 1] = ids[:-1]
    logits_TV = np.asarray(logits_of(model, inputs_BT)[0])
    at = range(len(ids) - 1 - count, len(ids) - 1)
    each = [logits_TV[t, ids[t + 1]] for t in at]
    greedy = all(logits_TV[t].argmax() == ids[t + 1] for t in at)
    found.append((float(np.sum(np.float64(each))), greedy))
  return found


def _mesh(**sizes):
  return sharding.make_mesh(config_lib.MeshConfig(**{"data": 1} | sizes))


def _compare(ours, theirs):
  np.testing.assert_allclose(
    [score[0] for score in ours], [s[0] for s in theirs], rtol=1e-5, atol=1e-4
  )
  assert [score[1] for score in ours] == [score[1] for score in theirs]


# KDA keeps a state and convolutions, MLA attends, experts sort tokens.
@pytest.fixture(scope="module")
def mixed():
  return tiny_network.model(**tiny_network.KINDS)


@pytest.fixture(scope="module")
def plain():
  return tiny_network.model()


class TestScores:
  def test_equal_those_of_each_text_alone(self, mixed):
    texts = _texts()
    expected = _alone(mixed, texts)
    assert {greedy for _, greedy in expected} == {True, False}
    for tokens in (1, 200):
      made = scorer.Scorer(_mesh(), length=LENGTH, batch_tokens=tokens)
      _compare(made(mixed, texts), expected)
      assert len(made.programs) <= 4

  def test_depend_neither_on_order_nor_on_company(self, plain):
    texts = _texts()
    made = scorer.Scorer(_mesh(), length=LENGTH, batch_tokens=128)
    whole = made(plain, texts)
    # The order of the texts does not change the batches.
    backwards = made(plain, texts[::-1])
    assert backwards[::-1] == whole
    _compare(made(plain, texts[30:50]), whole[30:50])

  @pytest.mark.slow
  def test_on_a_mesh(self, mixed):
    texts = _texts()
    mesh = _mesh(data=2, fsdp=2)
    model = jax.device_put(mixed, sharding.state_sharding(mixed, mesh))
    made = scorer.Scorer(mesh, length=LENGTH, batch_tokens=64)
    found = made(model, texts)
    _compare(found, _alone(mixed, texts))
    assert all(rows % 4 == 0 for rows, *_ in made.programs)

  @pytest.mark.slow
  def test_a_scheme_that_looks_back(self):
    model = tiny_network.model("mrla_light")
    texts = _texts(12)
    made = scorer.Scorer(_mesh(), length=LENGTH, batch_tokens=200)
    _compare(made(model, texts), _alone(model, texts))

  def test_choices_of_a_question_are_one_text(self, plain):
    inputs = tuple(range(9))
    texts = [scorer.Text((*inputs, i), 1) for i in range(5)]
    made = scorer.Scorer(_mesh(), length=LENGTH, batch_tokens=24)
    found = made(plain, texts)
    ((_, _, choices),) = made.programs
    assert choices == 16
    _compare(found, _alone(plain, texts))
    everything = [scorer.Text((*inputs, i), 1) for i in range(VOCABULARY)]
    total = np.exp([score.logprob for score in made(plain, everything)])
    np.testing.assert_allclose(total.sum(), 1, rtol=1e-5)


def test_as_long_as_kimi_linear_says():
  assert scorer.Scorer(_mesh(), length=2**20).length == 2**20


@pytest.mark.parametrize(
  "text", [((1,), 1), ((1, 2), 0), ((1, 2), 2), ((1,) * (LENGTH + 2), 1)]
)
def test_texts_without_a_score_are_refused(plain, text):
  made = scorer.Scorer(_mesh(), length=LENGTH)
  with pytest.raises(ValueError, match="expected one or more"):
    made(plain, [scorer.Text(*text)])
  assert not made.programs
