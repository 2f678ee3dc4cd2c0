# SPDX-License-Identifier: Apache-2.0
"""Documents, which every text source yields, and how they are split.

Where files do not decide it, a hash of a document's key decides its split,
never its position. So near-duplicates inside one file do not leak from training
to validation, and adding documents does not move others to another split.
"""

from collections.abc import Iterator
import hashlib
from typing import Any, NamedTuple, Protocol

TRAIN = "train"
VALIDATION = "validation"
SPLITS = (TRAIN, VALIDATION)


class Document(NamedTuple):
  """A text with the key whose hash may decide its split.

  Attributes:
    key: the relative path of a file, or the hash of a record's text.
    text: UTF-8 bytes.
  """

  key: str
  text: bytes


class Documents(Protocol):
  """A text source: documents in a fixed order."""

  def iterate(self, start: int = 0) -> Iterator[Document]:
    """Yields the documents from number `start` on."""
    ...

  def describe(self) -> dict[str, Any]:
    """A description that can be saved as JSON and identifies the content."""
    ...


def split_of(key: str, validation_fraction: float) -> str:
  """`train` or `validation`, by the SHA-256 of the key."""
  head = hashlib.sha256(key.encode()).digest()[:8]
  position = int.from_bytes(head, "big") / 2**64
  return VALIDATION if position < validation_fraction else TRAIN


def content_key(text: bytes) -> str:
  """The key of a record without a name: equal texts share a split."""
  return hashlib.sha256(text).hexdigest()


def describe_split(fraction: float) -> str:
  """The rule of `split_of` in words."""
  return (
    "a document is validation if the first 8 bytes of the SHA-256 of its key"
    f" (relative path, or SHA-256 of its text) are below {fraction:g} of"
    " their range"
  )
