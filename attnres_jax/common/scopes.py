# SPDX-License-Identifier: Apache-2.0
"""Names of the parts of a step, which its compiled program keeps.

A part is traced `with scopes.part(name)` where it is called. The names of its
operations then contain the part, through autodiff, checkpointing, loops and
compilation. `attnres_jax.plan.bill` adds up what each part costs, and profilers
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
# Slots of a pipeline's tick.
FORWARD, BACKWARD = "forward", "backward"
_TRIPS = re.compile(r"mean_trips<([\d.]+)>([^/]*)/while$")


def part(name: str) -> contextlib.AbstractContextManager:
  """A context in which what is traced belongs to a part.

  Of nested scopes, the innermost counts.
  """
  return jax.named_scope(f"part<{name}>")


def mean_trips(
  number: float, name: str = ""
) -> contextlib.AbstractContextManager:
  """A context for a loop whose trip count is only known at run time.

  The number is the mean over all executions and devices. The name is of a unit
  of work, if the loop runs one; see `unit`.
  """
  return jax.named_scope(f"mean_trips<{number:.9f}>{name}")


def mean_trips_of_name(name: str) -> float | None:
  """The mean trip count that the name of a loop states, if any."""
  match = _TRIPS.search(name)
  return float(match[1]) if match else None


def unit(slot: str, chunk: int) -> str:
  """The name of a unit of work of a pipeline, for `mean_trips`."""
  return f"{slot}<{chunk}>"


def unit_of_name(name: str) -> tuple[str, int] | None:
  """(slot, chunk) of the unit of work that a loop runs by its name, if any."""
  trips = _TRIPS.search(name)
  match = trips and re.fullmatch(r"(\w+)<(\d+)>", trips[2])
  return (match[1], int(match[2])) if match else None


def of_name(name: str) -> str | None:
  """The part that the name of an operation says it belongs to, if any."""
  scopes = _SCOPE.findall(name)
  return scopes[-1] if scopes else None
