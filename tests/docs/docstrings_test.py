# SPDX-License-Identifier: Apache-2.0
"""Modules and files in backticks exist, in docstrings and comments."""

import ast
import functools
import re

import pytest

from tests.docs import pages
from tests.docs import pages_test

ROOT = pages.ROOT
# Folder of a root of imports -> packages below it.
PACKAGES = {
  ROOT: ("attnres_jax", "configs", "experiments", "notebooks", "tests"),
  ROOT / "kernels": ("attnres_kernels", "benchmarks"),
}
FILES = {
  file: root
  for root, names in PACKAGES.items()
  for name in names
  for file in sorted((root / name).rglob("*.py"))
}
TREES = {file: ast.parse(file.read_text()) for file in FILES}


def _dotted(file):
  name = ".".join(file.relative_to(FILES[file]).with_suffix("").parts)
  return name.removesuffix(".__init__")


MODULES = {_dotted(file): file for file in FILES}


def _texts(file):
  """Comments and docstrings of a file."""
  yield from re.findall(r"(?:^|  )# .*$", file.read_text(), re.M)
  for node in ast.walk(TREES[file]):
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
      yield ast.get_docstring(node) or ""


def _bound(body):
  """Names that statements bind -> the statements of the classes among them."""
  names = {}
  for node in body:
    match node:
      case ast.FunctionDef(name=name):
        names[name] = []
      case ast.ClassDef(name=name):
        names[name] = node.body
      case ast.Import() | ast.ImportFrom():
        names |= {a.asname or a.name.partition(".")[0]: [] for a in node.names}
      case ast.Assign() | ast.AnnAssign() | ast.With() | ast.If() | ast.Try():
        for inner in ast.walk(node):
          if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store):
            names[inner.id] = []
  return names


@functools.cache
def _aliases(file):
  """Modules of ours that a file names in short: imported ones, neighbours."""
  package = _dotted(file).rpartition(".")[0]
  modules = [m for m in MODULES if m.rpartition(".")[0] == package]
  for node in ast.walk(TREES[file]):
    if isinstance(node, ast.ImportFrom):
      modules += [f"{node.module}.{a.name}" for a in node.names]
  rooms = [m for m in MODULES if m.count(".") == 1 and "attnres" in m]
  return {
    module.rpartition(".")[2]: module
    for module in (*rooms, *PACKAGES[ROOT], "attnres_kernels", *modules)
    if module in MODULES
  }


def _is_there(name):
  """Whether a module of ours, or what it binds, has this dotted name."""
  parts, rest = name.split("."), []
  while parts and ".".join(parts) not in MODULES:
    rest.insert(0, parts.pop())
  body = TREES[MODULES[".".join(parts)]].body if parts else []
  for part in rest:
    names = _bound(body)
    if part not in names:
      return False
    body = names[part]
  return True


def _is_field(name):
  name = name.removeprefix("config.")
  return any(f".{name}." in f".{field}." for field in pages_test.FIELDS)


@pytest.mark.parametrize("package", [n for p in PACKAGES.values() for n in p])
def test_names(package):
  wrong = []
  for file in FILES:
    if not _dotted(file).startswith(package):
      continue
    for name in re.findall(r"`([\w./-]+)`", "\n".join(_texts(file))):
      if name.endswith((".py", ".md", ".csv")):
        places = ROOT, ROOT / "attnres_jax", ROOT / "kernels", file.parent
        there = any((place / name).exists() for place in places)
      elif name.endswith((".json", ".jsonl")):  # Programs write these.
        continue
      elif re.fullmatch(r"[a-z_]\w*(\.\w+)+", name):
        first, _, rest = name.partition(".")
        module = _aliases(file).get(first)
        there = not module or _is_there(f"{module}.{rest}") or _is_field(name)
      else:
        continue
      if not there:
        wrong.append(f"{file.relative_to(ROOT)}: `{name}`")
  assert not wrong
