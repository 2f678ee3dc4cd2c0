# SPDX-License-Identifier: Apache-2.0
"""AttnRes networks in PyTorch: one file, as remote code of transformers.

  from transformers import AutoModelForCausalLM
  model = AutoModelForCausalLM.from_pretrained(DIR, trust_remote_code=True)

where DIR is an export of AttnRes-JAX. Plain residual sums, Full and Block
Attention Residuals (arXiv:2603.15031); softmax attention, MLA, KDA; dense and
routed MLPs. It computes what the JAX modules of the same names compute, and is
written to be read: KDA runs token by token. It can be trained, and `generate`
keeps a cache.

Shapes: B rows, T tokens, S cached tokens, D width, N heads, K heads of keys and
values, H, V widths of keys and values, M sources.
"""

import math

import torch
from torch import nn
from torch.nn import functional
from transformers import GenerationMixin
from transformers import PretrainedConfig
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

_LENGTH_EPS = 1e-6  # Of the squared length of KDA's queries and keys.
_WEIGHT_EPS = 1e-20  # Of the sum of the chosen experts' scores.


class AttnResConfig(PretrainedConfig):
  """`network` has the fields of AttnRes-JAX's ModelConfig."""

  model_type = "attnres"

  def __init__(self, network=None, **kwargs):
    self.network = network or {}
    super().__init__(**kwargs)


def kinds(network):
  """The kinds of mixer and MLP of each layer."""
  mixers, moe = network["mixers"], network["moe"]
  found = []
  for i in range(network["num_layers"]):
    dense = not moe["num_experts"] or i < moe["dense_layers"]
    found.append((mixers[i % len(mixers)], "mlp" if dense else "moe"))
  if network["last_mixer"]:
    found[-1] = network["last_mixer"], found[-1][1]
  return found


def block_size(network):
  """Sublayers of a block; 1 for Full AttnRes, None for a plain sum."""
  residual, last = network["residual"], 2 * network["num_layers"]
  if residual["name"] != "block_attnres":
    return {"prenorm": None, "full_attnres": 1}[residual["name"]]
  return residual["block_size"] or -(-last // residual["num_blocks"])


def linear(inputs, outputs, bias=False):
  return nn.Linear(inputs, outputs, bias=bias)


class RMSNorm(nn.Module):
  """x / rms(x) * weight, in float32."""

  def __init__(self, width, eps):
    super().__init__()
    self.weight = nn.Parameter(torch.ones(width))
    self.eps = eps

  def forward(self, x):
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
    return (wide * self.weight.float()).to(x.dtype)


def attend(q_BNTH, k_BNSH, v_BNSV):
  """Causal softmax attention; the T queries are the last of S tokens."""
  length, keys = q_BNTH.shape[2], k_BNSH.shape[2]
  if length == keys:  # Without a mask, which would select a slower kernel.
    return functional.scaled_dot_product_attention(
      q_BNTH, k_BNSH, v_BNSV, is_causal=True
    )
  seen_TS = torch.ones(length, keys, dtype=torch.bool, device=q_BNTH.device)
  seen_TS = seen_TS.tril(keys - length)
  return functional.scaled_dot_product_attention(
    q_BNTH, k_BNSH, v_BNSV, attn_mask=seen_TS
  )


def joined(past, new, dim):
  """What is cached and what is new."""
  return new if past is None else torch.cat([past, new], dim)


def rotated(x_BTNH, theta, rope, start):
  """Rotary positions, of tokens from `start` on."""
  half, device = x_BTNH.shape[-1] // 2, x_BTNH.device
  pair = torch.arange(half, device=device, dtype=torch.float32)
  frequency = theta ** (-pair / half)
  if rope["scaling"] != "none":
    low, high = rope["low_turns"], rope["high_turns"]
    length = rope["original_length"]
    if rope["scaling"] == "llama3":
      turns = length * frequency / (2 * math.pi)
      kept = ((turns - low) / (high - low)).clamp(0, 1)
    else:  # YaRN.
      first, last = (
        half * math.log(length / (turns * 2 * math.pi)) / math.log(theta)
        for turns in (high, low)
      )
      first = max(math.floor(first), 0)
      last = min(math.ceil(last), 2 * half - 1)
      kept = 1 - ((pair - first) / (last - first or 1e-3)).clamp(0, 1)
    frequency = frequency * (kept + (1 - kept) / rope["factor"])
  position = torch.arange(start, start + x_BTNH.shape[1], device=device)
  angle = position[:, None].float() * frequency
  cos, sin = angle.cos()[None, :, None], angle.sin()[None, :, None]
  wide = x_BTNH.float()
  first, second = wide.chunk(2, -1)
  if rope["pairs"] == "neighbours":
    first, second = wide[..., ::2], wide[..., 1::2]
  turned = torch.cat(
    [first * cos - second * sin, second * cos + first * sin], -1
  )
  return turned.to(x_BTNH.dtype)


class Attention(nn.Module):
  """Grouped queries, with or without rotary positions."""

  def __init__(self, network):
    super().__init__()
    width, self.heads = network["width"], network["num_heads"]
    self.kv_heads = network["num_kv_heads"] or self.heads
    self.head = network["head_width"] or width // self.heads
    self.theta, self.rope = network["rope_theta"], network["rope"]
    variant = network["attention"]
    bias, sizes = variant["qkv_bias"], (self.heads, self.kv_heads)
    self.q_proj = linear(width, sizes[0] * self.head, bias)
    self.k_proj = linear(width, sizes[1] * self.head, bias)
    self.v_proj = linear(width, sizes[1] * self.head, bias)
    self.o_proj = linear(sizes[0] * self.head, width, variant["output_bias"])
    if variant["qk_norm"]:
      self.q_norm = RMSNorm(self.head, network["norm_eps"])
      self.k_norm = RMSNorm(self.head, network["norm_eps"])
    else:
      self.q_norm = self.k_norm = nn.Identity()

  def forward(self, x_BTD, cache):
    batch, length, _ = x_BTD.shape
    q, k, v = (
      project(x_BTD).view(batch, length, -1, self.head)
      for project in (self.q_proj, self.k_proj, self.v_proj)
    )
    start = 0 if cache is None else cache[0].shape[2]
    q, k = self.q_norm(q) * self.rope["logit_scale"], self.k_norm(k)
    if self.theta:
      q = rotated(q, self.theta, self.rope, start)
      k = rotated(k, self.theta, self.rope, start)
    q, k, v = (a.transpose(1, 2) for a in (q, k, v))
    past_k, past_v = cache or (None, None)
    cache = joined(past_k, k, 2), joined(past_v, v, 2)
    groups = self.heads // self.kv_heads
    k, v = (a.repeat_interleave(groups, dim=1) for a in cache)
    y_BNTH = attend(q, k, v)
    return self.o_proj(y_BNTH.transpose(1, 2).flatten(2)), cache


class Mla(nn.Module):
  """Multi-head latent attention; caches the latents."""

  def __init__(self, network):
    super().__init__()
    width, self.heads = network["width"], network["num_heads"]
    shape = network["mla"]
    self.rank, self.own = shape["latent_rank"], shape["nope_width"]
    shared, value = shape["shared_width"], shape["value_width"]
    self.theta, self.rope = shape["rope_theta"], network["rope"]
    self.query_rank, queries = (
      shape["query_rank"],
      self.heads * (self.own + shared),
    )
    if self.query_rank:
      self.q_a_proj = linear(width, self.query_rank)
      self.q_a_layernorm = RMSNorm(self.query_rank, shape["latent_eps"])
      self.q_b_proj = linear(self.query_rank, queries)
    else:
      self.q_proj = linear(width, queries)
    self.kv_a_proj_with_mqa = linear(width, self.rank + shared)
    self.kv_a_layernorm = RMSNorm(self.rank, shape["latent_eps"])
    self.kv_b_proj = linear(self.rank, self.heads * (self.own + value))
    self.o_proj = linear(self.heads * value, width)
    self.gated = shape["output_gate"]
    if self.gated:
      self.g_proj = linear(width, self.heads * value)

  def forward(self, x_BTD, cache):
    latent, shared = self.kv_a_proj_with_mqa(x_BTD).split(
      [self.rank, self.kv_a_proj_with_mqa.out_features - self.rank], -1
    )
    start = 0 if cache is None else cache.shape[1]
    shared = self._turned(shared[:, :, None], start)[:, :, 0]
    new = torch.cat([self.kv_a_layernorm(latent), shared], -1)
    cache = joined(cache, new, 1)
    latent, shared = cache[..., : self.rank], cache[..., self.rank :]
    batch, keys, _ = cache.shape
    both = self.kv_b_proj(latent).view(batch, keys, self.heads, -1)
    own, v = both[..., : self.own], both[..., self.own :]
    shared = shared[:, :, None].expand(-1, -1, self.heads, -1)
    k = torch.cat([own, shared], -1)
    q = self._queries(x_BTD).view(batch, x_BTD.shape[1], self.heads, -1)
    q = q * self.rope["logit_scale"]
    own, shared = q[..., : self.own], q[..., self.own :]
    q = torch.cat([own, self._turned(shared, start)], -1)
    y_BNTV = attend(*(a.transpose(1, 2) for a in (q, k, v)))
    y = y_BNTV.transpose(1, 2).flatten(2)
    if self.gated:
      y = (self.g_proj(x_BTD).float().sigmoid() * y.float()).to(y.dtype)
    return self.o_proj(y), cache

  def _queries(self, x_BTD):
    if not self.query_rank:
      return self.q_proj(x_BTD)
    return self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x_BTD)))

  def _turned(self, shared_BTNH, start):
    if not self.theta:
      return shared_BTNH
    return rotated(shared_BTNH, self.theta, self.rope, start)


class ShortConv(nn.Module):
  """Causal convolution of each channel, then SiLU."""

  def __init__(self, channels, taps):
    super().__init__()
    self.weight = nn.Parameter(torch.empty(channels, 1, taps))

  def forward(self, x_BTC, tail_BKC):
    taps = self.weight.shape[-1]
    if tail_BKC is None:
      tail_BKC = x_BTC.new_zeros(x_BTC.shape[0], taps - 1, x_BTC.shape[2])
    x = torch.cat([tail_BKC, x_BTC], 1)
    length, wide = x_BTC.shape[1], x.float()
    y = sum(
      wide[:, i : i + length] * self.weight[:, 0, i].float()
      for i in range(taps)
    )
    return functional.silu(y).to(x_BTC.dtype), x[:, x.shape[1] - taps + 1 :]


class Kda(nn.Module):
  """Kimi Delta Attention (arXiv:2510.26692), token by token."""

  def __init__(self, network):
    super().__init__()
    width, self.heads = network["width"], network["num_heads"]
    shape = network["kda"]
    self.head, rank = shape["head_width"], shape["gate_rank"]
    inner = self.heads * self.head
    self.q_proj, self.k_proj, self.v_proj = (
      linear(width, inner) for _ in range(3)
    )
    self.q_conv1d, self.k_conv1d, self.v_conv1d = (
      ShortConv(inner, shape["conv_width"]) for _ in range(3)
    )
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

  def forward(self, x_BTD, cache):
    state, *tails = cache or [None] * 4
    batch, length, _ = x_BTD.shape
    heads = batch, length, self.heads, self.head
    features, new_tails = [], []
    for project, conv, tail in zip(
      (self.q_proj, self.k_proj, self.v_proj),
      (self.q_conv1d, self.k_conv1d, self.v_conv1d),
      tails,
    ):
      feature, tail = conv(project(x_BTD), tail)
      features.append(feature.view(heads))
      new_tails.append(tail)
    q, k, v = (a.float() for a in features)
    q, k = (
      a * torch.rsqrt(a.square().sum(-1, keepdim=True) + _LENGTH_EPS)
      for a in (q, k)
    )
    step = self.f_b_proj(self.f_a_proj(x_BTD)).float() + self.dt_bias.float()
    rate = self.A_log.float().exp()
    if self.decay_bound:
      decay = -self.decay_bound * (rate * step.view(heads)).sigmoid()
    else:
      decay = -rate * functional.softplus(step).view(heads)
    decay = decay.exp()
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
    if self.full_rank_gate:
      gate = self.g_proj(x_BTD)
    else:
      gate = self.g_b_proj(self.g_a_proj(x_BTD))
    gate = gate.float().sigmoid().view(heads)
    y = (gate * self.o_norm(o)).to(x_BTD.dtype).flatten(2)
    return self.o_proj(y), (state, *new_tails)


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
    self.groups, self.top_groups = shape["groups"], shape["top_groups"]

  def forward(self, x_UD):
    score_UE = (x_UD.float() @ self.weight.float().T).sigmoid()
    biased_UE = score_UE + self.e_score_correction_bias.float()
    if self.groups > 1:  # Of other groups than the best, no expert.
      biased_UGE = biased_UE.unflatten(1, (self.groups, -1))
      of_group_UG = biased_UGE.topk(2, dim=-1).values.sum(-1)
      best = of_group_UG.topk(self.top_groups, dim=-1).indices
      others = torch.ones_like(of_group_UG).scatter(1, best, 0).bool()
      biased_UGE = biased_UGE.masked_fill(others[..., None], -math.inf)
      biased_UE = biased_UGE.flatten(1)
    expert_UK = biased_UE.topk(self.top_k, dim=-1).indices
    chosen_UK = score_UE.gather(1, expert_UK)
    sum_U1 = chosen_UK.sum(-1, keepdim=True) + _WEIGHT_EPS
    return expert_UK, self.factor * chosen_UK / sum_U1


class Moe(nn.Module):
  """Routed and shared experts; without training's update of the router bias."""

  def __init__(self, network):
    super().__init__()
    width, shape = network["width"], network["moe"]
    hidden, shared = shape["expert_width"], shape["num_shared"]
    activation, names = network["activation"], ("w1", "w3", "w2")
    self.gate = Router(width, shape)
    latent = shape["latent_width"]
    self.experts = nn.ModuleList(
      Mlp(latent or width, hidden, activation, names)
      for _ in range(shape["num_experts"])
    )
    self.shared_experts = None
    if shared:
      self.shared_experts = Mlp(width, shared * hidden, activation)
    self.latent, self.normed = bool(latent), shape["latent_norm"]
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
    if self.shared_experts is not None:
      y_BTD = y_BTD + self.shared_experts(x_BTD)
    return y_BTD


MIXERS = {"attention": Attention, "kda": Kda, "mla": Mla}


class Reads(nn.Module):
  """How a network reads over depth (Eq. 2-6): no parameters of its own."""

  def __init__(self, network):
    super().__init__()
    read = network["residual"]["read"]
    self.heads, self.scale = read["heads"] or 1, read["logit_scale"]
    self.sum, self.eps = read["scale"] == "sum", network["norm_eps"]

  def forward(self, query, norm, sources):
    """The mixture of M sources [B, T, D], and its weights [M, B, T, heads]."""
    v = torch.stack([source.float() for source in sources])
    u_D = self.scale * query.weight[0].float() * norm.weight.float()
    slices = *v.shape[:-1], self.heads, -1
    score = (v * u_D).view(slices).sum(-1)
    score = score * torch.rsqrt(v.square().mean(-1, keepdim=True) + self.eps)
    weights = score.softmax(0)
    mixed = (weights[..., None] * v.view(slices)).sum(0).flatten(-2)
    if len(sources) == 1:
      mixed = v[0]
    mixed = mixed * (len(sources) if self.sum else 1)
    return mixed.to(sources[0].dtype), weights


class Layer(nn.Module):
  """A mixer and an MLP, each with its norm and its query over depth."""

  def __init__(self, network, mixer, mlp):
    super().__init__()
    width, eps = network["width"], network["norm_eps"]
    self.input_layernorm = RMSNorm(width, eps)
    self.post_attention_layernorm = RMSNorm(width, eps)
    self.self_attn = MIXERS[mixer](network)
    self.mlp_name = "mlp" if mlp == "mlp" else "block_sparse_moe"
    hidden = network["mlp_width"] or 32 * -(-8 * width // (3 * 32))
    dense = mlp == "mlp"
    self.add_module(
      self.mlp_name,
      Mlp(width, hidden, network["activation"]) if dense else Moe(network),
    )
    if block_size(network):
      self.self_attention_res_proj = linear(width, 1)
      self.self_attention_res_norm = RMSNorm(width, eps)
      self.mlp_res_proj = linear(width, 1)
      self.mlp_res_norm = RMSNorm(width, eps)

  def mix(self, h, cache):
    return self.self_attn(self.input_layernorm(h), cache)

  def think(self, h):
    return getattr(self, self.mlp_name)(self.post_attention_layernorm(h))


class AttnResModel(nn.Module):
  """Embedding, layers, readout and norm."""

  def __init__(self, network):
    super().__init__()
    width, eps = network["width"], network["norm_eps"]
    self.embed_tokens = nn.Embedding(network["vocab_size"], width)
    self.layers = nn.ModuleList(Layer(network, *k) for k in kinds(network))
    self.norm = RMSNorm(width, eps)
    self.block_size = block_size(network)
    self.read = Reads(network)
    if self.block_size:
      self.output_attn_res_proj = linear(width, 1)
      self.output_attn_res_norm = RMSNorm(width, eps)

  def forward(self, tokens_BT, caches=None):
    """The state before the head, and the caches of all mixers."""
    run = self._sum if self.block_size is None else self._attend
    h_BTD, caches = run(
      self.embed_tokens(tokens_BT), caches or [None] * len(self.layers)
    )
    return self.norm(h_BTD), caches

  def _sum(self, h, caches):
    wide, new, dtype = h.float(), [], h.dtype
    for layer, cache in zip(self.layers, caches):
      y, cache = layer.mix(wide.to(dtype), cache)
      wide = wide + y.float()
      wide = wide + layer.think(wide.to(dtype)).float()
      new.append(cache)
    return wide.to(dtype), new

  def _attend(self, h, caches):
    """Sources are completed blocks, then the sum of the open one."""
    blocks, partial, new, dtype = [h], None, [], h.dtype
    for i, (layer, cache) in enumerate(zip(self.layers, caches)):
      for half in range(2):
        name = "mlp" if half else "self_attention"
        query = getattr(layer, f"{name}_res_proj")
        norm = getattr(layer, f"{name}_res_norm")
        sources = blocks if partial is None else [*blocks, partial.to(dtype)]
        h, _ = self.read(query, norm, sources)
        if half:
          y = layer.think(h)
        else:
          y, cache = layer.mix(h, cache)
        partial = y.float() if partial is None else partial + y.float()
        if (2 * i + half + 1) % self.block_size == 0:
          blocks, partial = [*blocks, partial.to(dtype)], None
      new.append(cache)
    if partial is not None:
      blocks = [*blocks, partial.to(dtype)]
    h, _ = self.read(
      self.output_attn_res_proj, self.output_attn_res_norm, blocks
    )
    return h, new


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
    self.post_init()

  def get_input_embeddings(self):
    return self.model.embed_tokens

  def set_input_embeddings(self, module):
    self.model.embed_tokens = module

  def get_output_embeddings(self):
    return self.lm_head

  def set_output_embeddings(self, module):
    self.lm_head = module

  def forward(
    self,
    input_ids,
    attention_mask=None,
    past_key_values=None,
    labels=None,
    use_cache=None,
    logits_to_keep=0,
    **_,
  ):
    """Logits [B, T, V] in float32; with labels also their mean cross-entropy.

    Rows have one length: masks that hide tokens are refused.
    """
    if attention_mask is not None and not bool((attention_mask != 0).all()):
      raise ValueError("attention_mask hides tokens: rows need one length")
    h_BTD, caches = self.model(input_ids, past_key_values)
    logits = self.lm_head(h_BTD[:, -logits_to_keep:]).float()
    if self.soft_cap:
      logits = self.soft_cap * torch.tanh(logits / self.soft_cap)
    loss = None
    if labels is not None:
      loss = functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
      )
    return CausalLMOutputWithPast(
      loss=loss, logits=logits, past_key_values=caches if use_cache else None
    )

  # The cache is a list, with whatever each mixer keeps.
  def _prepare_cache_for_generation(self, *args, **kwargs):
    pass

  def prepare_inputs_for_generation(
    self, input_ids, past_key_values=None, use_cache=True, **_
  ):
    tokens = input_ids if past_key_values is None else input_ids[:, -1:]
    return dict(
      input_ids=tokens, past_key_values=past_key_values, use_cache=use_cache
    )

  def _init_weights(self, module):
    """Everything is in the checkpoint."""
