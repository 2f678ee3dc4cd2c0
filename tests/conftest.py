# SPDX-License-Identifier: Apache-2.0
"""JAX as the tests want it: eight CPU devices and strict promotion."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# A libtpu that happens to be installed must neither look for a pod nor lock.
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "true")

import jax

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")
