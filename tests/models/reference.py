# SPDX-License-Identifier: Apache-2.0
"""A transformer in NumPy: attention, MLPs, and the residuals of the paper.

A hook stands between projections and attention, where depth memories are.
"""

from flax import nnx
import jax
import numpy as np


class Hook:
  """What a depth memory does; this one does nothing."""

  def mixer(self, n, query, key, value):
    """Of mixer n, from 0: its values, and further columns of its softmax.

    A column is a score [B, T, N] and a value [B, T, K, H].
    """
    del n, query, key
    return value, []

  def mlp(self, n, x):
    """Sees the normalised input of the n-th MLP."""


def array(parameter):
  if isinstance(parameter, nnx.Variable):
    parameter = parameter[...]
  return np.asarray(parameter, np.float64)


def rms_norm(x, eps=1e-6):
  return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps)


def logits(model, tokens, segments=None, hook=None):
  """Logits [B, T, V] in float64, from the weights alone."""
  config, hook = model.config, hook or Hook()
  segments = np.zeros_like(tokens) if segments is None else segments
  table = array(model.embedding.table)
  values = [table[tokens]]
  for n in range(config.num_layers):
    for kind in ("attention", "mlp"):
      part = jax.tree.map(
        lambda a, n=n: np.asarray(a[n], np.float64), model.sublayers[kind]
      )
      x = rms_norm(_read(model, values), config.norm_eps)
      x = x * array(part.norm.gain)
      if kind == "mlp":
        hook.mlp(n, x)
        values.append(_mlp(part.core, x))
      else:
        values.append(_attention(part.core, x, n, config, segments, hook))
  h = rms_norm(_read(model, values), config.norm_eps)
  h = h * array(model.final_norm.gain)
  found = h @ (
    table.T if config.tie_embeddings else array(model.embedding.head)
  )
  cap = config.logit_soft_cap
  return cap * np.tanh(found / cap) if cap else found


def _read(model, values):
  """What follows the given outputs reads, by Eq. 1-6."""
  config, l = model.config, len(values) - 1
  name = config.residual.name
  if name == "prenorm":
    return sum(values)
  if name == "rescaled":
    return sum(values) / len(values)
  sources = values
  if name == "block_attnres":
    size = -(-config.num_sublayers // config.residual.num_blocks)
    starts = range(1, len(values), size)
    sources = [values[0], *(sum(values[s : s + size]) for s in starts)]
  queries = model.residual.queries
  u = array(queries.query)[l] * array(queries.gain)[l]
  weight = np.exp([rms_norm(v, config.norm_eps) @ u for v in sources])
  weight /= weight.sum(0)
  return sum(w[..., None] * v for w, v in zip(weight, sources))


def _mlp(core, x):
  gate, up = x @ array(core.gate), x @ array(core.up)
  return (gate / (1 + np.exp(-gate)) * up) @ array(core.down)


def _attention(core, x, n, config, segments, hook):
  def project(name):
    if getattr(core, name) is None:
      return x
    y = np.einsum("btd,dnh->btnh", x, array(getattr(core, name)))
    bias, norm = getattr(core, f"{name}_bias"), getattr(core, f"{name}_norm")
    if bias is not None:
      y = y + array(bias)
    if jax.tree.leaves(norm):
      y = rms_norm(y, config.norm_eps) * array(norm.gain)
    return y

  query, key, value = map(project, ("query", "key", "value"))
  value, columns = hook.mixer(n, query, key, value)
  if config.rope_theta:
    query, key = (
      _rotate(a, config.rope_theta, config.rope) for a in (query, key)
    )
  mixed = _attend(query, key, value, columns, segments)
  y = np.einsum("btnh,nhd->btd", mixed, array(core.output))
  return y if core.output_bias is None else y + array(core.output_bias)


def _rotate(x, theta, rope):
  """The pair (i, i + H/2) turns by t * theta ** (-2i / H)."""
  half = x.shape[-1] // 2
  out = np.zeros_like(x)
  for t in range(x.shape[1]):
    for i in range(half):
      angle = t * _scaled(theta ** (-i / half), rope)
      a, b = x[:, t, :, i], x[:, t, :, half + i]
      out[:, t, :, i] = a * np.cos(angle) - b * np.sin(angle)
      out[:, t, :, half + i] = b * np.cos(angle) + a * np.sin(angle)
  return out


def _scaled(frequency, rope):
  """Llama 3.1's rule, by wavelengths in tokens."""
  if rope.scaling == "none":
    return frequency
  wavelength = 2 * np.pi / frequency
  longest = rope.original_length / rope.low_turns
  shortest = rope.original_length / rope.high_turns
  if wavelength < shortest:
    return frequency
  if wavelength > longest:
    return frequency / rope.factor
  share = (rope.original_length / wavelength - rope.low_turns) / (
    rope.high_turns - rope.low_turns
  )
  return (1 - share) * frequency / rope.factor + share * frequency


def _attend(query, key, value, columns, segments):
  batch, length, heads, width = query.shape
  group = heads // key.shape[2]
  out = np.zeros((batch, length, heads, value.shape[-1]))
  for b, t, n in np.ndindex(batch, length, heads):
    k = n // group
    seen = [s for s in range(t + 1) if segments[b, s] == segments[b, t]]
    scores = list(key[b, seen, k] @ query[b, t, n] / width**0.5)
    values = list(value[b, seen, k])
    for score, more in columns:
      scores.append(score[b, t, n])
      values.append(more[b, t, k])
    weight = np.exp(np.array(scores) - max(scores))
    out[b, t, n] = (weight / weight.sum()) @ np.array(values)
  return out
