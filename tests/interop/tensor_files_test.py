# SPDX-License-Identifier: Apache-2.0
"""Files against bytes that are put together here, by the format's text."""

import json
import struct

import ml_dtypes
import numpy as np
import pytest

from attnres_jax import config as config_lib
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


def test_parts_of_tensors(tmp_path):
  _single(tmp_path)
  opened = tensor_files.open_folder(tmp_path)
  assert {n: (t.dtype, t.shape) for n, t in opened.items()} == {
    "matrix": ("F32", (7, 6)), "vector": ("BF16", (5,)),
  }  # fmt: skip
  for rows, columns in ((slice(0, 7), slice(0, 6)), (slice(2, 5), slice(1, 3))):
    part = opened["matrix"].read(rows, columns)
    np.testing.assert_array_equal(part, MATRIX[rows, columns])
  part = opened["vector"].read(slice(1, 4))
  assert part.dtype == VECTOR.dtype
  np.testing.assert_array_equal(part, VECTOR[1:4])


def _changed(**changes):
  return _file({**HEADER, **changes})


def _entry(**changes):
  return {**HEADER["matrix"], **changes}


@pytest.mark.parametrize(
  "content",
  [
    b"", b"\xff" * 8, _file(b"[]"), _file(b"[" * 100_000),
    # Names that occur twice, which the library takes.
    _file(b'{"a": {}, "a": {}}'),
    _file(json.dumps(HEADER)[:-1].encode() + b', "vector": %s}' % (
      json.dumps(HEADER["vector"]).encode()
    )),
    _file(HEADER)[:-3], _file(HEADER) + b"x", _changed(more=_entry()),
    *(
      _changed(matrix=entry)
      for entry in (
        _entry(dtype="F31"), _entry(shape=[7, 5]), _entry(shape=[2**40, 2**40]),
        _entry(data_offsets=[10, 178]), None,
      )
    ),
  ],
)  # fmt: skip
def test_damaged_files(tmp_path, content):
  path = _single(tmp_path, content)
  with pytest.raises(tensor_files.TensorFileError) as error:
    tensor_files.open_folder(tmp_path)
  assert str(error.value).startswith(f"{path}: no readable safetensors file (")
  assert len(str(error.value).splitlines()) == 1


def _written(folder, shard_bytes):
  entries = [
    tensor_files.Entry(name, dtype, array.shape, lambda array=array: array)
    for name, dtype, array in (
      ("vector", "BF16", VECTOR), ("matrix", "F32", MATRIX),
      ("half", "F16", MATRIX),
    )
  ]  # fmt: skip
  tensor_files.write_folder(folder, entries, shard_bytes)


@pytest.mark.parametrize("shard_bytes", [10**6, 180, 1])
def test_what_is_written_is_read(tmp_path, shard_bytes):
  _written(tmp_path, shard_bytes)
  written = list(tmp_path.glob("*.safetensors"))
  assert len(written) == {10**6: 1, 180: 2, 1: 3}[shard_bytes]
  opened = tensor_files.open_folder(tmp_path)
  assert opened.keys() == {"vector", "matrix", "half"}
  for name, array in ("matrix", MATRIX), ("half", MATRIX.astype(np.float16)):
    read = opened[name].read(slice(0, 7), slice(0, 6))
    np.testing.assert_array_equal(read, array)


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
    (lambda m: m.update(more="../a.safetensors"), "got '../a.safetensors', ex"),
  ],
)
def test_an_index_of_something_else(tmp_path, change, words):
  _written(tmp_path, 180)
  _damage_index(tmp_path, change)
  kinds = tensor_files.TensorFileError, config_lib.ConfigError
  with pytest.raises(kinds, match=words):
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


@pytest.mark.parametrize(
  "name", ["model-00009-of-00009.safetensors", "adapter_model.safetensors"]
)
def test_files_that_the_index_does_not_name(tmp_path, name):
  """A checkpoint is not loaded in part, without a word."""
  _written(tmp_path, 180)
  (tmp_path / name).write_bytes(_file(HEADER))
  with pytest.raises(tensor_files.TensorFileError, match=f"{name}: part of"):
    tensor_files.open_folder(tmp_path)


def test_values_that_a_dtype_cannot_hold(tmp_path):
  for value, dtype in ((1e6, "F16"), (np.inf, "F32"), (np.nan, "BF16")):
    array = np.array([1, value], np.float32)
    entry = tensor_files.Entry("big", dtype, (2,), lambda array=array: array)
    with pytest.raises(tensor_files.TensorFileError, match=f"'big' .* {dtype}"):
      tensor_files.write_folder(tmp_path, [entry], 1000)
  assert not list(tmp_path.iterdir())
