# SPDX-License-Identifier: Apache-2.0
"""Small random checkpoints of every family, without torch."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from attnres_jax import config as config_lib
from attnres_jax import models
from attnres_jax.interop import huggingface
from attnres_jax.interop import tensor_files
from tests import tiny_run

LLAMA3 = config_lib.RopeConfig(scaling="llama3", factor=8.0, original_length=32)
_Attention = config_lib.AttentionConfig
# By family: what its networks have.
FIELDS = {
  "llama": dict(rope=LLAMA3, tie_embeddings=True),
  "qwen2": dict(attention=_Attention(qkv_bias=True)),
  "qwen3": dict(attention=_Attention(qk_norm=True), head_width=32),
}
KIMI = dict(
  num_layers=5, num_heads=2, num_kv_heads=0, head_width=0, width=32,
  mixers=("kda", "kda", "mla"), last_mixer="kda", norm_eps=1e-5,
  kda=config_lib.KdaConfig(head_width=8, gate_rank=8),
  mla=config_lib.MlaConfig(
    latent_rank=8, nope_width=8, shared_width=4, value_width=6
  ),
  moe=config_lib.MoeConfig(
    num_experts=4, top_k=2, expert_width=12, dense_layers=2
  ),
)  # fmt: skip
FIELDS["kimi_linear"] = KIMI
# Of experts, rows and columns are groups of 32 (MXFP4).
FIELDS["kimi_k3"] = KIMI | dict(
  activation=config_lib.ActivationConfig("situ", 0.5, 0.8),
  kda=config_lib.KdaConfig(
    head_width=8, gate_rank=8, full_rank_gate=True, decay_bound=5.0
  ),
  mla=config_lib.MlaConfig(
    latent_rank=8, nope_width=8, shared_width=4, value_width=6, query_rank=10,
    output_gate=True,
  ),
  moe=config_lib.MoeConfig(
    num_experts=4, top_k=2, expert_width=32, dense_layers=1, num_shared=2,
    scaling_factor=1.0, latent_width=64, latent_norm=True,
  ),
  residual=config_lib.residual_config("block_attnres", block_size=4),
)  # fmt: skip
FIELDS["attnres"] = KIMI | dict(
  num_layers=3, num_kv_heads=2, head_width=16, rope_theta=100.0,
  mixers=("kda", "mla"), last_mixer="attention",
  residual=config_lib.residual_config("block_attnres", block_size=4),
)  # fmt: skip
CONFIG = config_lib.ModelConfig(
  vocab_size=300, width=64, num_layers=3, num_heads=4, num_kv_heads=2,
  head_width=16, mlp_width=96,
  residual=config_lib.residual_config(name="prenorm"),
)  # fmt: skip


def model(family="llama", **fields):
  """A network whose every parameter is random, biases and gains included."""
  config = dataclasses.replace(CONFIG, **FIELDS[family] | fields)
  rng = np.random.default_rng(0)

  def drawn(leaf):
    spread = 0.3 if leaf.ndim == 2 else 0.1
    noise = rng.standard_normal(leaf.shape, "float32") * np.float32(spread)
    return jax.numpy.asarray(noise)

  return jax.tree.map(drawn, jax.eval_shape(lambda: models.build_model(config)))


def write(folder, family="llama", dtype="F32", shard_bytes=10**9, **fields):
  """Writes one; returns its network."""
  made = model(family, **fields)
  huggingface.export(
    made,
    folder,
    dtype=dtype,
    facts={"max_position_embeddings": 64, "eos_token_id": 2},
    card="A test.\n",
    family=family,
    shard_bytes=shard_bytes,
  )
  return made


def logits_and_gradient(model, tokens):
  """Logits, and the gradient of the loss."""

  def loss(model):
    logits_BTV = model(tokens)
    logs_BTV = jax.nn.log_softmax(logits_BTV[:, :-1])
    chosen = jax.numpy.take_along_axis(logs_BTV, tokens[:, 1:, None], axis=2)
    return -jax.numpy.mean(chosen), logits_BTV

  gradient, logits_BTV = jax.grad(loss, has_aux=True)(model)
  return logits_BTV, gradient


def tensors(folder):
  """All arrays of a folder, by name."""
  opened = tensor_files.open_folder(folder)
  return {name: tensor.read() for name, tensor in opened.items()}


def change_tensors(folder, change):
  """Changes the arrays of a folder, which may get bytes, too."""
  arrays = tensors(folder)
  change(arrays)
  for file in folder.glob("model*"):
    file.unlink()
  more = {"I8": np.dtype(np.int8), "U8": np.dtype(np.uint8)}
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(tensor_files, "DTYPES", tensor_files.DTYPES | more)
    names = {t: n for n, t in tensor_files.DTYPES.items()}
    entries = [
      tensor_files.Entry(name, names[a.dtype], a.shape, lambda a=a: a)
      for name, a in arrays.items()
    ]
    tensor_files.write_folder(folder, entries, 60_000)


def change_config(folder, **changes):
  """Changes keys of config.json; `...` removes one."""
  path = folder / huggingface.CONFIG
  values = json.loads(path.read_text()) | changes
  values = {k: v for k, v in values.items() if v is not ...}
  path.write_text(json.dumps(values))


def run_fields(folder):
  """Fields of a run of two steps that starts from one of these."""
  return tiny_run.corpus(folder) | {
    "train.steps": 2, "optim.warmup_steps": 0, "train.eval_every": 0,
    "train.depth_every": 0, "train.eval_batches": 1, "data.source": "text",
    "data.validation_fraction": 0.2, "data.sequence_length": 16,
    "data.batch_size": 4, "mesh.data": 1, "checkpoint.asynchronous": False,
  }  # fmt: skip


def tokenizer_json():
  """A vocabulary of 256 bytes and two special tokens, as tokenizer.json."""
  import tokenizers  # An extra.

  bytes_ = tokenizers.pre_tokenizers.ByteLevel.alphabet()
  vocab = {c: i for i, c in enumerate(sorted(bytes_))}
  made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
  made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
    add_prefix_space=False
  )
  made.decoder = tokenizers.decoders.ByteLevel()
  made.add_special_tokens(["<s>", "</s>"])
  return made.to_str()
