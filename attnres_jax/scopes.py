# SPDX-License-Identifier: Apache-2.0
"""Names of the parts of a step, which its compiled program keeps.

A part is traced `with scopes.part(name)` where it is called. The names of its
operations then contain the part, through autodiff, checkpointing, loops and
compilation. `attnres_jax.aot.bill` adds up what each part costs, and profilers
show it too.

The kinds of sublayers are parts, by their names in a config, so a new kind
needs no entry here.
"""

import contextlib
import re

import jax

EMBEDDING = "embedding"
NORM = "norms"
RESIDUAL = "residual"
HEAD = "head and loss"
ACCUMULATION = "accumulation"
OPTIMISER = "optimiser"
PIPELINE = "pipeline"

_SCOPE = re.compile(r"part<([^>]*)>")
_SKIPPED = "usually_skipped"


def part(name: str) -> contextlib.AbstractContextManager:
  """A context in which what is traced belongs to a part.

  Of nested scopes, the innermost counts.
  """
  return jax.named_scope(f"part<{name}>")


def usually_skipped() -> contextlib.AbstractContextManager:
  """A context for a loop whose trip count, found at run time, is usually 0."""
  return jax.named_scope(_SKIPPED)


def is_skipped(name: str) -> bool:
  """Whether the name of a loop says that it usually does not run."""
  return name.endswith(f"{_SKIPPED}/while")


def of_name(name: str) -> str | None:
  """The part that the name of an operation says it belongs to, if any."""
  found = _SCOPE.findall(name)
  return found[-1] if found else None
