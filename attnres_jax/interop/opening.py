# SPDX-License-Identifier: Apache-2.0
"""What texts begin and end with, for a network that others trained or we did.

Here, every document begins with the tokenizer's separator. A checkpoint of
Hugging Face was trained with texts that begin as its tokenizer.json says (often
with a token for it, sometimes with none), and ends them with the `eos_token_id`
of its config.json.
"""

import os
import pathlib
from typing import Any, NamedTuple

from attnres_jax import config as config_lib
from attnres_jax import data
from attnres_jax.interop import weights_folder

CHOICES = ("auto", "separator", "vocabulary", "none")


class Opening(NamedTuple):
  """Of the texts of a run.

  Attributes:
    ids: before every text.
    prefix_id: before a text whose first token is scored, too.
    stop_ids: tokens that end a text.
    length: most tokens that the network was trained on.
  """

  ids: tuple[int, ...]
  prefix_id: int
  stop_ids: tuple[int, ...]
  length: int


def of_run(
  workdir: str | os.PathLike,
  config: config_lib.RunConfig,
  tokenizer: data.Tokenizer,
  choice: str = "auto",
) -> Opening:
  """What the texts of a run begin with.

  Args:
    workdir: of the run.
    config: of the run.
    tokenizer: of the run.
    choice: `separator` or `vocabulary` for those of the two, `none` for
      nothing, and `auto` for `vocabulary` in runs that began with a checkpoint
      of Hugging Face.

  Raises:
    ConfigError: a tokenizer.json is needed, and there is none.
  """
  facts, _ = weights_folder.origin(workdir, config)
  described = facts.get("config", {})
  imported = facts.get("format") == "huggingface"
  separator = tokenizer.separator_id
  ends = _ids(described.get("eos_token_id")) or (separator,)
  starts = _ids(described.get("bos_token_id")) or ends
  length = config.data.sequence_length
  if imported:
    length = described.get("max_position_embeddings") or length
  if choice == "auto":
    choice = "vocabulary" if imported else "separator"
  if choice == "separator":
    return Opening((separator,), separator, (separator,), length)
  ids = _of_vocabulary(config.data) if choice == "vocabulary" else ()
  return Opening(ids, starts[0], tuple({*ends, separator}), length)


def _ids(said: Any) -> tuple[int, ...]:
  """Of a key of config.json: a number, a list of them, or null."""
  if said is None:
    return ()
  return tuple(said) if isinstance(said, list) else (said,)


def _of_vocabulary(config: config_lib.DataConfig) -> tuple[int, ...]:
  """What a tokenizer.json puts before an empty text."""
  if config.tokenizer == "bytes":
    return ()
  if config.tokenizer == "sentencepiece":
    # A convention of the checkpoints that have one; the file does not say it.
    return (data.make_tokenizer(config).separator_id,)
  if config.tokenizer != "hf":
    config_lib.fail_argument(
      "--opening",
      "vocabulary",
      f"`separator` or `none`, with data.tokenizer={config.tokenizer!r}",
    )
  import tokenizers  # An extra, which this network's tokenizer needs anyway.

  path = pathlib.Path(config.tokenizer_path)
  made = tokenizers.Tokenizer.from_str(path.read_text(encoding="utf-8"))
  before = made.encode("a").ids
  plain = made.encode("a", add_special_tokens=False).ids
  # What it puts after a text ends a sequence, which contexts do not.
  for size in range(len(before) - len(plain) + 1):
    if before[size : size + len(plain)] == plain:
      return tuple(before[:size])
  return ()
