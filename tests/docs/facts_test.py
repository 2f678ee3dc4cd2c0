# SPDX-License-Identifier: Apache-2.0
"""Facts of pages: numbers typed once, one version, complete tables."""

import re
import tomllib

from attnres_jax import config as config_lib
from attnres_jax.interop import families
from tests import tiny_run
from tests.docs import pages

ROOT = tiny_run.ROOT
# The diary and the release notes repeat what pages said at their time.
PAGES = sorted(
  page
  for page in ROOT.rglob("*.md")
  if page.name != "CHANGELOG.md"
  and not {"dev", "runs", "node_modules"} & set(page.relative_to(ROOT).parts)
  and not any(part.startswith(".") for part in page.relative_to(ROOT).parts)
)
# A number and the word after it: 8.31 s, 27 GiB, 1.12 times.
FACT = re.compile(r"(?<![\w./:=,-])(\d[\d,]*(?:\.\d+)?)[ \n]+([A-Za-z%]+)")
# The words after measured numbers, and how many digits make a coincidence
# unlikely.
UNITS = {
  "kB": 2, "MB": 2, "GB": 2, "TB": 2, "KiB": 3, "MiB": 3, "GiB": 2, "ms": 2,
  "s": 2, "seconds": 2, "hours": 2, "minutes": 3, "nats": 2, "times": 3,
  "dollars": 2, "percent": 3, "%": 3,
}  # fmt: skip


def facts(text):
  """The numbers that someone typed, without generated parts and code."""
  text = re.sub(r"<!-- (\w+)(: .*?)? -->.*?<!-- /\1 -->", " ", text, flags=re.S)
  text = re.sub(r"```.*?```|`[^`]*`", " ", text, flags=re.S)
  text = re.sub(r"\]\([^)]*\)|https?://\S+|arXiv[: ]?\S+", " ", text)
  return {
    f"{number} {unit}"
    for number, unit in FACT.findall(text)
    if len(re.sub(r"\D", "", number).strip("0")) >= UNITS.get(unit, 99)
  }


def test_no_number_is_typed_on_two_pages():
  pages = {}
  for page in PAGES:
    for number in facts(page.read_text(encoding="utf-8")):
      pages.setdefault(number, []).append(str(page.relative_to(ROOT)))
  twice = {number: on for number, on in pages.items() if len(on) > 1}
  assert not twice, "\n".join(
    f"{n}: {', '.join(on)}" for n, on in twice.items()
  )


def test_one_version():
  project = tomllib.loads((ROOT / "pyproject.toml").read_text())
  version = project["project"]["version"]
  assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()
  released = re.findall(
    r"^## \[([\d.]+)\] - \d{4}-\d\d-\d\d$",
    (ROOT / "CHANGELOG.md").read_text(),
    re.M,
  )
  assert released[0] == version


def test_every_family_is_listed():
  labels = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}
  labels |= {"kimi_linear": "Kimi Linear", "kimi_k3": "Kimi K3"}
  labels |= {"attnres": "Full and Block AttnRes"}
  assert labels.keys() == families.FAMILIES.keys()
  for label in labels.values():
    assert f"\n| {label}" in pages.PAGES["docs/interop.md"]


def test_fields_of_pipelines_are_all_there():
  named = set(re.findall(r"`pipeline\.(\w+)`", pages.PAGES["docs/pipeline.md"]))
  assert named == {*config_lib.PipelineConfig.__dataclass_fields__}
