# SPDX-License-Identifier: Apache-2.0
"""Options of the compiler for the steps of a run, by kind of device.

By default, the compiler for TPUs waits for most collectives where they start.
On chips with SparseCores, these can send while the others compute.

Also by default, it replaces a product with a matrix that `fsdp` shards by a
loop over the shards, which sends one while it multiplies with another, and
reads and writes the float32 result once per shard. On eight v5p, a step of
configs/lm.py:size=medium moved 727 instead of 242 GB (`mesh.fsdp=8`, 16,384
tokens per device in one microbatch). On eight v5e, it moved 576 instead of 225.
"""

from typing import Any

import jax
from jax.sharding import Mesh

from attnres_jax import config as config_lib
from attnres_jax.common import chips

_COLLECTIVES = "xla_tpu_enable_sparse_core_collective_offload_"
_SPARSE_CORES = {
  **{
    f"{_COLLECTIVES}{kind}": "true"
    for kind in (
      "all_gather", "2d_all_gather", "3d_all_gather", "reduce_scatter",
      "all_reduce",
    )
  },
  # An all-gather that is fused with a product cannot be sent by these cores.
  "xla_tpu_enable_async_collective_fusion_fuse_all_gather": "false",
}  # fmt: skip
_ASYNC = {"xla_tpu_enable_async_all_to_all": "true"}
# Products of this many MiB become such loops: none.
_NO_LOOPS = {"xla_jf_spmd_threshold_for_windowed_einsum_mib": "1000000"}
# How much of the memory the compiler fills to overlap transfers. By default, it
# leaves 2 % free in the largest plans of scaling sweeps.
_ROOM = {"xla_tpu_scheduler_percent_shared_memory_limit": "91"}
# By prefix of `device_kind`, as in `chips.CHIPS`.
OPTIONS = {
  "TPU v4": _NO_LOOPS,
  "TPU v5": _SPARSE_CORES | _ASYNC | _NO_LOOPS,
  "TPU v5 lite": _ASYNC | _NO_LOOPS,
  "TPU v6 lite": _SPARSE_CORES | _ASYNC | _NO_LOOPS | _ROOM,
  "TPU7x": _NO_LOOPS,
}


def options(config: config_lib.RunConfig, mesh: Mesh) -> dict[str, str]:
  """What `jax.jit` takes as `compiler_options` for programs on this mesh.

  Those of `train.compiler_options` come last, and so replace ours.
  """
  ours = chips.row_of(OPTIONS, mesh.devices.flat[0].device_kind) or {}
  theirs = (item.partition("=") for item in config.train.compiler_options)
  return ours | {name: value for name, _, value in theirs}


def peak_bytes(compiled: Any) -> int:
  """Bytes of memory that are enough for a device to run a program.

  Without its code: arguments, results that replace no argument, and
  temporaries. Some temporaries are never alive together, which the compiler for
  TPUs counts in its mark. A step with a scan over blocks adds up to 19.6 GiB,
  and the compiler accepts it for a chip of 16 with a mark of 12.5. The mark
  also counts arrays on the core. So the smaller of the two is enough.

  The mark for CPUs leaves out temporaries of loops, and we have not compared
  the mark for GPUs with what one needs. There the sum counts.
  """
  memory = compiled.memory_analysis()
  arguments = memory.argument_size_in_bytes
  new = memory.output_size_in_bytes - memory.alias_size_in_bytes
  total = arguments + new + memory.temp_size_in_bytes
  sharding = jax.tree.leaves(compiled.input_shardings)[0]
  if any(device.platform == "tpu" for device in sharding.device_set):
    return min(total, max(memory.peak_memory_in_bytes, arguments))
  return total
