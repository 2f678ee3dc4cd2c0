# SPDX-License-Identifier: Apache-2.0
r"""Compile any configuration for TPUs or GPUs, on a machine without them.

  hlo           reads a compiled program: loops, products, traffic, collectives
  attribution   which part of the network each of its instructions belongs to
  least         what each part has to compute and move, from shapes alone
  bill          one row per part: what it costs, and what it needs at least
  report        figures of the compiled training step of a config

  python -m attnres_jax.plan --config=configs/lm.py:size=large \
    --config.mesh.fsdp=16 --config.mesh.data=1 --topology=v5e:4x4

Needs `libtpu` (`pip install libtpu`) but no TPU; for GPUs, the extra gpu-plan.

The room exceeds its budget by what no library counts: loops, fusions and pieces
of collectives in XLA's text, and the ticks of a pipeline.
"""
