# SPDX-License-Identifier: Apache-2.0
"""What every notebook needs: the library, trained networks, and controls.

Runtimes such as Colab's come with an older jax, and with a plugin for their
accelerator that fits only that jax. So `prepare` replaces jax and plugin
together, by the extra of the accelerator: `cuda12`, `cuda13` or `tpu`. Colab
downloads this file alone, so it imports the library only where it is installed.
"""

from collections.abc import Callable, Iterator, Mapping
import contextlib
import glob
import importlib.metadata
import importlib.util
import io
import os
import re
import shutil
import subprocess
import sys
import tempfile
from typing import Any

REPOSITORY = "github.com/attnres-jax/attnres-jax"
# The variable that turns controls off, for outputs that are read without a
# kernel.
PLAIN = "ATTNRES_NOTEBOOKS_PLAIN"
# Extra -> the platform that jax then shows.
EXTRAS = {"": "cpu", "tpu": "tpu", "cuda12": "gpu", "cuda13": "gpu"}


def play(draw: Callable[..., Any], /, **controls: Any) -> None:
  """Calls `draw`, and again whenever the reader moves a control.

  A control is (first, low, high) for a slider, a list for a menu that starts
  with its first item, or a text for a field. Without ipywidgets, `draw` is
  called once, with the first values.
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
    ends = {"min": low, "max": high, "continuous_update": False}
    if isinstance(value, float):
      return ipywidgets.FloatSlider(value, step=(high - low) / 40, **ends)
    return ipywidgets.IntSlider(value, **ends)

  ipywidgets.interact(draw, **{n: widget(c) for n, c in controls.items()})


@contextlib.contextmanager
def figure(width: float, height: float, **labels: Any) -> Iterator[Any]:
  """Axes to draw on, which then get labels, legend and grid, and are shown."""
  import matplotlib.pyplot as plt

  from attnres_jax.analysis import figures

  _, axes = plt.subplots(figsize=(width, height), layout="constrained")
  yield axes
  axes.set(**labels)
  if axes.get_legend_handles_labels()[0]:
    axes.legend(frameon=False)
  if not axes.images:
    figures.style(axes)
  plt.show()


def train(config: Any) -> tuple[Any, Any, Any]:
  """Trains without progress lines; the network, steps and validation losses."""
  from attnres_jax.train import checkpoint
  from attnres_jax.train import loop
  from attnres_jax.train import metrics

  folder = tempfile.mkdtemp(prefix="attnres_")
  with contextlib.redirect_stdout(io.StringIO()):
    loop.train_and_evaluate(config, folder)
  rows = metrics.read_rows(folder, "validation")
  steps, losses = zip(*((row["step"], row["loss"]) for row in rows))
  return checkpoint.load_model(folder)[1], steps, losses


def race(configs: Mapping[str, Any]) -> dict[str, Any]:
  """Trains networks, by schemes, one after another; returns them.

  Their validation losses are drawn as soon as the first one is trained, and
  again after each of the others.
  """
  from IPython import display
  import matplotlib.pyplot as plt

  from attnres_jax.analysis import figures

  chart, axes = plt.subplots(figsize=(6, 3), layout="constrained")
  plt.close(chart)  # Shown here, not once more when the cell ends.
  networks, shown = {}, None
  for scheme, config in configs.items():
    networks[scheme], steps, losses = train(config)
    label, look = figures.name_of(scheme), figures.style_of(scheme)
    axes.plot(steps, losses, marker="o", markersize=3, label=label, **look)
    axes.set(xlabel="step", ylabel="validation loss, nats per byte")
    axes.legend(frameon=False)
    figures.style(axes)
    if shown is None:
      shown = display.display(chart, display_id=True)
    elif shown:
      shown.update(chart)
    print(f"{label:15} validation loss {losses[-1]:.3f} nats per byte")
  return networks


def prepare(extras: str = "plots") -> None:
  """Installs what is missing, with these extras and the accelerator's.

  Raises SystemExit if the session has to be restarted, and RuntimeError if jax
  does not see the accelerator.
  """
  before = {n: _version(n) for n in ("jax", "numpy") if n in sys.modules}
  extra = find_extra()
  # In a clone, or after this cell has run, nothing changes.
  if not importlib.util.find_spec("attnres_jax"):
    for command in commands(extra, extras):
      subprocess.run([sys.executable, "-m", "pip", *command], check=True)
    importlib.invalidate_caches()
  for name, old in before.items():
    if _version(name) != old:
      raise SystemExit(
        f"{name} {old} was replaced after it had been imported. Restart the"
        " session (Runtime > Restart session), then run all cells again."
      )
  import jax

  platforms = [device.platform for device in jax.devices()]
  if extra and EXTRAS[extra] not in platforms:
    raise RuntimeError(
      f"this runtime has a {EXTRAS[extra].upper()}, but jax sees only"
      f' {", ".join(platforms)}. Try: pip install "attnres-jax[{extra}]", then'
      " restart the session"
    )
  print(f"jax runs on {len(platforms)} device(s): {platforms[0]}.")


def find_extra() -> str:
  """The extra of this runtime's accelerator; "" for its CPU."""
  if os.environ.get("JAX_PLATFORMS", "").startswith("cpu"):
    return ""
  if any(map(glob.glob, ("/dev/accel*", "/dev/vfio/[0-9]*"))):
    return "tpu"
  text = ""
  if shutil.which("nvidia-smi"):
    text = subprocess.run(["nvidia-smi"], capture_output=True, text=True).stdout
  return extra_of(text)


def extra_of(text: str) -> str:
  """The extra for the driver in the output of `nvidia-smi`.

  jax has no plugin for drivers older than CUDA 12.
  """
  match = re.search(r"CUDA(?: UMD)? Version:\s*(\d+)", text)
  newest = int(match[1]) if match else 0
  return "cuda13" if newest >= 13 else "cuda12" if newest == 12 else ""


def commands(extra: str, extras: str) -> list[list[str]]:
  """The arguments of pip, in order: plugins for another jax go first."""
  others = [
    f"jax-{other}-{part}"
    for other in ("cuda12", "cuda13")
    for part in ("pjrt", "plugin")
    if other != extra and _version(f"jax-{other}-{part}")
  ]
  chosen = ",".join(filter(None, [extras, extra]))
  # Upgraded, since the runtime's own plugin may fit no newer jax.
  install = ["install", "--quiet", "--upgrade"]
  install.append(f"attnres-jax[{chosen}] @ git+https://{REPOSITORY}")
  first = [["uninstall", "--quiet", "--yes", *others]] if others else []
  return [*first, install]


def _version(name: str) -> str:
  try:
    return importlib.metadata.version(name)
  except importlib.metadata.PackageNotFoundError:
    return ""
