# SPDX-License-Identifier: Apache-2.0
"""Depth attention on a GPU: ours, compiled PyTorch, and peers, side by side.

  export PYTHONPATH=.:kernels
  python kernels/benchmarks/gpu.py

All run in one process on the same inputs; see `gpu_protocol.py` for the rules.
PyTorch and the peers (flash-linear-attention, flash-attn-res, liger-kernel)
take part if they can be imported. Rows go to results/gpu.csv, with device,
versions and commit. `--platform=cpu` tries the driver on tiny shapes with the
plain backends and only prints the rows; the table is for GPUs.
"""

import argparse
import os
import pathlib
import sys
import time

from benchmarks import gpu_problems
from benchmarks import gpu_protocol as protocol
from benchmarks import gpu_torch
import jax
import jax.numpy as jnp

from attnres_jax import csv_rows
from attnres_jax import environment

_TABLE = pathlib.Path(__file__).parent / "results" / "gpu.csv"
_SUITES = ("read", "phase1", "stack", "step")


def main(arguments=None) -> list[dict[str, str]]:
  """Runs the suites; returns the rows."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--platform", choices=("gpu", "cpu"), default="gpu")
  parser.add_argument("--suite", default=",".join(_SUITES))
  parser.add_argument("--rounds", type=int, default=20)
  parser.add_argument(
    "--only", default="", help="comma-separated names of arms"
  )
  options = parser.parse_args(arguments)
  suites = options.suite.split(",")
  for suite in suites:
    if suite not in _SUITES:
      parser.error(f"--suite={suite} is not one of {', '.join(_SUITES)}")
  # Two frameworks share the memory.
  os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

  if jax.default_backend() != options.platform:
    sys.exit(
      f"gpu.py: needs a GPU, and JAX runs on {jax.default_backend()} here"
      " (--platform=cpu tries the driver on tiny shapes)"
    )
  machine = Machine(options.platform)
  rows = []
  for suite in suites:
    for problem in problems_of(suite, options.platform):
      for row in compare(problem, machine, options.rounds, options.only):
        rows.append(row)
        print(*(value for value in row.values() if value), flush=True)
  if options.platform == "gpu":
    write(rows, _TABLE)
  return rows


class Machine:
  """The device: its names, cache and copy bandwidth; flushes the cache."""

  def __init__(self, platform: str):

    self.platform = platform
    tiny = platform == "cpu"
    # As on an H100 or H200; an overestimate only costs memory.
    self.cache_bytes = 2**16 if tiny else 50 * 2**20
    # Tokens that are compared with float64, and the most at a time.
    self.kept = 16 if tiny else 1024
    self.implementations = (
      ("reference", "xla") if tiny else ("pallas_gpu", "xla")
    )
    self.common = {
      "device": jax.devices()[0].device_kind,
      "jax": jax.__version__,
      "torch": gpu_torch.version(),
      "commit": environment.commit(),
    }
    add_one = jax.jit(lambda x: x + 1)
    self._buffer = jnp.zeros((4 * self.cache_bytes // 4,), jnp.float32)
    self.flush = lambda: jax.block_until_ready(add_one(self._buffer))
    large = jnp.zeros((2**12 if tiny else 2**28,), jnp.float32)
    self.copy_bandwidth = (
      2
      * large.nbytes
      / min(
        _seconds(lambda: jax.block_until_ready(add_one(large)))
        for _ in range(9)
      )
    )


def problems_of(suite: str, platform: str):
  """The shapes of a suite; tiny ones on CPU."""
  modes = ("forward", "forward+backward")
  if suite in ("read", "phase1"):
    queries = 1 if suite == "read" else 8
    # (M, T, D): as reported by peers, the 48B model, Table 2, Kimi K3.
    shapes = (
      (9, 4096, 2048),
      (32, 4096, 2048),
      (9, 4096, 8192),
      (9, 8192, 2304),
      (8, 8192, 1168),
      (9, 8192, 7168),
    )
    if platform == "cpu":
      queries, shapes = min(queries, 2), ((3, 40, 32),)
    return [
      gpu_problems.Read(suite, queries, *shape, mode)
      for shape in shapes
      for mode in modes
    ]
  if suite == "stack":
    if platform == "cpu":
      return [gpu_problems.Stack(5, 2, 40, 32)]
    return [
      gpu_problems.Stack(32, 8, 4 * length, 2048) for length in (4096, 16384)
    ]
  if platform == "cpu":
    return [gpu_problems.Step(2, 2, 2, 8, 32, 2, 64)]
  # 24 and 32 sublayers in 8 blocks, and the batch that peers use for Table 2.
  return [
    gpu_problems.Step(layers, layers // 4, 4, 2048, 2048, 16, 32768)
    for layers in (12, 16)
  ]


def compare(problem, machine: Machine, rounds: int, only: str = "", extra=None):
  """Checks and times arms of one problem, `rounds` samples each: their rows.

  `only` has comma-separated names of arms, and `extra` more JAX arms by name,
  such as one with a deliberate error.
  """
  common = machine.common | {
    "suite": problem.suite,
    "shape": problem.shape,
    "mode": problem.mode,
  }
  number = protocol.input_sets(problem.input_bytes, machine.cache_bytes)
  if isinstance(problem, gpu_problems.Step):
    number = 1
  sets = [problem.draw(seed) for seed in range(number)]
  exact = problem.exact(sets[0], machine.kept)
  builders = {
    name: lambda f=function: gpu_problems.prepare(
      problem, f, sets, machine.kept
    )
    for name, function in (
      gpu_problems.arms(problem, machine.implementations) | (extra or {})
    ).items()
  }
  builders |= {
    name: lambda b=build: gpu_torch.prepare(problem, b, sets, machine.kept)
    for name, build in gpu_torch.arms(problem).items()
  }
  if only:
    builders = {k: v for k, v in builders.items() if k in only.split(",")}
  rows, running, verdicts = {}, {}, {}
  for name, build in builders.items():
    try:
      arm = build()
      outputs = arm.wait(arm.run(0))
      wanted = problem.wanted(exact, name)
      verdicts[name] = protocol.judge(
        arm.results(outputs), wanted, problem.margin
      )
      del outputs
      if verdicts[name].passed:
        running[name] = arm
      else:
        rows[name] = protocol.row(
          common,
          name,
          protocol.FAILED,
          reason=verdicts[name].reason,
          verdict=verdicts[name],
        )
    except (protocol.NotHere, NotImplementedError) as error:
      rows[name] = protocol.row(
        common, name, protocol.NOT_RUN, reason=str(error)
      )
    except Exception as error:  # A peer may fail in any way; its row stays.
      reason = f"{type(error).__name__}: {error}"[:200]
      rows[name] = protocol.row(common, name, protocol.FAILED, reason=reason)
  samples = measure(running, machine.flush, rounds)
  seconds = {k: protocol.median_interval(v) for k, v in samples.items()}
  baseline = seconds.get(problem.baseline, (None,))[0]
  for name, interval in seconds.items():
    rows[name] = protocol.row(
      common,
      name,
      protocol.OK,
      verdict=verdicts[name],
      seconds=interval,
      baseline_seconds=baseline,
      moved_bytes=problem.moved_bytes,
      copy_bandwidth=machine.copy_bandwidth,
    )
  return [rows[name] for name in builders]


def measure(arms, flush, rounds: int) -> dict[str, list[float]]:
  """Seconds per call of every arm, one sample per arm and round."""
  calls = {}
  for name, arm in arms.items():
    arm.wait(arm.run(0))
    seconds = _seconds(lambda arm=arm: arm.wait(arm.run(0)))
    calls[name] = protocol.calls_per_sample(seconds)
  samples = {name: [] for name in arms}
  for name in protocol.turns(list(arms), rounds):
    arm, number = arms[name], calls[name]

    def sample(arm=arm, number=number):
      outputs = None
      for i in range(number):
        outputs = arm.run(i)
      arm.wait(outputs)

    flush()
    samples[name].append(_seconds(sample) / number)
  return samples


def write(rows, path) -> None:
  """Replaces the table; refuses rows that are not from a GPU."""
  for row in rows:
    if "cpu" in row["device"].lower():
      raise ValueError(f"{path} is for GPUs, not for {row['device']}")
  csv_rows.write(path, rows)


def _seconds(function) -> float:
  start = time.perf_counter()
  function()
  return time.perf_counter() - start


if __name__ == "__main__":
  main()
