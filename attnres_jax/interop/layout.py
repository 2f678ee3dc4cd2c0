# SPDX-License-Identifier: Apache-2.0
"""Which tensors of a checkpoint make up which leaf, by kind of sublayer.

All families name their tensors in the same way, except for `Names`: attention
and dense MLPs as Llama does, everything else as Kimi Linear does. A row of a
table is used where the network has its leaf.
"""

from collections.abc import Iterator, Mapping
import dataclasses
from typing import Any, NamedTuple

import jax

from attnres_jax import config as config_lib
from attnres_jax import models
from attnres_jax.common import trees
from attnres_jax.interop import rules

# Kimi K3 has 128 entries for 96 heads. That it is the next multiple of 128 is
# inferred.
_A_LOG_PARTS = 128
_VECTOR: dict[str, Any] = {}
_LINEAR = dict(columns=1, transposed=True)
_OUTPUT = dict(columns=2, transposed=True)
_CONVOLUTION = _LINEAR | dict(ones=(0, 1, 0))


@dataclasses.dataclass(frozen=True)
class Names:
  """What families name differently.

  Attributes:
    prefix: of all names.
    moe: of experts and router, below a layer.
    expert: the matrices gate, up and down of an expert.
    padded_a_log: KDA's A_log is a vector with zeros after its heads.
  """

  prefix: str = ""
  moe: str = "block_sparse_moe"
  expert: tuple[str, str, str] = ("w1", "w3", "w2")
  padded_a_log: bool = False


class _Row(NamedTuple):
  """A leaf of a sublayer, and its tensor below a layer.

  Attributes:
    leaf: below the sublayer.
    name: of the tensor; `{}` stands for the number of an expert.
    layout: see `rules.Rule`.
  """

  leaf: str
  name: str
  layout: Mapping[str, Any] = _LINEAR


_IN, _POST = "input_layernorm.weight", "post_attention_layernorm.weight"
_BEFORE_MIXER = _Row("norm/gain", _IN, _VECTOR)
_BEFORE_MLP = _Row("norm/gain", _POST, _VECTOR)


def _attention(names: Names, leaves: Any) -> list[_Row]:
  del names, leaves
  at, inputs = "self_attn.", ("query", "key", "value")
  return [
    _BEFORE_MIXER,
    *(_Row(f"core/{a}", f"{at}{a[0]}_proj.weight") for a in inputs),
    *(_Row(f"core/{a}_bias", f"{at}{a[0]}_proj.bias", _VECTOR) for a in inputs),
    *(
      _Row(f"core/{a}_norm/gain", f"{at}{a[0]}_norm.weight", _VECTOR)
      for a in ("query", "key")
    ),
    _Row("core/output", at + "o_proj.weight", _OUTPUT),
    _Row("core/output_bias", at + "o_proj.bias", _VECTOR),
  ]


def _kda(names: Names, leaves: Any) -> list[_Row]:
  del leaves
  at, inputs = "self_attn.", ("query", "key", "value")
  a_log = dict(pad=_A_LOG_PARTS) if names.padded_a_log else dict(ones=(2, 0, 1))
  matrices = {
    "decay_down": "f_a", "decay_up": "f_b", "beta": "b", "gate": "g",
    "gate_down": "g_a", "gate_up": "g_b",
  }  # fmt: skip
  return [
    _BEFORE_MIXER,
    *(_Row(f"core/{a}", f"{at}{a[0]}_proj.weight") for a in inputs),
    *(_Row(f"core/{a}", f"{at}{b}_proj.weight") for a, b in matrices.items()),
    *(
      _Row(f"core/{a}_conv", f"{at}{a[0]}_conv1d.weight", _CONVOLUTION)
      for a in inputs
    ),
    _Row("core/a_log", at + "A_log", a_log),
    _Row("core/dt_bias", at + "dt_bias", _VECTOR),
    _Row("core/out_norm/gain", at + "o_norm.weight", _VECTOR),
    _Row("core/output", at + "o_proj.weight", _OUTPUT),
  ]


def _mla(names: Names, leaves: Any) -> list[_Row]:
  del names
  at = "self_attn."
  # Queries come from a latent, or from the input.
  query = "q_b_proj" if "core/query_down" in leaves else "q_proj"
  matrices = {
    "query_down": "q_a_proj", "query": query, "gate": "g_proj",
    "compress": "kv_a_proj_with_mqa", "expand": "kv_b_proj",
  }  # fmt: skip
  gains = {"query_latent_norm": "q_a", "latent_norm": "kv_a"}
  return [
    _BEFORE_MIXER,
    *(_Row(f"core/{a}", f"{at}{b}.weight") for a, b in matrices.items()),
    *(
      _Row(f"core/{a}/gain", f"{at}{b}_layernorm.weight", _VECTOR)
      for a, b in gains.items()
    ),
    _Row("core/output", at + "o_proj.weight", _OUTPUT),
  ]


def _mlp(names: Names, leaves: Any) -> list[_Row]:
  del names, leaves
  matrices = "gate", "up", "down"
  return [
    _BEFORE_MLP,
    *(_Row(f"core/{a}", f"mlp.{a}_proj.weight") for a in matrices),
  ]


def _moe(names: Names, leaves: Any) -> list[_Row]:
  del leaves
  at, matrices = names.moe + ".", ("gate", "up", "down")
  bias = at + "gate.e_score_correction_bias"
  return [
    _BEFORE_MLP,
    _Row("core/router", at + "gate.weight"),
    _Row("core/selection_bias", bias, _VECTOR),
    *(
      _Row(f"core/latent_{a}", f"{at}routed_expert_{a}_proj.weight")
      for a in ("down", "up")
    ),
    _Row("core/latent_norm/gain", at + "routed_expert_norm.weight", _VECTOR),
    *(
      _Row(f"core/{a}", f"{at}experts.{{}}.{b}.weight")
      for a, b in zip(matrices, names.expert)
    ),
    *(
      _Row(f"core/shared/{a}", f"{at}shared_experts.{a}_proj.weight")
      for a in matrices
    ),
  ]


# Kind of sublayer -> its rows, given `Names` and the leaves of a sublayer.
KINDS = {
  "attention": _attention, "kda": _kda, "mla": _mla, "mlp": _mlp, "moe": _moe,
}  # fmt: skip


def rules_of(
  config: config_lib.ModelConfig, names: Names = Names()
) -> tuple[rules.Rule, ...]:
  """A rule for every leaf of a network.

  Raises:
    ValueError: a leaf has no row in these tables, or two rows.
  """
  abstract = jax.eval_shape(lambda: models.build_model(config))
  shapes = {
    name.removesuffix("/value"): tuple(leaf.shape)
    for name, leaf in trees.to_flat(abstract).items()
  }
  found = list(_rules(config, names, shapes))
  if sorted(rule.leaf for rule in found) != sorted(
    f"{n}/value" for n in shapes
  ):
    missing = set(f"{n}/value" for n in shapes) ^ {rule.leaf for rule in found}
    raise ValueError(f"no rule, or several: {', '.join(sorted(missing))}")
  return tuple(found)


def _rules(
  config: config_lib.ModelConfig, names: Names, shapes: Mapping[str, Any]
) -> Iterator[rules.Rule]:
  def rule(leaf: str, tensors: list[str], **layout: Any) -> rules.Rule:
    tensors = [names.prefix + one for one in tensors]
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
    for leaf, name, layout in KINDS[kind](names, leaves):
      if leaf not in leaves:
        continue
      stack = [name]
      if "{}" in name:
        stack = [name.format(e) for e in range(config.moe.num_experts)]
      tensors = [layer + one for layer in layers for one in stack]
      yield rule(at + leaf, tensors, stack=1 + ("{}" in name), **layout)
  if "residual/queries/query" in shapes:  # As Kimi K3 names them.
    reads = [
      f"model.layers.{i}.{part}_res"
      for i in range(config.num_layers)
      for part in ("self_attention", "mlp")
    ] + ["model.output_attn_res"]
    proj, norm = ([f"{r}_{p}.weight" for r in reads] for p in ("proj", "norm"))
    yield rule("residual/queries/query", proj, stack=1, columns=1)
    yield rule("residual/queries/gain", norm, stack=1)
