# SPDX-License-Identifier: Apache-2.0
"""Installs this clone with extras into the environment of the running Python.

  .venv/bin/python dev/install.py plots
  .venv/bin/python dev/install.py torch,eval "torch==2.13.0+cpu"

uv resolves in seconds what takes pip minutes. It is installed first, by pip and
from the index of pip, whose settings uv is given, since it does not read them.
Where there is no uv, or uv fails, pip installs the same. Further arguments are
constraints on versions.
"""

import ast
from collections.abc import Mapping, Sequence
import os
import pathlib
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).parents[1]
# What pip calls a setting, and the variable by which uv reads it.
SETTINGS = {
  "index-url": "UV_DEFAULT_INDEX",
  "extra-index-url": "UV_INDEX",
  "find-links": "UV_FIND_LINKS",
  "constraint": "UV_CONSTRAINT",
  "cert": "SSL_CERT_FILE",
  "trusted-host": "UV_INSECURE_HOST",
  "default-timeout": "UV_HTTP_TIMEOUT",
  "timeout": "UV_HTTP_TIMEOUT",
}


def main(argv: Sequence[str]) -> int:
  """Installs; returns the exit status of the last installer."""
  extras, *constraints = argv
  start = time.monotonic()
  print(
    f"installing attnres-jax with {extras} and what they need into"
    f" {sys.prefix}: less than a minute on a fast line",
    flush=True,
  )
  target = ["--editable", f"{ROOT}[{extras}]"]
  with tempfile.TemporaryDirectory() as folder:
    if constraints:
      file = pathlib.Path(folder, "constraints.txt")
      file.write_text("\n".join(constraints) + "\n")
      target += ["--constraint", str(file)]
    status = _install(target)
  if not status:
    print(f"installed in {time.monotonic() - start:.0f} s", flush=True)
  return status


def _install(target: Sequence[str]) -> int:
  pip = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check"]
  if subprocess.run([*pip, "--quiet", "uv>=0.8"]).returncode:
    print("no uv here: pip installs, which takes minutes", flush=True)
    return subprocess.run([*pip, *target]).returncode
  command = [
    sys.executable, "-m", "uv", "pip", "install", "--python", sys.executable,
    # As pip: the newest version, whichever index has it.
    "--index-strategy", "unsafe-best-match",
  ]  # fmt: skip
  environment = os.environ | uv_settings(_pip_config(), os.environ)
  if not subprocess.run([*command, *target], env=environment).returncode:
    return 0
  print("uv failed: pip tries, which takes minutes", flush=True)
  return subprocess.run([*pip, *target]).returncode


def _pip_config() -> str:
  """Files and variables, as pip reads them."""
  command = [sys.executable, "-m", "pip", "config", "list"]
  return subprocess.run(command, capture_output=True, text=True).stdout


def uv_settings(config: str, environment: Mapping[str, str]) -> dict[str, str]:
  """Variables that give uv the settings of pip.

  Args:
    config: what `pip config list` prints: SECTION.NAME='VALUE', a line each.
    environment: of the user, whose variables for uv count more.
  """
  sections: dict[str, dict[str, str]] = {}
  for line in config.splitlines():
    key, _, value = line.partition("=")
    section, _, name = key.rpartition(".")
    sections.setdefault(section, {})[name] = str(ast.literal_eval(value))
  settings: dict[str, str] = {}
  # The later ones count more.
  for section in ("global", "install", ":env:"):
    for name, value in sections.get(section, {}).items():
      if name in SETTINGS:
        # uv separates several by blanks, but files to link to by commas.
        comma = name == "find-links"
        value = ",".join(value.split()) if comma else " ".join(value.split())
        settings[SETTINGS[name]] = value
  return {
    name: value for name, value in settings.items() if name not in environment
  }


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
