# SPDX-License-Identifier: Apache-2.0
"""A transformer in NumPy, with a hook between projections and attention."""

from flax import nnx
import numpy as np


class Hook:
  """What a depth memory does."""

  def mixer(self, n, query, key, value):
    """Of mixer n, from 0: its values, and further columns of its softmax.

    A column is a score [B, T, N] and a value [B, T, K, H].
    """
    raise NotImplementedError

  def mlp(self, n, x):
    """Sees the normalised input of the n-th MLP."""


def array(parameter):
  if isinstance(parameter, nnx.Variable):
    parameter = parameter[...]
  return np.asarray(parameter, np.float64)


def rms_norm(x, eps=1e-6):
  return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps)


def logits(model, tokens, hook):
  """Of a PreNorm network with attention and MLPs alone."""
  mixers, mlps = model.sublayers["attention"], model.sublayers["mlp"]
  theta = model.config.rope_theta
  h = array(model.embedding.table)[tokens]
  for n in range(model.config.num_layers):
    w = {
      name: array(getattr(mixers.core, name))[n]
      for name in ("query", "key", "value", "output")
      if getattr(mixers.core, name) is not None
    }
    x = rms_norm(h) * array(mixers.norm.gain)[n]
    query, key, value = (
      np.einsum("btd,dnh->btnh", x, w[name]) if name in w else x
      for name in ("query", "key", "value")
    )
    value, columns = hook.mixer(n, query, key, value)
    mixed = _attend(_rotate(query, theta), _rotate(key, theta), value, columns)
    h = h + np.einsum("btnh,nhd->btd", mixed, w["output"])
    x = rms_norm(h) * array(mlps.norm.gain)[n]
    hook.mlp(n, x)
    gate, up = (x @ array(p)[n] for p in (mlps.core.gate, mlps.core.up))
    h = h + (gate / (1 + np.exp(-gate)) * up) @ array(mlps.core.down)[n]
  h = rms_norm(h) * array(model.final_norm.gain)
  return h @ array(model.embedding.head)


def _rotate(x, theta):
  half = x.shape[-1] // 2
  out = np.zeros_like(x)
  for t in range(x.shape[1]):
    for i in range(half):
      angle = t * theta ** (-i / half)
      a, b = x[:, t, :, i], x[:, t, :, half + i]
      out[:, t, :, i] = a * np.cos(angle) - b * np.sin(angle)
      out[:, t, :, half + i] = b * np.cos(angle) + a * np.sin(angle)
  return out


def _attend(query, key, value, columns):
  batch, length, heads, width = query.shape
  group = heads // key.shape[2]
  out = np.zeros((batch, length, heads, value.shape[-1]))
  for b, t, n in np.ndindex(batch, length, heads):
    k = n // group
    scores = list(key[b, : t + 1, k] @ query[b, t, n] / width**0.5)
    values = list(value[b, : t + 1, k])
    for score, more in columns:
      scores.append(score[b, t, n])
      values.append(more[b, t, k])
    weight = np.exp(np.array(scores) - max(scores))
    out[b, t, n] = (weight / weight.sum()) @ np.array(values)
  return out
