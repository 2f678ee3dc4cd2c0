# SPDX-License-Identifier: Apache-2.0
"""The embedded corpus against a second walk over the same files."""

import hashlib
import pathlib
import platform
import pydoc_data.topics
import sysconfig

import pytest

from attnres_jax import config as config_lib
from attnres_jax.data import documents
from attnres_jax.data import stdlib


class TestStdlibDocuments:
  def test_holds_the_library_and_the_topics(self):
    root = pathlib.Path(sysconfig.get_path("stdlib"))
    left_out = {
      "test", "tests", "idle_test", "encodings", "site-packages",
      "dist-packages", "__pycache__",
    }  # fmt: skip
    names = sorted(
      path.relative_to(root)
      for path in root.rglob("*.py")
      if not left_out & set(path.relative_to(root).parts[:-1])
      and not path.name.startswith("_sysconfigdata")
      and path.parts[-2:] != ("pydoc_data", "topics.py")
    )
    names = sorted(path.as_posix() for path in names)
    topics = pydoc_data.topics.topics
    text = b"".join((root / name).read_bytes() for name in names)
    text += "".join(topics[name] for name in sorted(topics)).encode()

    corpus = stdlib.StdlibDocuments()
    assert corpus.describe() == {
      "source": "stdlib",
      "python": platform.python_version(),
      "implementation": platform.python_implementation(),
      "files": len(names),
      "topics": len(topics),
      "bytes": len(text),
      "sha256": hashlib.sha256(text).hexdigest(),
    }
    assert len(list(corpus.iterate())) == len(names) + len(topics)
    assert len(names) > 400
    assert 7_000_000 <= len(text) <= 20_000_000

  def test_iterates_from_any_document(self):
    corpus = stdlib.StdlibDocuments()
    everything = list(corpus.iterate())
    for start in (0, 7, len(everything) - 1, len(everything)):
      assert list(corpus.iterate(start)) == everything[start:]

  def test_says_when_there_is_no_library(self, tmp_path, monkeypatch):
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(config_lib.ConfigError, match="config.data.source"):
      stdlib.StdlibDocuments()


class TestSplit:
  def test_is_the_same_on_every_machine(self):
    # SHA-256("os.py") begins with 0xd9d7, SHA-256("2") with 0xd473.
    assert documents.split_of("os.py", 0.8510) == "validation"
    assert documents.split_of("os.py", 0.8509) == "train"
    assert documents.split_of("2", 0.8300) == "validation"
    assert documents.split_of("2", 0.8298) == "train"
