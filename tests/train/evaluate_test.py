# SPDX-License-Identifier: Apache-2.0
"""Evaluation sums over a fixed set of tokens."""

import inspect
import math

import jax
import jax.numpy as jnp
import numpy as np

from attnres_jax import config as config_lib
from attnres_jax import data
from attnres_jax.common import processes
from attnres_jax.common import sharding
from attnres_jax.models import loss
from attnres_jax.train import evaluate

SEPARATOR = 256


class _Dataset:
  num_rows = 12

  def __init__(self, batches):
    self._batches, self.opened = batches, []

  def batches(self):
    self.opened.append(batch for batch in self._batches)
    return self.opened[-1]


def _evaluator(batches, are_bytes=True):
  mesh = sharding.make_mesh(config_lib.MeshConfig(data=4))

  @jax.jit
  def eval_step(model, batch):
    targets = batch["tokens"][:, 1:]
    return dict(
      loss_sum=jnp.sum(model * targets.astype(jnp.float32)),
      tokens=jnp.asarray(targets.size, jnp.float32),
    )

  dataset = _Dataset(batches)
  return evaluate.Evaluator(3, dataset, mesh, eval_step, are_bytes), dataset


def _batches(count, rows=4):
  rng = np.random.default_rng(0)
  return [
    {"tokens": rng.integers(0, 257, (rows, 9), dtype=np.int32)}
    for _ in range(count)
  ]


def test_sums_over_the_first_batches_every_time():
  batches = _batches(5)
  evaluator, dataset = _evaluator(batches)
  used = np.stack([batch["tokens"][:, 1:] for batch in batches[:3]])
  for scale in (1.0, 0.5):
    result = evaluator(jnp.float32(scale))
    np.testing.assert_allclose(result["loss"], scale * used.mean(), rtol=1e-6)
    assert result["tokens"] == used.size
    np.testing.assert_allclose(
      result["bits_per_byte"],
      scale * used.sum() / math.log(2) / (used != SEPARATOR).sum(),
      rtol=1e-6,
    )
  tokens, _ = _evaluator(batches, are_bytes=False)
  assert "bits_per_byte" not in tokens(jnp.float32(1.0))
  (opened,) = dataset.opened
  assert inspect.getgeneratorstate(opened) == inspect.GEN_CLOSED


def test_processes_with_the_same_rows_count_their_bytes_once(monkeypatch):
  batches = _batches(3)
  single, _ = _evaluator(batches)
  monkeypatch.setattr(processes, "gather", lambda number: [number, number])
  # Ranks of a pipeline.
  monkeypatch.setattr(sharding, "share_of_rows", lambda *unused: (0, 1))
  ranks, _ = _evaluator(batches)
  monkeypatch.undo()
  model = jnp.float32(1.0)
  assert ranks(model)["bits_per_byte"] == single(model)["bits_per_byte"]


def test_bytes_across_documents_and_padding_do_not_count():
  batch = {
    "tokens": np.array([[1, 2, SEPARATOR, 3, 4, 0, 0]] * 4, np.int32),
    "segment_ids": np.array([[1, 1, 2, 2, 2, 0, 0]] * 4, np.int32),
  }
  evaluator, _ = _evaluator([batch])
  result = evaluator(jnp.float32(1.0))
  # Of the targets 2 | 3 4 (256 starts a document, zeros are padding).
  nats = 4 * (2 + SEPARATOR + 3 + 4)
  np.testing.assert_allclose(
    result["bits_per_byte"], nats / math.log(2) / (4 * 3), rtol=1e-6
  )


def test_a_split_has_one_loss_in_batches_of_any_size(tmp_path):
  (tmp_path / "corpus.txt").write_text("some words to be predicted\n" * 40)
  losses = []
  for size in (1, 4, 5, 16, 64):
    config = config_lib.DataConfig(
      source="text", path=str(tmp_path), validation_fraction=0.7,
      sequence_length=16, batch_size=size,
    )  # fmt: skip
    dataset = data.open_dataset(config, "validation")
    batches = [
      {name: np.array(array) for name, array in b.items()}
      for b in dataset.batches()
    ]
    mesh = sharding.make_mesh(
      config_lib.MeshConfig(), devices=jax.devices()[:1]
    )

    def step(model, batch):
      examples = loss.Examples.of(batch)
      nats = examples.targets.astype(np.float32) * examples.weights * model
      return dict(loss_sum=jnp.sum(nats), tokens=jnp.sum(examples.weights))

    evaluator = evaluate.Evaluator(10**6, _Dataset(batches), mesh, step, True)
    result = evaluator(jnp.float32(0.5))
    # All of the text, and where it ends.
    assert result["tokens"] == dataset.num_tokens
    losses.append((result["loss"], result["bits_per_byte"]))
  np.testing.assert_allclose(losses, [losses[0]] * len(losses), rtol=1e-6)
