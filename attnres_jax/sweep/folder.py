# SPDX-License-Identifier: Apache-2.0
"""The folder of a sweep: a workdir and a description for each run.

  sweep.json     where the sweep came from, its runs in order
  NAME/          a run; NAME is its slug and the hash of its config
    run.json     its name, overrides and resolved config
    state.json   how far it is; see `state`
    lock         held by its worker; lock.N in a bucket
    error.txt    of the last attempt that failed
    log.txt      what its workers printed, where a launcher keeps that here
    config.json data.json metrics.jsonl checkpoints/ summary.json
                 of every run; see `attnres_jax.train.loop`
  plans.csv      the file of plans, for `optim.accumulate_steps=0`
  compiled/      programs that runs share, where a launcher keeps them here

The same sweep can be prepared again, also with more runs. Fields that do not
change what is computed, such as the mesh, may change in between, and a run
keeps its name. A run is refused if its other fields differ from the fields in
the folder for the same overrides: it would be two different runs in one.
"""

from collections.abc import Mapping, Sequence
import contextlib
import dataclasses
import json
import re
from typing import Annotated, Any

from etils import epath

from attnres_jax import config as config_lib
from attnres_jax import sweep
from attnres_jax.common import files
from attnres_jax.common import records
from attnres_jax.config import fields
from attnres_jax.scaling import grid
from attnres_jax.sweep import damage
from attnres_jax.train import run_folder

SWEEP = sweep.SWEEP
RUN = "run.json"
LOG = "log.txt"
COMPILED = "compiled"
# Fields that files of other programs do not have.
_OURS, _RUN_OURS = {SWEEP: ("runs",)}, {RUN: ("name", "config")}


def _is_name(name: object) -> bool:
  """Whether a run may have this name, which stays inside its folder."""
  expected = r"[A-Za-z0-9_+-][A-Za-z0-9_.+-]*"
  return isinstance(name, str) and bool(re.fullmatch(expected, name))


_NAME = Annotated[
  str,
  fields.Accepted(
    _is_name,
    "names of folders: letters, digits and _.+-, no dot at the start; launch"
    " the sweep again to rewrite it",
  ),
]


@dataclasses.dataclass(frozen=True)
class Index(records.Record):
  """The names of a sweep's runs, in order.

  The source is the config file that made them, with its argument.
  """

  runs: tuple[_NAME, ...]
  source: str = ""


def prepare(
  folder: epath.PathLike, runs: Sequence[grid.Run], source: str
) -> list[grid.Run]:
  """Creates the workdirs of runs unless they exist.

  The source is the config file that the runs come from, with its argument.

  Returns:
    The runs of the folder, under their existing names. Fields that are newer
    than the folder have their defaults.

  Raises:
    ConfigError: the folder holds a run with another config; says what differs.
  """
  folder = epath.Path(folder)
  files.refuse_foreign(
    "--workdir", folder, _OURS, lambda: bool(files.glob(folder, f"*/{RUN}"))
  )
  listed, by_key = _listed(folder), {}
  planned = {run.name for run in runs}
  for name in listed:
    # A run of a planned name has the same config, as the name has its hash. Its
    # file is rewritten below, which also repairs a damaged one. A run whose
    # folder was removed is trained again.
    with contextlib.suppress(FileNotFoundError, damage.DamagedError):
      if name not in planned:
        run = _read(folder, name)
        by_key[_key(run.overrides)] = run
  prepared = []
  for run in runs:
    old = by_key.get(_key(run.overrides))
    if old is not None and run.name not in listed:
      changed = run_folder.harmful(run_config(old), run_config(run))
      if changed:
        head = (
          f"{folder} holds {old.name} with another configuration; take the same"
          " one or another folder. Differing:"
        )
        lines = [head, *config_lib.difference_lines(changed)]
        raise config_lib.ConfigError("\n".join(lines))
      run = dataclasses.replace(run, name=old.name)
    prepared.append(run)
  to_json = config_lib.to_json
  texts = {_named(folder, run.name): to_json(run) for run in prepared}
  # A refused launch writes nothing.
  for name in texts:
    with contextlib.suppress(OSError):
      files.refuse_foreign(
        "--workdir", folder / name, _RUN_OURS, lambda name=name: name in listed
      )
  if not files.is_remote(folder):
    folder.mkdir(parents=True, exist_ok=True)
  for name, text in texts.items():
    try:
      if not files.is_remote(folder):
        (folder / name).mkdir(parents=True, exist_ok=True)
      files.write(folder / name / RUN, text)
    except OSError as error:
      # Shown as damaged; the other runs can be trained.
      if files.is_disk_full(error):
        raise
  order = list(texts)
  order += [
    name
    for name in listed
    if name not in texts and (folder / name / RUN).exists()
  ]
  records.write(folder / SWEEP, Index(tuple(order), source))
  # As read from the files, where tuples are lists.
  of_values = grid.Run.of_values
  return [config_lib.from_json(t, RUN, of_values) for t in texts.values()]


def names(folder: epath.PathLike) -> list[str]:
  """Names of all runs, in order; [] if there is no sweep.

  Raises:
    DamagedError: the list of runs cannot be read.
  """
  with contextlib.suppress(FileNotFoundError):
    return list(damage.read(epath.Path(folder) / SWEEP, Index).runs)
  return []


def read(folder: epath.PathLike) -> list[grid.Run]:
  """All runs of a folder, in order; [] if there is no sweep.

  Raises:
    ConfigError: one of them cannot be read.
  """
  return [read_run(folder, name) for name in names(folder)]


def source(folder: epath.PathLike) -> str:
  """The config file of a folder's sweep, with its argument."""
  return damage.read(epath.Path(folder) / SWEEP, Index).source


def read_run(folder: epath.PathLike, name: str) -> grid.Run:
  """One run of a folder.

  Raises:
    ConfigError: a run of this name does not exist, or its file is damaged.
  """
  try:
    return _read(epath.Path(folder), _named(folder, name))
  except FileNotFoundError:
    raise config_lib.ConfigError(
      f"got run {name!r}, of which there is no {RUN} in {folder}; expected one"
      " that was prepared there (if its folder was removed, launch again)"
    ) from None


def run_config(run: grid.Run) -> config_lib.RunConfig:
  """The config of a run, ready to be trained, under the run's name."""
  config = config_lib.build_run_config(run.config)
  return dataclasses.replace(config, name=run.name)


def _listed(folder: epath.Path) -> list[str]:
  """Names of all runs; read from their folders if the list is damaged."""
  try:
    return names(folder)
  except damage.DamagedError:
    return [name.partition("/")[0] for name in files.glob(folder, f"*/{RUN}")]


def _named(folder: epath.PathLike, name: str) -> str:
  """Checks the name of a run."""
  if not _is_name(name):
    raise config_lib.ConfigError(
      f"got run {name!r}, expected the name of a folder in {folder}: letters,"
      " digits and _.+-, no dot at the start"
    )
  return name


def _read(folder: epath.Path, name: str) -> grid.Run:
  path = folder / name / RUN
  run = damage.read(path, grid.Run)
  with damage.of_file(path):
    if run.name != name:
      raise ValueError(f"name: got {run.name!r}, expected {name!r}")
    run_config(run)
    return run


def _key(overrides: Mapping[str, Any]) -> str:
  return json.dumps(overrides, sort_keys=True)
