# SPDX-License-Identifier: Apache-2.0
"""How a scheme looks in tables and figures, and where it was read."""

import enum
from typing import Any, NamedTuple


class Style(NamedTuple):
  """The style of a scheme in tables and figures.

  Colours are distinguishable for colour-blind readers, and readable on white
  and on black. Where they are similar, markers or line styles differ.

  Attributes:
    label: its name in words; empty for the name in the registry.
    colour: matplotlib colour of lines and points.
    marker: matplotlib marker of points.
    line: matplotlib line style.
  """

  label: str = ""
  colour: str = "#8c564b"
  marker: str = "x"
  line: Any = "-"


class Certainty(enum.Enum):
  """What the equations of a scheme were read in; its docstring says more."""

  PAPER = "paper"
  CODE = "released code"
  OURS = "none"
