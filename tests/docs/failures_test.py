# SPDX-License-Identifier: Apache-2.0
"""docs/when-a-run-fails.md says what the code says."""

import re

from attnres_jax.common import exits
from attnres_jax.sweep import monitor
from attnres_jax.sweep import state as state_lib
from tests import tiny_run

TEXT = (tiny_run.ROOT / "docs" / "when-a-run-fails.md").read_text()
# Of JAX itself.
THEIRS = {"RESOURCE_EXHAUSTED"}


def _source():
  """All texts of the library, each in one piece."""
  files = sorted((tiny_run.ROOT / "attnres_jax").rglob("*.py"))
  text = "\n".join(file.read_text() for file in files)
  return re.sub(r'"\s*\n\s*f?"', "", text)


def test_statuses_and_states():
  rows = re.findall(r"^\| (\d) \|.*?\| `(\w+)` \|", TEXT, re.M)
  expected = {str(int(e)): word for e, word in state_lib.OF_EXIT.items()}
  assert dict(rows) == expected and len(rows) == len(exits.Exit)
  assert f"`{monitor.INTERRUPTED}`" in TEXT


def test_every_message_exists():
  source = _source()
  # A table cell quotes what is printed; dots stand for a value.
  quoted = re.findall(r'"([^"]+)"', TEXT)
  assert len(quoted) > 7
  for message in quoted:
    for part in message.split("..."):
      assert part.strip() in source or message in THEIRS, message


def test_every_event_exists():
  source = _source()
  for event in re.findall(r"events? `([\w ]+)`", TEXT):
    assert f'"{event}"' in source, event
