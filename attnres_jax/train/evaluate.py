# SPDX-License-Identifier: Apache-2.0
"""Validation loss over a fixed set of tokens.

The batches are the same every time, read once and kept on the host, so that the
losses of a run, and of runs that differ only in the network, are comparable
token by token.
"""

from collections.abc import Callable, Sequence
import copy
import itertools
import math
import time
from typing import Any

import jax
import numpy as np

from attnres_jax.common import processes
from attnres_jax.common import sharding
from attnres_jax.models import loss

Batch = dict[str, np.ndarray]


class Evaluator:
  """Evaluates a model on the first `count` validation batches.

  Args:
    count: of batches.
    dataset: the validation split, as `data.open_dataset` returns it.
    mesh: batches are split over its devices.
    eval_step: (model, batch) -> dict(loss_sum, tokens), of
      `train_state.Program`.
    are_bytes: whether all tokens but the separator are bytes; else bits per
      byte are undefined.
  """

  def __init__(
    self,
    count: int,
    dataset: Any,
    mesh: jax.sharding.Mesh,
    eval_step: Callable[[Any, dict[str, jax.Array]], dict[str, jax.Array]],
    are_bytes: bool,
  ):
    self._batches = _first_batches(dataset, count)
    self._mesh = mesh
    self._eval_step = eval_step
    self._target_bytes = _count_bytes(self._batches, mesh) if are_bytes else 0

  def __call__(self, model: Any) -> dict[str, float]:
    """Nats per token (and bits per byte), token count and seconds taken."""
    return self.each(model, 1)[0]

  def each(self, models: Any, count: int) -> list[dict[str, float]]:
    """Evaluates each of `count` models, if the step takes so many."""
    start = time.perf_counter()
    sums = [
      self._eval_step(models, sharding.shard_batch(batch, self._mesh))
      for batch in self._batches
    ]
    sums = jax.device_get(sums)
    nats, tokens = (
      [math.fsum(column) for column in zip(*(np.ravel(s[name]) for s in sums))]
      for name in ("loss_sum", "tokens")
    )
    # Of several models, each has its share of the time.
    seconds = (time.perf_counter() - start) / count
    return [self._result(*pair, seconds) for pair in zip(nats, tokens)]

  def with_step(self, eval_step: Any) -> "Evaluator":
    """An evaluator of these batches by another step."""
    other = copy.copy(self)
    other._eval_step = eval_step
    return other

  def _result(
    self, nats: float, tokens: float, seconds: float
  ) -> dict[str, float]:
    result = {"loss": nats / tokens, "tokens": int(tokens)}
    if self._target_bytes:
      result["bits_per_byte"] = nats / math.log(2) / self._target_bytes
    return result | {"seconds": seconds}


def _first_batches(dataset: Any, count: int) -> list[Batch]:
  iterator = dataset.batches()
  try:
    return list(itertools.islice(iterator, count))
  finally:
    iterator.close()


def _count_bytes(batches: Sequence[Batch], mesh: jax.sharding.Mesh) -> int:
  """Number of targets that count and are bytes, over all processes."""
  count = sum(
    int(np.sum(loss.counted(b) & (b["tokens"][:, 1:] < 256))) for b in batches
  )
  part, _ = sharding.share_of_rows(mesh, jax.process_index())
  # Ranks of a pipeline have the same part.
  parts, counts = processes.gather(part), processes.gather(count)
  return sum(dict(zip(parts, counts)).values())
