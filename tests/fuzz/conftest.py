# SPDX-License-Identifier: Apache-2.0
"""Says at the end how many cases the fuzzer has tried."""

import collections


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
