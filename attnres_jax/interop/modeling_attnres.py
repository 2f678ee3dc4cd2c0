# SPDX-License-Identifier: Apache-2.0
"""AttnRes networks in PyTorch, as remote code of transformers.

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

from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional
from transformers import GenerationMixin
from transformers import PretrainedConfig
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from .layers_attnres import MIXERS
from .layers_attnres import Mlp
from .layers_attnres import Moe
from .layers_attnres import RMSNorm

# transformers copies a file beside this one if it is named like this.
from .layers_attnres import linear

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


def cache_of(given, num_layers):
  """A cache to continue; an empty one for None, or for transformers' own.

  Raises:
    ValueError: it has tokens, and no model of this class has returned it.
  """
  if isinstance(given, Cache):
    return given
  if given is None or not given.get_seq_length():
    return Cache(0, [None] * num_layers)
  raise ValueError(
    f"{_CACHE}: got a {type(given).__name__}, expected what this model returned"
    " with use_cache=True"
  )


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
    cache = cache_of(given, self.num_layers)
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

  def _prepare_cache_for_generation(self, *args, **kwargs):
    """`forward` makes caches, which hold whatever each mixer keeps."""

  def prepare_inputs_for_generation(
    self, input_ids, attention_mask=None, position_ids=None, use_cache=True,
    **kwargs,
  ):  # fmt: skip
    cache = cache_of(kwargs.get(_CACHE), self.num_layers)
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
