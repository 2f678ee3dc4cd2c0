# SPDX-License-Identifier: Apache-2.0
"""Where a result comes from: machine, versions, commit, text."""

import json
import os
import pathlib
import platform
import subprocess
import time
from typing import Any

import flax
import jax

_ROOT = pathlib.Path(__file__).parents[2]


def facts() -> dict[str, Any]:
  """Facts of this machine and this checkout."""
  return {
    "hardware": _hardware(),
    "system": f"{platform.system()} {platform.release()}",
    "python": platform.python_version(),
    "jax": jax.__version__,
    "flax": flax.__version__,
    "commit": commit(),
    "date": time.strftime("%Y-%m-%d", time.gmtime()),
  }


def corpus(run: pathlib.Path) -> str:
  """One line about the text that a run was trained on, from its data.json."""
  splits = json.loads((run / "data.json").read_text())
  train, validation = splits["train"], splits["validation"]
  return (
    f"standard library and help topics of Python {train['python']},"
    f" {train['split_bytes'] / 1e6:.2f} MB for training and"
    f" {validation['split_bytes'] / 1e6:.2f} MB for validation"
    f" (SHA-256 {train['sha256'][:12]})"
  )


def commit() -> str:
  """Short hash of the checkout, with a plus if files were changed."""
  try:
    commit = _git("rev-parse", "--short=10", "HEAD")
    return commit + ("+" if _git("status", "--porcelain") else "")
  except (OSError, subprocess.CalledProcessError):
    return "unknown"


def cpu() -> str:
  """The model of this machine's processor; starts no device."""
  try:
    for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
      if line.startswith("model name"):
        return " ".join(line.partition(":")[2].split())
  except OSError:
    pass  # Not Linux.
  return platform.processor() or platform.machine()


def _hardware() -> str:
  devices = jax.devices()
  memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
  if devices[0].platform == "cpu":
    cores = len(os.sched_getaffinity(0))
    return f"{cpu()}, {cores} cores, {memory:.0f} GB memory"
  return f"{len(devices)} x {devices[0].device_kind}"


def _git(*args: str) -> str:
  result = subprocess.run(
    ["git", *args], cwd=_ROOT, check=True, capture_output=True, text=True
  )
  return result.stdout.strip()
