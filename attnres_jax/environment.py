# SPDX-License-Identifier: Apache-2.0
"""Where a result comes from: machine, versions, commit."""

import os
import pathlib
import platform
import subprocess
import time

import flax
import jax

_ROOT = pathlib.Path(__file__).parents[1]


def facts() -> dict[str, str]:
  """Facts about this machine and the code that runs on it."""
  return {
    "hardware": hardware(),
    "system": f"{platform.system()} {platform.release()}",
    "python": platform.python_version(),
    "jax": jax.__version__,
    "flax": flax.__version__,
    "commit": commit(),
    "date": time.strftime("%Y-%m-%d", time.gmtime()),
  }


def commit() -> str:
  """Short hash of this checkout, with a plus if files were changed.

  "unknown" without git and for an installed package, even if its environment is
  inside a repository.
  """
  try:
    if pathlib.Path(_git("rev-parse", "--show-toplevel")) != _ROOT.resolve():
      return "unknown"
    commit = _git("rev-parse", "--short=10", "HEAD")
    return commit + ("+" if _git("status", "--porcelain") else "")
  except (OSError, subprocess.CalledProcessError):
    return "unknown"


def hardware() -> str:
  """The devices of this machine; for a CPU its model, cores and memory."""
  devices = jax.devices()
  if devices[0].platform != "cpu":
    return f"{len(devices)} x {devices[0].device_kind}"
  if hasattr(os, "sched_getaffinity"):
    cores = len(os.sched_getaffinity(0))
  else:
    cores = os.cpu_count() or 1
  parts = [cpu(), f"{cores} core{'s' * (cores > 1)}"]
  if "SC_PHYS_PAGES" in os.sysconf_names:
    pages = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    parts.append(f"{pages / 2**30:.0f} GB memory")
  return ", ".join(parts)


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
