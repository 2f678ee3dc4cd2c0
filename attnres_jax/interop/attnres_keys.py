# SPDX-License-Identifier: Apache-2.0
"""Keys of our own networks, which `modeling_attnres.py` reads."""

import dataclasses
import pathlib
from typing import Any

from flax import traverse_util

from attnres_jax import config as config_lib
from attnres_jax.interop import config_table as table
from attnres_jax.interop import layout

# The fields that `modeling_attnres.py` computes, by the object that has them.
_NETWORK = {
  "": "vocab_size width num_layers mixers last_mixer num_heads num_kv_heads"
  " head_width mlp_width rope_theta norm_eps tie_embeddings logit_soft_cap",
  "attention.": "qkv_bias output_bias qk_norm",
  "rope.": "scaling factor low_turns high_turns original_length",
  "activation.": "name gate_bound up_bound",
  "kda.": "head_width conv_width gate_rank full_rank_gate decay_bound",
  "mla.": "latent_rank nope_width shared_width value_width latent_eps"
  " query_rank output_gate",
  "moe.": "num_experts top_k expert_width num_shared scaling_factor"
  " dense_layers latent_width latent_norm",
  "residual.": "name block_size",
  "residual.read.": "heads logit_scale scale",
}
FIELDS = tuple(p + n for p, names in _NETWORK.items() for n in names.split())
_SCHEMES = ("prenorm", "full_attnres", "block_attnres")
CLASS = "AttnResForCausalLM"
_CODE = "modeling_attnres"
CODE = tuple(
  pathlib.Path(__file__).with_name(f"{name}.py")
  for name in (_CODE, "layers_attnres")
)
_GENERIC = {
  "vocab_size": "vocab_size", "hidden_size": "width",
  "num_hidden_layers": "num_layers", "num_attention_heads": "num_heads",
  "num_key_value_heads": "kv_heads", "tie_word_embeddings": "tie_embeddings",
}  # fmt: skip


def _values(config: config_lib.ModelConfig) -> dict[str, Any]:
  """All of `FIELDS`; at their defaults, options that the scheme lacks."""
  both = (config_lib.ModelConfig(), config)
  default, values = (config_lib.flatten(dataclasses.asdict(c)) for c in both)
  return {name: (default | values)[name] for name in FIELDS}


def _read_network(keys: table.Keys, so_far: Any) -> dict[str, Any]:
  del so_far
  config = table.build(config_lib.flatten(keys.take("network", dict)))
  # Exports of earlier versions state all fields.
  written = table.build(_values(table.network(config)))
  table.check_same(written, config)
  for name, field in _GENERIC.items():
    keys.expect(name, table.get(config, field))
  return config_lib.flatten(dataclasses.asdict(config))


def _write_network(config: config_lib.ModelConfig) -> dict[str, Any]:
  config_lib.choose(
    "model.residual.name", config.residual.name, dict.fromkeys(_SCHEMES)
  )
  for kind in config.sublayer_kinds:
    config_lib.choose("model.mixers", kind, layout.KINDS)
  nested = traverse_util.unflatten_dict(_values(config), sep=".")
  classes = {"AutoConfig": "AttnResConfig", "AutoModelForCausalLM": CLASS}
  return {name: table.get(config, f) for name, f in _GENERIC.items()} | {
    "network": nested,
    "auto_map": {n: f"{_CODE}.{c}" for n, c in classes.items()},
  }


ENTRY = table.Entry(_read_network, _write_network)
