# SPDX-License-Identifier: Apache-2.0
"""Documents, which every text source yields, and how they are split.

Where files do not decide it, a hash of a document's key decides its split,
never its position. So near-duplicates inside one file do not leak from training
to validation, and adding documents does not move others to another split.
"""

import hashlib
from typing import NamedTuple

TRAIN = "train"
VALIDATION = "validation"
SPLITS = (TRAIN, VALIDATION)


class Document(NamedTuple):
  """A UTF-8 text with the key whose hash may decide its split.

  The key is the relative path of a file, or the hash of a record's text.
  """

  key: str
  text: bytes


def split_of(key: str, validation_fraction: float) -> str:
  """`train` or `validation`, by the SHA-256 of the key."""
  head = hashlib.sha256(key.encode()).digest()[:8]
  position = int.from_bytes(head, "big") / 2**64
  return VALIDATION if position < validation_fraction else TRAIN
