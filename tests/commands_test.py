# SPDX-License-Identifier: Apache-2.0
"""Every `python -m` command of the project has the one kit of flags."""

import ast

from tests import tiny_run

KIT = "attnres_jax/common/command_line.py"


def _others(tree):
  """Lines that read flags by themselves, with absl, argparse or sys.argv."""
  for node in ast.walk(tree):
    if isinstance(node, ast.ImportFrom) and node.module == "absl":
      found = {"app", "flags"} & {one.name for one in node.names}
    elif isinstance(node, ast.Import):
      found = {"absl.app", "absl.flags"} & {one.name for one in node.names}
    elif isinstance(node, ast.Call):
      name = ast.unparse(node.func).rpartition(".")[2]
      first = node.args[0] if node.args else None
      found = name == "ArgumentParser" or (
        # A flag of this name has the fields, errors and help of the kit.
        name in ("add", "add_argument")
        and isinstance(first, ast.Constant)
        and first.value == "--config"
      )
    else:
      found = isinstance(node, ast.Attribute) and (
        ast.unparse(node) == "sys.argv"
      )
    if found:
      yield getattr(node, "lineno", 0)


def test_every_command_has_the_one_kit():
  """Each has a `command_line.Parser`, whose add_config defines --config."""
  others = [
    f"{path.relative_to(tiny_run.ROOT)}:{line}"
    for root in ("attnres_jax", "experiments", "configs")
    for path in sorted((tiny_run.ROOT / root).rglob("*.py"))
    if not path.match(KIT)
    for line in _others(ast.parse(path.read_text()))
  ]
  assert not others


def test_the_rule_finds_other_parsers():
  for text in (
    "from absl import app, flags", "import absl.flags",
    "import argparse\nargparse.ArgumentParser()", "print(sys.argv)",
    "add('--config', default='x')",
  ):  # fmt: skip
    assert list(_others(ast.parse(text)))
  assert not list(_others(ast.parse("def f() -> argparse.ArgumentParser: ...")))
