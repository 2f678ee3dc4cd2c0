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
# Folders and files that are not clean yet; the list only shrinks.
UNCLEAN = (
  "attnres_jax/models/expert_parallel.py", "attnres_jax/plan/",
  "experiments/first_hour/", "tests/experiments/first_hour/",
  "kernels/attnres_kernels/depth_attention/pallas_gpu.py",
  "kernels/attnres_kernels/kda/", "kernels/attnres_kernels/token_walk.py",
)  # fmt: skip


def bound(tree: ast.AST):
  """Names that a file gives, with their lines; keywords of calls are used."""
  for node in ast.walk(tree):
    if isinstance(getattr(node, "ctx", ast.Store()), ast.Store):
      if not isinstance(node, ast.keyword):
        for field in ("id", "attr", "arg", "name", "asname"):
          yield getattr(node, field, None), getattr(node, "lineno", 0)


def main() -> None:
  """Prints every such identifier, with exit status 1 if there is any."""
  files = subprocess.check_output(["git", "ls-files", "*.py"], text=True)
  lines = [
    f"{file}:{line}: {name!r} does not say what it is"
    for file in files.splitlines()
    if not file.startswith(UNCLEAN)
    for name, line in bound(ast.parse(pathlib.Path(file).read_bytes()))
    if isinstance(name, str) and name.strip("_") in WORDS
  ]
  raise SystemExit("\n".join(lines) or None)


if __name__ == "__main__":
  main()
