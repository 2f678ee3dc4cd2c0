# SPDX-License-Identifier: Apache-2.0
"""uv is given the settings of pip, which it does not read."""

import runpy

from tests import tiny_run

INSTALL = runpy.run_path(str(tiny_run.ROOT / "dev" / "install.py"))
CONFIG = """:env:.find-links='wheels more'
global.cert='/certs.pem'
global.extra-index-url='file:///one\\nfile:///two'
global.find-links='unused'
global.index-url='https://global'
install.index-url='https://here/simple'
global.quiet='1'
"""


def test_settings_of_pip_become_variables_of_uv():
  settings = INSTALL["uv_settings"](CONFIG, {"SSL_CERT_FILE": "mine"})
  assert settings == {
    "UV_DEFAULT_INDEX": "https://here/simple",
    "UV_INDEX": "file:///one file:///two",
    # A variable counts more than a file, and uv separates these by commas.
    "UV_FIND_LINKS": "wheels,more",
  }
