# SPDX-License-Identifier: Apache-2.0
"""Which cases of a law `make test` runs; `make test-all` runs all of them."""

from collections.abc import Collection, Iterable

import pytest


def parametrize(
  names: str, cases: Iterable, *, first: int | Collection = 1, **options
):
  """`pytest.mark.parametrize`, where most cases are marked `more`.

  Args:
    names: the parameters, as there.
    cases: their values, as there.
    first: the cases without the mark: how many from the start, or those whose
      first value is named here.
    **options: as there.
  """
  cases = [_as_param(case, "," in names) for case in cases]
  if isinstance(first, int):
    telling = cases[:first]
  else:
    telling = [case for case in cases if case.values[0] in first]
    missing = set(first) - {case.values[0] for case in telling}
    assert not missing, f"{names}: no case of {missing}"
  marked = [
    case
    if any(case is other for other in telling)
    else case._replace(marks=[*case.marks, pytest.mark.more])
    for case in cases
  ]
  return pytest.mark.parametrize(names, marked, **options)


def _as_param(case, several):
  if isinstance(case, type(pytest.param())):
    return case
  return pytest.param(*case) if several else pytest.param(case)
