# SPDX-License-Identifier: Apache-2.0
"""The two halves of every notebook say the same; `make notebooks` runs them."""

import nbformat
import pytest

from notebooks import execute


@pytest.mark.parametrize("path", execute.pairs(), ids=lambda path: path.stem)
def test_pair_is_in_sync(path):
  expected = execute.load(path)
  notebook = nbformat.read(path.with_suffix(".ipynb"), as_version=4)
  nbformat.validate(notebook)
  assert [(c.cell_type, c.source) for c in notebook.cells] == [
    (c.cell_type, c.source) for c in expected.cells
  ], "run `python -m notebooks.execute --write`"


@pytest.mark.parametrize("path", execute.pairs(), ids=lambda path: path.stem)
def test_ipynb_holds_outputs_and_opens_in_colab(path):
  notebook = nbformat.read(path.with_suffix(".ipynb"), as_version=4)
  code = [cell for cell in notebook.cells if cell.cell_type == "code"]
  counts = [c.execution_count for c in code]
  assert counts == [*range(1, len(code) + 1)]
  assert sum(bool(c.outputs) for c in code) > len(code) // 2
  assert not any(o.output_type == "error" for c in code for o in c.outputs)
  badge = f"blob/main/notebooks/{path.stem}.ipynb"
  assert badge in notebook.cells[0].source
  # Colab shows the first cell as a form, folded under its title.
  assert code[0].metadata["cellView"] == "form"
  assert code[0].source.startswith("#@title")
