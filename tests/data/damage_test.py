# SPDX-License-Identifier: Apache-2.0
"""Whatever happens to a file of data, one line names it, or it is still right.

Every reader meets every kind of damage. Where no checksum covers a byte, such
as a letter of plain text, other text is read, and that is all.
"""

import gzip
import json
import os

import numpy as np
import pytest

from attnres_jax import config as config_lib
from attnres_jax import data
from attnres_jax.data import packing
from tests.data import text_test
from tests.data import token_file

_TEXTS = [
  f"text {i}: " + "some words that compress well\n" * i for i in range(40)
]
_LINES = "".join(json.dumps({"text": text}) + "\n" for text in _TEXTS).encode()
_IDS = np.random.default_rng(0).integers(0, 256, 3000)


def _zst(path, content):
  pyarrow = pytest.importorskip("pyarrow")
  # Two frames, as several compressors write them.
  frames = []
  for part in (content[:500], content[500:]):
    sink = pyarrow.BufferOutputStream()
    with pyarrow.CompressedOutputStream(sink, "zstd") as stream:
      stream.write(part)
    frames.append(sink.getvalue().to_pybytes())
  path.write_bytes(b"".join(frames))


# name of the damaged file: its source, and what writes it.
_FILES = {
  "a.txt": ("text", lambda path: path.write_text("".join(_TEXTS))),
  "a.txt.gz": (
    "text", lambda path: path.write_bytes(gzip.compress(_LINES))
  ),
  "a.jsonl": ("jsonl", lambda path: path.write_bytes(_LINES)),
  "a.jsonl.gz": ("jsonl", lambda path: path.write_bytes(
    gzip.compress(_LINES[:999]) + gzip.compress(_LINES[999:])
  )),
  "a.jsonl.zst": ("jsonl", lambda path: _zst(path, _LINES)),
  "a.parquet": (
    "parquet", lambda path: text_test.write_parquet(path, _TEXTS)
  ),
  "a.bin": (
    "tokens", lambda path: token_file.write(path, _IDS, separator_id=256)
  ),
}  # fmt: skip


def _flipped(content, rng):
  content = np.frombuffer(content, np.uint8).copy()
  at = rng.integers(0, len(content), max(1, len(content) // 100))
  content[at] ^= rng.integers(1, 256, len(at)).astype(np.uint8)
  return content.tobytes()


_DAMAGE = {
  "empty": lambda content, rng: b"",
  "one byte": lambda content, rng: content[:1],
  "begin": lambda content, rng: content[: rng.integers(1, len(content))],
  "end": lambda content, rng: content[rng.integers(1, len(content)) :],
  "last byte": lambda content, rng: content[:-1],
  "more": lambda content, rng: content + b"\0",
  "zeros": lambda content, rng: bytes(len(content)),
  "noise": lambda content, rng: rng.bytes(len(content)),
  "flipped": _flipped,
  "other": lambda content, rng: b"<!DOCTYPE html><html>404</html>\n" * 20,
}


def _read(name, path):
  source, write = _FILES[name]
  held_out = path.with_name(f"held_out_{name}")
  write(held_out)
  config = config_lib.DataConfig(
    source=source, path=str(path), validation_path=str(held_out),
    sequence_length=200, batch_size=7, num_threads=0,
  )  # fmt: skip
  dataset = data.open_dataset(config, "train")
  batches = dataset.batches()
  for _ in range(dataset.num_batches):
    next(batches)
  batches.close()
  return dataset.num_tokens


@pytest.mark.parametrize("name", _FILES)
def test_good_files(name, tmp_path):
  path = tmp_path / name
  _FILES[name][1](path)
  assert _read(name, path) > 1000


@pytest.mark.parametrize("name", _FILES)
@pytest.mark.parametrize("damage", _DAMAGE)
@pytest.mark.parametrize("cases", [1, pytest.param(50, marks=pytest.mark.slow)])
def test_damage_is_one_line_with_the_name_of_the_file(
  name, damage, cases, tmp_path
):
  rng = np.random.default_rng([len(name), len(damage), cases])
  path = tmp_path / name
  _FILES[name][1](path)
  good = path.read_bytes()
  for _ in range(cases):
    path.write_bytes(_DAMAGE[damage](good, rng))
    try:
      _read(name, path)
    except (config_lib.ConfigError, packing.DataError) as error:
      (line,) = str(error).splitlines()
      assert line.isprintable()
      # What is damaged, or that nothing is left of it.
      assert name in line
      assert len(line) < 500 + len(str(path))


@pytest.mark.parametrize("name", _FILES)
def test_what_is_no_file_is_no_data(name, tmp_path):
  path = tmp_path / name
  _FILES[name][1](path)
  for make in (os.mkfifo, lambda path: os.symlink("/dev/zero", path)):
    path.unlink()
    make(path)
    with pytest.raises(config_lib.ConfigError, match=f"path: .*{name}"):
      _read(name, path)
  path.unlink()
  path.mkdir()
  with pytest.raises(config_lib.ConfigError, match=f"path: .*{name}"):
    _read(name, path)
