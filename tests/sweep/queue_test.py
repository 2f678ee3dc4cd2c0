# SPDX-License-Identifier: Apache-2.0
"""The queue of a worker: states and claims as values, no files."""

import collections

import pytest

from attnres_jax.common import exits
from attnres_jax.sweep import queue
from attnres_jax.sweep import state as state_lib

Exit = exits.Exit


def _states(*statuses, attempts=()):
  counts = dict(enumerate(attempts))
  return {
    f"run{i}": state_lib.State(status, counts.get(i, 0))
    for i, status in enumerate(statuses)
  }


def _choose(states, tries=None, **claims):
  tries = collections.Counter(tries or {})
  return queue.choose(states, tries, lambda n: claims.get(n, queue.FREE))


@pytest.mark.parametrize("status", state_lib.STATUSES)
def test_only_open_runs_are_trained(status):
  expected = "run0" if status in state_lib.OPEN else queue.NONE_LEFT
  assert _choose(_states(status)) == expected


def test_the_first_free_run_is_next():
  states = _states("done", "running", "failed", "pending")
  claims = {"run1": queue.HELD, "run2": queue.BROKEN}
  assert _choose(states, **claims) == "run3"
  assert _choose(states, **claims, run3=queue.HELD) == queue.WAIT
  broken = dict.fromkeys(("run1", "run2", "run3"), queue.BROKEN)
  assert _choose(states, **broken) == queue.NONE_LEFT


def test_a_failed_run_goes_behind_the_others_and_is_tried_three_times():
  states = _states("failed", "pending")
  assert _choose(states, {"run0": 1}) == "run1"
  assert _choose(states, {"run0": 2, "run1": 2}) == "run0"
  assert _choose(states, {"run0": 3, "run1": 3}) == queue.NONE_LEFT


def test_a_run_that_kills_its_workers_makes_way():
  """Each worker is new, so only the state has counted."""
  order = []
  attempts = [0, 0]
  for _ in range(2 * queue.MAX_TRIES):
    states = _states("running", "running", attempts=attempts)
    name = _choose(states)
    order.append(name)
    attempts[int(name[-1])] += 1
  assert order == ["run0"] * queue.MAX_TRIES + ["run1"] * queue.MAX_TRIES


def test_claims_are_asked_only_until_a_run_is_free():
  names = []
  claim_of = lambda name: names.append(name) or queue.FREE
  tries = collections.Counter()
  queue.choose(_states("done", "pending", "pending"), tries, claim_of)
  assert names == ["run1"]


@pytest.mark.parametrize(
  ("statuses", "claim", "expected"),
  [
    (("done", "done"), queue.FREE, Exit.DONE),
    (("done", "running"), queue.HELD, Exit.DONE),
    (("done", "diverged"), queue.FREE, Exit.DIVERGED),
    (("diverged", "refused"), queue.FREE, Exit.NEVER),
    (("done", "damaged"), queue.FREE, Exit.NEVER),
    (("done", "pending"), queue.BROKEN, Exit.NEVER),
    (("refused", "stopped"), queue.FREE, Exit.AGAIN),
    ((), queue.FREE, Exit.DONE),
  ],
)
def test_the_worst_end_counts(statuses, claim, expected):
  assert queue.outcome(_states(*statuses), lambda name: claim) == expected
