# SPDX-License-Identifier: Apache-2.0
"""AttnRes networks in PyTorch: one file, as remote code of transformers.

  AutoModelForCausalLM.from_pretrained(DIR, trust_remote_code=True)

loads DIR, an export of AttnRes-JAX. Plain residual sums, Full and Block
Attention Residuals (arXiv:2603.15031); softmax attention, MLA, KDA; dense and
routed MLPs. It computes what the JAX modules of the same names compute, and is
written to be read: KDA runs token by token. It can be trained.

Rows may have padding before their text, or after it where nothing is generated.

Shapes: B rows, T new tokens, S all tokens so far (S = T without a cache), D
width, N heads, K heads of keys and values, H, V widths of keys and values, M
sources.
"""

import functools
import math
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional
from transformers import GenerationMixin
from transformers import PretrainedConfig
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

_LENGTH_EPS = 1e-6  # Of the squared length of KDA's queries and keys.
_WEIGHT_EPS = 1e-20  # Of the sum of the chosen experts' scores.
# How transformers calls a cache, before and since 5.24.
_CACHE = "past_key_values"
if "cache" in CausalLMOutputWithPast.__dataclass_fields__:
  _CACHE = "cache"


class AttnResConfig(PretrainedConfig):
  """`network` has the fields of AttnRes-JAX's ModelConfig."""

  model_type = "attnres"

  def __init__(self, network=None, **kwargs):
    self.network = network or {}
    super().__init__(**kwargs)


def kinds(network):
  """The kinds of mixer and MLP of each layer."""
  mixers, moe, count = network["mixers"], network["moe"], network["num_layers"]
  order = [mixers[i % len(mixers)] for i in range(count)]
  order[-1] = network["last_mixer"] or order[-1]
  dense = moe["dense_layers"] if moe["num_experts"] else count
  return [(m, "mlp" if i < dense else "moe") for i, m in enumerate(order)]


def block_size(network):
  """Sublayers of a block; 1 for Full AttnRes, None for a plain sum."""
  name, size = network["residual"]["name"], network["residual"]["block_size"]
  return {"prenorm": None, "full_attnres": 1, "block_attnres": size}[name]


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


class Rows(NamedTuple):
  """Places of new tokens in their texts; which of all tokens are text."""

  position_BT: torch.Tensor
  text_BS: torch.Tensor | None  # None if all are.


def rows_of(tokens_BT, past, attention_mask, position_ids):
  """The `Rows` of T tokens that follow `past` cached ones.

  Raises:
    ValueError: the mask or the positions are none that this file computes.
  """
  shape = tokens_BT.shape[0], past + tokens_BT.shape[1]
  text_BS = tokens_BT.new_ones(shape).bool()
  if attention_mask is not None:
    text_BS = attention_mask != 0
    if text_BS.shape != shape:
      got = tuple(text_BS.shape)
      raise ValueError(f"attention_mask has shape {got}, expected {shape}")
    starts_BS = text_BS & ~functional.pad(text_BS, (1, 0))[:, :-1]
    if bool((starts_BS.sum(1) > 1).any()):
      raise ValueError(
        "attention_mask has padding inside a row's text, expected it before or"
        " after; to continue rows, pad on the left"
      )
  position_BT = (text_BS.cumsum(1) - 1)[:, past:]
  if position_ids is not None:
    wrong_BT = (position_ids != position_BT) & text_BS[:, past:]
    if bool(wrong_BT.any()):
      raise ValueError("position_ids have to count a row's text: 0, 1, 2, ...")
  return Rows(position_BT, None if bool(text_BS.all()) else text_BS)


class Cache:
  """What layers keep of `length` tokens: a tuple of arrays [B, ...] each."""

  # What `generate` asks of a cache that it is given: tokens are taken from it
  # by `prepare_inputs_for_generation`, and it cannot be shortened.
  is_compileable = is_croppable = False
  is_linear = (False,)

  def __init__(self, length, layers):
    self.length, self.layers = length, layers

  def get_seq_length(self):
    return self.length

  def reorder_cache(self, rows):
    """For beam search."""
    self.layers = [
      tuple(a.index_select(0, rows) for a in layer) for layer in self.layers
    ]


def cache_of(given, rows, layers):
  """A cache to continue, of this many rows and layers; an empty one for None.

  Raises:
    ValueError: no model of this class has returned it, or not for these rows.
  """
  if given is None or not _length(given):
    return Cache(0, [None] * layers)
  description = f"a {type(given).__name__}"
  if isinstance(given, Cache):
    sizes = {a.shape[0] for layer in given.layers for a in layer}
    if (len(given.layers), sizes) == (layers, {rows}):
      return given
    description = f"a cache of {len(given.layers)} layers and {[*sizes]} rows"
  raise ValueError(
    f"{_CACHE}: got {description}, expected what this model returned with"
    f" use_cache=True for {layers} layers and {rows} rows (beams are rows)"
  )


def _length(cache):
  """How many tokens a cache of transformers has; 1 if it does not say."""
  length = getattr(cache, "get_seq_length", lambda: 1)()
  return length if isinstance(length, int) else 1


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


class Layer(nn.Module):
  """A mixer and an MLP, each with its norm and its query over depth."""

  def __init__(self, network, mixer, mlp):
    super().__init__()
    width, eps = network["width"], network["norm_eps"]
    self.input_layernorm = RMSNorm(width, eps)
    self.post_attention_layernorm = RMSNorm(width, eps)
    self.self_attn = MIXERS[mixer](network)
    if mlp == "mlp":
      self.mlp = Mlp(width, network["mlp_width"], network["activation"])
    else:
      self.block_sparse_moe = Moe(network)
    for part in ("self_attention", "mlp") if block_size(network) else ():
      self.add_module(f"{part}_res_proj", linear(width, 1))
      self.add_module(f"{part}_res_norm", RMSNorm(width, eps))

  def feedforward(self, h):
    mlp = self.mlp if hasattr(self, "mlp") else self.block_sparse_moe
    return mlp(self.post_attention_layernorm(h))


class AttnResModel(nn.Module):
  """Embedding, layers, readout and norm."""

  def __init__(self, network):
    super().__init__()
    width, eps = network["width"], network["norm_eps"]
    self.embed_tokens = nn.Embedding(network["vocab_size"], width)
    self.layers = nn.ModuleList(Layer(network, *k) for k in kinds(network))
    self.norm = RMSNorm(width, eps)
    self.block_size = block_size(network)
    self.depth_read, self.eps = network["residual"]["read"], eps
    if self.block_size:
      self.output_attn_res_proj = linear(width, 1)
      self.output_attn_res_norm = RMSNorm(width, eps)

  def forward(self, tokens_BT, caches, rows):
    """The state before the head, and the caches of all mixers."""
    h, new = self.embed_tokens(tokens_BT), []
    # Sources over depth, and the float32 sum of the open block. Plain
    # residuals are one block, which never ends.
    sources, partial = [h], None if self.block_size else h.float()
    for i, (layer, cache) in enumerate(zip(self.layers, caches)):
      h = self._read(layer, "self_attention_res", sources, partial)
      y, cache = layer.self_attn(layer.input_layernorm(h), cache, rows)
      sources, partial = self._add(y, sources, partial, 2 * i + 1)
      h = self._read(layer, "mlp_res", sources, partial)
      y = layer.feedforward(h)
      sources, partial = self._add(y, sources, partial, 2 * i + 2)
      new.append(cache)
    h = self._read(self, "output_attn_res", sources, partial)
    return self.norm(h), new

  def _read(self, owner, name, sources, partial):
    """The read of a sublayer over depth (Eq. 2-6), [B, T, D]."""
    dtype, read = sources[0].dtype, self.depth_read
    if not self.block_size:
      return partial.to(dtype)
    if partial is not None:
      sources = [*sources, partial.to(dtype)]
    query, norm = (getattr(owner, f"{name}_{p}") for p in ("proj", "norm"))
    u_D = read["logit_scale"] * query.weight[0].float() * norm.weight.float()
    v_MBTD = torch.stack([source.float() for source in sources])
    heads = *v_MBTD.shape[:-1], read["heads"] or 1, -1
    rms = v_MBTD.square().mean(-1, keepdim=True).add(self.eps).sqrt()
    weights_MBTN = ((v_MBTD * u_D).view(heads).sum(-1) / rms).softmax(0)
    h_BTD = (weights_MBTN[..., None] * v_MBTD.view(heads)).sum(0).flatten(-2)
    return (h_BTD * (len(sources) if read["scale"] == "sum" else 1)).to(dtype)

  def _add(self, y, sources, partial, count):
    """Adds the output of sublayer `count`, which may complete a block."""
    partial = y.float() if partial is None else partial + y.float()
    if self.block_size and count % self.block_size == 0:
      return [*sources, partial.to(y.dtype)], None
    return sources, partial


class AttnResForCausalLM(PreTrainedModel, GenerationMixin):
  """The language model."""

  config_class = AttnResConfig
  _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}

  def __init__(self, config):
    super().__init__(config)
    network = config.network
    self.model = AttnResModel(network)
    self.lm_head = linear(network["width"], network["vocab_size"])
    self.soft_cap = network["logit_soft_cap"]
    self.num_layers = network["num_layers"]
    self.post_init()

  def forward(
    self, input_ids, attention_mask=None, position_ids=None, cache=None,
    past_key_values=None, labels=None, use_cache=None, logits_to_keep=0,
    num_items_in_batch=None, **_,
  ):  # fmt: skip
    """Logits [B, T, V] in float32; with labels also their mean cross-entropy.

    `attention_mask` [B, S] is 0 at padding. `position_ids` [B, T] may only say
    what follows from it. Labels of -100 are not learned. `num_items_in_batch`
    is the divisor of a sum over several batches, as Trainer states it.
    """
    given = past_key_values if cache is None else cache
    cache = cache_of(given, input_ids.shape[0], self.num_layers)
    rows = rows_of(input_ids, cache.length, attention_mask, position_ids)
    h_BTD, layers = self.model(input_ids, cache.layers, rows)
    logits = self.lm_head(h_BTD[:, -logits_to_keep:]).float()
    if self.soft_cap:
      logits = self.soft_cap * torch.tanh(logits / self.soft_cap)
    loss = None
    if labels is not None:
      total = num_items_in_batch
      loss = functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(),
        reduction="mean" if total is None else "sum",
      )  # fmt: skip
      loss = loss if total is None else loss / total
    new = Cache(cache.length + input_ids.shape[1], layers)
    named = {_CACHE: new if use_cache else None}
    return CausalLMOutputWithPast(loss=loss, logits=logits, **named)

  # `Cache` holds whatever each mixer keeps.
  def _prepare_cache_for_generation(self, *args, **kwargs):
    for given in (*args, *kwargs.values()):
      cache = given.get(_CACHE) if isinstance(given, dict) else None
      if cache is not None and not hasattr(cache, "get_seq_length"):
        cache_of(cache, "the prompt's", self.num_layers)  # Refuses it.

  def prepare_inputs_for_generation(
    self, input_ids, attention_mask=None, position_ids=None, use_cache=True,
    **kwargs,
  ):  # fmt: skip
    cache = cache_of(kwargs.get(_CACHE), input_ids.shape[0], self.num_layers)
    # All of a text, or only its end, beside the mask of all of it.
    seen = input_ids if attention_mask is None else attention_mask
    new = seen.shape[1] - cache.length
    if not 0 < new <= input_ids.shape[1]:
      raise ValueError(
        f"{_CACHE}: got a cache of {cache.length} tokens, expected input_ids"
        f" with these and more (they have {input_ids.shape[1]})"
      )
    tokens = input_ids[:, -new:]
    if attention_mask is not None and not bool(attention_mask[:, -1].all()):
      raise ValueError("to continue rows of several lengths, pad on the left")
    if position_ids is not None:
      position_ids = position_ids[:, -tokens.shape[1] :]
    return dict(
      input_ids=tokens, attention_mask=attention_mask,
      position_ids=position_ids, use_cache=use_cache, **{_CACHE: cache},
    )  # fmt: skip

  def _init_weights(self, module):
    """Everything is in the checkpoint."""
