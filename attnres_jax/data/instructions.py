# SPDX-License-Identifier: Apache-2.0
"""Prompts with their completions, of which only the completions are learnt.

Each line of a .jsonl file is an object with the texts `prompt` and
`completion`. An example is

  separator, prompt, completion, separator

and its loss counts the tokens of the completion and the separator that ends it.
Both texts are encoded separately, so that a prompt has the same tokens as when
the network is asked. Rows hold whole examples, in the order of the files, each
a document of its own (`data.segment_ids`), and are padded.
"""

import hashlib
from typing import Any

import numpy as np

from attnres_jax import config as config_lib
from attnres_jax.data import documents
from attnres_jax.data import packing
from attnres_jax.data import paths
from attnres_jax.data import text as text_lib
from attnres_jax.data import text_format as text_format_lib
from attnres_jax.data import tokenizer as tokenizer_lib

PROMPT, COMPLETION = "prompt", "completion"


def open_examples(
  config: config_lib.DataConfig,
  split: str,
  tokenizer: tokenizer_lib.Tokenizer,
) -> packing.Examples:
  """Reads and encodes the examples of a split.

  Raises:
    ConfigError: a line cannot be used, or an example is longer than a row.
  """
  files, by_hash = paths.splits(config, text_lib.FORMATS["jsonl"].suffixes)
  digest = hashlib.sha256()
  examples: list[packing.Example] = []
  text_format = text_format_lib.of_data(config, tokenizer=tokenizer)
  for file in files[split]:
    for where, record in text_lib.read_lines(file):
      prompt, completion = _texts(file, where, record)
      key = documents.content_key(f"{prompt}\0{completion}".encode())
      if by_hash:
        if documents.split_of(key, config.validation_fraction) != split:
          continue
      digest.update(key.encode())
      before, after = text_format.example(prompt, completion)
      ids = np.asarray([*before, *after], np.int32)
      if len(ids) > config.sequence_length + 1:
        config_lib.fail(
          "data.sequence_length",
          config.sequence_length,
          f"at least {len(ids) - 1}, for the example at {file.path}{where}",
        )
      examples.append(packing.Example(ids, len(after)))
  return packing.Examples(
    examples,
    vocab_size=tokenizer.vocab_size,
    separator_id=tokenizer.separator_id,
    description={
      "source": "instructions",
      "files": len(files[split]),
      "split": split,
      "split_documents": len(examples),
      "split_sha256": digest.hexdigest(),
    },
  )


def _texts(file: paths.File, where: str, record: Any) -> tuple[str, str]:
  """The prompt and the completion of a line."""
  names = ", ".join(record) if isinstance(record, dict) else "no object"
  texts = []
  for name in (PROMPT, COMPLETION):
    text = record.get(name) if isinstance(record, dict) else None
    if not isinstance(text, str):
      file.fail(f"an object with text in {name!r}; {names}", where)
    # JSON can contain half a surrogate pair, which is not valid UTF-8.
    texts.append(text.encode(errors="replace").decode())
  if not texts[1]:
    file.fail(f"a {COMPLETION!r} that is not empty", where)
  return texts[0], texts[1]
