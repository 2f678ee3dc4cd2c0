# SPDX-License-Identifier: Apache-2.0
"""Layouts entry by entry, round trips bit by bit, and what is refused."""

import math

import jax
import numpy as np
import pytest
import safetensors.numpy

from attnres_jax import config as config_lib
from attnres_jax.common import sharding
from attnres_jax.interop import families
from attnres_jax.interop import huggingface
from attnres_jax.interop import tensor_files
from tests import tiers
from tests.interop import small_checkpoint

FAMILIES = tuple(families.FAMILIES)
UP = "model.layers.1.mlp.up_proj.weight"


def _assert_same(model, other):
  jax.tree.map(np.testing.assert_array_equal, model, other)


@pytest.mark.more
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


def test_layers_of_several_dtypes_are_not_rounded(tmp_path):
  small_checkpoint.write(tmp_path, dtype="BF16")

  def widen(arrays):
    arrays[UP] = arrays[UP].astype(np.float32)

  small_checkpoint.change_tensors(tmp_path, widen)
  source = huggingface.read(tmp_path)
  assert source.dtype == "BF16"
  assert source.dtypes == {"sublayers/mlp/core/up/value": "F32"}


@tiers.parametrize("family", FAMILIES, first=["attnres"])
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
  places = jax.tree.map(lambda a: a.sharding, loaded)
  assert jax.tree.leaves(places) == jax.tree.leaves(
    sharding.state_sharding(model, mesh)
  )
  first = next(iter(loaded.sublayers.values()))
  query = first.core.query[...]
  assert query.addressable_shards[0].data.size < query.size


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
  arrays = small_checkpoint.tensors(tmp_path)
  arrays[name] = arrays[name].copy()
  arrays[name].flat[3] = value
  safetensors.numpy.save_file(arrays, tmp_path / tensor_files.SINGLE)
  words = f"{name}' has values that are not finite"
  with pytest.raises(tensor_files.TensorFileError, match=words):
    huggingface.load(huggingface.read(tmp_path))


TABLE, HEAD = "model.embed_tokens.weight", "lm_head.weight"
TIED = f"{HEAD}' differs from '{TABLE}"


@pytest.mark.parametrize(
  "target,source,change,words",
  [
    (UP, UP, lambda a: a.astype(np.int8), f"{UP}' is I8, expected one of"),
    # Though config.json says that the head is the table.
    (HEAD, TABLE, lambda a: a + 1e-3, TIED),
    (HEAD, TABLE, lambda a: a[:-1], TIED),
    (HEAD, TABLE, lambda a: a[0, 0], TIED),
    (
      "model.layers.0.self_attn.rotary_emb.inv_freq", TABLE,
      lambda a: np.ones(8, np.float32), "differs from those of rope_theta=",
    ),
  ],
)  # fmt: skip
def test_tensors_that_are_refused(tmp_path, target, source, change, words):
  small_checkpoint.write(tmp_path)
  small_checkpoint.change_tensors(
    tmp_path, lambda a: a.update({target: change(a[source])})
  )
  with pytest.raises(tensor_files.TensorFileError, match=words):
    huggingface.load(huggingface.read(tmp_path))


@pytest.mark.parametrize(
  "changes,words",
  [
    (dict(num_hidden_layers=900), "describes 900 layers, and the files have"),
    (dict(num_hidden_layers=4), "no tensor 'model.layers.3.input_layernorm"),
    (dict(num_hidden_layers=2), "'model.layers.2.input_layernorm.weight' is"),
    (dict(intermediate_size=95), "gate_proj.weight' is (96, 64), expected (95"),
    (dict(attention_bias=True), "no tensor 'model.layers.0.self_attn.q_proj.b"),
    (dict(tie_word_embeddings=False), "no tensor 'lm_head.weight' in the file"),
  ],
)
def test_files_of_another_network(tmp_path, changes, words):
  small_checkpoint.write(tmp_path)
  small_checkpoint.change_config(tmp_path, **changes)
  with pytest.raises(tensor_files.TensorFileError) as error:
    huggingface.read(tmp_path)
  assert words in str(error.value)


def test_tensors_that_are_ignored_by_name(tmp_path):
  model = small_checkpoint.write(tmp_path)

  def add(arrays):
    arrays["lm_head.weight"] = arrays["model.embed_tokens.weight"]
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    frequencies = model.config.rope_theta ** (-np.arange(8) / 8)
    arrays[name] = frequencies.astype(np.float16)

  small_checkpoint.change_tensors(tmp_path, add)
  _assert_same(huggingface.load(huggingface.read(tmp_path)), model)
