# SPDX-License-Identifier: Apache-2.0
r"""The text of this experiment: source code of 27 packages from PyPI.

  python -m experiments.gain_by_size.corpus --output=runs/gain_by_size_text

pip fetches the wheels that corpus.txt names, by version and hash. Their Python
files become documents.jsonl, and data.prepare writes its bytes as tokens. All
of it takes a few minutes and three gigabytes of disk. Rerun it to resume.

A file is left out if it is short, long (most are tables or generated), no
UTF-8, or for the most part a copy: at least half of its longer lines are in
files before it, in the order of names.
"""

import argparse
from collections.abc import Iterator, Sequence
import hashlib
import json
import pathlib
import subprocess
import sys
import zipfile

import tqdm

from attnres_jax import config as config_lib
from attnres_jax.common import command_line
from attnres_jax.common import files
from attnres_jax.data import prepare

WHEELS = pathlib.Path(__file__).with_name("corpus.txt")
# Bytes of a file that is a document.
_SHORT, _LONG = 500, 200_000
# Characters of a line that counts as copied, and the share that makes a copy.
_LINE, _COPIED = 20, 0.5
# Of documents that are held out: about a megabyte.
_VALIDATION = 0.003


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the command; returns its exit status."""
  parser = command_line.Parser(
    "python -m experiments.gain_by_size.corpus", __doc__
  )
  add = parser.add_argument
  add("--output", default="runs/gain_by_size_text", help="folder to make")
  return command_line.run(_make, parser.parse_args(argv))


def _make(options: argparse.Namespace) -> int:
  if files.is_remote(options.output):
    config_lib.fail_argument("--output", options.output, "a local folder")
  folder = pathlib.Path(files.check_folder("--output", options.output))
  wheels = folder / "wheels"
  _download(wheels)
  target = folder / "documents.jsonl"
  if not target.exists():
    partial = target.with_suffix(".partial")
    counts = write(sorted(wheels.glob("*.whl")), partial)
    partial.rename(target)
    files.write(folder / "documents.json", json.dumps(counts, indent=2) + "\n")
  return prepare.main([
    "--source=jsonl", f"--path={target}", "--tokenizer=bytes",
    f"--validation_fraction={_VALIDATION}", f"--output={folder / 'tokens'}",
  ])  # fmt: skip


def _download(folder: pathlib.Path) -> None:
  """Wheels for any machine, whatever Python this is."""
  command = [
    sys.executable, "-m", "pip", "download", "--no-deps", "--require-hashes",
    "--only-binary=:all:", "--implementation=py", "--abi=none",
    "--platform=any", "--python-version=3.13", f"--requirement={WHEELS}",
    f"--dest={folder}",
  ]  # fmt: skip
  if subprocess.run(command, check=False).returncode:
    raise config_lib.RunError("pip could not fetch the wheels of corpus.txt")


def write(
  wheels: Sequence[pathlib.Path], target: pathlib.Path
) -> dict[str, int]:
  """Writes the documents of wheels, by their names, as JSON lines.

  Returns the number and bytes of documents, and of files left out, by reason.
  """
  counts = dict(documents=0, bytes=0, size=0, encoding=0, copies=0)
  lines_seen = set[bytes]()
  with target.open("w", encoding="utf-8") as out:
    for name, content in tqdm.tqdm(_files(wheels), unit=" files"):
      if not _SHORT <= len(content) <= _LONG:
        counts["size"] += 1
        continue
      try:
        text = content.decode()
      except UnicodeDecodeError:
        counts["encoding"] += 1
        continue
      lines = {_digest(x) for x in content.split(b"\n") if len(x) >= _LINE}
      copied = len(lines & lines_seen) >= _COPIED * len(lines)
      lines_seen |= lines
      if copied:
        counts["copies"] += 1
        continue
      out.write(json.dumps({"name": name, "text": text}) + "\n")
      counts["documents"] += 1
      counts["bytes"] += len(content)
  return counts


def _files(wheels: Sequence[pathlib.Path]) -> Iterator[tuple[str, bytes]]:
  for wheel in wheels:
    with zipfile.ZipFile(wheel) as archive:
      for name in sorted(archive.namelist()):
        if name.endswith(".py"):
          yield f"{wheel.name}/{name}", archive.read(name)


def _digest(line: bytes) -> bytes:
  """Eight bytes: sets of millions of lines stay small."""
  return hashlib.blake2b(line.strip(), digest_size=8).digest()


if __name__ == "__main__":
  sys.exit(main())
