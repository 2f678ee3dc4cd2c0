# SPDX-License-Identifier: Apache-2.0
"""Which tensors of a checkpoint make up which leaf, by kind of sublayer.

All families name their tensors in the same way: attention and dense MLPs as
Llama does, everything else as Kimi Linear does, except for `Names`. A name of a
table is used where the network has its leaf.
"""

from collections.abc import Collection, Iterator, Mapping
import dataclasses
from typing import Any

import jax

from attnres_jax import config as config_lib
from attnres_jax import models
from attnres_jax.common import trees
from attnres_jax.interop import rules

# Kimi K3 has 128 entries for 96 heads. That it is the next multiple of 128 is
# inferred.
_A_LOG_PARTS = 128
_LINEAR = dict(columns=1, transposed=True)


@dataclasses.dataclass(frozen=True)
class Names:
  """What families name differently.

  All names have the prefix. If A_log is padded, it has zeros after its heads.
  """

  prefix: str = ""
  padded_a_log: bool = False


# By kind of sublayer: each leaf below `core`, and the name of its tensor, to
# which `.weight` is added unless it is a bias or A_log. `{}` stands for the
# number of an expert; a bar separates the tensors of a further axis.
_HEADS = "query q_proj  key k_proj  value v_proj  output o_proj "
KINDS = {
  "attention": _HEADS + """
    query_bias q_proj.bias    key_bias k_proj.bias    value_bias v_proj.bias
    query_norm/gain q_norm    key_norm/gain k_norm    output_bias o_proj.bias
  """,
  "kda": _HEADS + """
    query_conv q_conv1d       key_conv k_conv1d       value_conv v_conv1d
    decay_down f_a_proj       decay_up f_b_proj       beta b_proj
    gate_down g_a_proj        gate_up g_b_proj        gate g_proj
    out_norm/gain o_norm      dt_bias dt_bias         a_log A_log
  """,
  "mla": """
    query q_proj              gate g_proj             output o_proj
    query_down q_a_proj       query_latent_norm/gain q_a_layernorm
    expand kv_b_proj          latent_norm/gain kv_a_layernorm
    compress kv_a_proj_with_mqa
  """,
  "mlp": "gate gate_proj  up up_proj  down down_proj",
  "moe": """
    router gate               selection_bias gate.e_score_correction_bias
    gate_and_up experts.{}.w1|experts.{}.w3   down experts.{}.w2
    latent_down routed_expert_down_proj   shared/gate shared_experts.gate_proj
    latent_up routed_expert_up_proj       shared/up shared_experts.up_proj
    latent_norm/gain routed_expert_norm   shared/down shared_experts.down_proj
  """,
}  # fmt: skip


def rules_of(
  config: config_lib.ModelConfig, names: Names = Names()
) -> tuple[rules.Rule, ...]:
  """A rule for every leaf of a network.

  Raises:
    ValueError: a leaf has no name in these tables, or two.
  """
  abstract = jax.eval_shape(lambda: models.build_model(config))
  shapes = {
    name.removesuffix("/value"): tuple(leaf.shape)
    for name, leaf in trees.to_flat(abstract).items()
  }
  all_rules = tuple(_rules(config, names, shapes))
  leaves = [rule.leaf.removesuffix("/value") for rule in all_rules]
  if sorted(leaves) != sorted(shapes):
    wrong = set(leaves) ^ shapes.keys()
    raise ValueError(f"no rule, or several: {', '.join(sorted(wrong))}")
  return all_rules


def _rules(
  config: config_lib.ModelConfig, names: Names, shapes: Mapping[str, Any]
) -> Iterator[rules.Rule]:
  def rule(leaf: str, tensors: list[str], **layout: Any) -> rules.Rule:
    tensors = [names.prefix + tensor for tensor in tensors]
    return rules.Rule(f"{leaf}/value", shapes[leaf], tuple(tensors), **layout)

  yield rule("embedding/table", ["model.embed_tokens.weight"], columns=1)
  yield rule("final_norm/gain", ["model.norm.weight"])
  if "embedding/head" in shapes:
    yield rule("embedding/head", ["lm_head.weight"], **_LINEAR)
  kinds = config.sublayer_kinds
  for kind in dict.fromkeys(kinds):
    at = f"sublayers/{kind}/"
    leaves = {n.removeprefix(at) for n in shapes if n.startswith(at)}
    layers = [
      f"model.layers.{l // 2}." for l, k in enumerate(kinds) if k == kind
    ]
    for leaf, stack in _tensors(kind, leaves):
      several = len(stack) > 1
      if of_experts := "{}" in stack[0]:
        experts = range(config.moe.num_experts)
        stack = [name.format(e) for e in experts for name in stack]
      tensors = [layer + name for layer in layers for name in stack]
      layout = dict(stack=1 + of_experts + several) | _layout(leaf, names)
      yield rule(at + leaf, tensors, **layout)
  if "residual/queries/query" in shapes:  # As Kimi K3 names them.
    reads = [
      f"model.layers.{i}.{part}_res"
      for i in range(config.num_layers)
      for part in ("self_attention", "mlp")
    ] + ["model.output_attn_res"]
    proj, norm = ([f"{r}_{p}.weight" for r in reads] for p in ("proj", "norm"))
    yield rule("residual/queries/query", proj, stack=1, columns=1)
    yield rule("residual/queries/gain", norm, stack=1)


def _tensors(
  kind: str, leaves: Collection[str]
) -> Iterator[tuple[str, list[str]]]:
  """The leaves of a kind, and their tensors below a layer."""
  norm = "post_attention" if kind in ("mlp", "moe") else "input"
  yield "norm/gain", [f"{norm}_layernorm.weight"]
  parent = {"mlp": "mlp", "moe": "block_sparse_moe"}.get(kind, "self_attn")
  words = KINDS[kind].split()
  for leaf, name in zip(words[::2], words[1::2]):
    if leaf == "query" and "core/query_down" in leaves:
      name = "q_b_proj"  # From a latent.
    if not name.endswith(("bias", "A_log")):
      name = name.replace("|", ".weight|") + ".weight"
    if f"core/{leaf}" in leaves:
      yield f"core/{leaf}", [f"{parent}.{part}" for part in name.split("|")]


def _layout(leaf: str, names: Names) -> dict[str, Any]:
  """How the tensors of a leaf are laid out; see `rules.Rule`."""
  if leaf == "core/a_log":
    return (
      dict(pad=_A_LOG_PARTS) if names.padded_a_log else dict(ones=(2, 0, 1))
    )
  if leaf.endswith(("gain", "bias")):
    return {}
  if leaf == "core/gate_and_up":
    return dict(columns=1)
  if leaf.endswith("_conv"):
    return _LINEAR | dict(ones=(0, 1, 0))
  return _LINEAR | dict(columns=1 + (leaf == "core/output"))
