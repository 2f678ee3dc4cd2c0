# SPDX-License-Identifier: Apache-2.0
"""Scaling laws (paper, section 5.1): sweeps, fits, the published numbers.

`grid` describes runs, `compute` counts what they cost, `fit` draws a law
through their losses, `plots` shows them; `paper` holds what was published and
`architecture` the parameter arithmetic behind it. None of them needs a device.
"""

from attnres_jax.scaling.fit import compute_advantage
from attnres_jax.scaling.fit import fit_power_law

__all__ = ["compute_advantage", "fit_power_law"]
