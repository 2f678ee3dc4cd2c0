# SPDX-License-Identifier: Apache-2.0
"""Attention Residuals (arXiv:2603.15031) in JAX."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
  from attnres_jax.config import load_config
  from attnres_jax.inference.packaged import load_trained
  from attnres_jax.models import build_model

__all__ = ["build_model", "load_config", "load_trained"]

_HOMES = {
  "build_model": "attnres_jax.models",
  "load_config": "attnres_jax.config",
  "load_trained": "attnres_jax.inference.packaged",
}


def __getattr__(name: str) -> Any:
  # Imported on demand: schedules, fits and configs do not need JAX.
  if name not in _HOMES:
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
  return getattr(importlib.import_module(_HOMES[name]), name)
