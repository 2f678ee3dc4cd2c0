# SPDX-License-Identifier: Apache-2.0
"""The pages of a clone, and the commands of their blocks."""

import functools
import importlib
import re
import shlex

from attnres_jax.sweep import cli
from tests import tiny_run

ROOT = tiny_run.ROOT
PAGES = {
  str(page.relative_to(ROOT)): page.read_text()
  for page in sorted(
    [
      ROOT / "README.md",
      ROOT / "CONTRIBUTING.md",
      *(ROOT / "docs").glob("*.md"),
      *(ROOT / "experiments").glob("*/README.md"),
    ]
  )
}


def lines(*names):
  """Every command of these pages, as one line, with its text filled in."""
  filled, text = [], ""
  page = "\n".join(PAGES[name] for name in names)
  for kind, block in re.findall(r"^```(\w*)\n(.*?)^```$", page, re.S | re.M):
    if kind:
      continue
    for line in re.sub(r"\\\n\s*", "", block).splitlines():
      if line.startswith("TEXT="):
        (text,) = shlex.split(line.removeprefix("TEXT="))
      elif line and not line.startswith("#"):
        filled.append(line.replace("$TEXT", text))
  return filled


def commands(*names):
  """(module, arguments) of every `python -m`, quoted ones included."""
  calls = []
  for line in lines(*names):
    if "python -m" not in line:
      continue
    words = shlex.split(line, comments=True)
    # A command for another machine is one word of the local command.
    words = next((shlex.split(w) for w in words if "python -m" in w), words)
    if "-m" in words and "uv" not in words:
      start = words.index("-m") + 1
      calls.append((words[start], words[start + 1 :]))
  return calls


def main(module):
  """What `python -m` runs."""
  loaded = importlib.import_module(module)
  if hasattr(loaded, "EXPERIMENT"):
    return functools.partial(cli.main, loaded.EXPERIMENT)
  if not hasattr(loaded, "main"):
    loaded = importlib.import_module(f"{module}.__main__")
  return getattr(loaded, "main", None) or loaded.run.main
