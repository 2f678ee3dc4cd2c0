# SPDX-License-Identifier: Apache-2.0
"""How much text a configuration names, before anything compiles.

Token files say it in their headers, so that any number of terabytes are counted
in a moment. Text is tokenised, as a run does when it opens it; a process does
so once for each corpus.
"""

import dataclasses
import functools
import json

from attnres_jax import config as config_lib
from attnres_jax.data import documents
from attnres_jax.data import sources
from attnres_jax.data import token_files
from attnres_jax.data import tokenizer as tokenizer_lib


def vocab_size(config: config_lib.DataConfig) -> int:
  """The number of ids of the tokenizer: the least that a network must know.

  Raises:
    ConfigError: no such tokenizer, or it cannot be read.
    ImportError: its library is not installed.
  """
  return tokenizer_lib.make_tokenizer(config).vocab_size


def num_tokens(config: config_lib.DataConfig) -> int:
  """The ids of the training split, separators included, of all paths.

  Raises:
    ConfigError: no such data, or it cannot be read.
  """
  return sum(map(_count, config.each_path()))


def epochs(config: config_lib.DataConfig, train_tokens: float) -> float:
  """How often a run passes over its text; of a mixture, over any of its paths.

  Args:
    config: of the data.
    train_tokens: targets of the run, over all steps and rows.

  Returns:
    A fraction if the run ends before its text does; infinity without any text.

  Raises:
    ConfigError: no such data, or it cannot be read.
  """
  shares = config.weights or (1.0,)
  return max(
    share * train_tokens / count if (count := _count(one)) else float("inf")
    for share, one in zip(shares, config.each_path(), strict=True)
  )


def _count(config: config_lib.DataConfig) -> int:
  """Ids of one path."""
  if config.source == "tokens":
    return sum(map(len, token_files.find(config, documents.TRAIN)))
  config = dataclasses.replace(config, batch_size=1, seed=0, num_threads=0)
  if config.source not in sources.TEXT_SOURCES:
    return _count_text(config, "")
  source, _ = sources.open_documents(config, documents.TRAIN)
  return _count_text(config, json.dumps(source.describe()))


@functools.lru_cache(maxsize=64)
def _count_text(config: config_lib.DataConfig, content: str) -> int:
  del content  # Only tells one state of the files from another.
  opener = config_lib.choose("data.source", config.source, sources.SOURCES)
  tokenizer = tokenizer_lib.make_tokenizer(config)
  return len(opener(config, documents.TRAIN, tokenizer))
