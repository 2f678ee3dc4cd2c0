# SPDX-License-Identifier: Apache-2.0
"""Data: sources of text or tokens, tokenizers, packing, batches.

Training only needs `open_dataset(config.data, "train").batches()`. No module of
this package starts a JAX device.
"""

from attnres_jax.data.pipeline import Batches
from attnres_jax.data.pipeline import Dataset
from attnres_jax.data.pipeline import open_dataset
from attnres_jax.data.sources import SOURCES
from attnres_jax.data.tokenizer import TOKENIZERS
from attnres_jax.data.tokenizer import Tokenizer
from attnres_jax.data.tokenizer import make_tokenizer

__all__ = [
  "Batches",
  "Dataset",
  "SOURCES",
  "TOKENIZERS",
  "Tokenizer",
  "make_tokenizer",
  "open_dataset",
]
