# SPDX-License-Identifier: Apache-2.0
"""Kernels of other projects, where they are installed.

tokamax (`pip install attnres-jax[tokamax]`) has flash attention and grouped
matrix products for TPU and GPU. It is asked first there; what it cannot do
(`NotImplementedError` for the arguments or the device) is done in plain JAX.
"""

from collections.abc import Callable
import importlib
import importlib.util
from typing import Any

import jax


def tokamax(function: str) -> Callable[..., Any] | None:
  """The named function of tokamax; None if not installed, and on a CPU."""
  if jax.default_backend() == "cpu" or not importlib.util.find_spec("tokamax"):
    return None
  return getattr(importlib.import_module("tokamax"), function)


def attempt(
  function: Callable[..., Any], *args: Any, **kwargs: Any
) -> tuple[Any] | None:
  """The function's result in a tuple; None if it is not implemented there.

  tokamax reports that as `NotImplementedError`, or as a group of them if more
  than one of its backends was asked.
  """
  try:
    return (function(*args, **kwargs),)
  except NotImplementedError:
    return None
  except ExceptionGroup as group:
    if group.split(NotImplementedError)[1] is not None:
      raise
    return None
