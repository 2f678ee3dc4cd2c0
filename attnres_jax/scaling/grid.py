# SPDX-License-Identifier: Apache-2.0
"""Sweeps as data: a list of runs, each with a unique name.

In addition to `get_config(arg)`, a config file may define `def sweep(add)`, or
`def sweep(add, arg)`, which also gets the argument. It calls `add(**overrides)`
once per run; nothing is launched here. Overrides are arguments of `get_config`
(`size="s"`), fields of the run (`seed=1`) or dotted names of other fields
(`**{"optim.peak_lr": 3e-4}`).

    def sweep(add):
      for overrides in grid.product(
        size=("s", "m"), residual=("prenorm", "block_attnres"), seed=range(3)
      ):
        add(**overrides)

The name of a run consists of its overrides and a hash of its resolved config,
such as `s-block_attnres-seed1-3f0c1942`. The hash covers all fields except
fields that do not affect a run (`UNHASHED`), and does not depend on the version
of Python.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
import contextlib
import dataclasses
import functools
import hashlib
import inspect
import itertools
import json
import re
from typing import Any, TypeVar

from attnres_jax import config as config_lib
from attnres_jax.common import records
from attnres_jax.config import load as load_lib

Named = TypeVar("Named", bound=Any)
Resolve = Callable[[Mapping[str, Any]], Mapping[str, Any]]

HASH_DIGITS = 8
# Names have to fit into workdirs, labels and log lines.
MAX_SLUG = 80
# Overrides that tell schemes and seeds of one setting apart.
WITHIN_SETTING = ("residual", "model.residual.name", "seed", "data.seed")
UNHASHED = (
  "name",
  "data.max_epochs",
  "train.max_skipped_share",
  "train.profile_steps",
  "train.compiler_options",
)
# Parts and options that every config had; names of runs depend on them.
_LOG = {"tensorboard": False, "wandb_project": ""}
_OF_ALL_SCHEMES = dict(
  form="two_phase", schedule_size=6, rank=0, streams=4, stream_dtype="float32",
  gate="own", read=dataclasses.asdict(config_lib.DepthReadConfig()),
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Run(records.Record):
  """One run of a sweep.

  Attributes:
    name: unique in the sweep and valid as a folder: slug and hash.
    overrides: the arguments of `add`.
    config: resolved, a nested dict ready for JSON.
  """

  name: str
  overrides: Mapping[str, Any]
  config: Mapping[str, Any]


def load(
  spec: str,
  fields: Mapping[str, str] | None = None,
  sweep: Callable[..., None] | None = None,
) -> list[Run]:
  """The runs of `path/to/file.py:key=value,...`.

  Args:
    spec: the file, with its argument, or the config.json of a run.
    fields: dotted field names to values as text, for all runs; overrides of a
      run take precedence.
    sweep: adds the runs, as `of_axes` does; by default the file's own does.

  Raises:
    ConfigError: no such file, it defines no sweep, or a field or an argument
      has no effect.
  """
  source = config_lib.Source(spec, fields or {})
  path, arg = load_lib.split_spec(spec)
  given = sweep is not None
  if sweep is None:
    sweep = getattr(load_lib.load_file(path), "sweep", None)
  if sweep is None:
    raise config_lib.ConfigError(
      f"config file {path!r}: defines no sweep(add) or sweep(add, arg);"
      " expected one, or --sweep and --seeds of python -m attnres_jax.sweep"
    )
  if not callable(sweep):
    raise config_lib.ConfigError(f"config file {path!r}: sweep is no function")
  with load_lib.running(path):
    if len(inspect.signature(sweep).parameters) > 1:
      sweep = functools.partial(sweep, arg=arg)
    runs = collect(sweep, config_resolver(spec, source.values()))
  if not runs:
    raise config_lib.ConfigError(f"config file {path!r}: its sweep adds no run")
  varied = {name for run in runs for name in run.overrides if "." in name}
  for name in sorted(varied) if given else ():
    values = (r.overrides[name] for r in runs if name in r.overrides)
    _check_acts(name, next(values), runs)
  for name, value in source.fields.items():
    if all(name in run.overrides for run in runs):
      config_lib.fail_argument(
        f"--config.{name}", value, "a field that the sweep does not set"
      )
    _check_acts(name, source.values()[name], runs)
  for name in (word.partition("=")[0] for word in arg.split(",")):
    set_to = [r.overrides[name] for r in runs if name in r.overrides]
    # The same in all runs, it may be the argument's.
    if len(set_to) == len(runs) and any(v != set_to[0] for v in set_to):
      expected = f"no {name}, which the sweep sets; --only selects runs"
      config_lib.fail_argument("--config", spec, expected)
  return runs


def of_axes(
  axes: Mapping[str, Iterable[Any]], seeds: Iterable[int] = ()
) -> Callable[..., None]:
  """A sweep over every combination of values, seed by seed.

  Axes are fields with dots, or arguments of the config file. Seeds are of
  weights and data, so that runs of a seed are pairs; none for the config's own.
  """
  pairs = [{"seed": seed, "data.seed": seed} for seed in seeds] or [{}]

  def sweep(add: Callable[..., Run]) -> None:
    for pair in pairs:
      for overrides in product(**axes):
        add(**overrides, **pair)

  return sweep


def _check_acts(name: str, value: Any, runs: Sequence[Run]) -> None:
  """Refuses a field, set for all runs, that acts in none of them."""
  from attnres_jax.train import described

  refusals = []
  for run in runs:
    config = config_lib.build_run_config(run.config)
    try:
      described.check_acts(config, name, value)
      return
    except config_lib.ConfigError as error:
      refusals.append(error)
  raise refusals[0]


def collect(
  sweep: Callable[[Callable[..., Run]], None], resolve: Resolve
) -> list[Run]:
  """The runs of a config file's `sweep(add)`, in the order of the calls.

  `resolve` turns overrides into a complete config, a nested dict.

  Raises:
    ValueError: two runs have the same resolved config.
    ConfigError: an override has an unknown field or an invalid value.
  """
  runs: dict[str, Run] = {}

  def add(**overrides: Any) -> Run:
    config = resolve(overrides)
    digest = config_hash(config)
    if digest in runs:
      config_lib.fail_argument(
        "overrides",
        overrides,
        f"another config than that of {runs[digest].name}",
      )
    name = "-".join(filter(None, [slug_of(overrides), digest]))
    runs[digest] = Run(name, overrides, config)
    return runs[digest]

  sweep(add)
  return list(runs.values())


def config_resolver(
  spec: str, fields: Mapping[str, Any] | None = None
) -> Resolve:
  """Resolves overrides against `path/to/file.py:key=value,...` and its fields.

  Arguments of `get_config` take precedence over `spec`, and overrides over
  `fields`.
  """
  base = dict(fields or {})

  def resolve(overrides: Mapping[str, Any]) -> Mapping[str, Any]:
    plain = {field.name for field in dataclasses.fields(config_lib.RunConfig)}
    changed, arguments = dict(base), []
    for key, value in overrides.items():
      if "." in key or key in plain:
        changed[key] = value
      else:
        arguments.append(f"{key}={value}")
    path, given = load_lib.split_spec(spec)
    argument = ",".join([*filter(None, [given]), *arguments])
    run = config_lib.load_config(f"{path}:{argument}", changed, by_hand=False)
    return config_lib.to_dict(run)

  return resolve


def product(**axes: Iterable[Any]) -> Iterator[dict[str, Any]]:
  """Every combination of the axes' values; the last axis varies fastest.

  For dotted fields, use `product(**{"optim.peak_lr": (1e-3, 3e-3)})`.
  """
  for values in itertools.product(*axes.values()):
    yield dict(zip(axes, values))


def select(runs: Iterable[Named], pattern: str) -> list[Named]:
  """The runs, or their progress, whose names match the regular expression.

  Raises:
    ConfigError: it is none, or matches none.
  """
  expression = compile_pattern(pattern)
  chosen = [run for run in runs if expression.search(run.name)]
  if pattern and not chosen:
    raise config_lib.ConfigError(
      f"--only: got {pattern!r}, which matches no run"
    )
  return chosen


def compile_pattern(pattern: str) -> re.Pattern[str]:
  """The value of `--only`, checked."""
  try:
    return re.compile(pattern)
  except re.error as error:
    config_lib.fail_argument(
      "--only", pattern, f"a regular expression ({error})"
    )


def config_hash(config: Mapping[str, Any]) -> str:
  """A short hexadecimal hash of all fields of a resolved config."""
  hashed = _without(config, "")
  with contextlib.suppress(KeyError):
    residual = _OF_ALL_SCHEMES | hashed["model"]["residual"]
    model = hashed["model"] | {"residual": residual}
    hashed = {"log": _LOG} | hashed | {"model": model}
  text = json.dumps(
    hashed, sort_keys=True, separators=(",", ":"), allow_nan=False
  )
  return hashlib.sha256(text.encode()).hexdigest()[:HASH_DIGITS]


def slug_of(overrides: Mapping[str, Any]) -> str:
  """Overrides as one readable word, such as `s-block_attnres-seed1`.

  Words appear alone; numbers and booleans with the name of their field, after
  its last dot. Duplicates, such as two equal seeds, appear once.
  """
  parts = []
  for key, value in overrides.items():
    leaf = key.rpartition(".")[2]
    if isinstance(value, bool):
      parts.append(leaf if value else f"no_{leaf}")
    elif isinstance(value, str):
      parts.append(value or f"no_{leaf}")
    else:
      parts.append(f"{leaf}{value}")
  slug = re.sub(r"[^A-Za-z0-9_.+-]+", "_", "-".join(dict.fromkeys(parts)))
  return slug[:MAX_SLUG].strip("-_.")


def _without(config: Mapping[str, Any], prefix: str) -> dict[str, Any]:
  """A nested dict without the fields of `UNHASHED`."""
  return {
    key: _without(value, f"{prefix}{key}.")
    if isinstance(value, Mapping)
    else value
    for key, value in config.items()
    if prefix + key not in UNHASHED
  }
