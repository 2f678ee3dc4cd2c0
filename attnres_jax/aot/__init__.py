# SPDX-License-Identifier: Apache-2.0
"""Compile any configuration for a TPU pod, on a machine without one.

  topology   names of slices, and what one of their devices offers
  hlo        a compiled program, read: loops, products, traffic, collectives
  report     the train step of a config, compiled, in numbers

  python -m attnres_jax.aot --config=configs/lm.py:size=large \
    --config.mesh.fsdp=16 --config.mesh.data=1 --topology=v5e:4x4

Needs `libtpu` (`pip install libtpu`); no TPU is touched.
"""
