# SPDX-License-Identifier: Apache-2.0
"""`dev/words.py` sees every way to give a name, and no way to use one."""

import ast
import runpy

from tests import tiny_run

GIVEN = """
import os as whole
def one(asked, *, kept=1): pass
class C:
  wanted: int = 1
for _found, [x, own] in []: pass
x.said = 1
[0 for known in []]
try: pass
except OSError as lying: pass
match x:
  case [*dealt]: pass
"""
USED = "keep(found=x.kept, rounded=own)['wanted']"


def test_given_names():
  words = runpy.run_path(str(tiny_run.ROOT / "dev" / "words.py"))
  names = lambda text: {name for name, _ in words["given"](ast.parse(text))}
  given = {name.strip("_") for name in names(GIVEN)} & words["WORDS"]
  assert given == set(
    "whole one asked kept wanted found own said known lying dealt".split()
  )
  assert not names(USED)
