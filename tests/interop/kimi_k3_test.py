# SPDX-License-Identifier: Apache-2.0
"""Kimi K3 against its specification in float64; experts in four bits."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnres_jax import config as config_lib
from attnres_jax import optimizer
from attnres_jax.common import sharding
from attnres_jax.common import trees
from attnres_jax.interop import families
from attnres_jax.interop import huggingface
from attnres_jax.interop import mxfp4
from attnres_jax.interop import tensor_files
from tests.interop import k3_reference
from tests.interop import small_checkpoint

LENGTH = 7
BIAS = "e_score_correction_bias"
PACKED, SCALE = "weight_packed", "weight_scale"


def _read(folder):
  return {
    name: tensor.read()
    for name, tensor in tensor_files.open_folder(folder).items()
  }


def _write(folder, arrays):
  """Replaces files of the folder."""
  for file in folder.glob("model*"):
    file.unlink()
  names = {t: n for n, t in tensor_files.DTYPES.items()}
  names[np.dtype(np.uint8)] = "U8"
  entries = [
    tensor_files.Entry(name, names[a.dtype], a.shape, lambda a=a: a)
    for name, a in arrays.items()
  ]
  with pytest.MonkeyPatch.context() as patch:
    known = tensor_files.DTYPES | {"U8": np.dtype(np.uint8)}
    patch.setattr(tensor_files, "DTYPES", known)
    tensor_files.write_folder(folder, entries, 60_000)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  """As published: experts in four bits, and tensors of images beside them."""
  path = tmp_path_factory.mktemp("k3")
  small_checkpoint.write(path, "kimi_k3")
  rng = np.random.default_rng(3)
  arrays = {}
  for name, array in _read(path).items():
    if name.endswith(("norm.weight", "A_log", "dt_bias")):
      # Gains and rates whose functions are not nearly linear.
      array = array + np.float32(name.endswith("norm.weight"))
      if name.endswith("A_log"):
        array[2:] = 0  # Of two heads.
    if name.endswith("lm_head.weight"):
      array = (
        np.float32(0.4) * array
      )  # As large as those of the other families.
    if ".experts." in name:
      rows, columns = array.shape
      base = name.removesuffix("weight")
      codes = rng.integers(0, 256, (rows, columns // 2), dtype=np.uint8)
      scales = rng.integers(122, 125, (rows, columns // 32), dtype=np.uint8)
      arrays[base + PACKED], arrays[base + SCALE] = codes, scales
    else:
      arrays[name] = array
  arrays["vision_tower.patch_embed.weight"] = np.ones((2, 2), np.float32)
  arrays["mm_projector.proj.weight"] = np.ones(2, np.float32)
  _write(path, arrays)
  described = path / huggingface.CONFIG
  values = json.loads(described.read_text()) | {"vision_config": {}}
  described.write_text(json.dumps(values))
  return path


def _reference(folder):
  """Tensors in float64, without images, and the text_config."""
  arrays, found = _read(folder), {}
  for name, array in arrays.items():
    if name.endswith(PACKED):
      base = name.removesuffix("_packed")
      scales = arrays[base + "_scale"]
      found[base] = k3_reference.decoded(array, scales)
    elif array.dtype != np.uint8 and name.startswith("language_model."):
      found[name] = np.asarray(array, np.float64)
  config = json.loads((folder / huggingface.CONFIG).read_text())
  return found, config["text_config"]


def _tokens(seed=0):
  rng = np.random.default_rng(seed)
  return rng.integers(0, 300, LENGTH, dtype=np.int32)


def _loss(logits_TV, tokens_T):
  logs = jax.nn.log_softmax(logits_TV[:-1])
  return -jnp.mean(logs[np.arange(LENGTH - 1), tokens_T[1:]])


def _their_logits(tensors, text, tokens_T):
  with k3_reference.in_float64():
    run = jax.jit(lambda a: k3_reference.Network(a, text).logits(tokens_T))
    return np.asarray(run(tensors))


def test_logits(folder):
  model = huggingface.load(huggingface.read(folder))
  tokens_T = _tokens()
  found = jax.jit(lambda model: model(tokens_T[None]))(model)[0]
  expected = _their_logits(*_reference(folder), tokens_T)
  assert expected.std() > 0.3
  np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)


@pytest.mark.slow
def test_an_optimiser_step(folder, tmp_path):
  """Every tensor after a step of AdamW, of the gradient in float64."""
  source = huggingface.read(folder)
  model, tokens_T = huggingface.load(source), _tokens(1)
  tensors, text = _reference(folder)
  rate, decay = 1e-2, 0.1
  fields = dict(weight_decay=decay, clip_norm=0.0, eps=1e-4)
  transform = optimizer.make_optimizer(config_lib.OptimConfig(**fields))

  @jax.jit
  def step(model):
    gradient = jax.grad(lambda m: _loss(m(tokens_T[None])[0], tokens_T))(model)
    rates = dict(learning_rate=rate, balance_rate=0.0)
    updates, _ = transform.update(
      gradient, transform.init(model), model, **rates
    )
    return jax.tree.map(jnp.add, model, updates)

  stepped = step(model)
  huggingface.export(
    stepped, tmp_path / "out", dtype="F32", facts={}, card="",
    family="kimi_k3",
  )  # fmt: skip
  found = _read(tmp_path / "out")

  def loss(tensors):
    return _loss(k3_reference.Network(tensors, text).logits(tokens_T), tokens_T)

  with k3_reference.in_float64():
    gradient = jax.device_get(jax.jit(jax.grad(loss))(tensors))
  plain = ("A_log", "dt_bias", "_res_proj.weight", "_res_norm.weight")
  for name, before in tensors.items():
    if name.endswith(BIAS):
      continue  # Balanced, not trained.
    g = gradient[name]
    # The first step of AdamW: moments are the gradient and its square.
    wanted = before - rate * g / (np.abs(g) + 1e-4)
    if not name.endswith(plain):
      wanted = wanted - rate * decay * before
    gap = np.abs(found[name] - wanted).max()
    assert gap < 2e-4 * rate / 1e-2, (name, gap)
    # The first query reads one source; experts may get no token.
    idle = "layers.0.self_attention_res" in name or ".experts." in name
    assert idle or np.abs(found[name] - before).max() > 1e-6, name
  after = _loss(stepped(tokens_T[None])[0], tokens_T)
  updated = {k: np.asarray(v, np.float64) for k, v in found.items()}
  theirs = _loss(_their_logits(updated, text, tokens_T), tokens_T)
  np.testing.assert_allclose(after, theirs, rtol=0, atol=1e-5)
  start = _loss(_their_logits(tensors, text, tokens_T), tokens_T)
  assert theirs < start


def test_shards_decode_their_own_part(folder):
  source = huggingface.read(folder)
  mesh = sharding.make_mesh(
    config_lib.MeshConfig(data=1, fsdp=2, expert=2, tensor=2)
  )
  both = huggingface.load(source), huggingface.load(source, mesh)
  alone, sharded = map(trees.to_flat, both)
  for name, leaf in alone.items():
    np.testing.assert_array_equal(sharded[name], leaf, err_msg=name)
  up = sharded["sublayers/moe/core/up/value"]
  assert up.addressable_shards[0].data.size == up.size // 8


def test_parts_that_are_no_whole_groups(tmp_path):
  rng = np.random.default_rng(0)
  codes = rng.integers(0, 256, (5, 48), dtype=np.uint8)
  scales = rng.integers(100, 140, (5, 3), dtype=np.uint8)
  _write(tmp_path, {"w_packed": codes, "w_scale": scales})
  tensors = tensor_files.open_folder(tmp_path)
  whole = k3_reference.decoded(codes, scales)
  for columns in (slice(0, 96), slice(30, 35), slice(33, 64), slice(95, 96)):
    found = mxfp4.read(tensors, "w", slice(1, 4), columns)
    np.testing.assert_array_equal(found, whole[1:4, columns])


def _changed(folder, tmp_path, change):
  arrays = _read(folder)
  change(arrays)
  _write(tmp_path, arrays)
  config = (folder / huggingface.CONFIG).read_text()
  (tmp_path / huggingface.CONFIG).write_text(config)
  return tmp_path


EXPERT = "language_model.model.layers.2.block_sparse_moe.experts.1.w2.weight"
A_LOG = "language_model.model.layers.0.self_attn.A_log"


@pytest.mark.parametrize(
  "change,words",
  [
    (lambda a: a.pop(EXPERT + "_scale"), f"no tensor '{EXPERT}_scale' in the"),
    (
      lambda a: a.update({EXPERT + "_scale": a[EXPERT + "_scale"][:, :0]}),
      r"w2.weight_scale' is \(64, 0\), expected \(64, 1\)",
    ),
    (
      lambda a: a.update({
        EXPERT + "_packed": a[EXPERT + "_packed"].astype("float32")
      }),
      "w2.weight_packed' is F32, expected one of U8",
    ),
    (lambda a: a.update(x=np.ones(2, "f4")), "'x' is not part of the network"),
  ],
)  # fmt: skip
def test_files_that_are_refused(folder, tmp_path, change, words):
  with pytest.raises(tensor_files.TensorFileError, match=words):
    huggingface.read(_changed(folder, tmp_path, change))


@pytest.mark.parametrize(
  "change,words",
  [
    (
      lambda a: a[A_LOG].__setitem__(5, 1),
      "A_log' is not zero after its first",
    ),
    (
      lambda a: a[EXPERT + "_scale"].__setitem__((0, 0), 255),
      "w2.weight_scale' has values that are not finite",
    ),
  ],
)
def test_values_that_are_refused(folder, tmp_path, change, words):
  source = huggingface.read(_changed(folder, tmp_path, change))
  with pytest.raises(tensor_files.TensorFileError, match=words):
    huggingface.load(source)


def _published():
  """text_config of the released network (spec: interop section 1)."""
  return dict(
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
    linear_attn_config=dict(
      head_dim=128, num_heads=96, short_conv_kernel_size=4,
      use_full_rank_gate=True, gate_lower_bound=-5.0,
      full_attn_layers=[*range(4, 93, 4), 93],
      kda_layers=[i for i in range(1, 93) if i % 4],
    ),
  )  # fmt: skip


def _config(**changes):
  text = {k: v for k, v in (_published() | changes).items() if v is not ...}
  return families.read_config({"model_type": "kimi_k3", "text_config": text})


def test_the_published_shapes():
  config = _config()
  rules = families.FAMILIES["kimi_k3"].rules(config)
  abstract = jax.eval_shape(lambda: huggingface.models.build_model(config))
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
  for rule in rules:
    rule = dataclasses.replace(rule, packed=".experts." in rule.names[0])
    for name, shape, _ in rule.stored():
      count += 1
      for end, wanted in (packed | plain).items():
        if name.endswith(end):
          assert shape == wanted, name
          seen.add(end)
  assert seen == packed.keys() | plain.keys()
  # All but those of images, of which the headers have 497,220.
  assert 490_000 < count < 497_220
  size = sum(leaf.size for leaf in jax.tree.leaves(abstract))
  assert round(size / 1e11) == 28
  family = families.FAMILIES["kimi_k3"]
  written = {"model_type": "kimi_k3"} | family.write_config(config)
  assert families.read_config(written) == config


@pytest.mark.parametrize(
  "changes,words",
  [
    (dict(hidden_act="gelu"), "text_config: hidden_act: got 'gelu', expected"),
    (dict(activation_situ_beta=...), "activation_situ_beta: got None, expect"),
    (dict(mla_use_nope=False), "text_config: mla_use_nope: got False"),
    (dict(attn_res_block_size=...), "attn_res_block_size: got None, expected"),
    (dict(new_key=1), "text_config: new_key: got 1, expected no such key"),
    (
      dict(linear_attn_config=_published()["linear_attn_config"]
           | dict(gate_lower_bound=5.0)),
      "gate_lower_bound: got 5.0, expected a number below 0",
    ),
  ],
)  # fmt: skip
def test_configs_that_are_refused(changes, words):
  with pytest.raises(config_lib.ConfigError, match=words):
    _config(**changes)
