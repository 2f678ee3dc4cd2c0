# SPDX-License-Identifier: Apache-2.0
"""Runs every notebook from top to bottom, as a reader would.

  make notebooks
  python -m notebooks.execute
  python -m notebooks.execute --write    # .ipynb files from the .py files
  python -m notebooks.execute --write upcycle

A notebook is a pair: NAME.py, which is edited and reviewed, and NAME.ipynb, for
Colab. The latter has no outputs, unless the header of NAME.py says `outputs:
true`, for figures that readers should see without Colab.
"""

import argparse
from collections.abc import Sequence
import os
import pathlib
import sys
import time

import jupytext
import nbclient
import nbformat

FOLDER = pathlib.Path(__file__).parent
_TIMEOUT_SECONDS = 600
# They are no notebooks.
_OTHER = "colab.py", "execute.py"


def main(argv: Sequence[str] | None = None) -> int:
  parser = argparse.ArgumentParser(description="Runs the notebooks.")
  parser.add_argument(
    "--write", action="store_true", help="only write the .ipynb files"
  )
  known = {path.stem: path for path in pairs()}
  parser.add_argument(
    "names", nargs="*", default=[], help=f"of {', '.join(known)}; all if none"
  )
  options = parser.parse_args(argv)
  if wrong := [name for name in options.names if name not in known]:
    parser.error(f"no notebook {wrong[0]!r}: expected {', '.join(known)}")
  for path in (known[name] for name in options.names or known):
    notebook = load(path)
    if options.write:
      if keeps_outputs(notebook):
        execute(notebook)
        for cell in notebook.cells:
          cell.metadata.pop("execution", None)  # wall-clock times
      nbformat.write(notebook, path.with_suffix(".ipynb"))
      continue
    start = time.perf_counter()
    execute(notebook)
    print(f"{path.name}: ran in {time.perf_counter() - start:.0f} s")
  return 0


def pairs() -> list[pathlib.Path]:
  """The .py half of every notebook."""
  return sorted(path for path in FOLDER.glob("*.py") if path.name not in _OTHER)


def load(path: pathlib.Path) -> nbformat.NotebookNode:
  """The notebook of a .py file, without outputs."""
  notebook = jupytext.read(path, fmt="py:percent")
  for i, cell in enumerate(notebook.cells):
    cell.id = f"cell-{i}"  # the same every time it is written
  return notebook


def keeps_outputs(notebook: nbformat.NotebookNode) -> bool:
  """Whether its .ipynb contains the outputs of its cells."""
  return bool(notebook.metadata.get("outputs", False))


def execute(notebook: nbformat.NotebookNode) -> None:
  """Runs all cells in a fresh kernel of this Python, from the root.

  Raises:
    nbclient.exceptions.CellExecutionError: a cell failed.
  """
  root = FOLDER.parent
  paths = [str(root), str(root / "kernels"), os.environ.get("PYTHONPATH", "")]
  os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
  client = nbclient.NotebookClient(
    notebook,
    timeout=_TIMEOUT_SECONDS,
    kernel_name="python3",
    resources={"metadata": {"path": str(root)}},
  )
  client.execute()


if __name__ == "__main__":
  sys.exit(main())
