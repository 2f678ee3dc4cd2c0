# SPDX-License-Identifier: Apache-2.0
"""The one-line error that every bad argument of this package gets."""

from typing import NoReturn


def fail(argument: str, value: object, accepted: str) -> NoReturn:
  """Raises it, naming the argument, its value and what is accepted."""
  raise ValueError(f"{argument}: got {value!r}, expected {accepted}")
