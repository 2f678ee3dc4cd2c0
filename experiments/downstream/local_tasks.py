# SPDX-License-Identifier: Apache-2.0
r"""Writes two tasks of text that every machine has; nothing is downloaded.

  python -m experiments.downstream.local_tasks --out=runs/tasks
  python -m attnres_jax.interop.score --workdir=runs/tiny \
    --tasks=corpus_choice,corpus_bytes --include_path=runs/tasks

From the validation split of the embedded corpus (the standard library of the
running Python): which of four lines follows, the others being lines of the same
document; and bits per byte of whole pieces.
"""

import argparse
from collections.abc import Sequence
import json
import sys

import numpy as np

from attnres_jax import config as config_lib
from attnres_jax.common import command_line
from attnres_jax.common import files
from attnres_jax.data import documents
from attnres_jax.data import sources
from attnres_jax.interop import weights_folder

# Of each task, at most.
_QUESTIONS = 200
_CONTEXT, _PIECE = 200, 600
_CHOICE = """\
task: corpus_choice
dataset_path: json
dataset_kwargs: {data_files: {test: FOLDER/corpus_choice.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: context
doc_to_choice: choices
doc_to_target: label
target_delimiter: ""
metric_list:
  - {metric: acc}
  - {metric: acc_norm}
"""
_BYTES = """\
task: corpus_bytes
dataset_path: json
dataset_kwargs: {data_files: {test: FOLDER/corpus_bytes.jsonl}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: text
metric_list:
  - {metric: bits_per_byte}
"""


def main(argv: Sequence[str] | None = None) -> int:
  """The command; returns its exit status."""
  parser = command_line.Parser(
    "python -m experiments.downstream.local_tasks", __doc__
  )
  parser.add_argument("--out", required=True, help="new folder")
  return command_line.run(_write, parser.parse_args(argv))


def _write(options: argparse.Namespace) -> None:
  out = weights_folder.check_new("--out", options.out).absolute()
  out.mkdir(parents=True, exist_ok=True)
  for name, task, rows in (
    ("corpus_choice", _CHOICE, choices(_QUESTIONS)),
    ("corpus_bytes", _BYTES, pieces(_QUESTIONS)),
  ):
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    files.write(out / f"{name}.jsonl", lines)
    files.write(out / f"{name}.yaml", task.replace("FOLDER", str(out)))
    print(f"{name}: {len(rows)} questions in {out}")


def choices(count: int) -> list[dict]:
  """Questions: a context of lines, and four lines of which one follows."""
  rng, rows = np.random.default_rng(0), []
  texts = [[x for x in t.splitlines() if x.strip()] for t in _texts()]
  texts = [lines for lines in texts if len(set(lines)) >= 12]
  for number in range(count):
    lines = texts[number % len(texts)]
    at = int(rng.integers(6, len(lines)))
    others = sorted({*lines} - {lines[at]})
    options = rng.choice(others, 3, replace=False).tolist()
    label = int(rng.integers(4))
    options.insert(label, lines[at])
    context = "\n".join(lines[:at])[-_CONTEXT:] + "\n"
    rows.append(dict(context=context, choices=options, label=label))
  return rows


def pieces(count: int) -> list[dict]:
  """Pieces of documents."""
  texts = [
    text[start : start + _PIECE]
    for text in _texts()
    for start in range(0, len(text) - _PIECE, _PIECE)
  ]
  order = np.random.default_rng(0).permutation(len(texts))
  return [dict(text=texts[i]) for i in order[:count]]


def _texts() -> list[str]:
  config = config_lib.DataConfig()
  return [text.decode() for text in sources.texts(config, documents.VALIDATION)]


if __name__ == "__main__":
  sys.exit(main())
