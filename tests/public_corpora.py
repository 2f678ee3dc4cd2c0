# SPDX-License-Identifier: Apache-2.0
"""Corpora in the formats in which the public ones are published.

  python -m tests.public_corpora FOLDER MEGABYTES

writes, with text of the standard library in place of theirs, what the
downloads of docs/data.md write: names of files, columns and fields, compression
and headers. Megabytes are of text, for each corpus.
"""

import gzip
import itertools
import json
import pathlib
import struct
import sys

import numpy as np
import pyarrow
from pyarrow import parquet
import tokenizers
from tokenizers import decoders
from tokenizers import models
from tokenizers import pre_tokenizers
from tokenizers import trainers

from attnres_jax.data import stdlib

END = "<|endoftext|>"
_END_ID = 50256  # In GPT-2's vocabulary.


def texts(num_bytes: int) -> list[str]:
  """Different documents of a few kilobytes, so many bytes in all."""
  pieces, size = [], 0
  for turn in itertools.count():
    for document in stdlib.StdlibDocuments().iterate():
      text = document.text.decode(errors="replace")
      for start in range(0, len(text), 4000):
        if size >= num_bytes:
          return pieces
        pieces.append(f"{document.key} {turn}\n{text[start : start + 4000]}")
        size += len(pieces[-1])
  raise AssertionError


def fineweb_edu(folder: pathlib.Path, pieces: list[str]) -> None:
  """HuggingFaceFW/fineweb-edu, sample/10BT: Parquet."""
  folder = folder / "fineweb_edu" / "sample" / "10BT"
  folder.mkdir(parents=True)
  for number, part in enumerate(np.array_split(np.arange(len(pieces)), 4)):
    table = pyarrow.table(
      {
        "text": [pieces[i] for i in part],
        "id": [f"<urn:uuid:{i}>" for i in part],
        "language_score": [0.9] * len(part),
        "token_count": [len(pieces[i]) // 4 for i in part],
        "score": [3.5] * len(part),
      }
    )
    parquet.write_table(
      table, folder / f"{number:03d}_00000.parquet", row_group_size=1000
    )


def pile(folder: pathlib.Path, pieces: list[str]) -> None:
  """The Pile: jsonl.zst, with the validation texts in another file."""
  (folder / "pile" / "train").mkdir(parents=True)
  held_out = pieces[: len(pieces) // 50]
  rest = pieces[len(held_out) :]
  half = len(rest) // 2
  for name, part in {
    "train/00": rest[:half], "train/01": rest[half:], "val": held_out,
  }.items():  # fmt: skip
    meta = {"pile_set_name": "Pile-CC"}
    lines = "".join(json.dumps({"text": t, "meta": meta}) + "\n" for t in part)
    sink = pyarrow.BufferOutputStream()
    with pyarrow.CompressedOutputStream(sink, "zstd") as stream:
      stream.write(lines.encode())
    path = folder / "pile" / f"{name}.jsonl.zst"
    path.write_bytes(sink.getvalue().to_pybytes())


def json_lines(folder: pathlib.Path, pieces: list[str]) -> None:
  """allenai/c4, en: json.gz, lines with `text`, `timestamp` and `url`."""
  (folder / "c4" / "en").mkdir(parents=True)
  for name, part in {
    "c4-train.00000-of-01024": pieces[50:], "c4-validation.00000-of-00008":
    pieces[:50],
  }.items():  # fmt: skip
    lines = [json.dumps({"text": t, "timestamp": "", "url": ""}) for t in part]
    path = folder / "c4" / "en" / f"{name}.json.gz"
    path.write_bytes(gzip.compress("\n".join(lines).encode(), 1))


def single_text(folder: pathlib.Path, pieces: list[str]) -> None:
  """Your own file."""
  (folder / "my_text.txt").write_text("".join(pieces))


def _ids(folder: pathlib.Path, pieces: list[str]) -> list[np.ndarray]:
  read = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
  return [np.array(p.ids, "<u2") for p in read.encode_batch(pieces)]


def llm_c(folder: pathlib.Path, pieces: list[str]) -> None:
  """kjj0/fineweb10B-gpt2: shards whose documents begin with the separator."""
  (folder / "fineweb10B").mkdir()
  ids = np.concatenate([np.r_[_END_ID, p] for p in _ids(folder, pieces)])
  for name, part in zip(
    ("fineweb_val_000000", "fineweb_train_000001", "fineweb_train_000002"),
    np.split(ids, [len(ids) // 10, len(ids) // 2]),
  ):
    header = struct.pack("<256i", 20240520, 1, len(part), *[0] * 253)
    content = header + part.astype("<u2").tobytes()
    (folder / "fineweb10B" / f"{name}.bin").write_bytes(content)


def nano_gpt(folder: pathlib.Path, pieces: list[str]) -> None:
  """What nanoGPT's data/openwebtext/prepare.py writes: the separator ends."""
  (folder / "openwebtext").mkdir()
  ids = [np.r_[p, _END_ID] for p in _ids(folder, pieces)]
  for name, part in (("val", ids[:20]), ("train", ids[20:])):
    content = np.concatenate(part).astype("<u2").tobytes()
    (folder / "openwebtext" / f"{name}.bin").write_bytes(content)


def vocabulary(folder: pathlib.Path, pieces: list[str]) -> None:
  """A tokenizer.json with the vocabulary size and the separator of GPT-2.

  It knows fewer pairs, and names without text take the place of the others.
  """
  tokenizer = tokenizers.Tokenizer(models.BPE())
  tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  tokenizer.decoder = decoders.ByteLevel()
  trainer = trainers.BpeTrainer(
    vocab_size=2000,
    initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    show_progress=False,
  )
  tokenizer.train_from_iterator(pieces[:300], trainer)
  values = json.loads(tokenizer.to_str())
  words = values["model"]["vocab"]
  words |= {f"<unused{i}>": i for i in range(len(words), _END_ID)}
  values["added_tokens"] = [{
    "id": _END_ID, "content": END, "special": True, "lstrip": False,
    "rstrip": False, "normalized": False, "single_word": False,
  }]  # fmt: skip
  (folder / "tokenizer.json").write_text(json.dumps(values))


def write(folder: pathlib.Path, num_bytes: int) -> None:
  """All of them."""
  pieces = texts(num_bytes)
  for make in (
    vocabulary, fineweb_edu, pile, json_lines, single_text, llm_c, nano_gpt
  ):  # fmt: skip
    make(folder, pieces)


if __name__ == "__main__":
  write(pathlib.Path(sys.argv[1]), int(float(sys.argv[2]) * 1e6))
