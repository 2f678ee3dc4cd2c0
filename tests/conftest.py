# SPDX-License-Identifier: Apache-2.0
"""Configures JAX for tests: eight CPU devices, strict promotion, fast compiles.

Warnings are errors, see `filterwarnings` in pyproject.toml.
"""

import ctypes
import gc
import importlib.metadata
import mmap
import os
import pathlib
import signal

from packaging import requirements

# A shell's background job ignores these, and so would every process of a test.
for _number, _usual in (
  (signal.SIGINT, signal.default_int_handler),
  (signal.SIGHUP, signal.SIG_DFL),
):
  if signal.getsignal(_number) is signal.SIG_IGN:
    signal.signal(_number, _usual)

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# If libtpu is installed, it must neither look for a pod nor lock a device.
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "true")
# Eight devices wait for each other on few cores: on a busy machine, tests must
# be slow, but not fail after 40 seconds.
flags = [
  "--xla_cpu_collective_call_warn_stuck_timeout_seconds=300",
  "--xla_cpu_collective_call_terminate_timeout_seconds=900",
  # Cutting a small program in parts takes longer than their threads save.
  "--xla_cpu_parallel_codegen_split_count=1",
]
# With these emitters XLA compiles twice as fast. jax 0.12 does not have them.
if importlib.metadata.version("jaxlib").startswith("0.10."):
  flags.append("--xla_cpu_use_fusion_emitters=false")
os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *flags])

import jax
import jaxtyping
import pytest

from tests import programs
from tests import signatures

# Calls are held against the shapes, dtypes and types in signatures.
jaxtyping.install_import_hook(
  ["attnres_kernels", "attnres_jax.analysis", "attnres_jax.scaling"],
  f"{signatures.__name__}.check",
)
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")
# A running program shares its threads with the compiler of the next one, and
# its devices could then wait for each other forever.
jax.config.update("jax_cpu_enable_async_dispatch", False)
# The suite compiles many tiny programs and runs each of them a few times.
jax.config.update("jax_disable_most_optimizations", True)
# Tracing makes many objects that stay: looking at them after every 700, as
# Python does unless told, takes a sixth of the suite's time.
gc.set_threshold(50_000, 20, 50)
programs.share()


def pytest_collection_modifyitems(items):
  """Skips tests whose optional packages are missing; see `markers`."""
  for item in items:
    for mark in item.iter_markers("needs"):
      if reason := _missing(requirements.Requirement(mark.args[0])):
        item.add_marker(pytest.mark.skip(reason=reason))


def _missing(requirement):
  try:
    version = importlib.metadata.version(requirement.name)
  except importlib.metadata.PackageNotFoundError:
    return f"not run: {requirement.name} is not installed"
  if not requirement.specifier.contains(version, prereleases=True):
    return f"not run: needs {requirement}, this is {version}"
  return None


# A compiled program takes about seven memory mappings. Linux allows 65,530 per
# process, and XLA crashes at the next one.
_MAPPINGS = pathlib.Path("/proc/self/maps")
_MANY_MAPPINGS = 10_000
# Several workers share the memory of a small machine.
_PAGES = pathlib.Path("/proc/self/statm")
_MANY_BYTES = 2 << 30


@pytest.fixture(scope="module", autouse=True)
def few_programs():
  """Occasionally drops the programs of earlier modules."""
  yield
  if _MAPPINGS.exists():
    if _MAPPINGS.read_bytes().count(b"\n") > _MANY_MAPPINGS:
      _drop_programs()
  # Collections of later modules, such as those of a checkpoint that cannot be
  # read, skip what lives now: with many programs they take seconds.
  gc.collect()
  gc.freeze()


@pytest.fixture(autouse=True)
def little_memory():
  """Occasionally drops the programs of earlier tests."""
  yield
  if _PAGES.exists():
    resident = int(_PAGES.read_text().split()[1]) * mmap.PAGESIZE
    if resident > _MANY_BYTES:
      _drop_programs()


def _drop_programs():
  programs.forget()
  jax.clear_caches()
  gc.unfreeze()
  gc.collect()
  # glibc keeps what is freed, unless told.
  trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
  if trim is not None:
    trim(0)


@pytest.fixture
def canvas():
  """Figures without a screen."""
  import matplotlib.pyplot  # Which few tests need, and takes a second.

  before = matplotlib.get_backend()
  matplotlib.use("Agg")
  yield
  matplotlib.pyplot.close("all")
  matplotlib.use(before)


@pytest.fixture
def float64():
  """Enables 64-bit arrays, for comparisons with definitions."""
  with jax.enable_x64(True):
    yield


@pytest.fixture
def any_arguments():
  """Lets arguments that break a signature reach the function's own checks."""
  jaxtyping.config.update("jaxtyping_disable", True)
  yield
  jaxtyping.config.update("jaxtyping_disable", False)
