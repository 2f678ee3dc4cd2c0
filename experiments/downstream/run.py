# SPDX-License-Identifier: Apache-2.0
"""Scores a trained network on the benchmarks of the paper's Table 3.

  python -m experiments.downstream.run --workdir=runs/48b --out=scores/48b
  python -m experiments.downstream.run --table scores/prenorm scores/attnres

Each finished benchmark is a file of --out; rerun the command to score the
others.
"""

import argparse
from collections.abc import Mapping, Sequence
import os
import pathlib
import sys
from typing import Any

from scipy import stats

from attnres_jax import config as config_lib
from attnres_jax.common import command_line
from attnres_jax.common import files
from attnres_jax.interop import score
from attnres_jax.scaling import pairs
from experiments.downstream import benchmarks
from experiments.pages import page
from experiments.pages import readme

TASKS = pathlib.Path(__file__).parent / "tasks"
# What Hugging Face's metric of code asks for.
_MAY_RUN_CODE = "HF_ALLOW_CODE_EVAL"


PUBLISHED = readme.Published(
  TASKS.parent, [readme.Place(lambda rows: table(()), rows="")]
)


def main(argv: Sequence[str] | None = None) -> int:
  """The command; returns its exit status."""
  parser = command_line.Parser("python -m experiments.downstream.run", __doc__)
  add = parser.add_argument
  add("--workdir", help="folder of a run")
  add("--out", help="folder for the scores")
  add("--only", default="", help="names as in Table 3, separated by commas")
  add(
    "--runs_code",
    action="store_true",
    help="also run tasks that execute answers",
  )
  add("--table", nargs="+", default=[], help="show the scores of folders")
  options, rest = parser.parse_known_args(argv)
  if options.table:
    return command_line.run(lambda: print(table(options.table)))
  return command_line.run(lambda: _score(options, rest))


def _score(options: argparse.Namespace, rest: list[str]) -> int:
  for name in ("workdir", "out"):
    if not getattr(options, name):
      raise config_lib.ConfigError(f"--{name}: missing, expected a folder")
  out = pathlib.Path(files.check_folder("--out", options.out))
  chosen = choose(options.only)
  if options.runs_code:
    os.environ[_MAY_RUN_CODE] = "1"
  for one in chosen:
    if one.runs_code and not options.runs_code:
      print(f"{one.name}: left out, since it executes answers (--runs_code)")
      continue
    if file_of(out, one).exists():
      scored = files.read_json(file_of(out, one))["run"]
      print(f"{one.name}: done ({scored['name']}, step {scored['step']})")
      continue
    print(f"{one.name}: {one.task}", flush=True)
    status = score.main([
      f"--workdir={options.workdir}", f"--tasks={one.task}",
      f"--out={file_of(out, one)}", f"--include_path={TASKS}", *rest,
      *([] if one.shots is None else [f"--num_fewshot={one.shots}"]),
      *(["--runs_code"] * one.runs_code),
    ])  # fmt: skip
    if status:
      return status
  print(table([str(out)]))
  return 0


def choose(names: str) -> list[benchmarks.Benchmark]:
  """The benchmarks of a list of names; all of them if it is empty.

  Raises:
    ConfigError: there is no such benchmark.
  """
  known = {one.name: one for one in benchmarks.BENCHMARKS}
  wanted = [name for name in names.split(",") if name] or list(known)
  return [config_lib.choose("--only", name, known) for name in wanted]


def file_of(folder: pathlib.Path, one: benchmarks.Benchmark) -> pathlib.Path:
  return folder / f"{one.name.lower()}.json"


def table(folders: Sequence[str]) -> str:
  """Published scores, and ours with their 90 % intervals, in percent."""
  known = [pathlib.Path(files.check_folder("--table", f)) for f in folders]
  header = (
    "benchmark", "task, shots", "paper: PreNorm", "paper: AttnRes",
    *(folder.name for folder in known), "questions",
  )  # fmt: skip
  lines = []
  for one in benchmarks.BENCHMARKS:
    shots = "" if one.shots is None else f", {one.shots}"
    found = [_value(file_of(folder, one), one) for folder in known]
    counts = {count for _, count in found if count}
    lines.append([
      one.name, f"{one.task}{shots}", f"{one.prenorm:.1f}",
      f"{one.attnres:.1f}", *(text for text, _ in found),
      "/".join(map(str, sorted(counts))) or "not run",
    ])  # fmt: skip
  return page.Table(header, lines).markdown()


def _value(
  path: pathlib.Path, one: benchmarks.Benchmark
) -> tuple[str, int | None]:
  """A score with its standard error, and how many questions it has."""
  if not path.exists():
    return "-", None
  found = files.read_json(path)
  metric, _, which = one.metric.partition("/")
  key = f",{which or 'none'}"
  everything = found["results"] | found.get("groups", {})
  each = [everything[one.task]] if one.task in everything else []
  each = each or [found["results"][name] for name in sorted(found["results"])]
  values = [values[metric + key] for values in each if metric + key in values]
  if not values:
    config_lib.fail_argument(str(path), one.metric, "a metric of the task")
  errors = [values.get(f"{metric}_stderr{key}") for values in each]
  error = errors[0] if len(errors) == 1 else None
  suffix = ""
  if isinstance(error, float):
    margin = stats.norm.ppf((1 + pairs.LEVEL) / 2) * error
    suffix = f" ± {100 * margin:.1f}"
  return f"{100 * sum(values) / len(values):.1f}{suffix}", _count(found)


def _count(found: Mapping[str, Any]) -> int:
  return sum(one["effective"] for one in found["n-samples"].values())


if __name__ == "__main__":
  sys.exit(main())
