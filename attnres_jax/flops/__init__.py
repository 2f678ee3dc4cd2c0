# SPDX-License-Identifier: Apache-2.0
"""The cost of a configuration, counted in its traced program without a device.

  programs     how a program is counted
  parameters   of every part, total and activated
  operations   FLOPs of a token, forward and backward
  traffic      bytes that the residual scheme moves, and what decoding keeps
  report       all of it for one config:

  python -m attnres_jax.flops --config=configs/kimi_linear.py:size=48b

Nothing here knows the name of a residual scheme. Arrays stay abstract, and no
JAX backend starts.

With `plan`, the room exceeds its budget of 2,700 lines by counting what XLA
does not: FLOPs inside of scans and kernels, the experts of a token, and the
vectors that a residual scheme moves.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
  from attnres_jax.flops.operations import FlopsPerToken
  from attnres_jax.flops.operations import flops_per_token
  from attnres_jax.flops.report import Report
  from attnres_jax.flops.report import make_report

__all__ = ["FlopsPerToken", "Report", "flops_per_token", "make_report"]


def __getattr__(name: str) -> Any:
  # Imported on demand: the command reads its flags first.
  if name not in __all__:
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
  of_report = name in ("Report", "make_report")
  module = f"{__name__}.{'report' if of_report else 'operations'}"
  return getattr(importlib.import_module(module), name)
