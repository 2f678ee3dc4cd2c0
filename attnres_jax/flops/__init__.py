# SPDX-License-Identifier: Apache-2.0
"""What a configuration costs, by arithmetic: no device, no model is built.

  parameters   of every part, total and activated
  operations   FLOPs of a token, forward and backward
  traffic      bytes that the residual scheme moves, and what decoding keeps
  chips        peaks, for model FLOP utilisation
  report       all of it for one config:

  python -m attnres_jax.flops --config=configs/kimi_linear.py:size=48b

This package is a leaf: of the library it imports `config` only.
"""

from attnres_jax.flops.chips import model_flop_utilisation
from attnres_jax.flops.chips import peak_flops_per_second
from attnres_jax.flops.operations import DEPTH_READS
from attnres_jax.flops.operations import DepthReads
from attnres_jax.flops.operations import FlopsPerToken
from attnres_jax.flops.operations import block_reads
from attnres_jax.flops.operations import flops_per_token
from attnres_jax.flops.operations import full_reads
from attnres_jax.flops.report import Report
from attnres_jax.flops.report import make_report

__all__ = [
  "DEPTH_READS",
  "DepthReads",
  "FlopsPerToken",
  "Report",
  "block_reads",
  "flops_per_token",
  "full_reads",
  "make_report",
  "model_flop_utilisation",
  "peak_flops_per_second",
]
