# SPDX-License-Identifier: Apache-2.0
"""Depth attention on TPU: forward and backward Pallas kernels."""

from attnres_kernels.depth_attention.pallas_tpu_backward import backward
from attnres_kernels.depth_attention.pallas_tpu_forward import forward
from attnres_kernels.depth_attention.pallas_tpu_tiles import why_not

__all__ = ["backward", "forward", "why_not"]
