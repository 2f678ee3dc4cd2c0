# SPDX-License-Identifier: Apache-2.0
"""Attention over depth as fast operators (Attention Residuals, 2603.15031).

`depth_attention` is phase 1 of the paper's two-phase algorithm, `depth_merge`
and `depth_merge_norm` are phase 2. `kda` is the delta rule of Kimi Linear, the
network that the paper trains, and `short_conv` makes its features. The package
imports only JAX.
"""

from attnres_kernels.depth_attention.api import depth_attention
from attnres_kernels.depth_merge.api import combine_mixtures
from attnres_kernels.depth_merge.api import depth_merge
from attnres_kernels.depth_merge.api import depth_merge_norm
from attnres_kernels.depth_merge.api import merges_several
from attnres_kernels.kda.api import kda
from attnres_kernels.kda.api import kda_step
from attnres_kernels.platforms import IMPLEMENTATIONS
from attnres_kernels.platforms import Implementation
from attnres_kernels.rms_norm.api import rms_norm
from attnres_kernels.short_conv.api import short_conv

__all__ = [
  "IMPLEMENTATIONS",
  "Implementation",
  "combine_mixtures",
  "depth_attention",
  "depth_merge",
  "depth_merge_norm",
  "kda",
  "kda_step",
  "merges_several",
  "rms_norm",
  "short_conv",
]
