# SPDX-License-Identifier: Apache-2.0
"""Which run of a sweep a worker trains next, and how a worker ends.

Functions of the states of runs and of `claim_of(name)`, one of the words below.
It is asked only about runs that may be trained, since stores answer slowly.
"""

from collections.abc import Callable, Mapping

from attnres_jax.common import exits
from attnres_jax.sweep import state as state_lib

# Nobody trains the run; a live worker does; its description cannot be read.
FREE, HELD, BROKEN = "free", "held", "broken"
# How often a worker without --run tries a run that fails.
MAX_TRIES = 3
# In place of the name of a run.
NONE_LEFT, WAIT = "", "..."

States = Mapping[str, state_lib.State]
_Exit = exits.Exit
_WORST_FIRST = _Exit.AGAIN, _Exit.NEVER, _Exit.DIVERGED, _Exit.DONE


def choose(
  states: States, tries: Mapping[str, int], claim_of: Callable[[str], str]
) -> str:
  """The name of the run to train next, WAIT if others hold it, or NONE_LEFT.

  A run that kills its process is counted in its state only. After some attempts
  it makes way for the others, or a worker that is started again and again would
  train nothing else. `tries` are this worker's; `claim_of` says who has a run.
  """
  candidates = sorted(
    (name for name, state in states.items() if state.status in state_lib.OPEN),
    key=lambda name: (tries[name], states[name].attempts // MAX_TRIES),
  )
  result = NONE_LEFT
  for name in candidates:
    claim = claim_of(name) if tries[name] < MAX_TRIES else BROKEN
    if claim == FREE:
      return name
    result = WAIT if claim == HELD else result
  return result


def outcome(states: States, claim_of: Callable[[str], str]) -> exits.Exit:
  """The worst end of the runs that nobody is training."""
  ends = {state_lib.REFUSED: _Exit.NEVER, state_lib.DAMAGED: _Exit.NEVER}
  ends |= {state_lib.DIVERGED: _Exit.DIVERGED, state_lib.DONE: _Exit.DONE}
  of_open = {FREE: _Exit.AGAIN, HELD: _Exit.DONE, BROKEN: _Exit.NEVER}
  reached = {_Exit.DONE} | {
    ends[state.status] if state.status in ends else of_open[claim_of(name)]
    for name, state in states.items()
  }
  return next(end for end in _WORST_FIRST if end in reached)
