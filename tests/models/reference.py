# SPDX-License-Identifier: Apache-2.0
"""A transformer in NumPy: attention, MLPs, and the residuals of the paper."""

from flax import nnx
import jax
import numpy as np
from scipy import special

from tests.models import trunks


def array(parameter):
  if isinstance(parameter, nnx.Variable):
    parameter = parameter[...]
  return np.asarray(parameter, np.float64)


def logits(model, tokens, segments=None):
  """Logits [B, T, V] in float64, from the weights alone."""
  config, first = model.config, None
  segments = np.zeros_like(tokens) if segments is None else segments
  table = array(model.embedding.table)
  values = [table[tokens]]
  for n in range(config.num_layers):
    for kind in ("attention", "mlp"):
      part = jax.tree.map(
        lambda a, n=n: np.asarray(a[n], np.float64), model.sublayers[kind]
      )
      x = trunks.rms_norm(_read(model, values), config.norm_eps)
      x = x * array(part.norm.gain)
      if kind == "mlp":
        values.append(_mlp(part.core, x))
      else:
        y, first = _attention(part.core, x, first, config, segments)
        values.append(y)
  h = trunks.rms_norm(_read(model, values), config.norm_eps)
  h = h * array(model.final_norm.gain)
  raw = h @ (table.T if config.tie_embeddings else array(model.embedding.head))
  cap = config.logit_soft_cap
  return cap * np.tanh(raw / cap) if cap else raw


def sources(values, size):
  """What a read after these values attends to: Eq. 2 (size 1) or Eq. 6."""
  starts = range(1, len(values), size)
  return [values[0], *(sum(values[s : s + size]) for s in starts)]


def _read(model, values):
  """What follows the given outputs reads, by Eq. 1-6."""
  config, l = model.config, len(values) - 1
  name = config.residual.name
  if name == "prenorm":
    return sum(values)
  if name == "rescaled":
    return sum(values) / len(values)
  size = 1
  if name == "block_attnres":
    size = -(-config.num_sublayers // config.residual.num_blocks)
  values, queries = sources(values, size), model.residual.queries
  u = array(queries.query)[l] * array(queries.gain)[l]
  return trunks.attend(u, values, config.norm_eps)


def _mlp(core, x):
  gate, up = x @ array(core.gate), x @ array(core.up)
  return (gate / (1 + np.exp(-gate)) * up) @ array(core.down)


def _attention(core, x, first, config, segments):
  def project(name):
    y = np.einsum("btd,dnh->btnh", x, array(getattr(core, name)))
    bias, norm = getattr(core, f"{name}_bias"), getattr(core, f"{name}_norm")
    if bias is not None:
      y = y + array(bias)
    if jax.tree.leaves(norm):
      y = trunks.rms_norm(y, config.norm_eps) * array(norm.gain)
    return y

  query, key, value = map(project, ("query", "key", "value"))
  first = value if first is None else first
  if config.value_residual:
    value = (first + value) / 2
  if config.rope_theta:
    query, key = (
      _rotate(a, config.rope_theta, config.rope) for a in (query, key)
    )
  mixed = attend(query, key, value, segments)
  y = np.einsum("btnh,nhd->btd", mixed, array(core.output))
  y = y if core.output_bias is None else y + array(core.output_bias)
  return y, first


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


def attend(query, key, value, segments):
  """Causal attention within segments [B, T]; groups of heads share a key."""
  batch, length, heads, width = query.shape
  group = heads // key.shape[2]
  out = np.zeros((batch, length, heads, value.shape[-1]))
  for b, t, n in np.ndindex(batch, length, heads):
    k = n // group
    seen = [s for s in range(t + 1) if segments[b, s] == segments[b, t]]
    scores = key[b, seen, k] @ query[b, t, n] / width**0.5
    out[b, t, n] = special.softmax(scores) @ value[b, seen, k]
  return out
