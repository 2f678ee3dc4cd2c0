# SPDX-License-Identifier: Apache-2.0
"""SHA-256 of all files of a folder: safetensors files have no checksums.

`manifest.json` is {"files": {name: {"bytes", "sha256"}}}. The Hugging Face hub
shows the same hashes for large files.
"""

import hashlib
import json
import os
import pathlib

from attnres_jax.common import files

FILE = "manifest.json"


def write(folder: pathlib.Path, known: dict[str, str] | None = None) -> None:
  """Lists all files of a folder.

  Args:
    folder: without subfolders.
    known: hashes that were computed before.
  """
  found = {
    path.name: {
      "bytes": path.stat().st_size,
      "sha256": (known or {}).get(path.name) or sha256(path),
    }
    for path in sorted(folder.iterdir())
    if path.is_file() and path.name != FILE
  }
  files.write(folder / FILE, json.dumps({"files": found}, indent=2) + "\n")


def damage(folder: str | os.PathLike) -> list[str]:
  """What differs from the manifest, file by file; empty if nothing does.

  Raises:
    OSError: there is no manifest.
    ValueError: it is damaged.
  """
  folder = pathlib.Path(folder)
  listed = files.read_json(folder / FILE).get("files")
  if not isinstance(listed, dict):
    raise ValueError("no list of files")
  found = []
  for name, entry in listed.items():
    path = folder / files.name_from_file(name, "files", folder / FILE)
    if not isinstance(entry, dict):
      raise ValueError(f"{name!r} has no size and no hash")
    if not path.is_file():
      found.append(f"{name}: it is missing")
    elif path.stat().st_size != entry.get("bytes"):
      size = path.stat().st_size
      found.append(f"{name}: {size} bytes instead of {entry.get('bytes')}")
    elif sha256(path) != entry.get("sha256"):
      found.append(f"{name}: its content has changed")
  return found


def sha256(path: pathlib.Path) -> str:
  """The hash of a file, in hexadecimal."""
  with open(path, "rb") as file:
    return hashlib.file_digest(file, "sha256").hexdigest()
