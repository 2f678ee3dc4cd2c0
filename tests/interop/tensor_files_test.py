# SPDX-License-Identifier: Apache-2.0
"""Files against bytes that are put together here, by the format's text."""

import json
import struct

import ml_dtypes
import numpy as np
import pytest

from attnres_jax.interop import manifest
from attnres_jax.interop import tensor_files

RNG = np.random.default_rng(0)
MATRIX = RNG.standard_normal((7, 6)).astype(np.float32)
VECTOR = RNG.standard_normal(5).astype(ml_dtypes.bfloat16)
HEADER = {
  "__metadata__": {"format": "pt"},
  "matrix": {"dtype": "F32", "shape": [7, 6], "data_offsets": [0, 168]},
  "vector": {"dtype": "BF16", "shape": [5], "data_offsets": [168, 178]},
}


def _file(header, data=MATRIX.tobytes() + VECTOR.tobytes()):
  text = header if isinstance(header, bytes) else json.dumps(header).encode()
  return struct.pack("<Q", len(text)) + text + data


def _single(folder, content=None):
  path = folder / tensor_files.SINGLE
  path.write_bytes(_file(HEADER) if content is None else content)
  return path


@pytest.mark.parametrize("piece", [8, 1 << 20])
def test_parts_of_tensors(tmp_path, monkeypatch, piece):
  monkeypatch.setattr(tensor_files, "_PIECE_BYTES", piece)
  _single(tmp_path)
  found = tensor_files.open_folder(tmp_path)
  assert {n: (t.dtype, t.shape) for n, t in found.items()} == {
    "matrix": ("F32", (7, 6)), "vector": ("BF16", (5,)),
  }  # fmt: skip
  for rows, columns in ((slice(0, 7), slice(0, 6)), (slice(2, 5), slice(1, 3))):
    part = found["matrix"].read(rows, columns)
    np.testing.assert_array_equal(part, MATRIX[rows, columns])
  part = found["vector"].read(slice(1, 4), slice(0, 1))
  assert part.dtype == VECTOR.dtype
  np.testing.assert_array_equal(part[:, 0], VECTOR[1:4])


def _changed(**changes):
  return _file({**HEADER, **changes})


def _entry(**changes):
  return {**HEADER["matrix"], **changes}


@pytest.mark.parametrize(
  "content,words",
  [
    (b"", "no safetensors file, or cut off: 0 bytes"),
    (_file(HEADER)[:40], "no safetensors file, or cut off: 40 bytes"),
    (_file(b"{"), "its header cannot be read"),
    (_file(b"[]"), "its header cannot be read"),
    (_file(b'{"a": {}, "a": {}}'), "a name occurs twice"),
    (_file(HEADER)[:-3], "cut off"),
    (_file(HEADER) + b"x", "with something after the last tensor"),
    (_changed(matrix=_entry(dtype="F31")), "'matrix' has the unknown dtype"),
    (_changed(matrix=_entry(shape=[7, 5])), "168 bytes for F32(7, 5)"),
    (_changed(matrix=_entry(shape=[-7, -6])), "'matrix' has no valid"),
    (_changed(matrix=[]), "'matrix' has no valid"),
    (_changed(matrix=_entry(data_offsets=[10, 178])), "overlaps"),
    (_changed(more=_entry()), "overlaps"),
  ],
)
def test_damaged_files(tmp_path, content, words):
  path = _single(tmp_path, content)
  with pytest.raises(tensor_files.TensorFileError) as error:
    tensor_files.open_folder(tmp_path)
  assert str(path) in str(error.value) and words in str(error.value)


def _written(folder, shard_bytes):
  entries = [
    tensor_files.Entry(name, dtype, array.shape, lambda array=array: array)
    for name, dtype, array in (
      ("vector", "BF16", VECTOR), ("matrix", "F32", MATRIX),
      ("half", "F16", MATRIX),
    )
  ]  # fmt: skip
  return tensor_files.write_folder(folder, entries, shard_bytes)


@pytest.mark.parametrize("shard_bytes", [10**6, 180, 1])
def test_what_is_written_is_read(tmp_path, shard_bytes):
  digests = _written(tmp_path, shard_bytes)
  assert digests == {p.name: manifest.sha256(p) for p in tmp_path.iterdir()}
  assert len(digests) == {10**6: 1, 180: 3, 1: 4}[shard_bytes]
  found = tensor_files.open_folder(tmp_path)
  assert found.keys() == {"vector", "matrix", "half"}
  for name, array in ("matrix", MATRIX), ("half", MATRIX.astype(np.float16)):
    read = found[name].read(slice(0, 7), slice(0, 6))
    np.testing.assert_array_equal(read, array)
  assert all(t.start % 4 == 0 for t in found.values() if t.dtype == "F32")


def _damage_index(folder, change):
  index = folder / tensor_files.INDEX
  values = json.loads(index.read_text())
  change(values["weight_map"])
  index.write_text(json.dumps(values))


@pytest.mark.parametrize(
  "change,words",
  [
    (lambda m: m.pop("vector"), "tensor 'vector' is not in the index"),
    (lambda m: m.update(half=m["matrix"]), "has no tensor 'half', which"),
    (lambda m: m.update(more=m["half"]), "has no tensor 'more', which"),
    (lambda m: m.update(more="gone.safetensors"), "named by the index, but"),
    (lambda m: m.update(more="../a.safetensors"), "is no name of a file"),
    (lambda m: m.update(more=3), "a name of a file is no string"),
  ],
)
def test_an_index_of_something_else(tmp_path, change, words):
  _written(tmp_path, 180)
  _damage_index(tmp_path, change)
  with pytest.raises(tensor_files.TensorFileError, match=words):
    tensor_files.open_folder(tmp_path)


def test_folders_that_are_ambiguous(tmp_path):
  with pytest.raises(tensor_files.TensorFileError, match="neither this file"):
    tensor_files.open_folder(tmp_path)
  _written(tmp_path, 1)
  first, second, *_ = sorted(tmp_path.glob("*.safetensors"))
  content = second.read_bytes()
  second.write_bytes(first.read_bytes())
  with pytest.raises(tensor_files.TensorFileError, match="is also in"):
    tensor_files.open_folder(tmp_path)
  second.write_bytes(content)
  _single(tmp_path)
  with pytest.raises(tensor_files.TensorFileError, match="only one of them"):
    tensor_files.open_folder(tmp_path)


def test_manifest(tmp_path):
  _written(tmp_path, 1)
  manifest.write(tmp_path)
  assert manifest.damage(tmp_path) == []
  one, two, three = sorted(tmp_path.glob("*.safetensors"))
  content = bytearray(one.read_bytes())
  content[-1] ^= 1
  one.write_bytes(content)
  two.unlink()
  size = three.stat().st_size
  three.write_bytes(b"")
  assert manifest.damage(tmp_path) == [
    f"{one.name}: its content has changed",
    f"{two.name}: it is missing",
    f"{three.name}: 0 bytes instead of {size}",
  ]
