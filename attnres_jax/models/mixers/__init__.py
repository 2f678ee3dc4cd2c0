# SPDX-License-Identifier: Apache-2.0
"""Sequence mixers: modules that map h_BTD, already normalised, to o_BTD."""

from attnres_jax.models.mixers.attention import Attention
from attnres_jax.models.mixers.kda import Kda
from attnres_jax.models.mixers.mla import Mla

__all__ = ["Attention", "Kda", "Mla"]
