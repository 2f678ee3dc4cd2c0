# SPDX-License-Identifier: Apache-2.0
"""Published networks, and what is refused of a config.json."""

import dataclasses
import math

import jax
import pytest

from attnres_jax import config as config_lib
from attnres_jax import models
from attnres_jax.interop import families
from tests import tiny_network
from tests.interop import small_checkpoint

LLAMA = dict(
  model_type="llama", vocab_size=300, hidden_size=64, num_hidden_layers=3,
  num_attention_heads=4, intermediate_size=96,
)  # fmt: skip
KIMI_48B = dict(
  model_type="kimi_linear", architectures=["KimiLinearForCausalLM"],
  hidden_size=2304, num_hidden_layers=27, vocab_size=163840,
  intermediate_size=9216, num_attention_heads=32, num_key_value_heads=32,
  head_dim=72, rope_theta=10000.0, rope_scaling=None, mla_use_nope=True,
  q_lora_rank=None, kv_lora_rank=512, qk_nope_head_dim=128,
  qk_rope_head_dim=64, v_head_dim=128, rms_norm_eps=1e-5, hidden_act="silu",
  num_experts=256, num_experts_per_token=8, num_shared_experts=1,
  moe_intermediate_size=1024, routed_scaling_factor=2.446,
  first_k_dense_replace=1, moe_layer_freq=1, moe_renormalize=True,
  moe_router_activation_func="sigmoid", use_grouped_topk=True,
  num_expert_group=1, topk_group=1, bos_token_id=163584, eos_token_id=163586,
  pad_token_id=163839, tie_word_embeddings=False, auto_map={},
  linear_attn_config=dict(
    head_dim=128, num_heads=32, short_conv_kernel_size=4,
    full_attn_layers=[4, 8, 12, 16, 20, 24, 27],
    kda_layers=[i for i in range(1, 27) if i % 4],
  ),
)  # fmt: skip
QWEN_HALF_BILLION = dict(
  model_type="qwen2", architectures=["Qwen2ForCausalLM"],
  attention_dropout=0.0, bos_token_id=151643, eos_token_id=151643,
  hidden_act="silu", hidden_size=896, initializer_range=0.02,
  intermediate_size=4864, max_position_embeddings=32768, max_window_layers=24,
  num_attention_heads=14, num_hidden_layers=24, num_key_value_heads=2,
  rms_norm_eps=1e-6, rope_theta=1000000.0, sliding_window=32768,
  tie_word_embeddings=True, torch_dtype="bfloat16",
  transformers_version="4.40.1", use_cache=True, use_mrope=False,
  use_sliding_window=False, vocab_size=151936,
)  # fmt: skip
# text_config of the released network (spec: interop section 1).
KDA_OF_K3 = dict(
  head_dim=128, num_heads=96, short_conv_kernel_size=4,
  use_full_rank_gate=True, gate_lower_bound=-5.0,
  full_attn_layers=[*range(4, 93, 4), 93],
  kda_layers=[i for i in range(1, 93) if i % 4],
)  # fmt: skip
K3 = dict(
  model_type="kimi_linear", hidden_size=7168, num_hidden_layers=93,
  num_attention_heads=96, num_key_value_heads=96, vocab_size=163840,
  intermediate_size=33792, hidden_act="situ", activation_situ_beta=4.0,
  activation_situ_linear_beta=25.0, rms_norm_eps=1e-5, mla_use_nope=True,
  mla_use_output_gate=True, q_lora_rank=1536, kv_lora_rank=512,
  qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
  num_experts=896, num_experts_per_token=16, num_shared_experts=2,
  moe_intermediate_size=3072, routed_expert_hidden_size=3584,
  latent_moe_use_norm=True, routed_scaling_factor=1.0,
  first_k_dense_replace=1, moe_layer_freq=1, moe_renormalize=True,
  moe_router_activation_func="sigmoid", attn_res_block_size=12,
  linear_attn_config=KDA_OF_K3,
)  # fmt: skip


def _read(values):
  return families.of_config_json(values)[1].read_config(values)


def _of_k3(text):
  return {"model_type": "kimi_k3", "text_config": text}


def _billions(config):
  abstract = jax.eval_shape(lambda: models.build_model(config))
  return sum(leaf.size for leaf in jax.tree.leaves(abstract)) / 1e9


@pytest.mark.parametrize("values", [QWEN_HALF_BILLION, KIMI_48B, _of_k3(K3)])
def test_published_networks_come_back(values):
  config = _read(values)
  name = values["model_type"]
  written = families.FAMILIES[name].write_config(config)
  assert _read({"model_type": name} | written) == config


def test_the_published_48b_network_is_that_of_configs():
  config = _read(KIMI_48B)
  ours = tiny_network.full_size()
  assert config == dataclasses.replace(
    ours, vocab_size=163840, dtype="float32", residual=config.residual,
    remat=config.remat, rope_theta=config.rope_theta,
    num_kv_heads=config.num_kv_heads,
  )  # fmt: skip


@pytest.mark.more
def test_the_published_shapes_of_k3():
  config = _read(_of_k3(K3))
  packed = {
    "w1.weight_packed": (3072, 1792), "w1.weight_scale": (3072, 112),
    "w2.weight_packed": (3584, 1536), "w2.weight_scale": (3584, 96),
  }  # fmt: skip
  plain = {
    "self_attention_res_proj.weight": (1, 7168), "A_log": (128,),
    "q_conv1d.weight": (12288, 1, 4), "f_b_proj.weight": (12288, 128),
    "g_proj.weight": (12288, 7168), "q_b_proj.weight": (18432, 1536),
    "kv_b_proj.weight": (24576, 512), "routed_expert_norm.weight": (3584,),
    "routed_expert_up_proj.weight": (7168, 3584),
    "block_sparse_moe.shared_experts.up_proj.weight": (6144, 7168),
    "layers.0.mlp.up_proj.weight": (33792, 7168), ".b_proj.weight": (96, 7168),
  }  # fmt: skip
  count, seen = 0, set()
  for rule in families.FAMILIES["kimi_k3"].rules(config):
    rule = dataclasses.replace(rule, packed=".experts." in rule.names[0])
    for name, shape, _ in rule.stored():
      count += 1
      for end, expected in (packed | plain).items():
        if name.endswith(end):
          assert shape == expected, name
          seen.add(end)
  assert seen == packed.keys() | plain.keys()
  # All but those of images, of which the headers have 497,220.
  assert 490_000 < count < 497_220
  assert round(_billions(config) / 100) == 28


# By published or small network: changes of keys, and words of the error.
_REFUSED = {
  "llama": [
    (dict(model_type="gpt2"), "config.json: model_type: got 'gpt2', expected"),
    (dict(architectures=["LlamaForX"]), "architectures: got ['LlamaForX']"),
    (dict(new_key=1), "config.json: new_key: got 1, expected no such key"),
    (dict(hidden_act="gelu"), "hidden_act: got 'gelu', expected 'silu'"),
    (dict(mlp_bias=True), "mlp_bias: got True, expected False"),
    (dict(attention_dropout=0.1), "attention_dropout: got 0.1, expected 0"),
    (dict(hidden_size=...), "hidden_size: got None, expected a value"),
    (dict(hidden_size="64"), "hidden_size: got '64', expected a value of type"),
    (dict(rope_theta=1e4, rope_parameters={"rope_theta": 5.0}), "rope_theta"),
    (dict(rope_scaling={"rope_type": "dynamic"}), "rope_type: got 'dynamic'"),
    (dict(rope_scaling={"rope_type": "llama3"}), "factor: got None, expected"),
    (dict(rope_scaling={"type": "linear"}), "rope_type: got 'linear'"),
    (dict(rope_scaling={"new_key": 1}), "rope_scaling: new_key: got 1, expect"),
    (dict(quantization_config={}, num_attention_heads=0), "heads: got 0"),
    (dict(rope_parameters={"rope_theta": 0}), "rope_theta: got"),
    (dict(num_hidden_layers=10**12), "num_hidden_layers: got"),
    *(
      (dict(rope_theta=base), "rope_theta: got")
      for base in (0, 0.0, -1, 1, math.nan, "x")
    ),
  ],
  "qwen2": [
    (dict(layer_types=["sliding_attention"] * 3), "layer_types: got"),
    (dict(use_sliding_window=True), "use_sliding_window: got True"),
  ],
  "kimi_linear": [
    (dict(mla_use_nope=False), "mla_use_nope: got False, expected True"),
    (dict(q_lora_rank=8), "q_lora_rank: got 8"),
    (dict(num_expert_group=2), "num_expert_group: got 2, expected 1"),
    (dict(moe_layer_freq=2), "moe_layer_freq: got 2, expected 1"),
    (dict(moe_renormalize=False), "moe_renormalize: got False, expected True"),
    (dict(linear_attn_config=dict(head_dim=8)), "linear_attn_config: got {"),
    (dict(linear_attn_config=..., layer_types=["kda"]), "layer_types: got ("),
    (dict(mlp_layer_types=["sparse"] * 27), "mlp_layer_types: got ["),
  ],
  "kimi_k3": [
    (dict(hidden_act="gelu"), "text_config: hidden_act: got 'gelu', expected"),
    (dict(activation_situ_beta=...), "activation_situ_beta: got None, expect"),
    (dict(mla_use_nope=False), "text_config: mla_use_nope: got False"),
    (dict(attn_res_block_size=...), "attn_res_block_size: got None, expected"),
    (dict(new_key=1), "text_config: new_key: got 1, expected no such key"),
    (
      dict(linear_attn_config=KDA_OF_K3 | dict(gate_lower_bound=5.0)),
      "gate_lower_bound: got 5.0, expected a number below 0",
    ),
  ],
}


@pytest.mark.parametrize(
  "family,changes,words",
  [(name, *case) for name, cases in _REFUSED.items() for case in cases],
)
def test_configs_that_are_refused(family, changes, words):
  bases = {"kimi_linear": KIMI_48B, "kimi_k3": K3}
  base = bases.get(family, LLAMA | dict(model_type=family))
  _read(_of_k3(base) if base is K3 else base)
  values = {k: v for k, v in (base | changes).items() if v is not ...}
  with pytest.raises(config_lib.ConfigError) as error:
    _read(_of_k3(values) if base is K3 else values)
  assert words in str(error.value)


@pytest.mark.parametrize(
  "fields,words",
  [
    (dict(residual=config_lib.residual_config("rescaled")), "residual.name"),
    (dict(qkv_norm=True), "config.model.qkv_norm"),
  ],
)
def test_networks_that_no_family_expresses(fields, words):
  config = dataclasses.replace(small_checkpoint.CONFIG, **fields)
  with pytest.raises(config_lib.ConfigError) as error:
    families.of_network(config)
  # But for Kimi Linear and K3, which have other mixers.
  assert str(error.value).count(words) == len(families.FAMILIES) - 2
