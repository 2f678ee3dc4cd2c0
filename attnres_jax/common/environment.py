# SPDX-License-Identifier: Apache-2.0
"""Where a result comes from: machine, versions, commit."""

import functools
import importlib.metadata
import os
import pathlib
import platform
import subprocess
import time
from typing import Any

from attnres_jax import config as config_lib

_ROOT = pathlib.Path(__file__).parents[2]
_CODE = ":/", ":(exclude,top)*.csv"


def facts() -> dict[str, str]:
  """Facts about this machine and the code that runs on it."""
  return {
    "hardware": hardware(),
    "system": f"{platform.system()} {platform.release()}",
    "python": platform.python_version(),
    "jax": jax_version(),
    "flax": importlib.metadata.version("flax"),
    "commit": commit(),
    "date": time.strftime("%Y-%m-%d", time.gmtime()),
  }


@functools.cache
def compiled() -> dict[str, str]:
  """Where an estimate of the TPU compiler comes from.

  Asked once per process: writing a table changes a file of the checkout.
  """
  return {
    "jax": jax_version(),
    "libtpu": importlib.metadata.version("libtpu"),
    "commit": commit(),
  }


def jax_version() -> str:
  """The version of the installed JAX, which is not imported for it."""
  return importlib.metadata.version("jax")


def commit() -> str:
  """Short hash of this checkout, with a plus if files were changed.

  CSV files do not count: they are rows, to which commands add some.
  "unknown" without git and for an installed package, even if its environment is
  inside a repository.
  """
  try:
    if pathlib.Path(_git("rev-parse", "--show-toplevel")) != _ROOT.resolve():
      return "unknown"
    commit = _git("rev-parse", "--short=10", "HEAD")
    return commit + ("+" if _git("status", "--porcelain", "--", *_CODE) else "")
  except (OSError, subprocess.CalledProcessError):
    return "unknown"


def hardware() -> str:
  """The devices of this machine; for a CPU its model, cores and memory."""
  import jax

  devices = jax.devices()
  if devices[0].platform != "cpu":
    return f"{len(devices)} x {devices[0].device_kind}"
  number = len(cores())
  parts = [cpu(), f"{number} core{'s' * (number > 1)}"]
  if memory := _host_memory():
    parts.append(f"{memory / 2**30:.0f} GB memory")
  return ", ".join(parts)


def cores() -> list[int]:
  """The cores that this process may use, which only Linux says."""
  if hasattr(os, "sched_getaffinity"):
    return sorted(os.sched_getaffinity(0))
  return [*range(os.cpu_count() or 1)]


def check_size(state: Any) -> None:
  """Stops a run whose state, given by its shapes, cannot fit in memory.

  Raises:
    ConfigError: naming the estimate and the limit.
  """
  import jax

  from attnres_jax.common import sharding

  device = jax.local_devices()[0]
  stats = device.memory_stats() or {}
  limit, shares = stats.get("bytes_limit"), 1
  if device.platform == "cpu":
    limit, shares = _host_memory(), jax.local_device_count()
  needed = shares * sharding.bytes_per_device(state)
  if limit and needed > limit:
    config_lib.fail_argument(
      "config.model",
      f"a state of {needed / 2**30:,.0f} GiB",
      f"at most the {limit / 2**30:,.0f} GiB of memory here",
    )


def _host_memory() -> int:
  """Bytes of this machine; 0 where it does not say."""
  if "SC_PHYS_PAGES" not in os.sysconf_names:
    return 0
  return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def cpu() -> str:
  """The model of this machine's processor, without starting a device."""
  try:
    for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
      if line.startswith("model name"):
        return " ".join(line.partition(":")[2].split())
  except OSError:
    pass  # Not Linux.
  return platform.processor() or platform.machine()


def _git(*args: str) -> str:
  result = subprocess.run(
    ["git", *args], cwd=_ROOT, check=True, capture_output=True, text=True
  )
  return result.stdout.strip()
