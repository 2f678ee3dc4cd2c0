# SPDX-License-Identifier: Apache-2.0
"""Kimi K3 in float64, from its specification, by the names of its tensors.

One sequence, token by token and expert by expert; nothing of the library is
used.
"""

import numpy as np
from scipy import special

CODES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def decoded(packed, scales):
  """A matrix in four bits, number by number."""
  rows, columns = packed.shape[0], 2 * packed.shape[1]
  values = np.zeros((rows, columns))
  for r in range(rows):
    for c in range(columns):
      code = (int(packed[r, c // 2]) >> (4 * (c % 2))) & 15
      value = CODES[code % 8] * (-1 if code >= 8 else 1)
      values[r, c] = value * 2.0 ** (int(scales[r, c // 32]) - 127)
  return values


def norm(x, gain, eps):
  return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + eps) * gain


class Network:
  """The logits of a sequence.

  Args:
    tensors: name in the files -> float64 array; experts decoded.
    text: `text_config` of the config.json.
  """

  def __init__(self, tensors, text):
    self.tensors, self.text = tensors, text
    self.eps = text["rms_norm_eps"]

  def at(self, name):
    return self.tensors["language_model." + name]

  def linear(self, x, name):
    return x @ self.at(name + ".weight").T

  def normed(self, x, name, eps=None):
    return norm(x, self.at(name + ".weight"), eps or self.eps)

  def logits(self, tokens_T):
    text, at = self.text, "model.layers.{}."
    p = self.at("model.embed_tokens.weight")[tokens_T]
    blocks = []
    for t in range(text["num_hidden_layers"]):
      layer = at.format(t)
      h = p
      if blocks:
        h = self.read(layer + "self_attention_res", [*blocks, p])
      if t % text["attn_res_block_size"] == 0:
        blocks.append(p)
        p = None
      is_kda = t + 1 in text["linear_attn_config"]["kda_layers"]
      mixer = self.kda if is_kda else self.mla
      y = mixer(self.normed(h, layer + "input_layernorm"), layer + "self_attn.")
      p = y if p is None else p + y
      h = self.read(layer + "mlp_res", [*blocks, p])
      h = self.normed(h, layer + "post_attention_layernorm")
      if t < text["first_k_dense_replace"]:
        p = p + self.mlp(h, layer + "mlp.{}_proj", ("gate", "up", "down"))
      else:
        p = p + self.moe(h, layer + "block_sparse_moe.")
    h = self.read("model.output_attn_res", [*blocks, p])
    return self.linear(self.normed(h, "model.norm"), "lm_head")

  def read(self, name, sources):
    """Softmax over depth of <w, RMSNorm(v) g>."""
    query = self.at(name + "_proj.weight")[0]
    scores = [self.normed(v, name + "_norm") @ query for v in sources]
    weights = special.softmax(np.stack(scores), axis=0)
    return sum(w[:, None] * v for w, v in zip(weights, sources))

  def mlp(self, x, form, names):
    gate, up, down = (form.format(name) for name in names)
    g, u = self.linear(x, gate), self.linear(x, up)
    most = self.text["activation_situ_beta"]
    up_most = self.text["activation_situ_linear_beta"]
    hidden = most * np.tanh(g / most) * special.expit(g)
    return self.linear(hidden * up_most * np.tanh(u / up_most), down)

  def moe(self, x, at):
    text = self.text
    low = self.linear(x, at + "routed_expert_down_proj")
    scores = special.expit(self.linear(x, at + "gate"))
    biased = scores + self.at(at + "gate.e_score_correction_bias")
    least = np.sort(biased, axis=1)[:, -text["num_experts_per_token"], None]
    chosen = np.where(biased >= least, scores, 0.0)
    share = chosen / chosen.sum(1, keepdims=True)
    y = 0.0
    for e in range(text["num_experts"]):
      form = at + f"experts.{e}." + "{}"
      expert = self.mlp(low, form, ("w1", "w3", "w2"))
      y = y + text["routed_scaling_factor"] * share[:, e, None] * expert
    y = self.normed(y, at + "routed_expert_norm")
    y = self.linear(y, at + "routed_expert_up_proj")
    names = "gate", "up", "down"
    return y + self.mlp(x, at + "shared_experts.{}_proj", names)

  def mla(self, x, at):
    text, count = self.text, len(x)
    heads, rank = text["num_attention_heads"], text["kv_lora_rank"]
    nope = text["qk_nope_head_dim"]
    latent = self.normed(
      self.linear(x, at + "q_a_proj"), at + "q_a_layernorm", 1e-6
    )
    q = self.linear(latent, at + "q_b_proj").reshape(count, heads, -1)
    both = self.linear(x, at + "kv_a_proj_with_mqa")
    latent = self.normed(both[:, :rank], at + "kv_a_layernorm", 1e-6)
    kv = self.linear(latent, at + "kv_b_proj").reshape(count, heads, -1)
    outputs = []
    for n in range(heads):
      k = np.concatenate([kv[:, n, :nope], both[:, rank:]], axis=1)
      scores = q[:, n] @ k.T / np.sqrt(k.shape[1])
      scores = np.where(np.tri(count, dtype=bool), scores, -np.inf)
      outputs.append(special.softmax(scores, axis=1) @ kv[:, n, nope:])
    gate = special.expit(self.linear(x, at + "g_proj"))
    return self.linear(gate * np.concatenate(outputs, axis=1), at + "o_proj")

  def kda(self, x, at):
    shape = self.text["linear_attn_config"]
    heads, head = shape["num_heads"], shape["head_dim"]
    count = len(x)

    def feature(name):
      raw = self.linear(x, at + name + "_proj")
      taps = self.at(at + name + "_conv1d.weight")[:, 0]
      before = np.zeros((taps.shape[1] - 1, raw.shape[1]))
      padded = np.concatenate([before, raw])
      mixed = sum(
        padded[i : i + count] * taps[:, i] for i in range(taps.shape[1])
      )
      return (mixed * special.expit(mixed)).reshape(count, heads, head)

    def unit(a):
      return a / np.sqrt((a**2).sum(-1, keepdims=True) + 1e-6)

    q, k, v = unit(feature("q")), unit(feature("k")), feature("v")
    raw = self.linear(self.linear(x, at + "f_a_proj"), at + "f_b_proj")
    raw = (raw + self.at(at + "dt_bias")).reshape(count, heads, head)
    rate = np.exp(self.at(at + "A_log")[:heads, None])
    decay = np.exp(shape["gate_lower_bound"] * special.expit(rate * raw))
    beta = special.expit(self.linear(x, at + "b_proj"))
    gate = special.expit(self.linear(x, at + "g_proj")).reshape(
      count, heads, head
    )
    rows = []
    for n in range(heads):
      state, outputs = np.zeros((head, head)), []
      for t in range(count):
        state = decay[t, n][:, None] * state
        error = v[t, n] - state.T @ k[t, n]
        state = state + beta[t, n] * np.outer(k[t, n], error)
        outputs.append(state.T @ q[t, n] / np.sqrt(head))
      o = self.normed(np.stack(outputs), at + "o_norm")
      rows.append(gate[:, n] * o)
    return self.linear(np.concatenate(rows, axis=1), at + "o_proj")
