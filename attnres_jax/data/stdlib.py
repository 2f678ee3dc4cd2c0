# SPDX-License-Identifier: Apache-2.0
"""The default corpus: the running Python's standard library and help topics.

Real text that every machine has: about 10 MB of source code and 0.5 MB of
English prose (the language reference, as shown by `help("topics")`), read from
the user's installation, not part of this repository. It depends on the
interpreter, which `describe()` names.

Tests are excluded (as large as the library, and repetitive), and so are
installed packages. The code pages in `encodings` are generated, nearly
identical tables, which would make validation easy. The file with the topics
would repeat them, and build settings (`_sysconfigdata*`) differ between
machines.
"""

from collections.abc import Iterator
import functools
import hashlib
import os
import pathlib
import platform
import sysconfig
from typing import Any

from attnres_jax import config as config_lib
from attnres_jax.data import documents

_LEFT_OUT_FOLDERS = frozenset({
    "__pycache__", "dist-packages", "encodings", "idle_test", "site-packages",
    "test", "tests",
})  # fmt: skip
_TOPICS_FILE = "pydoc_data/topics.py"


class StdlibDocuments:
  """One document per source file, then one per help topic, sorted by key."""

  def __init__(self):
    """Reads everything: about 11 MB, once per process."""
    self._files = _read(sysconfig.get_path("stdlib"))
    self._topics = _topics()

  def iterate(self, start: int = 0) -> Iterator[documents.Document]:
    """Yields the documents from number `start` on."""
    yield from (self._files + self._topics)[start:]

  def describe(self) -> dict[str, Any]:
    """The interpreter, and the number of bytes and their hash."""
    text = b"".join(document.text for document in self.iterate())
    return {
      "source": "stdlib",
      "python": platform.python_version(),
      "implementation": platform.python_implementation(),
      "files": len(self._files),
      "topics": len(self._topics),
      "bytes": len(text),
      "sha256": hashlib.sha256(text).hexdigest(),
    }


@functools.lru_cache(maxsize=1)
def _read(root: str) -> tuple[documents.Document, ...]:
  paths = {}
  for folder, folders, names in os.walk(root):
    folders[:] = [name for name in folders if name not in _LEFT_OUT_FOLDERS]
    for name in names:
      path = pathlib.Path(folder, name)
      key = path.relative_to(root).as_posix()
      is_settings = name.startswith("_sysconfigdata")
      if name.endswith(".py") and not is_settings and key != _TOPICS_FILE:
        paths[key] = path
  if not paths:
    config_lib.fail(
      "data.source",
      "stdlib",
      f"a Python whose library is a folder of .py files ({root} has none)",
    )
  return tuple(
    documents.Document(key, path.read_bytes())
    for key, path in sorted(paths.items())
  )


@functools.lru_cache(maxsize=1)
def _topics() -> tuple[documents.Document, ...]:
  from pydoc_data import topics  # Half a megabyte that few programs need.

  return tuple(
    documents.Document(f"{_TOPICS_FILE}:{name}", text.encode())
    for name, text in sorted(topics.topics.items())
  )
