# SPDX-License-Identifier: Apache-2.0
"""Fails on identifiers that do not say what a thing is: python dev/words.py

A result is named by what it is: `rows` or `missing_fields` instead of `found`,
`scheme` instead of `one`, `config_names` instead of `known`.
"""

import ast
import pathlib
import subprocess

WORDS = set(
  "alone asked dealt found how keep kept known lying one own post rounded said"
  " traced wanted whole".split()
)


def given(tree: ast.AST):
  """(name, line) of every name that a file gives; calls only use keywords."""
  for node in ast.walk(tree):
    stores = isinstance(getattr(node, "ctx", ast.Store()), ast.Store)
    for field in ("id", "attr", "arg", "name", "asname"):
      name = getattr(node, field, None)
      if stores and isinstance(name, str) and not isinstance(node, ast.keyword):
        yield name, getattr(node, "lineno", 0)


if __name__ == "__main__":
  listed = subprocess.check_output(["git", "ls-files", "*.py"], text=True)
  wrong = [
    f"{file}:{line}: {name!r} does not say what it is"
    for file in map(pathlib.Path, listed.split())
    if file.exists()
    for name, line in given(ast.parse(file.read_bytes()))
    if name.strip("_") in WORDS
  ]
  raise SystemExit("\n".join(wrong) or None)
