# SPDX-License-Identifier: Apache-2.0
"""Tokens per second on this CPU: our engine against generate of transformers.

  python -m experiments.decode_vs_transformers.run --folder=runs/decode
  python -m experiments.decode_vs_transformers.run --only=512 --rounds=3

Needs the extra `torch`. Each network is a Llama with drawn weights, which we
write for transformers, so that both libraries compute the same function. Both
run in float32 with as many threads, in processes of their own that take turns;
each process continues prompts of 128 tokens greedily, several times after one
to warm up. Adds a row per process and batch to results.csv beside this file.
"""

import argparse
from collections.abc import Callable, Sequence
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time
from typing import Any

import numpy as np

from attnres_jax.common import command_line
from attnres_jax.common import csv_rows
from attnres_jax.common import environment
from attnres_jax.config import fields
from experiments import publish
from experiments.decode_vs_transformers import report
from experiments.pages import readme

_FILE = pathlib.Path(__file__).absolute().with_name("results.csv")
PUBLISHED = readme.Published(_FILE.parent, [readme.Place(report.table)])

# Name -> width, layers, heads, MLP width, vocabulary.
NETWORKS = {
  "512-bytes": (512, 8, 8, 1408, 256),
  "512-32k": (512, 8, 8, 1408, 32000),
  "1024-bytes": (1024, 16, 16, 2816, 256),
  "1024-32k": (1024, 16, 16, 2816, 32000),
}
BATCHES = (1, 8)
PROMPT, STEPS, REPEATS = 128, 48, 3
# (tokens [B, steps], seconds of the first token, of each step after it)
Found = tuple[np.ndarray, float, list[float]]


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the command; returns its exit status."""
  parser = command_line.Parser(
    "python -m experiments.decode_vs_transformers.run", __doc__
  )
  add = parser.add_argument
  add("--folder", default="runs/decode", help="for the networks")
  add("--only", default="", help="networks whose names begin like this")
  add("--rounds", type=int, default=2, help="processes of each library")
  add("--threads", type=int, default=1, help="of either library")
  add("--one", nargs=2, help=argparse.SUPPRESS)
  return command_line.run(_main, parser.parse_args(argv))


def _main(options: argparse.Namespace) -> None:
  if options.one:
    name, library = options.one
    _one(name, library, pathlib.Path(options.folder), options.threads)
    return
  for name in ("rounds", "threads"):
    fields.accept(f"--{name}", getattr(options, name), fields.Size)
  key = "network", "batch", "library", "threads", "round"
  for name in NETWORKS:
    if not name.startswith(options.only):
      continue
    _write(name, pathlib.Path(options.folder))
    tokens: dict[int, Any] = {}
    for i in range(options.rounds):
      for library in list(_LIBRARIES)[:: 1 if i % 2 else -1]:
        for row in _in_process(name, library, options):
          ids = row.pop("tokens")
          own = tokens.setdefault(row["batch"], ids)
          row["same_tokens"] = float(np.mean(np.equal(ids, own)))
          row |= dict(round=i, threads=options.threads)
          print(row, flush=True)
          csv_rows.put(_FILE, row | environment.facts(), key)
  publish.publish(PUBLISHED)


def _in_process(
  name: str, library: str, options: argparse.Namespace
) -> list[dict[str, Any]]:
  command = [
    sys.executable, "-m", "experiments.decode_vs_transformers.run",
    f"--folder={options.folder}", f"--threads={options.threads}",
    "--one", name, library,
  ]  # fmt: skip
  # XLA has as many threads as the process may use cores.
  cores = sorted(os.sched_getaffinity(0))[-options.threads :]
  done = subprocess.run(
    ["taskset", "-c", ",".join(map(str, cores)), *command],
    stdout=subprocess.PIPE,
    check=True,
    text=True,
    env=os.environ | dict(OMP_NUM_THREADS=str(options.threads)),
  )
  return [json.loads(line) for line in done.stdout.splitlines()[-2:]]


def _write(name: str, folder: pathlib.Path) -> None:
  """The network for transformers."""
  from attnres_jax.interop import huggingface

  if not (folder / name).exists():
    huggingface.export(
      _model(name), folder / name, dtype="F32", facts={}, card=""
    )


def _model(name: str) -> Any:
  from attnres_jax import config as config_lib
  from attnres_jax import models

  width, layers, heads, mlp_width, vocab_size = NETWORKS[name]
  return models.build_model(
    config_lib.ModelConfig(
      vocab_size=vocab_size, width=width, num_layers=layers, num_heads=heads,
      mlp_width=mlp_width, mixers=("attention",), rope_theta=10000.0,
      residual=config_lib.ResidualConfig("prenorm"),
    )
  )  # fmt: skip


def _one(name: str, library: str, folder: pathlib.Path, threads: int) -> None:
  """In a process of its own: prints a row per batch."""
  run = _LIBRARIES[library](name, folder, threads)
  rng = np.random.default_rng(0)
  for batch in BATCHES:
    prompts = rng.integers(0, NETWORKS[name][-1], (batch, PROMPT))
    found = [run(prompts) for _ in range(REPEATS + 1)][1:]
    steps = [second for _, _, seconds in found for second in seconds]
    speeds = [batch * STEPS / sum(seconds) for _, _, seconds in found]
    row = dict(
      network=name, batch=batch, library=library,
      tokens_per_second=round(statistics.median(speeds), 2),
      slowest=round(min(speeds), 2),
      fastest=round(max(speeds), 2),
      step_ms=round(1e3 * statistics.median(steps), 3),
      least_step_ms=round(1e3 * min(steps), 3),
      first_token_ms=round(
        1e3 * statistics.median(first for _, first, _ in found), 1
      ),
      tokens=found[0][0].tolist(),
    )  # fmt: skip
    print(json.dumps(row), flush=True)


def _ours(
  name: str, folder: pathlib.Path, threads: int
) -> Callable[[np.ndarray], Found]:
  del folder, threads
  from attnres_jax.inference import draw
  from attnres_jax.inference import engine as engine_lib

  model, greedy = _model(name), draw.Settings(temperature=0.0)

  def run(prompts: np.ndarray) -> Found:
    batch = len(prompts)
    # The first request draws while the prompts of others are computed, and in
    # the step of its own prompt.
    more = STEPS + batch + 1
    if batch not in engines:
      engines[batch] = engine_lib.Engine(
        model, slots=batch, length=PROMPT + more, chunk=PROMPT
      )
    engine = engines[batch]
    start = time.perf_counter()
    numbers = [
      engine.submit(engine_lib.Request(prompt.tolist(), more, greedy))
      for prompt in prompts
    ]
    ids: dict[int, list[int]] = {number: [] for number in numbers}
    seconds = []

    def step() -> None:
      for token in engine.step():
        ids[token.request].append(token.id)

    while not all(ids.values()):
      step()
    first = time.perf_counter() - start
    for _ in range(STEPS):
      start = time.perf_counter()
      step()
      seconds.append(time.perf_counter() - start)
    for number in numbers:
      engine.cancel(number)
    return np.array([ids[n][:STEPS] for n in numbers]), first, seconds

  engines: dict[int, engine_lib.Engine] = {}
  return run


def _transformers(
  name: str, folder: pathlib.Path, threads: int
) -> Callable[[np.ndarray], Found]:
  import torch
  import transformers

  torch.set_num_threads(threads)
  model = transformers.AutoModelForCausalLM.from_pretrained(
    folder / name, dtype=torch.float32
  ).eval()

  class Clock(transformers.generation.streamers.BaseStreamer):
    """When each token came; the prompt comes first."""

    def __init__(self) -> None:
      self.times: list[float] = []

    def put(self, value: Any) -> None:
      del value
      self.times.append(time.perf_counter())

    def end(self) -> None:
      pass

  def run(prompts: np.ndarray) -> Found:
    ids, clock = torch.from_numpy(prompts), Clock()
    start = time.perf_counter()
    with torch.inference_mode():
      out = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False,
        max_new_tokens=STEPS + 1, min_new_tokens=STEPS + 1, pad_token_id=0,
        streamer=clock,
      )  # fmt: skip
    times = clock.times[-STEPS - 1 :]
    seconds = np.diff(times).tolist()
    new = out[:, PROMPT : PROMPT + STEPS].numpy()
    return new, times[0] - start, seconds

  return run


_LIBRARIES = {"transformers": _transformers, "ours": _ours}

if __name__ == "__main__":
  sys.exit(main())
