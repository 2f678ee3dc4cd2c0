# SPDX-License-Identifier: Apache-2.0
"""The tokenizer of a run of ours, as files that transformers reads.

With them, `tokenizer(text)` of transformers gives the ids of
`TextFormat.prompt(text)`: the separator, then the text.
"""

import json
from typing import Any

from attnres_jax import config as config_lib
from attnres_jax.data import paths
from attnres_jax.data import text_format as text_format_lib
from attnres_jax.data import tokenizer as tokenizer_lib

_NAME = "<|endoftext|>"


def of_run(
  config: config_lib.DataConfig, text_format: text_format_lib.TextFormat
) -> dict[str, bytes]:
  """Content by file name; empty for token ids, which have no text.

  The format is a run's, not an imported checkpoint's.
  """
  if config.tokenizer == "ids":
    return {}
  separator = text_format.end_ids[0]
  tokenizers = paths.library(
    "tokenizers", "data.tokenizer", config.tokenizer, "hf"
  )
  if config.tokenizer == "bytes":
    made = _of_bytes(tokenizers)
  else:
    path, _ = tokenizer_lib.vocabulary_file(config)
    made = tokenizers.Tokenizer.from_file(path)
  made.no_truncation()
  made.no_padding()
  name = made.id_to_token(separator) or _NAME
  made.add_special_tokens([name])
  if made.token_to_id(name) != separator:
    config_lib.fail(
      "data.tokenizer_path",
      config.tokenizer_path,
      f"a vocabulary without holes below its separator, id {separator}",
    )
  made.post_processor = tokenizers.processors.TemplateProcessing(
    single=[name, "$A"],
    pair=[name, "$A", name, "$B:0"],
    special_tokens=[(name, separator)],
  )
  described = dict(
    tokenizer_class="PreTrainedTokenizerFast",
    model_max_length=config.sequence_length,
    padding_side="left",
    clean_up_tokenization_spaces=False,
    bos_token=name,
    eos_token=name,
    pad_token=name,
    add_bos_token=True,
    # Special tokens written in a text are text.
    split_special_tokens=True,
    model_input_names=["input_ids", "attention_mask"],
  )
  return {
    "tokenizer.json": made.to_str(pretty=True).encode(),
    "tokenizer_config.json": (json.dumps(described, indent=2) + "\n").encode(),
  }


def _of_bytes(tokenizers: Any) -> Any:
  """A tokenizer whose ids are the bytes of a text."""
  # Bytes without a printable character have one above 255 (GPT-2).
  printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
  others = [b for b in range(256) if b not in printable]
  vocabulary = {chr(b): b for b in printable}
  vocabulary |= {chr(256 + i): b for i, b in enumerate(others)}
  made = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
  made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
    add_prefix_space=False, use_regex=False
  )
  made.decoder = tokenizers.decoders.ByteLevel()
  return made
