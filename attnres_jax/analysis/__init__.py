# SPDX-License-Identifier: Apache-2.0
"""How a trained network uses its depth (paper, sections 5.2 and 6.2).

With `scaling`, the room exceeds its budget of 2,000 lines by interventions,
which the paper does not have: `edited` changes what a network reads or writes,
and `removal` measures the loss without a source.
"""

from attnres_jax.analysis.depth_weights import DepthWeights
from attnres_jax.analysis.depth_weights import depth_weights
from attnres_jax.analysis.magnitudes import Magnitudes
from attnres_jax.analysis.magnitudes import magnitudes
from attnres_jax.analysis.mixing_matrix import mixing_matrix
from attnres_jax.analysis.mixing_matrix import semiseparable_rank
from attnres_jax.analysis.removal import Removal
from attnres_jax.analysis.removal import source_removal

__all__ = [
  "DepthWeights",
  "Magnitudes",
  "Removal",
  "depth_weights",
  "magnitudes",
  "mixing_matrix",
  "semiseparable_rank",
  "source_removal",
]
