# SPDX-License-Identifier: Apache-2.0
"""What every notebook needs: the library, files of the project, and controls.

Runtimes such as Colab's come with an older jax, and with a plugin for their
accelerator that fits only that jax. So `prepare` replaces jax and plugin
together, by the extra of the accelerator: `cuda12`, `cuda13` or `tpu`. Colab
downloads this file alone, so it imports only Python's standard library.
"""

from collections.abc import Callable, Mapping, Sequence
import glob
import importlib.metadata
import importlib.util
import os
import pathlib
import re
import shutil
import subprocess
import sys
from typing import Any, NamedTuple
import urllib.request

REPOSITORY = "github.com/attnres-jax/attnres-jax"
_RAW = "https://raw.githubusercontent.com/attnres-jax/attnres-jax/main"
# The variable that turns controls off, for outputs that are read without a
# kernel.
PLAIN = "ATTNRES_NOTEBOOKS_PLAIN"
# Plugins of jax, by the extra that installs them.
_PLUGINS = {
  "cuda12": ("jax-cuda12-plugin", "jax-cuda12-pjrt"),
  "cuda13": ("jax-cuda13-plugin", "jax-cuda13-pjrt"),
}  # fmt: skip
# Extra -> the platform that jax then shows.
_PLATFORMS = {"cuda12": "gpu", "cuda13": "gpu", "tpu": "tpu", "": "cpu"}


class Machine(NamedTuple):
  """A runtime."""

  library: bool = False  # attnres_jax can be imported
  tpu: bool = False
  cuda: tuple[int, int] | None = None  # the newest that the driver supports
  plugins: tuple[str, ...] = ()  # of jax, installed
  imported: Mapping[str, str] = {}  # versions of jax and numpy


class Plan(NamedTuple):
  """What pip must do for a runtime."""

  accelerator: str  # in words
  extra: str  # "" for a CPU
  install: str  # "" if the library is there
  uninstall: tuple[str, ...]  # plugins that would not fit the new jax


def play(draw: Callable[..., Any], /, **controls: Any) -> None:
  """Calls `draw`, and again whenever the reader moves a control.

  Without ipywidgets, it calls `draw` once with the first values.

  Args:
    draw: draws or prints; takes each control by its name.
    controls: (first, low, high) of numbers for a slider, a list for a menu
      that starts with its first item, or a text for a field.
  """
  if os.environ.get(PLAIN) or not importlib.util.find_spec("ipywidgets"):
    first = lambda c: c if isinstance(c, str) else c[0]
    draw(**{name: first(control) for name, control in controls.items()})
    return
  import ipywidgets

  def widget(control):
    if isinstance(control, str):
      return ipywidgets.Text(control, continuous_update=False)
    if isinstance(control, list):
      return ipywidgets.Dropdown(options=control)
    value, low, high = control
    ends = {"value": value, "min": low, "max": high}
    if isinstance(value, float):
      step = (high - low) / 40
      return ipywidgets.FloatSlider(**ends, step=step, continuous_update=False)
    return ipywidgets.IntSlider(**ends, continuous_update=False)

  made = {name: widget(control) for name, control in controls.items()}
  ipywidgets.interact(draw, **made)


def fetch(path: str) -> pathlib.Path:
  """A file of the repository; downloads it where there is no clone."""
  file = pathlib.Path(path)
  if not file.exists():
    file.parent.mkdir(parents=True, exist_ok=True)
    urllib.request.urlretrieve(f"{_RAW}/{path}", file)
  return file


def prepare(extras: str = "plots") -> None:
  """Installs what is missing; raises if jax does not see the accelerator.

  `extras` are the library's, besides the accelerator's. SystemExit asks to
  restart the session.
  """
  machine = look()
  plan = make_plan(machine, extras)
  print(f"This runtime has {plan.accelerator}.")
  if plan.install:
    for command in commands(plan):
      subprocess.run([sys.executable, "-m", "pip", *command], check=True)
    importlib.invalidate_caches()
  if stale := needs_restart(machine.imported, _version):
    raise SystemExit(
      f"{stale} was replaced after it had been imported. Restart the session"
      " (Runtime > Restart session), then run all cells again."
    )
  import jax

  print(check(plan, [device.platform for device in jax.devices()]))


def look() -> Machine:
  """The runtime of this process."""
  names = {name for names in _PLUGINS.values() for name in names}
  loaded = {
    name: getattr(sys.modules[name], "__version__", "")
    for name in ("jax", "numpy")
    if name in sys.modules
  }
  tpu = any(map(glob.glob, ("/dev/accel*", "/dev/vfio/[0-9]*")))
  return Machine(
    library=importlib.util.find_spec("attnres_jax") is not None,
    tpu=tpu and not os.environ.get("JAX_PLATFORMS", "").startswith("cpu"),
    cuda=cuda_of(_nvidia_smi()),
    plugins=tuple(filter(_version, sorted(names))),
    imported=loaded,
  )


def cuda_of(text: str) -> tuple[int, int] | None:
  """The CUDA version in the output of `nvidia-smi`."""
  found = re.search(r"CUDA(?: UMD)? Version:\s*(\d+)\.(\d+)", text)
  return (int(found[1]), int(found[2])) if found else None


def make_plan(machine: Machine, extras: str = "plots") -> Plan:
  """Chooses the extra of a runtime, and which plugins must go."""
  extra, accelerator = "", "no accelerator: everything runs on its CPU"
  if machine.tpu:
    extra, accelerator = "tpu", "a TPU"
  elif machine.cuda:
    version = ".".join(map(str, machine.cuda))
    accelerator = f"a GPU, whose driver supports CUDA {version}"
    if machine.cuda < (12, 0):
      accelerator += ", too old for jax: everything runs on its CPU"
    else:
      extra = "cuda13" if machine.cuda >= (13, 0) else "cuda12"
  if machine.library:
    # A clone, or an earlier run of this cell; nothing is changed.
    return Plan(accelerator, extra, "", ())
  wanted = ",".join(filter(None, [extras, extra]))
  install = f"attnres-jax[{wanted}] @ git+https://{REPOSITORY}"
  kept = _PLUGINS.get(extra, ())
  others = tuple(name for name in machine.plugins if name not in kept)
  return Plan(accelerator, extra, install, others)


def commands(plan: Plan) -> list[list[str]]:
  """The arguments of pip, in order."""
  # Upgraded, since the runtime's own plugin may fit no newer jax.
  install = ["install", "--quiet", "--upgrade", plan.install]
  if not plan.uninstall:
    return [install]
  return [["uninstall", "--quiet", "--yes", *plan.uninstall], install]


def needs_restart(
  imported: Mapping[str, str], version: Callable[[str], str]
) -> str:
  """The first package whose imported version is not the installed one."""
  for name, old in imported.items():
    if old and version(name) != old:
      return f"{name} {old}"
  return ""


def check(plan: Plan, platforms: Sequence[str]) -> str:
  """Names the platform of jax; raises if it is not the plan's accelerator."""
  expected = _PLATFORMS[plan.extra]
  if expected == "cpu" or expected in platforms:
    return f"jax runs on {len(platforms)} device(s): {platforms[0]}."
  advice = f'pip install "attnres-jax[{plan.extra}]", then restart the session'
  raise RuntimeError(
    f"this runtime has {plan.accelerator}, but jax sees only"
    f" {', '.join(platforms)}. Try: {advice}"
  )


def _version(name: str) -> str:
  try:
    return importlib.metadata.version(name)
  except importlib.metadata.PackageNotFoundError:
    return ""


def _nvidia_smi() -> str:
  if not shutil.which("nvidia-smi"):
    return ""
  done: Any = subprocess.run(
    ["nvidia-smi"], capture_output=True, text=True, check=False
  )
  return done.stdout
