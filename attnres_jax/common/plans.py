# SPDX-License-Identifier: Apache-2.0
"""The mesh, microbatches and checkpointing of configs on slices, as a file.

  python -m attnres_jax.plan.search --config=... --topology=v5p-32 --save

adds a row to the file, and a run with `optim.accumulate_steps=0` takes the row
of its config on the devices that it finds. A row counts for all configs with
the same step, whatever their seed, rates and number of steps are.
"""

from collections.abc import Iterable, Mapping, Sequence
import contextlib
import csv
import dataclasses
import hashlib
import json
import os
from typing import Any

from etils import epath

from attnres_jax import config as config_lib
from attnres_jax.common import csv_rows
from attnres_jax.common import environment
from attnres_jax.common import files

FILE = "configs/plans.csv"
# In the folder of a sweep.
COPY = "plans.csv"
# Column of the file -> field that it replaces, unless the cell is empty, as are
# those of pipelines in plain plans, and the last where the default fits.
COLUMNS = {
  "data": "mesh.data",
  "fsdp": "mesh.fsdp",
  "expert": "mesh.expert",
  "microbatches": "optim.accumulate_steps",
  "remat": "model.remat",
  "stage": "mesh.stage",
  "virtual_stages": "pipeline.virtual_stages",
  "pipeline_microbatches": "pipeline.microbatches",
  "gather": "pipeline.gather",
  "tile_tokens": "loss.tile_tokens",
}
_KEYS = ("config_hash", "device_kind", "devices")
Path = os.PathLike[str] | str


def apply(
  config: config_lib.RunConfig, overrides: Mapping[str, Any]
) -> config_lib.RunConfig:
  """The config with fields, named with dots, replaced."""
  for name, value in overrides.items():
    config = _replace(config, name.split("."), value)
  return config


def resolve(
  config: config_lib.RunConfig, devices: Sequence[Any], path: Path = FILE
) -> config_lib.RunConfig:
  """The config with its plan, if `optim.accumulate_steps` asks for one.

  The config has its vocabulary size. Devices are of all processes, or of
  `topology.devices`.

  Raises:
    ConfigError: there is no plan, or the config already has a mesh.
  """
  if config.optim.accumulate_steps:
    return config
  mesh = dataclasses.replace(config.mesh, tensor=1)
  if mesh != config_lib.MeshConfig():
    config_lib.fail(
      "optim.accumulate_steps",
      0,
      "a number with a mesh of your own; with 0, the mesh is that of a plan",
    )
  row = find(config, devices, path)
  where = f"{len(devices)} x {devices[0].device_kind}"
  if row is None:
    config_lib.fail(
      "optim.accumulate_steps",
      0,
      f"a number, or a plan of {config.name} for {where} in {path}; this makes"
      " one: python -m attnres_jax.plan.search --config=... --topology=SLICE"
      " --save",
    )
  return apply(config, overrides_of(row))


def find(
  config: config_lib.RunConfig, devices: Sequence[Any], path: Path = FILE
) -> dict[str, str] | None:
  """The row of a config on devices that are one slice; None without one."""
  if len({getattr(device, "slice_index", 0) for device in devices}) > 1:
    return None
  key = _key(config, devices)
  matches = [r for r in rows(path) if all(r[k] == key[k] for k in _KEYS)]
  return matches[0] if matches else None


def rows(path: Path = FILE) -> list[dict[str, str]]:
  """All rows of the file; none if it does not exist.

  Raises:
    ConfigError: it is another file.
  """
  checked = files.check_path("--plans", os.fspath(path))
  if not checked.exists():
    return []
  table, columns = [], ""
  if files.is_file(checked):
    with contextlib.suppress(ValueError, csv.Error):  # Not even text.
      text = files.read(checked).decode()
      table, columns = csv_rows.parse(text), text.partition("\n")[0].strip()
      if not text:
        return []
  missing = [name for name in _KEYS if name not in columns.split(",")]
  if missing:
    config_lib.fail_argument(
      "--plans", str(path), f"a file of plans, with a column {missing[0]}"
    )
  return table


def under_other_schemes(
  config: config_lib.RunConfig,
  devices: Sequence[Any],
  schemes: Iterable[str],
  path: Path = FILE,
) -> dict[str, Any] | None:
  """What the plan of the same network under another residual scheme replaces.

  The first of `schemes` with a row counts; None if there is no row.
  """
  for name in schemes:
    residual = config_lib.under(config.model.residual, name)
    other = apply(config, {"model.residual": residual})
    row = find(other, devices, path)
    if row is not None and name != config.model.residual.name:
      return overrides_of(row)
  return None


def put(
  config: config_lib.RunConfig,
  devices: Sequence[Any],
  overrides: Mapping[str, Any],
  facts: Mapping[str, Any],
  path: Path = FILE,
) -> None:
  """Adds the row of a config, in place of an older one, with further facts."""
  row = {"config": config.name} | _key(config, devices)
  row |= {
    column: overrides[name]
    for column, name in COLUMNS.items()
    if name in overrides
  }
  row |= dict(facts)
  row |= dict(jax=environment.jax_version(), commit=environment.commit())
  csv_rows.put(path, row, _KEYS)


def copy(path: Path, folder: Path) -> None:
  """Puts a copy of the file, if there is one, into the folder of a sweep.

  Its workers may run where the file is not.
  """
  path = epath.Path(path)
  if path.exists():
    target = epath.Path(folder) / COPY
    files.write_output("--workdir", target, path.read_text(), _KEYS)


def config_hash(config: config_lib.RunConfig) -> str:
  """Hash of the fields of a plan that are not at their defaults.

  So new fields, at their defaults, do not make a plan obsolete.
  """
  residual = type(config.model.residual)()
  model = config_lib.ModelConfig(residual=residual)
  run = config_lib.RunConfig(model=model)
  default = config_lib.flatten(config_lib.to_dict(run))
  fields = {
    name: value
    for name, value in config_lib.flatten(config_lib.to_dict(config)).items()
    if value != default[name]
    and name not in COLUMNS.values()
    and "step" in config_lib.affects(name)
  }
  text = json.dumps(fields, sort_keys=True)
  return hashlib.sha256(text.encode()).hexdigest()[:12]


def overrides_of(row: Mapping[str, str]) -> dict[str, Any]:
  """The fields that a row of the file replaces."""
  fields = {name: row.get(column) for column, name in COLUMNS.items()}
  return {n: config_lib.parse_field(n, t) for n, t in fields.items() if t}


def _key(
  config: config_lib.RunConfig, devices: Sequence[Any]
) -> dict[str, str]:
  kind, number = devices[0].device_kind, str(len(devices))
  return dict(zip(_KEYS, (config_hash(config), kind, number)))


def _replace(config: Any, path: Sequence[str], value: Any) -> Any:
  name, *rest = path
  if rest:
    value = _replace(getattr(config, name), rest, value)
  return dataclasses.replace(config, **{name: value})
