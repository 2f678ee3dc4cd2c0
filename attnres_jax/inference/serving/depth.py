# SPDX-License-Identifier: Apache-2.0
"""The depth weights of one token, computed when somebody asks for them.

A forward pass over the text up to that token, in a thread of its own: it costs
the tokens that are drawn nothing but the time of the device.
"""

import asyncio
from concurrent import futures
from typing import Any

import numpy as np

from attnres_jax import config as config_lib
from attnres_jax import models
from attnres_jax.analysis.depth_weights import weights_at
from attnres_jax.inference import engine as engine_lib
from attnres_jax.inference.serving import api

# Requests that may wait for the thread.
_MOST_WAITING = 8
# Texts are padded to this or four times as much, and so on. Each length is
# compiled once, which takes longer than any forward pass.
_LEAST_LENGTH = 256
_KINDS = dict(kda="KDA", mla="MLA", attention="attention", mlp="MLP", moe="MoE")


class DepthWeights:
  """Computes depth weights, one text at a time."""

  def __init__(self, model: models.Transformer, length: int):
    """For texts of at most `length` tokens."""
    self._model, self._length = model, length
    self._labels = model.residual.source_labels()
    self._num_waiting = 0
    self._thread = futures.ThreadPoolExecutor(1, "depth_weights")

  async def of(self, ids: list[int]) -> dict[str, Any]:
    """What every sublayer read at the last of these tokens.

    Returns:
      For JSON: `reads`, one per sublayer and one of the output, each with a
      `name` and the `weights` of its `sources`.

    Raises:
      ApiError: the scheme has no depth weights, the text is too long, or too
        many requests wait.
      ConfigError: an id is not in the vocabulary.
    """
    if self._labels is None:
      raise api.ApiError(
        400,
        f"{self._model.config.residual.name} does not attend over depth, so it"
        " has no depth weights",
        code="no_depth_weights",
      )
    if len(ids) > self._length:
      raise api.refuse("prompt", f"{len(ids)} tokens", f"1 to {self._length}")
    engine_lib.check_ids(ids, self._model.config.vocab_size)
    if self._num_waiting >= _MOST_WAITING:
      raise api.busy("too many requests wait", 429, "queue_full")
    self._num_waiting += 1
    try:
      loop = asyncio.get_running_loop()
      return await loop.run_in_executor(self._thread, self._compute, ids)
    finally:
      self._num_waiting -= 1

  def stop(self) -> None:
    """Waits for the end of the thread."""
    self._thread.shutdown(cancel_futures=True)

  def _compute(self, ids: list[int]) -> dict[str, Any]:
    size = _LEAST_LENGTH
    while size < len(ids):
      size *= 4
    tokens_BT = np.zeros((1, size), np.int32)
    tokens_BT[0, : len(ids)] = ids
    found = weights_at(self._model, tokens_BT, np.int32(len(ids) - 1))
    assert found is not None and self._labels is not None
    return dict(
      reads=[
        dict(name=name, sources=sources, weights=_rounded(weight_MB[:, 0]))
        for name, sources, weight_MB in zip(
          _names(self._model.config), self._labels, found, strict=True
        )
      ]
    )


def _names(config: config_lib.ModelConfig) -> list[str]:
  kinds = [_KINDS.get(kind, kind) for kind in config.sublayer_kinds]
  return [*(f"{l} {kind}" for l, kind in enumerate(kinds, 1)), "output"]


def _rounded(weight_M: Any) -> list[float]:
  return [round(float(weight), 5) for weight in np.asarray(weight_M)]
