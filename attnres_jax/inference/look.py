# SPDX-License-Identifier: Apache-2.0
r"""Draws what the sublayers of trained networks read, on a text of yours.

  python -m attnres_jax.inference.look --text="def reverse(items):" \
    --workdir=attnres_jax:trained/block_attnres --workdir=runs/mine \
    --output=weights.svg

`--draw=weights` draws the weights of depth attention (Fig. 8), and
`--draw=matrices` the depth mixing matrices of any scheme (Fig. 9). Both are
means over the tokens of the text, which opens a document. The numbers are
beside the figure, in weights.json. Needs the extra `plots`.
"""

import argparse
from collections.abc import Sequence
import dataclasses
import io
import json
import sys
from typing import Any

from etils import epath
import numpy as np

from attnres_jax import config as config_lib
from attnres_jax.common import command_line
from attnres_jax.common import files
from attnres_jax.config import errors
from attnres_jax.inference import trained

_CREATOR = "attnres_jax.inference.look"
_MARKS = ("look", "text", "networks")


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the command; returns its exit status."""
  parser = command_line.Parser(f"python -m {_CREATOR}", __doc__)
  trained.add_flags(parser, several=True)
  add = parser.add_argument
  add("--text", type=command_line.text, required=True, help="what they read")
  add("--draw", default="weights", help="weights or matrices")
  add("--output", default="weights.svg", help="the figure, an SVG file")
  return command_line.run(_look, parser.parse_args(argv))


def _look(options: argparse.Namespace) -> None:
  errors.check_in("--draw", options.draw, ("weights", "matrices"))
  figure_path = epath.Path(options.output)
  if figure_path.suffix != ".svg":
    config_lib.fail_argument("--output", options.output, "a name such as a.svg")
  numbers_path = figure_path.with_suffix(".json")
  files.check_output("--output", figure_path, (_CREATOR,))
  files.check_output("--output", numbers_path, _MARKS)
  import matplotlib

  from attnres_jax.analysis import plots

  measured = {}
  for workdir in options.workdir:
    name, answer = _measure(options, workdir)
    # Two networks of one scheme go by their folders.
    measured[workdir if name in measured else name] = answer
  draw = {"weights": plots.depth_weights, "matrices": plots.mixing_matrices}
  drawn = io.StringIO()
  # The same numbers give the same file.
  with matplotlib.rc_context({"svg.hashsalt": "", "svg.fonttype": "none"}):
    draw[options.draw](measured).savefig(
      drawn, format="svg", facecolor="white",
      metadata={"Date": None, "Creator": _CREATOR},
    )  # fmt: skip
  rows = {
    "look": options.draw, "text": options.text,
    "networks": {name: _listed(answer) for name, answer in measured.items()},
  }  # fmt: skip
  marked = (figure_path, drawn.getvalue(), (_CREATOR,))
  numbers = (numbers_path, json.dumps(rows, indent=1) + "\n", _MARKS)
  for path, content, marks in (marked, numbers):
    files.write_output("--output", path, content, marks)
    print(path)


def _measure(options: argparse.Namespace, workdir: str) -> tuple[str, Any]:
  """The scheme of a network, and what is to be drawn of it."""
  run = argparse.Namespace(workdir=workdir, step=options.step)
  config, model, _ = trained.load(run)
  from attnres_jax import analysis
  from attnres_jax.data import text_format

  ids = text_format.of_data(config.data, workdir).prompt(options.text)
  tokens_BT = np.asarray([ids])
  scheme = config.model.residual.name
  if options.draw == "matrices":
    return scheme, analysis.mixing_matrix(model, tokens_BT)
  if model.residual.source_labels() is None:
    config_lib.fail_argument(
      "--workdir", workdir,
      f"a network that attends over depth, which {scheme} does not;"
      " --draw=matrices draws any",
    )  # fmt: skip
  return scheme, analysis.depth_weights(model, tokens_BT)


def _listed(answer: Any) -> Any:
  """Arrays as lists; null where a source does not exist yet."""
  if dataclasses.is_dataclass(answer):
    return {name: _listed(value) for name, value in vars(answer).items()}
  if isinstance(answer, np.ndarray):
    digits = np.round(answer.astype(np.float64), 6).astype(object)
    digits[~np.isfinite(answer)] = None
    return digits.tolist()
  return answer


if __name__ == "__main__":
  sys.exit(main())
