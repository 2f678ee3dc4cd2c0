# SPDX-License-Identifier: Apache-2.0
r"""Scores a trained run on tasks of the lm-evaluation-harness.

  python -m attnres_jax.interop.score --workdir=runs/llama \
    --tasks=arc_easy,lambada_openai --out=scores.json

The results are written as JSON, and printed as a table. `--include_path` is a
folder with tasks of your own, as YAML files; if it has all tasks, nothing is
downloaded. Scores do not depend on `--batch_tokens`, `--slots` or the mesh,
except by rounding. The network is sharded over the devices of this host.

Texts open and end as the run's text format says (`data.text_format`): with the
separator of documents, or as the tokenizer of an imported checkpoint does it.
"""

import argparse
from collections.abc import Sequence
import json
import sys
import time

from etils import epath

from attnres_jax import config as config_lib
from attnres_jax.common import command_line
from attnres_jax.common import environment
from attnres_jax.common import files
from attnres_jax.common import sharding
from attnres_jax.common import text_table
from attnres_jax.config import fields
from attnres_jax.data import text_format as text_format_lib
from attnres_jax.inference import trained
from attnres_jax.interop import config_table
from attnres_jax.interop import scorer as scorer_lib
from attnres_jax.interop import weights_folder
from attnres_jax.train import checkpoint


def main(argv: Sequence[str] | None = None) -> int:
  """The command; returns its exit status."""
  parser = command_line.Parser("python -m attnres_jax.interop.score", __doc__)
  add = parser.add_argument
  trained.add_flags(parser)
  add("--tasks", required=True, help="names, separated by commas")
  add("--out", default="", help="new JSON file; WORKDIR/scores_STEP.json")
  add("--include_path", default="", help="folder with further tasks")
  add("--limit", type=int, default=0, help="examples of each task; 0 for all")
  add(
    "--num_fewshot", type=int, default=-1, help="examples in a context; -1:"
    " as the task says",
  )  # fmt: skip
  add("--length", type=int, default=0, help="of contexts; 0: the network's")
  add("--batch_tokens", type=int, default=8192, help="scored at once")
  add("--slots", type=int, default=8, help="answers generated at once")
  add("--log_samples", action="store_true", help="write all answers, too")
  add("--runs_code", action="store_true", help="lets tasks execute answers")
  add("--fsdp", type=int, default=-1, help="devices that share the weights")
  add("--data", type=int, default=1, help="copies of the weights")
  add("--tensor", type=int, default=1, help="devices that share each matrix")
  return command_line.run(_score, parser.parse_args(argv))


def _score(options: argparse.Namespace) -> None:
  for name in ("limit", "length"):
    fields.accept(f"--{name}", getattr(options, name), fields.Count)
  if options.num_fewshot < -1:
    config_lib.fail_argument(
      "--num_fewshot", options.num_fewshot, "-1, or a number of examples"
    )
  fields.accept("--slots", options.slots, fields.Size)
  names = [name for name in options.tasks.split(",") if name]
  if options.include_path:
    files.check_folder("--include_path", options.include_path, writable=False)
  from attnres_jax.interop import harness  # An extra.

  workdir, step = trained.find(options)
  out = epath.Path(options.out or workdir / f"scores_{step}.json")
  if out.exists():
    config_lib.fail_argument("--out", str(out), "a file that does not exist")
  files.check_folder("--out", str(out.parent))
  table = harness.find_tasks(names, options.include_path)
  sizes = {name: getattr(options, name) for name in ("data", "fsdp", "tensor")}
  mesh = sharding.make_mesh(config_lib.MeshConfig(**sizes))
  config, model = checkpoint.load_model(workdir, step, mesh)
  text_format = text_format_lib.of_data(config.data, workdir)
  facts, _ = weights_folder.origin(workdir, config)
  known = facts.get("config", {})
  longest = next(filter(None, map(known.get, config_table.LENGTHS)), 0)
  length = options.length or max(longest, config.data.sequence_length)
  scorer = scorer_lib.Scorer(mesh, length, options.batch_tokens)
  network = harness.Network(model, text_format, scorer, options.slots)
  start = time.perf_counter()
  results = harness.evaluate(
    network, names, table, limit=options.limit,
    num_fewshot=options.num_fewshot, log_samples=options.log_samples,
    confirm_run_unsafe_code=options.runs_code,
  )  # fmt: skip
  results["run"] = dict(
    name=config.name, step=step, residual=config.model.residual.name
  )
  results["command"] = dict(
    limit=options.limit, num_fewshot=options.num_fewshot,
    length=length, opening=list(text_format.open_ids),
    prefix=text_format.prefix_id,
  )  # fmt: skip
  results["environment"] = environment.facts() | dict(
    devices=mesh.size, seconds=time.perf_counter() - start
  )
  text = json.dumps(results, indent=2) + "\n"
  files.write_output("--out", out, text, ["results"])
  rows = []
  for name, value in harness.numbers(results).items():
    task, _, metric = name.partition("/")
    count = results["n-samples"].get(task, {}).get("effective", "")
    rows.append([task, metric, f"{value:.4f}", count])
  print(text_table.table(["task", "metric", "value", "examples"], rows))
  print(f"{config.name}, step {step}: {out}")


if __name__ == "__main__":
  sys.exit(main())
