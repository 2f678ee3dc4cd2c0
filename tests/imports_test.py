# SPDX-License-Identifier: Apache-2.0
"""Imports between packages run in one direction."""

import ast
import pathlib

import attnres_jax

ROOT = pathlib.Path(attnres_jax.__file__).parent
# A package imports itself and those before it.
FLOORS = (
  "config", "common", "data", "models", "optimizer", "flops", "pipeline",
  "train", "analysis", "scaling", "inference", "interop", "plan", "sweep",
)  # fmt: skip
# A config is right if what it describes can be built, of schemes that have
# their options beside their code.
UPWARD = {("load.py", "train"), ("load.py", "models")}


def test_packages_import_downwards():
  upward = set()
  for package in FLOORS:
    below = FLOORS[: FLOORS.index(package) + 1]
    for path in (ROOT / package).rglob("*.py"):
      for name in _imported(path):
        if name not in below and (path.name, name) not in UPWARD:
          upward.add(f"{path.relative_to(ROOT)} imports {name}")
  assert not upward, "\n".join(sorted(upward))


def test_kernels_know_nothing_of_the_library():
  """Their benchmarks share chips, rows and facts about machines with it."""
  kernels, upward = ROOT.parent / "kernels", set()
  for path in kernels.rglob("*.py"):
    below = {"common"} if path.parent.name == "benchmarks" else set()
    for name in _imported(path) - below:
      upward.add(f"{path.relative_to(kernels)} imports {name}")
  assert not upward, "\n".join(sorted(upward))


def test_all_packages_have_a_floor():
  packages = {path.parent.name for path in ROOT.glob("*/__init__.py")}
  assert packages - {"configs"} == set(FLOORS)
  modules = {path.stem for path in ROOT.glob("*.py")}
  assert modules == {"__init__", "main"}


def test_schedules_and_laws_need_no_device_library():
  """Tables of pipelines and fits of losses, also where there is no JAX."""
  names = ("layout", "schedule", "memory")
  files = [ROOT / "pipeline" / f"{name}.py" for name in names]
  for path in (*files, *(ROOT / "scaling").glob("*.py")):
    for node in ast.parse(path.read_text()).body:
      modules = [getattr(node, "module", None) or ""]
      if isinstance(node, ast.Import):
        modules = [alias.name for alias in node.names]
      roots = {module.split(".")[0] for module in modules}
      assert not roots & {"jax", "flax", "matplotlib"}, path.name


def _imported(path: pathlib.Path) -> set[str]:
  """First name below attnres_jax of every import of a file, lazy ones too."""
  names = set()
  for node in ast.walk(ast.parse(path.read_text())):
    if isinstance(node, ast.Import):
      names |= {alias.name for alias in node.names}
    elif isinstance(node, ast.ImportFrom) and node.module:
      names |= {f"{node.module}.{alias.name}" for alias in node.names}
  roots = ("attnres_jax", "configs", "experiments", "benchmarks", "tests")
  imports = [name.split(".") for name in names if name.split(".")[0] in roots]
  return {
    parts[1] if parts[0] == "attnres_jax" else parts[0] for parts in imports
  } - {"build_model", "load_config"}
