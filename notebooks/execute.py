# SPDX-License-Identifier: Apache-2.0
"""Runs every notebook from top to bottom, as a reader would.

  make notebooks
  python -m notebooks.execute --write    # .ipynb files from the .py files
  python -m notebooks.execute --write quickstart

A notebook is a pair: NAME.py, which is edited and reviewed, and NAME.ipynb, for
Colab, with outputs. This module adds the badge and the first cell.
"""

import argparse
from collections.abc import Sequence
import math
import os
import pathlib
import queue
import sys
import tempfile
import time
from typing import Any

from jupyter_client import asynchronous
from jupyter_client import channels
import jupytext
import nbclient
import nbformat
from traitlets import config as traitlets_config

from notebooks import colab

FOLDER = pathlib.Path(__file__).parent
_OTHER = "colab.py", "execute.py"  # They are no notebooks.
_COLAB = "https://colab.research.google.com"
_KERNEL = {"name": "python3", "display_name": "Python 3", "language": "python"}
# Colab folds a cell with a title and `cellView: form`.
_SETUP = """#@title Set-up: run this cell first {display-mode: "form"}
import os
import pathlib
import urllib.request

if pathlib.Path("execute.py").exists():
  os.chdir("..")  # Jupyter was started in the folder of the notebooks.
file = pathlib.Path("notebooks/colab.py")
if not file.exists():  # There is no clone, as on Colab.
  file.parent.mkdir(exist_ok=True)
  source = "https://raw.githubusercontent.com/attnres-jax/attnres-jax/main"
  urllib.request.urlretrieve(f"{source}/{file}", file)

from notebooks import colab

colab.prepare("plots")"""


def main(argv: Sequence[str] | None = None) -> int:
  paths = {path.stem: path for path in pairs()}
  parser = argparse.ArgumentParser(description="Runs the notebooks.")
  parser.add_argument(
    "--write", action="store_true", help="write the .ipynb files, with outputs"
  )
  parser.add_argument("names", nargs="*", help="some of them; all if none")
  options = parser.parse_args(argv)
  if wrong := [name for name in options.names if name not in paths]:
    parser.error(f"no notebook {wrong[0]!r}: expected {', '.join(paths)}")
  if options.write:
    os.environ[colab.PLAIN] = "1"  # A page without a kernel has no controls.
  for name in options.names or paths:
    notebook, start = load(paths[name]), time.perf_counter()
    pictured = execute(notebook)
    seconds = time.perf_counter() - start
    print(f"{name}: a picture after {pictured:.0f} s, ran in {seconds:.0f} s")
    if options.write:
      for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # Wall-clock times.
      nbformat.write(notebook, paths[name].with_suffix(".ipynb"))
  return 0


def pairs() -> list[pathlib.Path]:
  """The .py half of every notebook."""
  return sorted(path for path in FOLDER.glob("*.py") if path.name not in _OTHER)


def load(path: pathlib.Path) -> nbformat.NotebookNode:
  """The notebook of a .py file, without outputs."""
  notebook = jupytext.read(path, fmt="py:percent")
  notebook.metadata = nbformat.from_dict({"kernelspec": _KERNEL})
  title, _, rest = notebook.cells[0].source.partition("\n")
  where = f"{colab.REPOSITORY.removeprefix('github.com/')}/blob/main/notebooks"
  badge = (
    f"[![Open In Colab]({_COLAB}/assets/colab-badge.svg)]"
    f"({_COLAB}/github/{where}/{path.stem}.ipynb)"
  )
  notebook.cells[0].source = f"{title}\n\n{badge}\n{rest}"
  setup = nbformat.v4.new_code_cell(_SETUP, metadata={"cellView": "form"})
  notebook.cells.insert(1, setup)
  for i, cell in enumerate(notebook.cells):
    cell.id = f"cell-{i}"  # The same every time it is written.
  return notebook


class Channel(channels.AsyncZMQSocketChannel):
  """Waits in turns of a second.

  pyzmq sometimes hears of a message only when its wait is over.
  """

  async def get_msg(self, timeout: float | None = None) -> dict[str, Any]:
    end = math.inf if timeout is None else time.monotonic() + timeout
    while not await self.socket.poll(1000):
      if time.monotonic() > end:
        raise queue.Empty
    return await self._recv()


class Client(asynchronous.AsyncKernelClient):
  shell_channel_class = iopub_channel_class = Channel


class Runner(nbclient.NotebookClient):
  """Runs a notebook, and notes after how many seconds it shows a picture."""

  pictured, start = math.inf, 0.0

  def process_message(self, msg: Any, cell: Any, cell_index: int) -> Any:
    if "image/png" in msg["content"].get("data", ()):
      self.pictured = min(self.pictured, time.perf_counter() - self.start)
    return super().process_message(msg, cell, cell_index)


def execute(notebook: nbformat.NotebookNode) -> float:
  """Runs all cells in a fresh kernel, from the root; the first error is raised.

  Returns the seconds until the first picture, infinity without one.
  """
  root = FOLDER.parent
  paths = [str(root), str(root / "kernels"), os.environ.get("PYTHONPATH", "")]
  os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
  # Through files: another process may take a port before the kernel has it, and
  # then no message arrives.
  with tempfile.TemporaryDirectory() as folder:
    manager = {
      "transport": "ipc", "ip": f"{folder}/kernel",
      "client_class": "notebooks.execute.Client",
    }  # fmt: skip
    runner = Runner(
      notebook,
      kernel_name="python3",
      timeout=600,
      resources={"metadata": {"path": str(root)}},
      config=traitlets_config.Config(KernelManager=manager),
    )
    runner.start = time.perf_counter()
    runner.execute()
  return runner.pictured


if __name__ == "__main__":
  sys.exit(main())
