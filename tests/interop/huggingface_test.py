# SPDX-License-Identifier: Apache-2.0
"""Layouts entry by entry, round trips bit by bit, and what is refused."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from attnres_jax import config as config_lib
from attnres_jax import sharding
from attnres_jax.interop import families
from attnres_jax.interop import huggingface
from attnres_jax.interop import tensor_files
from tests.interop import small_checkpoint

FAMILIES = tuple(families.FAMILIES)
UP = "model.layers.1.mlp.up_proj.weight"


def _tensors(folder):
  return {
    name: tensor.read(
      slice(0, tensor.shape[0]), slice(0, int(np.prod(tensor.shape[1:])))
    ).reshape(tensor.shape)
    for name, tensor in tensor_files.open_folder(folder).items()
  }


def _assert_same(one, other):
  jax.tree.map(np.testing.assert_array_equal, one, other)


def _change(folder, **changes):
  path = folder / huggingface.CONFIG
  values = json.loads(path.read_text()) | changes
  values = {k: v for k, v in values.items() if v is not ...}
  path.write_text(json.dumps(values))


@pytest.mark.parametrize("family", FAMILIES)
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
  "mesh", [dict(fsdp=4, tensor=2), dict(data=2, fsdp=2, tensor=2)]
)
def test_shards_are_those_of_the_whole(tmp_path, mesh):
  model = small_checkpoint.write(tmp_path, "qwen2")
  mesh = sharding.make_mesh(config_lib.MeshConfig(**{"data": 1} | mesh))
  loaded = huggingface.load(huggingface.read(tmp_path), mesh)
  _assert_same(loaded, model)
  found = jax.tree.map(lambda a: a.sharding, loaded)
  assert jax.tree.leaves(found) == jax.tree.leaves(
    sharding.state_sharding(model, mesh)
  )
  query = loaded.sublayers["attention"].core.query[...]
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
    (dict(hidden_size=...), "hidden_size: got None, expected a value of type"),
    (dict(hidden_size="64"), "hidden_size: got '64', expected a value of type"),
    (dict(rope_theta=1e4, rope_parameters={"rope_theta": 5.0}), "rope_theta"),
    (dict(rope_scaling={"rope_type": "yarn"}), "rope_type: got 'yarn'"),
    (dict(rope_scaling={"type": "linear"}), "rope_type: got 'linear'"),
    (dict(rope_scaling={"beta_fast": 1}), "rope_scaling: beta_fast: got 1"),
    (dict(quantization_config={}, num_attention_heads=0), "model.num_heads"),
  ],
)
def test_configs_that_are_refused(tmp_path, changes, words):
  small_checkpoint.write(tmp_path)
  _change(tmp_path, **changes)
  with pytest.raises(config_lib.ConfigError) as error:
    huggingface.read(tmp_path)
  assert words in str(error.value)


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
    arrays[name] = np.ones(8, np.float32)

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
    (dict(rope_theta=0.0), "config.model.rope_theta"),
    (dict(logit_soft_cap=2.0), "config.model.logit_soft_cap"),
    (dict(qkv_norm=True), "config.model.qkv_norm"),
    (dict(mixers=("mla",)), "config.model.mixers"),
  ],
)
def test_networks_that_no_family_expresses(fields, words):
  config = dataclasses.replace(small_checkpoint.CONFIG, **fields)
  with pytest.raises(config_lib.ConfigError) as error:
    families.of_network(config)
  assert str(error.value).count(words) == len(FAMILIES)
