# SPDX-License-Identifier: Apache-2.0
"""The folder of a sweep: a workdir per run, and what each of them is.

  sweep.json     where the sweep came from, its runs in order
  NAME/          a run; NAME is its slug and the hash of its config
    run.json     its name, overrides and resolved config
    state.json   pending, running, stopped, failed or done; see `state`
    lock         held by its worker, on disks
    log.txt      what its workers printed, where a launcher keeps that here
    config.json data.json metrics.jsonl checkpoints/ summary.json
                 of every run; see `attnres_jax.train`
  compiled/      programs that runs share, where a launcher keeps them here

The same sweep may be prepared again, with more runs too. What does not change
what is computed, such as the mesh, may change on the way, and leaves the name
of a run alone. A run whose overrides are here with another config than that is
refused: half of it would be another run.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import json
from typing import Any

from etils import epath

from attnres_jax import config as config_lib
from attnres_jax import files
from attnres_jax import run_folder
from attnres_jax.scaling import grid

SWEEP = "sweep.json"
RUN = "run.json"
LOG = "log.txt"
COMPILED = "compiled"


def prepare(
  folder: epath.PathLike, runs: Sequence[grid.Run], source: str
) -> list[grid.Run]:
  """Makes the workdirs of runs; those that exist go on.

  Args:
    folder: of the sweep, local or gs://; made if needed.
    runs: of the sweep, in order.
    source: the config file they come from, with its argument.

  Returns:
    The runs as they are in the folder now, under the names they had. A field
    that the configuration got since then had its default.

  Raises:
    ConfigError: a run is there with another config; says what differs.
  """
  folder = epath.Path(folder)
  folder.mkdir(parents=True, exist_ok=True)
  # A folder that was removed is one to be trained anew.
  there = [name for name in _names(folder) if (folder / name / RUN).exists()]
  found = {
    _key(run.overrides): run
    for run in (read_run(folder, name) for name in there)
  }
  prepared, names_here = [], {}
  for run in runs:
    run = dataclasses.replace(
      run, branch_of=names_here.get(run.branch_of, run.branch_of)
    )
    name, old = run.name, found.get(_key(run.overrides))
    if old is not None:
      changed = _changes(old, run)
      if changed:
        raise config_lib.ConfigError(_refusal(folder, old, changed))
      run = dataclasses.replace(run, name=old.name)
    prepared.append(run)
    names_here[name] = run.name
  for run in prepared:
    workdir = folder / run.name
    workdir.mkdir(parents=True, exist_ok=True)
    text = json.dumps(dataclasses.asdict(run), indent=2) + "\n"
    files.write(workdir / RUN, text)
  names = [run.name for run in prepared]
  names += [run.name for run in found.values() if run.name not in names]
  index = {"source": source, "runs": names}
  files.write(folder / SWEEP, json.dumps(index, indent=2) + "\n")
  return [read_run(folder, run.name) for run in prepared]


def read(folder: epath.PathLike) -> list[grid.Run]:
  """All runs of a folder, in order; [] where there is no sweep."""
  return [read_run(folder, name) for name in _names(epath.Path(folder))]


def source(folder: epath.PathLike) -> str:
  """The config file, with its argument, that a folder's sweep came from."""
  return json.loads((epath.Path(folder) / SWEEP).read_text())["source"]


def read_run(folder: epath.PathLike, name: str) -> grid.Run:
  """One run of a folder.

  Raises:
    ConfigError: there is none of this name.
  """
  path = epath.Path(folder) / name / RUN
  if not path.exists():
    raise config_lib.ConfigError(
      f"got run {name!r}, of which there is no {RUN} in {folder}; expected one"
      " that was prepared there (if its folder was removed, launch again)"
    )
  return grid.Run(**json.loads(path.read_text()))


def run_config(run: grid.Run) -> config_lib.RunConfig:
  """The config of a run, ready to be trained, under the run's name."""
  config = config_lib.build_run_config(run.config)
  return dataclasses.replace(config, name=run.name)


def _names(folder: epath.Path) -> list[str]:
  """Of all runs, in order."""
  path = folder / SWEEP
  return json.loads(path.read_text())["runs"] if path.exists() else []


def _key(overrides: Mapping[str, Any]) -> str:
  return json.dumps(overrides, sort_keys=True)


def _changes(old: grid.Run, new: grid.Run) -> dict[str, tuple[Any, Any]]:
  """What differs between configs that should compute the same."""
  found = config_lib.differences(*(_plain(run_config(r)) for r in (old, new)))
  return {
    name: pair
    for name, pair in found.items()
    if not run_folder.is_harmless(name)
  }


def _plain(config: config_lib.RunConfig) -> dict[str, Any]:
  """As JSON has it, so that tuples and lists are the same."""
  return json.loads(config_lib.to_json(config))


def _refusal(
  folder: epath.Path, run: grid.Run, changes: dict[str, tuple[Any, Any]]
) -> str:
  lines = [
    f"{folder} holds {run.name} with another configuration; take the same one"
    " or another folder. Differing:"
  ]
  lines += [
    f"  config.{field}: {old!r} there, {new!r} here"
    for field, (old, new) in changes.items()
  ]
  return "\n".join(lines)
