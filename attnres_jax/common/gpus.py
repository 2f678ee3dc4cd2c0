# SPDX-License-Identifier: Apache-2.0
r"""NVIDIA GPUs as targets of the compiler, on a machine without any.

  pip install 'attnres-jax[gpu-plan]'

installs XLA's compiler for GPUs and CUDA's libraries beside a jax that runs on
the CPU. What the driver would say about a GPU is in `TARGETS` instead. Without
a GPU, nothing is timed: products get XLA's default tiles, where a GPU would
choose between tiles and cuBLAS.
"""

from collections.abc import Sequence
import importlib.metadata
import re
from typing import Any, NamedTuple, NoReturn

from attnres_jax import config as config_lib

EXTRA = "pip install 'attnres-jax[gpu-plan]'"
# GPUs of a host, which NVLink connects.
PER_HOST = 8
# Options for programs of GPUs that are not there to time anything.
COMPILER_OPTIONS: dict[str, bool | str] = {"xla_gpu_autotune_level": "0"}

# Without the libraries, XLA makes other programs: more than twice the launches.
_LIBRARIES = (
  "jax-cuda13-plugin", "nvidia-cublas", "nvidia-cuda-nvcc",
  "nvidia-cuda-runtime", "nvidia-cudnn-cu13",
)  # fmt: skip


class Target(NamedTuple):
  """What the compiler has to know about a GPU.

  Attributes:
    name: as the driver reports it, which is JAX's `device_kind`.
    capability: major version of its instructions.
    cores: streaming multiprocessors.
    clock_ghz: highest.
    memory_bytes: of the device.
    memory_bytes_per_second: as published.
    cache_bytes: of its L2 cache.
  """

  name: str
  capability: int
  cores: int
  clock_ghz: float
  memory_bytes: int
  memory_bytes_per_second: float
  cache_bytes: int


TARGETS = {
  "h100": Target(
    "NVIDIA H100 80GB HBM3", 9, 132, 1.98, 84942979072, 3352e9, 50 * 2**20
  ),
  "h200": Target("NVIDIA H200", 9, 132, 1.98, 150121545728, 4800e9, 50 * 2**20),
  "b200": Target(
    "NVIDIA B200", 10, 148, 1.965, 191514017792, 8000e9, 126 * 2**20
  ),
}
_NAMES = "h100-1, h100-8 or h200-8x8 (hosts x GPUs)"


def parse(name: str, field: str = "topology") -> tuple[str, int, int] | None:
  """(kind, hosts, GPUs per host) of a name; None for what names no GPU.

  Names are "h100-8", "h200-8x8" for eight hosts, or "h100:1x8".

  Raises:
    ConfigError: a GPU in a number that hosts do not have.
  """
  kind, mark, count = name.partition("-" if "-" in name else ":")
  if kind not in TARGETS:
    return None
  match = re.fullmatch(r"(?:([1-9]\d{0,4})x)?([1-9]\d{0,4})", count)
  hosts, each = (int(match[1] or 1), int(match[2])) if match else (1, 0)
  if each not in (1, 2, 4, PER_HOST) or (hosts > 1 and each < PER_HOST):
    config_lib.fail_argument(
      field,
      name,
      f"1, 2, 4 or 8 GPUs, or hosts of {PER_HOST}: {_NAMES}",
    )
  return kind, hosts, each


def topology_name(name: str) -> str | None:
  """One name for each topology, "h100:1x8"; None for what names no GPU."""
  parsed = parse(name)
  return parsed and f"{parsed[0]}:{parsed[1]}x{parsed[2]}"


def devices(name: str) -> Sequence[Any] | None:
  """Descriptions of all GPUs of a topology; None for what names no GPU.

  Raises:
    ConfigError: no such topology, or the compiler is not installed.
  """
  parsed = parse(name)
  if parsed is None:
    return None
  kind, hosts, each = parsed
  missing = [library for library in _LIBRARIES if not version(library)]
  if missing:
    _refuse(name, f"{missing[0]} is missing")
  from jax.experimental import topologies

  try:
    description = topologies.get_topology_desc(
      platform="cuda",
      topology_name="",
      topology=f"1x{hosts}x{each}",
      target_config=target_config(TARGETS[kind]),
    )
  except Exception as error:  # jaxlib raises several kinds.
    _refuse(name, str(error).strip().splitlines()[0])
  return description.devices


def of_kind(device_kind: str) -> Target:
  """The row of a device of `devices`, by its `device_kind`."""
  return {row.name: row for row in TARGETS.values()}[device_kind]


def version(library: str = _LIBRARIES[0]) -> str:
  """The version of an installed package, "" if there is none."""
  try:
    return importlib.metadata.version(library)
  except importlib.metadata.PackageNotFoundError:
    return ""


def target_config(target: Target) -> str:
  """The text of XLA's `GpuTargetConfigProto`."""
  name = f'"{target.name}"'
  capability = (
    f"major: {target.capability} feature_extension: ACCELERATED_FEATURES"
  )
  # Equal on all GPUs of our table; cuDNN's version is the extra's least.
  device = {
    "threads_per_block_limit": 1024,
    "threads_per_warp": 32,
    "threads_per_core_limit": 2048,
    "fpus_per_core": 128,
    "block_dim_limit_x": 2**31 - 1,
    "block_dim_limit_y": 2**16 - 1,
    "block_dim_limit_z": 2**16 - 1,
    "shared_memory_per_block": 48 * 2**10,
    "shared_memory_per_block_optin": 227 * 2**10,
    "shared_memory_per_core": 228 * 2**10,
    "registers_per_core_limit": 2**16,
    "registers_per_block_limit": 2**16,
    "core_count": target.cores,
    "clock_rate_ghz": target.clock_ghz,
    "memory_bandwidth": int(target.memory_bytes_per_second),
    "device_memory_size": target.memory_bytes,
    "l2_cache_size": target.cache_bytes,
    "runtime_version": '"13.0.0"',
    "driver_version": '"13.0.0"',
    "compile_time_toolkit_version": '"13.0.0"',
    "dnn_version": '"9.12.0"',
    "name": name,
  }
  lines = [f"  {field}: {value}" for field, value in device.items()]
  return "\n".join([
    "gpu_device_info {",
    *lines,
    f"  cuda_compute_capability {{ {capability} }}",
    "}",
    'platform_name: "CUDA"',
    "dnn_version_info { major: 9 minor: 12 patch: 0 }",
    f"device_description_str: {name}",
  ])  # fmt: skip


def _refuse(name: str, reason: str) -> NoReturn:
  config_lib.fail_argument(
    "topology", name, f"it where the compiler for GPUs is ({EXTRA}): {reason}"
  )
