# SPDX-License-Identifier: Apache-2.0
"""Networks: a trunk of sublayers connected by a residual scheme.

Array names end in their axes. One table for the whole code base:

  B  batch                 T  query position       S  key position
  D  model width           N  query heads          K  key/value heads
  H  head width            F  MLP width            V  vocabulary, value width
  L  stacked layers        M  depth sources        Q  depth queries of one block
  E  experts               R  rank                 W  taps of a convolution
  G  gate and up of an expert
  C  coefficients of a residual scheme, whose streams are M, too

The paper uses other letters (L sublayers, N blocks, S sublayers per block);
`attnres_jax.models.residuals` maps them to names here.

Modules are `flax.nnx` modules used as plain pytrees: `jax.jit`, `jax.grad`,
`jax.lax.scan` and `jax.checkpoint` act on the module itself, every leaf is a
float32 parameter, nothing is mutated in a forward pass.

A parameter names its axes where it is created, `nnx.Param(value, axes="D|NH")`,
by the letters above, without the axes of stacked layers. With bars it is a
matrix, rows|columns, or a stack of matrices, stack|rows|columns; without a bar,
it is an array of vectors along its last axis. This determines how a mesh shards
it (`attnres_jax.common.sharding`) and how it is trained
(`attnres_jax.optimizer`).

The room exceeds its budget of 9,700 lines by `trunk`, which runs blocks one by
one, sublayers of a block in a scan, or all blocks in one scan.
"""

from attnres_jax.models.transformer import Transformer
from attnres_jax.models.transformer import build_model
from attnres_jax.models.trunk import Trace

__all__ = ["Trace", "Transformer", "build_model"]
