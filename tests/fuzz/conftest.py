# SPDX-License-Identifier: Apache-2.0
"""Draws cases, and says at the end how many the fuzzer has tried."""

import collections

import hypothesis
from hypothesis import strategies as st
import pytest


@pytest.fixture
def explore(cases, record_property):
  """Calls a check with as many draws as `laws.shares` says; always the same."""

  def explore(what, check, *strategies):
    tried = 0

    @hypothesis.settings(
      max_examples=cases,
      derandomize=True,
      phases=[hypothesis.Phase.generate],  # Cases are small as they are.
      deadline=None,
      database=None,
      suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(st.tuples(*strategies))
    def run(drawn):
      nonlocal tried
      tried += 1
      check(*drawn)

    run()
    record_property(f"cases of {what}", tried)

  return explore


def pytest_terminal_summary(terminalreporter):
  counts = collections.Counter()
  for reports in terminalreporter.stats.values():
    for report in reports:
      if getattr(report, "when", None) != "call":
        continue
      for name, value in report.user_properties:
        if name.startswith("cases of "):
          counts[name.removeprefix("cases of ")] += value
  if counts:
    terminalreporter.section("fuzzer")
    for name, count in sorted(counts.items()):
      terminalreporter.line(f"{count:6d} cases of {name}")
