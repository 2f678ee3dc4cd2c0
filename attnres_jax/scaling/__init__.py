# SPDX-License-Identifier: Apache-2.0
"""Scaling laws (paper, section 5.1): sweeps, fits, the published numbers.

`grid` describes runs, `compute` counts their cost, `fit` fits a law to their
losses, `speedup` and `pairs` compare pairs of runs, and `plots` shows them;
`paper` has the published numbers and `architecture` the parameter counts behind
them. None of them needs a device.

The room exceeds its budget by the paper's tables as data, and by intervals of
pairs of runs, which no library has.
"""

from attnres_jax.scaling.fit import compute_advantage
from attnres_jax.scaling.fit import fit_power_law
from attnres_jax.scaling.speedup import effective_speedup

__all__ = ["compute_advantage", "effective_speedup", "fit_power_law"]
