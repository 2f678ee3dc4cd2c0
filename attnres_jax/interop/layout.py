# SPDX-License-Identifier: Apache-2.0
"""Which tensors of a checkpoint make up which leaf, by kind of sublayer.

All families name their tensors in the same way: attention and dense MLPs as
Llama does, everything else as Kimi Linear does, but for `Names`.
"""

from collections.abc import Mapping, Sequence
import dataclasses
from typing import Any

from attnres_jax import config as config_lib
from attnres_jax.interop import rules

# Kimi K3 has 128 entries for 96 heads. That it is the next multiple of 128 is
# inferred.
_A_LOG_PARTS = 128
_MATRICES = "gate", "up", "down"
_KDA = {
    "query": "q_proj", "key": "k_proj", "value": "v_proj",
    "decay_down": "f_a_proj", "decay_up": "f_b_proj", "beta": "b_proj",
}  # fmt: skip
_LOW_RANK_GATE = {"gate_down": "g_a_proj", "gate_up": "g_b_proj"}
_GATE = {"gate": "g_proj"}
_MLA = {
  "query": "q_proj", "compress": "kv_a_proj_with_mqa", "expand": "kv_b_proj",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Names:
  """What families name differently.

  Attributes:
    moe: of experts and router, below a layer.
    expert: of the matrices of an expert.
    padded_a_log: KDA's A_log is a vector with zeros after its heads.
  """

  moe: str = "block_sparse_moe."
  expert: Mapping[str, str] = dataclasses.field(
    default_factory=lambda: {"gate": "w1", "up": "w3", "down": "w2"}
  )
  padded_a_log: bool = False


def rules_of(
  config: config_lib.ModelConfig, names: Names = Names()
) -> list[rules.Rule]:
  """Of all leaves but those of the residual scheme."""
  found = [
    rules.Rule("embedding/table/value", ("model.embed_tokens.weight",), 0, 1),
    rules.Rule("final_norm/gain/value", ("model.norm.weight",)),
  ]
  if not config.tie_embeddings:
    head = "embedding/head/value", ("lm_head.weight",)
    found.append(rules.Rule(*head, columns=1, transposed=True))
  kinds = config.sublayer_kinds
  for kind in dict.fromkeys(kinds):
    numbers = [l // 2 for l, k in enumerate(kinds) if k == kind]
    found += RULES[kind](_Stack(kind, numbers, names), config)
  return found


def of_reads(config: config_lib.ModelConfig) -> list[rules.Rule]:
  """Queries [1, D] and gains over depth, as Kimi K3 names them."""
  reads = [
    f"model.layers.{i}.{part}_res"
    for i in range(config.num_layers)
    for part in ("self_attention", "mlp")
  ] + ["model.output_attn_res"]
  proj, norm = (
    tuple(f"{read}_{part}.weight" for read in reads)
    for part in ("proj", "norm")
  )
  return [
    rules.Rule("residual/queries/query/value", proj, stack=1, columns=1),
    rules.Rule("residual/queries/gain/value", norm, stack=1),
  ]


@dataclasses.dataclass(frozen=True)
class _Stack:
  """Makes rules of the sublayers of one kind, which have these numbers."""

  kind: str
  numbers: Sequence[int]
  names: Names

  def vector(
    self,
    leaf: str,
    name: str,
    ones: tuple[int, int, int] = (0, 0, 0),
    pad: int = 1,
  ) -> rules.Rule:
    return self._rule(leaf, self._names(name), 1, ones=ones, pad=pad)

  def linear(self, leaf: str, name: str, columns: int = 1) -> rules.Rule:
    names = self._names(f"{name}.weight")
    return self._rule(leaf, names, 1, columns=columns, transposed=True)

  def convolution(self, leaf: str, name: str) -> rules.Rule:
    names = self._names(f"{name}.weight")
    layout = dict(columns=1, transposed=True, ones=(0, 1, 0))
    return self._rule(leaf, names, 1, **layout)

  def experts(self, leaf: str, name: str, count: int) -> rules.Rule:
    names = [
      one
      for i in self.numbers
      for one in (f"model.layers.{i}.{name.format(e)}" for e in range(count))
    ]
    return self._rule(leaf, tuple(names), 2, columns=1, transposed=True)

  def _names(self, name: str) -> tuple[str, ...]:
    return tuple(f"model.layers.{i}.{name}" for i in self.numbers)

  def _rule(
    self, leaf: str, names: tuple[str, ...], stack: int, **layout: Any
  ) -> rules.Rule:
    path = f"sublayers/{self.kind}/{leaf}/value"
    return rules.Rule(path, names, stack=stack, **layout)


def _attention(
  stack: _Stack, config: config_lib.ModelConfig
) -> list[rules.Rule]:
  at, variant = "self_attn.", config.attention
  inputs = {"query": "q", "key": "k", "value": "v"}
  found = [
    stack.vector("norm/gain", "input_layernorm.weight"),
    *(stack.linear(f"core/{a}", f"{at}{b}_proj") for a, b in inputs.items()),
    stack.linear("core/output", f"{at}o_proj", columns=2),
  ]
  biases = inputs if variant.qkv_bias else {}
  if variant.output_bias:
    biases = biases | {"output": "o"}
  for a, b in biases.items():
    found.append(stack.vector(f"core/{a}_bias", f"{at}{b}_proj.bias"))
  for a in ("query", "key") if variant.qk_norm else ():
    found.append(stack.vector(f"core/{a}_norm/gain", f"{at}{a[0]}_norm.weight"))
  return found


def _kda(stack: _Stack, config: config_lib.ModelConfig) -> list[rules.Rule]:
  at = "self_attn."
  gates = _GATE if config.kda.full_rank_gate else _LOW_RANK_GATE
  flat = stack.names.padded_a_log
  ones, pad = ((0, 0, 0), _A_LOG_PARTS) if flat else ((2, 0, 1), 1)
  convolutions = {"query": "q", "key": "k", "value": "v"}
  return [
    stack.vector("norm/gain", "input_layernorm.weight"),
    *(stack.linear(f"core/{a}", at + b) for a, b in (_KDA | gates).items()),
    *(
      stack.convolution(f"core/{a}_conv", f"{at}{b}_conv1d")
      for a, b in convolutions.items()
    ),
    stack.vector("core/a_log", at + "A_log", ones, pad),
    stack.vector("core/dt_bias", at + "dt_bias"),
    stack.vector("core/out_norm/gain", at + "o_norm.weight"),
    stack.linear("core/output", at + "o_proj", columns=2),
  ]


def _mla(stack: _Stack, config: config_lib.ModelConfig) -> list[rules.Rule]:
  at, matrices, queries = "self_attn.", dict(_MLA), []
  if config.mla.query_rank:
    matrices |= {"query_down": "q_a_proj", "query": "q_b_proj"}
    gain = "core/query_latent_norm/gain"
    queries = [stack.vector(gain, at + "q_a_layernorm.weight")]
  if config.mla.output_gate:
    matrices |= _GATE
  return [
    stack.vector("norm/gain", "input_layernorm.weight"),
    *(stack.linear(f"core/{a}", at + b) for a, b in matrices.items()),
    *queries,
    stack.vector("core/latent_norm/gain", at + "kv_a_layernorm.weight"),
    stack.linear("core/output", at + "o_proj", columns=2),
  ]


def _mlp(stack: _Stack, config: config_lib.ModelConfig) -> list[rules.Rule]:
  del config
  return [
    stack.vector("norm/gain", "post_attention_layernorm.weight"),
    *(stack.linear(f"core/{a}", f"mlp.{a}_proj") for a in _MATRICES),
  ]


def _moe(stack: _Stack, config: config_lib.ModelConfig) -> list[rules.Rule]:
  at, count = stack.names.moe, config.moe.num_experts
  bias = at + "gate.e_score_correction_bias"
  shared = _MATRICES if config.moe.num_shared else ()
  latents = []
  if config.moe.latent_width:
    latents = [
      stack.linear(f"core/latent_{a}", f"{at}routed_expert_{a}_proj")
      for a in ("down", "up")
    ]
  if config.moe.latent_norm:
    name = at + "routed_expert_norm.weight"
    latents.append(stack.vector("core/latent_norm/gain", name))
  return [
    *latents,
    stack.vector("norm/gain", "post_attention_layernorm.weight"),
    stack.linear("core/router", at + "gate"),
    stack.vector("core/selection_bias", bias),
    *(
      stack.experts(f"core/{a}", f"{at}experts.{{}}.{b}.weight", count)
      for a, b in stack.names.expert.items()
    ),
    *(
      stack.linear(f"core/shared/{a}", f"{at}shared_experts.{a}_proj")
      for a in shared
    ),
  ]


# Kind of sublayer -> its rules.
RULES = {
  "attention": _attention,
  "kda": _kda,
  "mla": _mla,
  "mlp": _mlp,
  "moe": _moe,
}
