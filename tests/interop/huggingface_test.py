# SPDX-License-Identifier: Apache-2.0
"""Layouts entry by entry, round trips bit by bit, and what is refused."""

import dataclasses
import json
import math

import jax
import numpy as np
import pytest
import safetensors.numpy

from attnres_jax import config as config_lib
from attnres_jax import models
from attnres_jax.common import sharding
from attnres_jax.interop import families
from attnres_jax.interop import huggingface
from attnres_jax.interop import tensor_files
from tests import tiny_network
from tests.interop import small_checkpoint

FAMILIES = tuple(families.FAMILIES)
UP = "model.layers.1.mlp.up_proj.weight"


def _tensors(folder):
  return {
    name: tensor.read()
    for name, tensor in tensor_files.open_folder(folder).items()
  }


def _assert_same(one, other):
  jax.tree.map(np.testing.assert_array_equal, one, other)


def _change(folder, **changes):
  path = folder / huggingface.CONFIG
  values = json.loads(path.read_text()) | changes
  values = {k: v for k, v in values.items() if v is not ...}
  path.write_text(json.dumps(values))


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_layouts_are_those_of_linear_maps(tmp_path, family):
  model = small_checkpoint.write(tmp_path, family)
  found = _tensors(tmp_path)
  attention = model.sublayers["attention"]
  mlp, layer = model.sublayers["mlp"].core, "model.layers.1."
  query_DNH, key_DKH = (
    np.asarray(a[1]) for a in (attention.core.query, attention.core.key)
  )
  output_NHD = np.asarray(attention.core.output[1])
  head_width = query_DNH.shape[2]
  for d, n, h in ((0, 0, 0), (63, 3, 5), (17, 2, 15)):
    row = n * head_width + h
    weight = found[layer + "self_attn.q_proj.weight"]
    assert weight[row, d] == query_DNH[d, n, h]
    assert (
      found[layer + "self_attn.o_proj.weight"][d, row] == (output_NHD[n, h, d])
    )
    row = n // 2 * head_width + h
    weight = found[layer + "self_attn.k_proj.weight"]
    assert weight[row, d] == key_DKH[d, n // 2, h]
  gate = found[layer + "mlp.gate_proj.weight"]
  np.testing.assert_array_equal(gate, np.asarray(mlp.gate[1]).T)
  table = found["model.embed_tokens.weight"]
  np.testing.assert_array_equal(table, model.embedding.table[...])
  norms = found[layer + "post_attention_layernorm.weight"]
  np.testing.assert_array_equal(norms, model.sublayers["mlp"].norm.gain[1])
  assert ("lm_head.weight" in found) == (family != "llama")
  biases = [name for name in found if name.endswith("bias")]
  assert len(biases) == (9 if family == "qwen2" else 0)
  if biases:
    bias = found[layer + "self_attn.q_proj.bias"]
    expected = np.asarray(attention.core.query_bias[1]).reshape(-1)
    np.testing.assert_array_equal(bias, expected)


def test_layouts_of_kimi_linear(tmp_path):
  model = small_checkpoint.write(tmp_path, "kimi_linear")
  found, layer = _tensors(tmp_path), "model.layers.3."
  kda = model.sublayers["kda"].core  # Of layers 0, 1, 3 and 4.
  conv = found[layer + "self_attn.k_conv1d.weight"]
  assert conv.shape == (16, 1, 4)
  key_conv_WNH = np.asarray(kda.key_conv[2])
  for tap, n, h in ((0, 0, 0), (3, 1, 5)):
    assert conv[n * 8 + h, 0, tap] == key_conv_WNH[tap, n, h]
  a_log = found[layer + "self_attn.A_log"]
  assert a_log.shape == (1, 1, 2, 1)
  np.testing.assert_array_equal(a_log[0, 0, :, 0], kda.a_log[2])
  dt_bias = found[layer + "self_attn.dt_bias"]
  np.testing.assert_array_equal(dt_bias, np.ravel(kda.dt_bias[2]))
  moe = model.sublayers["moe"].core  # Of layers 2, 3 and 4.
  for ours, theirs in (("gate", "w1"), ("up", "w3"), ("down", "w2")):
    expert = found[layer + f"block_sparse_moe.experts.2.{theirs}.weight"]
    expected = np.asarray(getattr(moe, ours)[1, 2]).T
    np.testing.assert_array_equal(expert, expected)
  bias = found[layer + "block_sparse_moe.gate.e_score_correction_bias"]
  np.testing.assert_array_equal(bias, moe.selection_bias[1])
  mla = model.sublayers["mla"].core
  latent = found["model.layers.2.self_attn.kv_a_proj_with_mqa.weight"]
  np.testing.assert_array_equal(latent, np.asarray(mla.compress[0]).T)
  assert "model.layers.1.mlp.up_proj.weight" in found


# What is published of Kimi-Linear-48B-A3B.
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


def test_the_published_48b_network_is_that_of_configs():
  found = families.read_config(KIMI_48B)
  ours = tiny_network.full_size()
  assert found == dataclasses.replace(
    ours,
    vocab_size=163840,
    dtype="float32",
    residual=found.residual,
    remat=found.remat,
    rope_theta=found.rope_theta,
    num_kv_heads=found.num_kv_heads,
  )
  written = families.FAMILIES["kimi_linear"].write_config(found)
  same = {"model_type": "kimi_linear"} | written
  assert families.read_config(same) == found


@pytest.mark.parametrize(
  "changes,words",
  [
    (dict(mla_use_nope=False), "mla_use_nope: got False, expected True"),
    (dict(q_lora_rank=8), "q_lora_rank: got 8"),
    (dict(num_expert_group=2), "num_expert_group: got 2, expected 1"),
    (dict(linear_attn_config=dict(head_dim=8)), "linear_attn_config: got {"),
    (dict(linear_attn_config=..., layer_types=["kda"]), "layer_types: got ("),
    (dict(mlp_layer_types=["sparse"] * 27), "mlp_layer_types: got ["),
  ],
)
def test_configs_of_kimi_linear_that_are_refused(changes, words):
  values = {k: v for k, v in (KIMI_48B | changes).items() if v is not ...}
  with pytest.raises(config_lib.ConfigError) as error:
    families.read_config(values)
  assert words in str(error.value)


# What is published of DeepSeek-V3, but for its weights in eight bits.
DEEPSEEK = dict(
  model_type="deepseek_v3", architectures=["DeepseekV3ForCausalLM"],
  attention_bias=False, attention_dropout=0.0, auto_map={}, bos_token_id=0,
  eos_token_id=1, ep_size=1, first_k_dense_replace=3, hidden_act="silu",
  hidden_size=7168, initializer_range=0.02, intermediate_size=18432,
  kv_lora_rank=512, max_position_embeddings=163840, moe_intermediate_size=2048,
  moe_layer_freq=1, n_group=8, n_routed_experts=256, n_shared_experts=1,
  norm_topk_prob=True, num_attention_heads=128, num_experts_per_tok=8,
  num_hidden_layers=61, num_key_value_heads=128, num_nextn_predict_layers=1,
  q_lora_rank=1536, qk_nope_head_dim=128, qk_rope_head_dim=64,
  rms_norm_eps=1e-6, rope_theta=10000, routed_scaling_factor=2.5,
  scoring_func="sigmoid", tie_word_embeddings=False, topk_group=4,
  topk_method="noaux_tc", v_head_dim=128, vocab_size=129280, use_cache=True,
  rope_scaling=dict(
    type="yarn", factor=40, beta_fast=32, beta_slow=1, mscale=1.0,
    mscale_all_dim=1.0, original_max_position_embeddings=4096,
  ),
)  # fmt: skip


def test_the_published_network_of_deepseek():
  found = families.read_config(DEEPSEEK)
  assert found.num_sublayers == 122
  assert found.rope == config_lib.RopeConfig(
    scaling="yarn", factor=40.0, high_turns=32.0, original_length=4096,
    logit_scale=(0.1 * math.log(40) + 1) ** 2, pairs="neighbours",
  )  # fmt: skip
  abstract = jax.eval_shape(lambda: models.build_model(found))
  # 671B are published, without the layer that predicts a second token.
  count = sum(leaf.size for leaf in jax.tree.leaves(abstract))
  assert round(count / 1e9) == 671
  written = families.FAMILIES["deepseek_v3"].write_config(found)
  assert families.read_config({"model_type": "deepseek_v3"} | written) == found
  assert written["rope_scaling"]["mscale"] == 1.0


@pytest.mark.parametrize(
  "changes,words",
  [
    (
      dict(quantization_config={"quant_method": "fp8"}),
      "quantization_config: got {'quant_method': 'fp8'}, expected null",
    ),
    (dict(topk_method="greedy"), "topk_method: got 'greedy', expected 'noaux"),
    (dict(norm_topk_prob=False), "norm_topk_prob: got False, expected True"),
    (dict(moe_layer_freq=2), "moe_layer_freq: got 2, expected 1"),
    (dict(n_group=3), "model.moe.groups: got 3, expected equal groups of 2"),
    (dict(n_group=4, topk_group=5), "top_groups: got 5, expected at most"),
    (dict(n_group=64, topk_group=1), "top_groups: got 1, expected groups that"),
    (
      dict(rope_scaling=dict(rope_type="yarn", factor=40, mscale=2.0)),
      "rope_scaling: mscale: got 2.0, expected mscale_all_dim=0.0",
    ),
    (dict(q_lora_rank="1536"), "q_lora_rank: got '1536', expected a value of"),
    (dict(qk_rope_head_dim=63), "mla.shared_width: got 63, expected an even"),
  ],
)
def test_configs_of_deepseek_that_are_refused(changes, words):
  with pytest.raises(config_lib.ConfigError) as error:
    families.read_config(DEEPSEEK | changes)
  assert words in str(error.value)


def test_the_second_token_of_deepseek_is_left_out(tmp_path):
  """But not a layer that config.json merely does not count."""
  model = small_checkpoint.write(tmp_path, "deepseek_v3")
  extra = "model.layers.3."

  def add(arrays):
    arrays[extra + "eh_proj.weight"] = np.ones((64, 128), np.float32)
    arrays[extra + "input_layernorm.weight"] = np.ones(64, np.float32)

  _rewrite(tmp_path, add)
  with pytest.raises(tensor_files.TensorFileError, match="is not part of the"):
    huggingface.read(tmp_path)
  _change(tmp_path, num_nextn_predict_layers=1)
  _assert_same(huggingface.load(huggingface.read(tmp_path)), model)
  _change(tmp_path, num_hidden_layers=2)
  with pytest.raises(tensor_files.TensorFileError, match="layers.2.input_lay"):
    huggingface.read(tmp_path)


def test_networks_that_deepseek_cannot_express():
  config = small_checkpoint.model("deepseek_v3").config
  write = families.FAMILIES["deepseek_v3"].write_config
  mla = dataclasses.replace(config.mla, rope_theta=0.0)
  with pytest.raises(config_lib.ConfigError, match="mla.rope_theta: got 0"):
    write(dataclasses.replace(config, mla=mla))
  rope = config_lib.RopeConfig(logit_scale=2.0)
  with pytest.raises(config_lib.ConfigError, match="rope.logit_scale: got 2"):
    write(dataclasses.replace(config, rope=rope))


def test_dtypes_of_leaves_are_kept(tmp_path):
  model = small_checkpoint.model("kimi_linear")
  leaf = "sublayers/kda/core/a_log/value"
  options = dict(facts={}, card="", family="kimi_linear")
  huggingface.export(
    model, tmp_path / "a", dtype="BF16", dtypes={leaf: "F32"}, **options
  )
  source = huggingface.read(tmp_path / "a")
  assert source.dtype == "BF16" and source.dtypes == {leaf: "F32"}
  huggingface.export(
    huggingface.load(source), tmp_path / "b", dtype=source.dtype,
    dtypes=source.dtypes, **options,
  )  # fmt: skip
  for path in (tmp_path / "a").iterdir():
    assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes()


@pytest.mark.parametrize("family", FAMILIES)
def test_round_trips_are_bit_equal(tmp_path, family):
  model = small_checkpoint.write(tmp_path / "a", family, shard_bytes=60_000)
  source = huggingface.read(tmp_path / "a")
  assert len({t.file for t in source.tensors.values()}) > 3
  assert source.family == family and source.dtype == "F32"
  assert source.config == model.config
  loaded = huggingface.load(source)
  _assert_same(loaded, model)
  small_checkpoint.write(tmp_path / "b", family, dtype="BF16")
  source = huggingface.read(tmp_path / "b")
  facts = {k: source.values[k] for k in ("max_position_embeddings",)}
  facts["eos_token_id"] = 2
  huggingface.export(
    huggingface.load(source), tmp_path / "c", dtype=source.dtype, facts=facts,
    card="A test.\n", family=family,
  )  # fmt: skip
  for path in (tmp_path / "b").iterdir():
    assert path.read_bytes() == (tmp_path / "c" / path.name).read_bytes(), path


@pytest.mark.parametrize(
  "family,mesh",
  [
    ("qwen2", dict(fsdp=4, tensor=2)),
    ("qwen2", dict(data=2, fsdp=2, tensor=2)),
    ("kimi_linear", dict(fsdp=2, expert=2, tensor=2)),
  ],
)
def test_shards_are_those_of_the_whole(tmp_path, family, mesh):
  model = small_checkpoint.write(tmp_path, family)
  mesh = sharding.make_mesh(config_lib.MeshConfig(**{"data": 1} | mesh))
  loaded = huggingface.load(huggingface.read(tmp_path), mesh)
  _assert_same(loaded, model)
  found = jax.tree.map(lambda a: a.sharding, loaded)
  assert jax.tree.leaves(found) == jax.tree.leaves(
    sharding.state_sharding(model, mesh)
  )
  first = next(iter(loaded.sublayers.values()))
  query = first.core.query[...]
  assert query.addressable_shards[0].data.size < query.size


@pytest.mark.parametrize(
  "changes,words",
  [
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
    (dict(rope_scaling={"rope_type": "yarn"}), "factor: got None, expected a"),
    (dict(rope_scaling={"type": "linear"}), "rope_type: got 'linear'"),
    (dict(rope_scaling={"beta_fast": 1}), "rope_scaling: beta_fast: got 1"),
    (dict(quantization_config={}, num_attention_heads=0), "heads: got 0"),
    *(
      (dict(rope_theta=base), "rope_theta: got")
      for base in (0, 0.0, -1, 1, math.nan, "x")
    ),
    (
      dict(rope_parameters={"rope_theta": 0}, rope_theta=...),
      "rope_theta: got",
    ),
    *(
      (dict(eos_token_id=id), "eos_token_id: got")
      for id in ("x", 1.5, [[1]], True, -1, 300, [2, 300], {}, 10**30)
    ),
    (
      dict(bos_token_id=[1]),
      "bos_token_id: got [1], expected ids from 0 to 299",
    ),
    (dict(num_hidden_layers=10**12), "num_hidden_layers: got"),
    (dict(num_hidden_layers=900), "describes 900 layers, and the files have"),
  ],
)
def test_configs_that_are_refused(tmp_path, changes, words):
  small_checkpoint.write(tmp_path)
  _change(tmp_path, **changes)
  kinds = config_lib.ConfigError, tensor_files.TensorFileError
  with pytest.raises(kinds) as error:
    huggingface.read(tmp_path)
  assert words in str(error.value)


_BAD = (
  None, True, "x", "\x1b[31m", -1, 0, 1.5, math.nan, math.inf, 10**12, 10**30,
  [], [[1]], {}, {"x": 1},
)  # fmt: skip


@pytest.mark.parametrize(
  "family",
  [
    name if name == "llama" else pytest.param(name, marks=pytest.mark.slow)
    for name in FAMILIES
  ],
)
def test_any_value_of_any_key_is_read_or_refused_in_a_line(family, tmp_path):
  small_checkpoint.write(tmp_path, family)
  path = tmp_path / huggingface.CONFIG
  good = json.loads(path.read_text())
  inner = good.get("text_config", good.get("network", {}))
  places = [good] + ([inner] if inner else [])
  for place in places:
    for key, kept in list(place.items()):
      for value in _BAD:
        place[key] = value
        path.write_text(json.dumps(good))
        try:
          huggingface.read(tmp_path)
        except (config_lib.ConfigError, tensor_files.TensorFileError) as error:
          text = str(error)
          assert text.isprintable() and str(tmp_path) in text, (key, value)
      place[key] = kept


@pytest.mark.parametrize(
  "text", ["", "[]", "{", "[" * 100_000, '{"model_type": []}', "\xff"]
)
def test_a_damaged_config_json(tmp_path, text):
  small_checkpoint.write(tmp_path)
  path = tmp_path / huggingface.CONFIG
  path.write_bytes(text.encode("latin-1"))
  kinds = config_lib.ConfigError, tensor_files.TensorFileError
  with pytest.raises(kinds, match="config.json: ") as error:
    huggingface.read(tmp_path)
  assert str(error.value).isprintable()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", [UP, "model.norm.weight"])
def test_weights_that_are_not_finite_are_refused(tmp_path, name, value):
  small_checkpoint.write(tmp_path)
  arrays = _tensors(tmp_path)
  arrays[name] = arrays[name].copy()
  arrays[name].flat[3] = value
  safetensors.numpy.save_file(arrays, tmp_path / tensor_files.SINGLE)
  source = huggingface.read(tmp_path)
  words = f"{name}' has values that are not finite"
  with pytest.raises(tensor_files.TensorFileError, match=words):
    huggingface.load(source)


@pytest.mark.parametrize(
  "name,change,words",
  [
    ("lm_head.weight", lambda a: a + 1e-3, "differs from 'model.embed_tokens"),
    ("lm_head.weight", lambda a: a[:-1], "differs from 'model.embed_tokens"),
    (
      "model.layers.0.self_attn.rotary_emb.inv_freq",
      lambda a: np.ones(8, np.float32),
      "differs from those of rope_theta=",
    ),
  ],
)
def test_copies_that_differ_are_refused(tmp_path, name, change, words):
  """A checkpoint whose files contradict its config.json."""
  small_checkpoint.write(tmp_path)

  def add(arrays):
    arrays[name] = change(arrays["model.embed_tokens.weight"])

  _rewrite(tmp_path, add)
  with pytest.raises(tensor_files.TensorFileError, match=words):
    huggingface.load(huggingface.read(tmp_path))


def test_windows_are_refused(tmp_path):
  small_checkpoint.write(tmp_path, "qwen2")
  _change(tmp_path, sliding_window=8, max_window_layers=1)
  assert huggingface.read(tmp_path).config.num_layers == 3
  _change(tmp_path, layer_types=["full_attention", "sliding_attention"] * 2)
  with pytest.raises(config_lib.ConfigError, match="layer_types"):
    huggingface.read(tmp_path)
  _change(tmp_path, layer_types=..., use_sliding_window=True)
  with pytest.raises(config_lib.ConfigError, match="use_sliding_window"):
    huggingface.read(tmp_path)


@pytest.mark.parametrize(
  "changes,words",
  [
    (dict(num_hidden_layers=4), "no tensor 'model.layers.3.input_layernorm"),
    (dict(num_hidden_layers=2), "'model.layers.2.input_layernorm.weight' is"),
    (dict(intermediate_size=95), "gate_proj.weight' is (96, 64), expected (95"),
    (dict(attention_bias=True), "no tensor 'model.layers.0.self_attn.q_proj.b"),
    (dict(tie_word_embeddings=False), "no tensor 'lm_head.weight' in the file"),
  ],
)
def test_files_of_another_network(tmp_path, changes, words):
  small_checkpoint.write(tmp_path)
  _change(tmp_path, **changes)
  with pytest.raises(tensor_files.TensorFileError) as error:
    huggingface.read(tmp_path)
  assert words in str(error.value)


def _rewrite(folder, change):
  """Changes the tensors of a folder with one file."""
  arrays = _tensors(folder)
  change(arrays)
  names = {t: n for n, t in tensor_files.DTYPES.items()}
  names[np.dtype(np.int8)] = "I8"
  entries = [
    tensor_files.Entry(name, names[a.dtype], a.shape, lambda a=a: a)
    for name, a in arrays.items()
  ]
  (folder / tensor_files.SINGLE).unlink()
  with pytest.MonkeyPatch.context() as patch:
    known = tensor_files.DTYPES | {"I8": np.dtype(np.int8)}
    patch.setattr(tensor_files, "DTYPES", known)
    tensor_files.write_folder(folder, entries, 10**9)


def test_tensors_that_are_ignored_by_name(tmp_path):
  model = small_checkpoint.write(tmp_path)

  def add(arrays):
    arrays["lm_head.weight"] = arrays["model.embed_tokens.weight"]
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    frequencies = model.config.rope_theta ** (-np.arange(8) / 8)
    arrays[name] = frequencies.astype(np.float16)

  _rewrite(tmp_path, add)
  _assert_same(huggingface.load(huggingface.read(tmp_path)), model)


@pytest.mark.parametrize(
  "name,array,words",
  [
    (UP, np.ones((96, 64), np.int8), "up_proj.weight' is I8, expected one of"),
    ("x", np.ones(2, np.float32), "'x' is not part of the network"),
  ],
)
def test_tensors_that_are_refused(tmp_path, name, array, words):
  small_checkpoint.write(tmp_path)
  _rewrite(tmp_path, lambda arrays: arrays.update({name: array}))
  with pytest.raises(tensor_files.TensorFileError, match=words):
    huggingface.read(tmp_path)


@pytest.mark.parametrize(
  "fields,words",
  [
    (dict(residual=config_lib.ResidualConfig("rescaled")), "residual.name"),
    (dict(qkv_norm=True), "config.model.qkv_norm"),
  ],
)
def test_networks_that_no_family_expresses(fields, words):
  config = dataclasses.replace(small_checkpoint.CONFIG, **fields)
  with pytest.raises(config_lib.ConfigError) as error:
    families.of_network(config)
  # But for Kimi Linear and K3 and DeepSeek-V3, which have other mixers.
  assert str(error.value).count(words) == len(FAMILIES) - 3
