# SPDX-License-Identifier: Apache-2.0
"""A schedule has the memory and the work of the whole program."""

import dataclasses

import pytest

from attnres_jax import config as config_lib
from attnres_jax.common import topology
from attnres_jax.plan import report
from attnres_jax.plan import schedule
from attnres_jax.plan import text
from tests.plan import small

pytestmark = [pytest.mark.needs("libtpu"), pytest.mark.slow]

SLICE = "v5e:2x2"


def _config(**fields):
  wide = {"model.width": 1024, "data.sequence_length": 1024}
  return small.config(**wide | fields)


def test_equals_the_whole_program():
  config = _config()
  plan = report.make_schedule_report(config, SLICE)
  compiled = report.make_report(config, topology.devices(SLICE))
  for name in (
    "compute_seconds", "memory_seconds", "link_seconds", "traffic_bytes",
    "sent_bytes", "charged_flops", "collectives", "parts", "bound",
  ):  # fmt: skip
    assert plan[name] == compiled[name], name
  # All but the program itself, which lies in the same memory.
  assert plan["peak_bytes"] == pytest.approx(compiled["peak_bytes"], rel=0.1)
  assert plan["compile_seconds"] < compiled["compile_seconds"]
  *rest, last = text.to_text(plan).splitlines()
  # Between the table of memory and the last line, which is about compiling.
  at = slice(rest.index("", 3), None)
  *same, _ = text.to_text(compiled).splitlines()
  assert rest[at] == same[same.index("", 3) :]
  assert last.startswith("compiled up to its schedule in")


def test_what_does_not_fit():
  config = _config(**{"data.batch_size": 8192})
  plan = report.make_schedule_report(config, SLICE)
  assert not plan["fits"]
  # The compiler says what it needs before it refuses it, or only refuses.
  if "reason" in plan:
    assert "RESOURCE_EXHAUSTED" in plan["reason"]
  else:
    assert plan["peak_bytes"] > plan["hbm_bytes"]
    assert plan["headroom_bytes"] < 0
  shown = text.to_text(plan)
  assert "does not fit" in shown and "largest arrays" in shown


def test_other_errors_are_raised():
  optim = dataclasses.replace(_config().optim, name="none")
  config = dataclasses.replace(_config(), optim=optim)
  with pytest.raises(config_lib.RunError, match="exit status 1"):
    schedule.up_to_schedule(schedule.lower_step, config, SLICE)
