# SPDX-License-Identifier: Apache-2.0
"""A network and a server for the tests of a file."""

import pytest

from tests.inference.serving import local_server


@pytest.fixture(scope="module")
def model():
  return local_server.make_model()


@pytest.fixture(scope="module")
def server(model):
  server = local_server.Server(model)
  yield server
  local_server.until(server.is_idle)
  server.close()
