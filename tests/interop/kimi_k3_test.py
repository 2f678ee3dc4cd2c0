# SPDX-License-Identifier: Apache-2.0
"""Kimi K3 against its specification in float64; experts in four bits."""

import json
import shutil

import jax
import numpy as np
import pytest

from attnres_jax import config as config_lib
from attnres_jax.common import sharding
from attnres_jax.common import trees
from attnres_jax.interop import huggingface
from attnres_jax.interop import layout
from attnres_jax.interop import mxfp4
from attnres_jax.interop import tensor_files
from tests.interop import k3_reference
from tests.interop import small_checkpoint

LENGTH = 7
PACKED, SCALE = "weight_packed", "weight_scale"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  """A checkpoint as published: experts in four bits, tensors of images."""
  path = tmp_path_factory.mktemp("k3")
  small_checkpoint.write(path, "kimi_k3")
  rng = np.random.default_rng(3)

  def change(arrays):
    for name, array in list(arrays.items()):
      if name.endswith("norm.weight"):
        # Gains whose functions are not nearly linear.
        arrays[name] = array + np.float32(1)
      if name.endswith("lm_head.weight"):  # As large as of other families.
        arrays[name] = np.float32(0.4) * array
      if ".experts." in name:
        rows, columns = arrays.pop(name).shape
        base = name.removesuffix("weight")
        codes = rng.integers(0, 256, (rows, columns // 2), dtype=np.uint8)
        scales = rng.integers(122, 125, (rows, columns // 32), dtype=np.uint8)
        arrays[base + PACKED], arrays[base + SCALE] = codes, scales
    arrays["vision_tower.patch_embed.weight"] = np.ones((2, 2), np.float32)
    arrays["mm_projector.proj.weight"] = np.ones(2, np.float32)

  small_checkpoint.change_tensors(path, change)
  small_checkpoint.change_config(path, vision_config={})
  return path


def _reference(folder):
  """Tensors in float64, without images, and the text_config."""
  arrays, weights = small_checkpoint.tensors(folder), {}
  for name, array in arrays.items():
    if name.endswith(PACKED):
      base = name.removesuffix("_packed")
      scales = arrays[base + "_scale"]
      weights[base] = k3_reference.decoded(array, scales)
    elif array.dtype != np.uint8 and name.startswith("language_model."):
      weights[name] = np.asarray(array, np.float64)
  config = json.loads((folder / huggingface.CONFIG).read_text())
  return weights, config["text_config"]


@pytest.mark.more
def test_logits(folder):
  model = huggingface.load(huggingface.read(folder))
  rng = np.random.default_rng(0)
  tokens_T = rng.integers(0, 300, LENGTH, dtype=np.int32)
  logits = jax.jit(lambda model: model(tokens_T[None]))(model)[0]
  expected = k3_reference.Network(*_reference(folder)).logits(tokens_T)
  assert expected.dtype == np.float64 and expected.std() > 0.3
  np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-4)


def test_as_many_heads_as_entries(tmp_path, monkeypatch):
  """Then nothing is behind the heads of A_log."""
  monkeypatch.setattr(layout, "_A_LOG_PARTS", 2)
  model = small_checkpoint.write(tmp_path, "kimi_k3")
  loaded = huggingface.load(huggingface.read(tmp_path))
  jax.tree.map(np.testing.assert_array_equal, loaded, model)


def test_shards_decode_their_own_part(folder):
  source = huggingface.read(folder)
  mesh = sharding.make_mesh(
    config_lib.MeshConfig(data=1, fsdp=2, expert=2, tensor=2)
  )
  both = huggingface.load(source), huggingface.load(source, mesh)
  single, sharded = map(trees.to_flat, both)
  for name, leaf in single.items():
    np.testing.assert_array_equal(sharded[name], leaf, err_msg=name)
  both = sharded["sublayers/moe/core/gate_and_up/value"]
  assert both.addressable_shards[0].data.size == both.size // 8


def test_parts_that_are_no_whole_groups(tmp_path):
  rng = np.random.default_rng(0)
  codes = rng.integers(0, 256, (5, 48), dtype=np.uint8)
  scales = rng.integers(100, 140, (5, 3), dtype=np.uint8)
  small_checkpoint.write(tmp_path)
  small_checkpoint.change_tensors(
    tmp_path, lambda a: a.update(w_packed=codes, w_scale=scales)
  )
  tensors = tensor_files.open_folder(tmp_path)
  expected = k3_reference.decoded(codes, scales)
  for columns in (slice(0, 96), slice(30, 35), slice(33, 64), slice(95, 96)):
    actual = mxfp4.read(tensors, "w", slice(1, 4), columns)
    np.testing.assert_array_equal(actual, expected[1:4, columns])


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
    (
      lambda a: a[A_LOG].__setitem__(5, 1),
      "A_log' is not zero after its first",
    ),
    (
      lambda a: a[EXPERT + "_scale"].__setitem__((0, 0), 255),
      "w2.weight_scale' has values that are not finite",
    ),
  ],
)  # fmt: skip
def test_tensors_that_are_refused(folder, tmp_path, change, words):
  shutil.copytree(folder, tmp_path / "changed")
  small_checkpoint.change_tensors(tmp_path / "changed", change)
  with pytest.raises(tensor_files.TensorFileError, match=words):
    huggingface.load(huggingface.read(tmp_path / "changed"))
