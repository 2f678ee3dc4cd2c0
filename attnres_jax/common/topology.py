# SPDX-License-Identifier: Apache-2.0
"""Names of TPU slices and hosts of GPUs; descriptions of their devices."""

from collections.abc import Sequence
import os
import re
from typing import Any

from attnres_jax import config as config_lib
from attnres_jax.common import chips
from attnres_jax.common import gpus
from attnres_jax.config import errors
from attnres_jax.config import fields

# Read by libtpu when it is loaded. With these it does not wait for a cloud's
# metadata server, lock a device, or complain that this host has no TPU.
ENVIRONMENT = {
  "TPU_SKIP_MDS_QUERY": "1",
  "ALLOW_MULTIPLE_LIBTPU_LOAD": "true",
  "TPU_ACCELERATOR_TYPE": "v5p-8",
  "TPU_WORKER_HOSTNAMES": "localhost",
}

# Chips of a slice -> its shape, for the names used by clouds. Some are named by
# cores, two per chip.
_FLAT = {
  1: "1x1", 4: "2x2", 8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8", 128: "8x16",
  256: "16x16",
}  # fmt: skip
_CUBES = {
  4: "2x2x1", 8: "2x2x2", 16: "2x2x4", 32: "2x4x4", 64: "4x4x4",
  128: "4x4x8", 256: "4x8x8", 512: "8x8x8", 1024: "8x8x16", 2048: "8x16x16",
}  # fmt: skip
_SQUARES = {4: "2x2", 16: "4x4", 64: "8x8", 256: "16x16"}
_MARKETING = {
  "v2": (_SQUARES, 2),
  "v3": (_SQUARES | {1024: "32x32"}, 2),
  "v5e": (_FLAT, 1),
  "v5litepod": (_FLAT, 1),
  "v6e": (_FLAT, 1),
  "v4": (_CUBES, 2),
  "v5p": (_CUBES, 2),
}


def topology_name(name: str) -> str:
  """The compiler's name of a slice: "v5e:4x4" for "v5e-16" and "v5e:4x4".

  GPUs have one of our own, "h100:1x8" for "h100-8".

  Raises:
    ConfigError: a cloud's name with an unknown size.
  """
  if gpu := gpus.topology_name(name):
    return gpu
  match = re.fullmatch(r"(\w+)-(\d+)", name)
  if not match:
    return name
  kind, count = match[1], int(match[2])
  errors.check_in("topology", kind, [*_MARKETING, *gpus.TARGETS])
  shapes, per_chip = _MARKETING[kind]
  sizes = {per_chip * number: shape for number, shape in shapes.items()}
  if count not in sizes:
    accepted = ", ".join(f"{kind}-{size}" for size in sizes)
    config_lib.fail_argument("topology", name, f"one of {accepted}")
  return f"{'v5e' if kind == 'v5litepod' else kind}:{sizes[count]}"


def devices(name: str, num_slices: int = 1) -> Sequence[Any]:
  """Descriptions of all devices of a slice, of several slices, or of GPUs.

  Raises:
    ConfigError: the compiler is not installed, or does not know the topology,
      or the number of slices is none.
  """
  fields.accept("--num_slices", num_slices, fields.Size)
  if targets := gpus.devices(name):
    if num_slices > 1:
      accepted = f"1 with GPUs, whose hosts are in the topology ({name}x8)"
      config_lib.fail_argument("--num_slices", num_slices, accepted)
    return targets
  for variable, value in ENVIRONMENT.items():
    os.environ.setdefault(variable, value)
  from jax.experimental import topologies

  slice_name = topology_name(name)
  options: dict[str, Any] = {}
  if num_slices > 1:
    options["num_slices"] = num_slices
  if slice_name.endswith(":1x1"):
    options["chips_per_host_bounds"] = (1, 1, 1)
  if slice_name.startswith("v4:"):
    # One device per chip, as JAX runs these chips.
    options["chip_config_name"] = "megacore"
  try:
    description = topologies.get_topology_desc(
      platform="tpu", topology_name=slice_name, **options
    )
  except Exception as error:  # jaxlib raises several kinds.
    reason = str(error).strip().splitlines()[0]
    config_lib.fail_argument(
      "topology",
      name,
      "GPUs such as h100-8, or a TPU topology such as v5e:4x4, v5p:4x4x4 or"
      f" v5e-16, with libtpu installed ({reason})",
    )
  return description.devices


def chip(device: Any) -> chips.Chip:
  """The row of the table for a device.

  Raises:
    ConfigError: it has no row, or one without memory and links.
  """
  kind = device.device_kind
  row = chips.chip_of(kind)
  if row is None or not row.hbm_bytes:
    planned = sorted(name for name, c in chips.CHIPS.items() if c.hbm_bytes)
    config_lib.fail_argument(
      "topology",
      kind,
      f"one of {', '.join(planned)}; {kind} has no plans, as its memory and"
      " rates are not in our table: train with a mesh and microbatches of"
      " your own, without `planned`",
    )
  return row
