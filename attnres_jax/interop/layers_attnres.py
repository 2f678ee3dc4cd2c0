# SPDX-License-Identifier: Apache-2.0
"""The sublayers of `modeling_attnres`, which says what their letters mean.

A mixer maps x [B, T, D], its cache and the `Rows` of the tokens to its output
and the new cache, a tuple of arrays [B, ...]; the first cache is None.
"""

import functools
import math

import torch
from torch import nn
from torch.nn import functional

_LENGTH_EPS = 1e-6  # Of the squared length of KDA's queries and keys.
_WEIGHT_EPS = 1e-20  # Of the sum of the chosen experts' scores.

linear = functools.partial(nn.Linear, bias=False)


class RMSNorm(nn.Module):
  """x / rms(x) * weight, in float32."""

  def __init__(self, width, eps):
    super().__init__()
    self.weight = nn.Parameter(torch.ones(width))
    self.eps = eps

  def forward(self, x):
    shape, weight = self.weight.shape, self.weight.float()
    return functional.rms_norm(x.float(), shape, weight, self.eps).to(x.dtype)


def attend(q_BNTH, k_BNSH, v_BNSV, text_BS):
  """Causal softmax attention; the T queries are the last of S tokens."""
  length, keys = q_BNTH.shape[2], k_BNSH.shape[2]
  seen = None  # A mask would select a slower kernel.
  if length != keys or text_BS is not None:
    place_S = torch.arange(keys, device=q_BNTH.device)
    place_T1 = place_S[-length:, None]
    seen = place_T1 >= place_S
    if text_BS is not None:
      # Padding sees itself: a softmax over nothing would be NaN.
      seen = (seen & text_BS[:, None, None]) | (place_T1 == place_S)
  return functional.scaled_dot_product_attention(
    q_BNTH, k_BNSH, v_BNSV, attn_mask=seen, is_causal=seen is None
  )


def joined(cache, new, dim):
  """Two arrays of a cache, if there is one, each with its new tokens."""
  if cache is None:
    return new
  return tuple(torch.cat(both, dim) for both in zip(cache, new))


def rotated(x_BTNH, theta, rope, position_BT):
  """Rotary positions; theta 0 means none."""
  if not theta:
    return x_BTNH
  half, device = x_BTNH.shape[-1] // 2, x_BTNH.device
  pair = torch.arange(half, device=device, dtype=torch.float32)
  frequency = theta ** (-pair / half)
  if rope["scaling"] != "none":
    low, high = rope["low_turns"], rope["high_turns"]
    turns = rope["original_length"] * frequency / (2 * math.pi)
    unscaled = ((turns - low) / (high - low)).clamp(0, 1)
    frequency = frequency * (unscaled + (1 - unscaled) / rope["factor"])
  angle = position_BT[:, :, None, None].float() * frequency
  cos, sin = angle.cos(), angle.sin()
  first, second = x_BTNH.float().chunk(2, -1)
  turned = torch.cat(
    [first * cos - second * sin, second * cos + first * sin], -1
  )
  return turned.to(x_BTNH.dtype)


class Attention(nn.Module):
  """Grouped queries, with or without rotary positions."""

  def __init__(self, network):
    super().__init__()
    width, self.head = network["width"], network["head_width"]
    heads, kv_heads = network["num_heads"], network["num_kv_heads"]
    self.groups, variant = heads // kv_heads, network["attention"]
    self.theta, self.rope = network["rope_theta"], network["rope"]
    for letter, count in ("q", heads), ("k", kv_heads), ("v", kv_heads):
      made = linear(width, count * self.head, bias=variant["qkv_bias"])
      self.add_module(f"{letter}_proj", made)
    self.o_proj = linear(heads * self.head, width, bias=variant["output_bias"])
    for name in "q_norm", "k_norm":
      norm = RMSNorm(self.head, network["norm_eps"])
      self.add_module(name, norm if variant["qk_norm"] else nn.Identity())

  def forward(self, x_BTD, cache, rows):
    batch, length, _ = x_BTD.shape
    q, k, v = (
      project(x_BTD).view(batch, length, -1, self.head)
      for project in (self.q_proj, self.k_proj, self.v_proj)
    )
    q, k = (
      rotated(a, self.theta, self.rope, rows.position_BT)
      for a in (self.q_norm(q), self.k_norm(k))
    )
    q, k, v = (a.transpose(1, 2) for a in (q, k, v))
    cache = joined(cache, (k, v), 2)
    k, v = (a.repeat_interleave(self.groups, dim=1) for a in cache)
    y_BNTH = attend(q, k, v, rows.text_BS)
    return self.o_proj(y_BNTH.transpose(1, 2).flatten(2)), cache


class Mla(nn.Module):
  """Multi-head latent attention; caches the latents."""

  def __init__(self, network):
    super().__init__()
    width, self.heads = network["width"], network["num_heads"]
    shape = network["mla"]
    self.rank, self.nope = shape["latent_rank"], shape["nope_width"]
    shared, value = shape["shared_width"], shape["value_width"]
    self.query_rank, self.gated = shape["query_rank"], shape["output_gate"]
    queries = self.heads * (self.nope + shared)
    if self.query_rank:
      self.q_a_proj = linear(width, self.query_rank)
      self.q_a_layernorm = RMSNorm(self.query_rank, shape["latent_eps"])
      self.q_b_proj = linear(self.query_rank, queries)
    else:
      self.q_proj = linear(width, queries)
    self.kv_a_proj_with_mqa = linear(width, self.rank + shared)
    self.kv_a_layernorm = RMSNorm(self.rank, shape["latent_eps"])
    self.kv_b_proj = linear(self.rank, self.heads * (self.nope + value))
    self.o_proj = linear(self.heads * value, width)
    if self.gated:
      self.g_proj = linear(width, self.heads * value)

  def forward(self, x_BTD, cache, rows):
    both = self.kv_a_proj_with_mqa(x_BTD)
    latent, shared = both[..., : self.rank], both[..., self.rank :]
    cache = joined(cache, (self.kv_a_layernorm(latent), shared), 1)
    latent, shared = cache
    batch, keys, _ = latent.shape
    both = self.kv_b_proj(latent).view(batch, keys, self.heads, -1)
    k_nope, v = both[..., : self.nope], both[..., self.nope :]
    shared = shared[:, :, None].expand(-1, -1, self.heads, -1)
    k = torch.cat([k_nope, shared], -1)
    if self.query_rank:
      q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x_BTD)))
    else:
      q = self.q_proj(x_BTD)
    q = q.view(batch, -1, self.heads, k.shape[-1])
    y_BNTV = attend(*(a.transpose(1, 2) for a in (q, k, v)), rows.text_BS)
    y = y_BNTV.transpose(1, 2).flatten(2)
    if self.gated:
      y = (self.g_proj(x_BTD).float().sigmoid() * y.float()).to(y.dtype)
    return self.o_proj(y), cache


class ShortConv(nn.Module):
  """Causal convolution of each channel, then SiLU."""

  def __init__(self, channels, taps):
    super().__init__()
    self.weight = nn.Parameter(torch.empty(channels, 1, taps))

  def forward(self, x_BTC, tail_BKC):
    channels, _, taps = self.weight.shape
    if tail_BKC is None:
      tail_BKC = x_BTC.new_zeros(x_BTC.shape[0], taps - 1, channels)
    x = torch.cat([tail_BKC, x_BTC], 1)
    wide, weight = x.transpose(1, 2).float(), self.weight.float()
    y = functional.conv1d(wide, weight, groups=channels).transpose(1, 2)
    return functional.silu(y).to(x_BTC.dtype), x[:, x.shape[1] - taps + 1 :]


class Kda(nn.Module):
  """Kimi Delta Attention (arXiv:2510.26692), token by token."""

  def __init__(self, network):
    super().__init__()
    width, self.heads = network["width"], network["num_heads"]
    shape = network["kda"]
    self.head, rank = shape["head_width"], shape["gate_rank"]
    inner = self.heads * self.head
    for letter in "qkv":
      self.add_module(f"{letter}_proj", linear(width, inner))
      self.add_module(f"{letter}_conv1d", ShortConv(inner, shape["conv_width"]))
    self.f_a_proj, self.f_b_proj = linear(width, rank), linear(rank, inner)
    self.full_rank_gate = shape["full_rank_gate"]
    self.decay_bound = shape["decay_bound"]
    if self.full_rank_gate:
      self.g_proj = linear(width, inner)
    else:
      self.g_a_proj, self.g_b_proj = linear(width, rank), linear(rank, inner)
    self.b_proj = linear(width, self.heads)
    self.A_log = nn.Parameter(torch.zeros(1, 1, self.heads, 1))
    self.dt_bias = nn.Parameter(torch.zeros(inner))
    self.o_norm = RMSNorm(self.head, network["norm_eps"])
    self.o_proj = linear(inner, width)

  def forward(self, x_BTD, cache, rows):
    if rows.text_BS is not None:
      # Zeros are what precedes a text, and they leave the state at zero.
      x_BTD = x_BTD * rows.text_BS[:, -x_BTD.shape[1] :, None]
    state, *tails = cache or [None] * 4
    batch, length, _ = x_BTD.shape
    heads = batch, length, self.heads, self.head
    pairs = (
      (self.q_proj, self.q_conv1d), (self.k_proj, self.k_conv1d),
      (self.v_proj, self.v_conv1d),
    )  # fmt: skip
    features, tails = zip(
      *(conv(f(x_BTD), tail) for (f, conv), tail in zip(pairs, tails))
    )
    q, k, v = (a.view(heads).float() for a in features)
    q, k = (
      a * torch.rsqrt(a.square().sum(-1, keepdim=True) + _LENGTH_EPS)
      for a in (q, k)
    )
    step = self.f_b_proj(self.f_a_proj(x_BTD)).float() + self.dt_bias.float()
    rate = self.A_log.float().exp()
    if self.decay_bound:
      log_decay = -self.decay_bound * (rate * step.view(heads)).sigmoid()
    else:
      log_decay = -rate * functional.softplus(step).view(heads)
    decay = log_decay.exp()
    beta = self.b_proj(x_BTD).float().sigmoid()[..., None]
    if state is None:
      state = q.new_zeros(batch, self.heads, self.head, self.head)
    outputs = []
    for t in range(length):
      state = decay[:, t, :, :, None] * state
      recalled = torch.einsum("bnh,bnhv->bnv", k[:, t], state)
      update = beta[:, t] * (v[:, t] - recalled)
      state = state + k[:, t, :, :, None] * update[:, :, None]
      outputs.append(torch.einsum("bnh,bnhv->bnv", q[:, t], state))
    o = torch.stack(outputs, 1) * self.head**-0.5
    x = x_BTD if self.full_rank_gate else self.g_a_proj(x_BTD)
    gate = (self.g_proj if self.full_rank_gate else self.g_b_proj)(x)
    y = gate.float().sigmoid().view(heads) * self.o_norm(o)
    return self.o_proj(y.to(x_BTD.dtype).flatten(2)), (state, *tails)


class Mlp(nn.Module):
  """Down(units of gate x and up x): SwiGLU, or SiTU, which is bounded."""

  def __init__(
    self, width, hidden, activation, names=("gate_proj", "up_proj", "down_proj")
  ):
    super().__init__()
    self.names, self.activation = names, activation
    shapes = (width, hidden), (width, hidden), (hidden, width)
    for name, shape in zip(names, shapes):
      self.add_module(name, linear(*shape))

  def forward(self, x):
    gate, up, down = (getattr(self, name) for name in self.names)
    return down(self._units(gate(x), up(x)))

  def _units(self, gate, up):
    if self.activation["name"] == "silu":
      return functional.silu(gate) * up
    most, up_most = self.activation["gate_bound"], self.activation["up_bound"]
    wide, up_wide = gate.float(), up.float()
    opened = most * (wide / most).tanh() * wide.sigmoid()
    return (opened * up_most * (up_wide / up_most).tanh()).to(gate.dtype)


class Router(nn.Module):
  """The experts of each token, and the weights of their outputs."""

  def __init__(self, width, shape):
    super().__init__()
    self.weight = nn.Parameter(torch.empty(shape["num_experts"], width))
    self.e_score_correction_bias = nn.Parameter(
      torch.zeros(shape["num_experts"]), requires_grad=False
    )
    self.top_k, self.factor = shape["top_k"], shape["scaling_factor"]

  def forward(self, x_UD):
    score_UE = (x_UD.float() @ self.weight.float().T).sigmoid()
    biased_UE = score_UE + self.e_score_correction_bias.float()
    expert_UK = biased_UE.topk(self.top_k, dim=-1).indices
    chosen_UK = score_UE.gather(1, expert_UK)
    sum_U1 = chosen_UK.sum(-1, keepdim=True) + _WEIGHT_EPS
    return expert_UK, self.factor * chosen_UK / sum_U1


class Moe(nn.Module):
  """Routed and shared experts; without training's update of the router bias."""

  def __init__(self, network):
    super().__init__()
    width, shape = network["width"], network["moe"]
    hidden, latent = shape["expert_width"], shape["latent_width"]
    activation, shared = network["activation"], shape["num_shared"]
    self.gate = Router(width, shape)
    self.experts = nn.ModuleList(
      Mlp(latent or width, hidden, activation, ("w1", "w3", "w2"))
      for _ in range(shape["num_experts"])
    )
    self.shared, self.latent, self.normed = shared, latent, shape["latent_norm"]
    if shared:
      self.shared_experts = Mlp(width, shared * hidden, activation)
    if latent:
      self.routed_expert_down_proj = linear(width, latent)
      self.routed_expert_up_proj = linear(latent, width)
    if self.normed:
      self.routed_expert_norm = RMSNorm(latent, network["norm_eps"])

  def forward(self, x_BTD):
    x_UD = x_BTD.flatten(0, 1)
    expert_UK, weight_UK = self.gate(x_UD)
    if self.latent:
      x_UD = self.routed_expert_down_proj(x_UD)
    y_UD = torch.zeros_like(x_UD, dtype=torch.float32)
    for e, expert in enumerate(self.experts):
      token, place = (expert_UK == e).nonzero(as_tuple=True)
      if len(token):
        part = expert(x_UD[token]).float() * weight_UK[token, place, None]
        y_UD = y_UD.index_add(0, token, part)
    y_UD = y_UD.to(x_BTD.dtype)
    if self.normed:
      y_UD = self.routed_expert_norm(y_UD)
    if self.latent:
      y_UD = self.routed_expert_up_proj(y_UD)
    y_BTD = y_UD.view_as(x_BTD)
    if self.shared:
      y_BTD = y_BTD + self.shared_experts(x_BTD)
    return y_BTD


MIXERS = {"attention": Attention, "kda": Kda, "mla": Mla}
