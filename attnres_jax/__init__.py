# SPDX-License-Identifier: Apache-2.0
"""Attention Residuals (arXiv:2603.15031) in JAX."""

from attnres_jax.config import load_config
from attnres_jax.models import build_model

__all__ = ["build_model", "load_config"]
