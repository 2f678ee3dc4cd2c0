# SPDX-License-Identifier: Apache-2.0
"""Draws cases."""

import hypothesis
from hypothesis import strategies as st
import pytest


@pytest.fixture
def explore(cases):
  """Calls a check with as many draws as `laws.shares` says; always the same."""

  def explore(check, *strategies):
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
      check(*drawn)

    run()

  return explore
