# SPDX-License-Identifier: Apache-2.0
"""Data: sources of text or tokens, tokenizers, packing, batches.

Training only needs `open_dataset(config.data, "train").batches()`. No module of
this package starts a JAX device.

Libraries read Parquet, zst and vocabularies, shuffle and batch.
The room exceeds its budget by what libraries lack: errors that name file, line
and field, splits that never leak, `prepare` that resumes to the same bytes, the
texts of imported tokenizers, and packing.
"""

from attnres_jax.data.counts import check as check
from attnres_jax.data.counts import count_tokens as count_tokens
from attnres_jax.data.counts import epochs as epochs
from attnres_jax.data.pipeline import Batches as Batches
from attnres_jax.data.pipeline import Dataset as Dataset
from attnres_jax.data.pipeline import open_dataset as open_dataset
from attnres_jax.data.sources import SOURCES as SOURCES
from attnres_jax.data.tokenizer import TOKENIZERS as TOKENIZERS
from attnres_jax.data.tokenizer import Tokenizer as Tokenizer
from attnres_jax.data.tokenizer import make_tokenizer as make_tokenizer
