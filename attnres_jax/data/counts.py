# SPDX-License-Identifier: Apache-2.0
"""Whether the text of a run fits it, before anything compiles.

A run knows how many tokens it has opened. Before there is a run, token files
say it in their headers, so that any number of terabytes are counted in a
moment, and text is tokenised, once in a process for each corpus.
"""

from collections.abc import Sequence
import dataclasses
import functools
import json

from attnres_jax import config as config_lib
from attnres_jax.data import documents
from attnres_jax.data import pipeline
from attnres_jax.data import sources
from attnres_jax.data import token_files
from attnres_jax.data import tokenizer as tokenizer_lib

# Embeddings are padded to multiples of up to this, so that devices can share
# their rows.
_PADDING = 1024
_HINT = (
  " tokenise a corpus with python -m attnres_jax.data.prepare and pass"
  " --config.data.source=tokens --config.data.path=FOLDER with the same"
  " data.tokenizer and data.tokenizer_path"
)


def check(
  config: config_lib.RunConfig,
  opened: pipeline.Dataset | None = None,
  *,
  offline: bool = False,
) -> None:
  """Refuses a run whose text does not fit it, before anything is compiled.

  Args:
    config: of the run.
    opened: its training split; None reads what `config.data` names.
    offline: look only at what needs no file of the data: the vocabulary of
      bytes, and the embedded corpus.

  Raises:
    ConfigError: the vocabulary is not the tokenizer's, or the run would pass
      over its text more than `data.max_epochs` times.
  """
  data = config.data
  if not offline or data.tokenizer == "bytes":
    _check_vocabulary(config)
  if offline and data.source != "stdlib":
    return
  counts = opened.part_tokens if opened else count_tokens(data)
  tokens = config.train.steps * data.batch_size * data.sequence_length
  passes = epochs(data, counts, tokens)
  if passes > data.max_epochs:
    config_lib.fail_argument(
      "data.max_epochs",
      data.max_epochs,
      f"at least {passes:.3g}: the run trains on {tokens:,} tokens, and its"
      f" text has {sum(counts):,};{_HINT}",
    )


def epochs(
  config: config_lib.DataConfig, counts: Sequence[int], train_tokens: float
) -> float:
  """How often a run passes over its text; of a mixture, over any of its paths.

  `counts` are the tokens of each path. The result is a fraction if the run ends
  before its text does, and infinite without any text.
  """
  shares = config.weights or (1.0,)
  return max(
    share * train_tokens / count if count else float("inf")
    for share, count in zip(shares, counts, strict=True)
  )


def count_tokens(config: config_lib.DataConfig) -> list[int]:
  """The ids of the training split, separators included, of each path.

  Raises:
    ConfigError: no such data, or it cannot be read.
  """
  return [_count(part) for part in config.each_path()]


def _check_vocabulary(config: config_lib.RunConfig) -> None:
  """Rows of the embedding beyond a padded vocabulary would never be used.

  An imported network may have more.
  """
  given, name = config.model.vocab_size, config.data.tokenizer
  size = tokenizer_lib.make_tokenizer(config.data).vocab_size
  padded = -(-size // _PADDING) * _PADDING
  most = given if config.train.start_from else padded
  if given and not size <= given <= most:
    config_lib.fail_argument(
      "model.vocab_size",
      given,
      f"the {size} ids of data.tokenizer={name!r}, or up to"
      f" {padded} with padding (0 takes the tokenizer's);{_HINT}",
    )


def _count(config: config_lib.DataConfig) -> int:
  """Ids of one path."""
  if config.source == "tokens":
    return sum(map(len, token_files.find(config, documents.TRAIN)))
  # The same text, whatever the order and number of its rows.
  config = dataclasses.replace(
    config, batch_size=1, seed=0, num_threads=0, max_epochs=1.0
  )
  if config.source not in sources.TEXT_SOURCES:
    return _count_text(config, "")
  opened = sources.open_splits(config)[documents.TRAIN]
  return _count_text(config, json.dumps(opened.documents.describe()))


@functools.lru_cache(maxsize=64)
def _count_text(config: config_lib.DataConfig, content: str) -> int:
  del content  # Only tells one state of the files from another.
  opener = config_lib.choose("data.source", config.source, sources.SOURCES)
  tokenizer = tokenizer_lib.make_tokenizer(config)
  return len(opener(config, documents.TRAIN, tokenizer))
