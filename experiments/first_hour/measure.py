# SPDX-License-Identifier: Apache-2.0
"""The tasks of the first hour, most telling first; each makes rows.

Before a task begins, its row says so. If the process dies or hangs, the next
process turns that row into the reason and runs the later tasks.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
import faulthandler
import functools
import itertools
import json
import pathlib
import statistics
import tempfile
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from attnres_jax import config as config_lib
from attnres_jax.common import chips
from attnres_jax.common import csv_rows
from attnres_jax.common import environment
from attnres_jax.plan import candidates
from attnres_jax.train import loop
from attnres_kernels import problems
from attnres_kernels.depth_attention import shapes
from experiments import measure as measure_lib
from experiments.cost import compiled as compiled_lib
from experiments.cost import networks
from experiments.cost import report as cost_report
from experiments.first_hour import peers
from experiments.first_hour import timing

OK, FAILED, NOT_HERE, BEGUN = "ok", "failed", "not here", "begun"
# Begun when less time was left than a task may take.
CUT = "begun near the end"
FIELDS = (
  "task", "name", "case", "arm", "status", "measured", "unit", "low", "high",
  "limit", "reason",
)  # fmt: skip
# All rows of a file agree in these.
SAME = ("hardware", "commit", "jax", "form")
PARTS = ("rates", "checks", "operators", "steps", "training")
# A task that takes longer hangs; its process ends itself.
_TASK_SECONDS = 300
_ARMS = "prenorm", "block_attnres", "full_attnres"
Row = dict[str, str]


class Task(NamedTuple):
  """A part, a name, and what makes its rows."""

  part: str
  name: str
  call: Callable[[], Iterator[Row]]


def row(
  name: str, case: str = "", arm: str = "", measured: float | None = None,
  unit: str = "", spread: Sequence[float] = (), limit: float | None = None,
  status: str = OK, reason: str = "",
) -> Row:  # fmt: skip
  """A row without its task."""
  number = lambda x: "" if x is None else f"{x:.5g}"
  low, high = map(number, spread or (None, None))
  return dict(zip(FIELDS, (
    "", name, case, arm, status, number(measured), unit, low, high,
    number(limit), " ".join(reason.split())[:400],
  ), strict=True))  # fmt: skip


def run(
  folder: pathlib.Path, parts: list[str], short: bool, end: float
) -> tuple[list[Row], int]:
  """Runs the tasks that `folder`/rows.csv lacks, and writes each row at once.

  Ends by `end`, of the monotonic clock. A task that this interrupts has not
  failed: the next command begins it again. Returns all rows, and how many tasks
  are left.

  Raises:
    ConfigError: the rows there are of another device, commit or version.
  """
  facts = environment.facts() | {"form": "short" if short else "full"}
  path = folder / "rows.csv"
  rows = csv_rows.read(path, missing_ok=True)
  for old, name in itertools.product(rows, SAME):
    if old[name] != facts[name]:
      raise config_lib.ConfigError(
        f"{path}: got rows with {name} {old[name]!r}, expected"
        f" {facts[name]!r}, as here; choose another folder with --out"
      )
  rows = [old for old in rows if old["status"] != CUT]
  for old in rows:
    if old["status"] == BEGUN:
      old |= {"status": FAILED, "reason": "the process ended or was stopped"}
  csv_rows.write(path, rows)
  done = {old["task"] for old in rows}
  todo = [
    task
    for task in tasks(jax.devices()[0].platform, short, folder)
    if task.part in parts and task.name not in done
  ]
  for number, task in enumerate(todo):
    left = end - time.monotonic()
    if left <= 0:
      return rows, len(todo) - number
    identity = {"task": task.name} | facts
    status = BEGUN if left > _TASK_SECONDS else CUT
    begun = row(task.name, status=status) | identity
    csv_rows.write(path, [*rows, begun])
    faulthandler.dump_traceback_later(
      min(left, _TASK_SECONDS), exit=True, file=2
    )
    made = []
    try:
      for cells in task.call():
        made.append(cells | identity)
        csv_rows.write(path, [*rows, *made, begun])
        print(*(cells[name] for name in FIELDS if cells[name]), flush=True)
    except NotImplementedError as error:
      made.append(row(task.name, status=NOT_HERE, reason=str(error)) | identity)
    except Exception as error:  # Compilers raise many kinds; later tasks run.
      reason = f"{type(error).__name__}: {error}"
      made.append(row(task.name, status=FAILED, reason=reason) | identity)
    faulthandler.cancel_dump_traceback_later()
    rows += made
    csv_rows.write(path, rows)
    jax.clear_caches()  # Programs stay in the memory of a device.
  return rows, 0


def tasks(platform: str, short: bool, folder: pathlib.Path) -> Iterator[Task]:
  """All of them, the most telling first."""
  kernel = {"tpu": "pallas_tpu", "gpu": "pallas_gpu"}.get(platform, "xla")
  every, call = problems.OPERATORS, functools.partial
  yield Task("rates", "rates of the device", _rates)
  checks = [
    (name, op.short if short else op.check) for name, op in every.items()
  ]
  if platform == "gpu":  # TPUs have no kernel for several.
    checks.append(
      ("depth_merge_norm", shapes.Shape("several", 1, 7, 520, 1168))
    )
  for name, shape in checks:
    used = kernel if platform != "gpu" or every[name].on_gpu else "xla"
    for dtype in ("float32", "bfloat16"):
      case = f"check {name} {shape}, {dtype}"
      yield Task("checks", case, call(check, name, shape, dtype, used))

  def times(name: str, timed: Sequence[Any]) -> Iterator[Task]:
    for shape, way in itertools.product(dict.fromkeys(timed), problems.PASSES):
      task = call(operators, name, way, shape, kernel, short)
      yield Task("operators", f"{name} {way} {shape}", task)

  first = (shapes.BLOCK_48B[-1], *shapes.STEP[:3])
  if short:
    first = (every["depth_attention"].short,)
  yield from times("depth_attention", first)
  if platform == "gpu":
    yield from times("depth_merge_norm", shapes.MERGE_SEVERAL)
  # The yardstick and the smaller steps come before the larger ones.
  large = {"d1024": "yardstick", "d2048": "medium"}
  for network, size in ({"tiny": "micro"} if short else large).items():
    rounds = 3 if short else 15
    yield Task("steps", f"steps, {network}", call(steps, network, rounds))
    training_run = call(training, size, short, folder)
    yield Task("training", f"training, {size}", training_run)
  for name, op in every.items():
    others = (op.short,) if short else op.timed
    yield from times(name, [shape for shape in others if shape not in first])


def _rates() -> Iterator[Row]:
  chip = chips.chip_of(jax.devices()[0].device_kind) or chips.Chip(0.0)
  for name, measured, published, scale, unit in (
    ("memory, read plus written", timing.copy_rate(),
     chip.published_hbm_bytes_per_second, 1e9, "GB/s"),
    ("bfloat16 products", timing.product_rate(),
     chip.peak_flops_per_second, 1e12, "TFLOP/s"),
  ):  # fmt: skip
    limit = published / scale or None
    yield row(name, measured=measured / scale, unit=unit, limit=limit)


def check(
  name: str, shape: Any, dtype: str, implementation: str
) -> Iterator[Row]:
  """The worst of all values and gradients against the reference, in float32.

  A bfloat16 result may be off by twice what storing the exact result is off by;
  a float32 result by 2e-5, or by 1e-4 if the inputs are bfloat16.
  """
  operator = problems.OPERATORS[name]
  problem = operator.build(shape, dtype, problems.draws(0))
  compute = functools.partial(problems.results, problem)
  arguments = problems.arguments(problem)
  got = jax.jit(functools.partial(compute, implementation))(*arguments)
  wide = [x.astype(jnp.float32) for x in arguments]
  with jax.default_matmul_precision("highest"):
    exact = jax.jit(functools.partial(compute, problem.reference))(*wide)
  rms = lambda x: float(np.sqrt(np.mean(x**2)))
  worst = (0.0, 1.0, "")
  for key, stored in got.items():
    expected = np.float64(exact[key])
    scale = rms(expected) or 1.0
    error = rms(np.float64(stored) - expected) / scale
    error = error if np.isfinite(error) else np.inf
    allowed = 2e-5 if dtype == "float32" else problem.tolerance or 1e-4
    if stored.dtype == jnp.bfloat16 and not problem.tolerance:
      rounding = np.float64(exact[key].astype(jnp.bfloat16)) - expected
      allowed = 2 * max(rms(rounding) / scale, 2**-9 / 3**0.5)
    worst = max(worst, (error, allowed, key), key=lambda x: x[0] / x[1])
  error, allowed, key = worst
  yield row(
    f"error of {name}", f"{shape}, {dtype}", implementation, error,
    limit=allowed, status=OK if error <= allowed else FAILED,
    reason=f"the worst of {len(exact)} results: {key}",
  )  # fmt: skip


def operators(
  name: str, way: str, shape: Any, kernel: str, short: bool
) -> Iterator[Row]:
  """Microseconds of all implementations, and of peers that are installed.

  The limit is arguments and results, each once, over published bandwidth.
  """
  operator = problems.OPERATORS[name]
  problem = operator.build(shape, "bfloat16", problems.draws(0))
  arguments = problems.arguments(problem)
  if way == "forward":
    arguments = arguments[: len(problem.arrays)]

  def function(implementation: str, *arguments: jax.Array) -> Any:
    named = problems.results(problem, implementation, *arguments)
    # Of a value, a number: so the forward pass stays, which training does need.
    short = lambda key, x: x[(0,) * x.ndim] if key.startswith("result") else x
    return (
      named if way == "forward" else {k: short(k, x) for k, x in named.items()}
    )

  chip = chips.chip_of(jax.devices()[0].device_kind) or chips.Chip(0.0)
  rate = chip.published_hbm_bytes_per_second
  least = timing.least_bytes(functools.partial(function, "xla"), arguments)
  case = functools.partial(row, f"{name} {way}", str(shape))
  rounds = 3 if short else 9

  def timed(arm: str, samples: timing.Seconds) -> Row:
    median, *spread = (1e6 * seconds for seconds in samples)
    return case(arm, median, "us", spread, 1e6 * least / rate if rate else None)

  for arm in dict.fromkeys((kernel, "xla")):
    if arm != "pallas_gpu" or operator.on_gpu:
      call = functools.partial(function, arm)
      yield timed(arm, timing.of_calls(call, arguments, rounds))
  for arm in peers.PEERS if name == "depth_attention" else ():
    try:
      dout = None if way == "forward" else arguments[len(problem.arrays)]
      read = peers.PEERS[arm](shape.width)
      run_peer, _ = peers.program(read, problem.arrays, dout)
      yield timed(arm, timing.of_loops(run_peer, rounds))
    except Exception as error:  # Peers fail in many ways.
      reason = f"{type(error).__name__}: {error}"
      yield case(arm, status=NOT_HERE, reason=reason)


def steps(name: str, rounds: int) -> Iterator[Row]:
  """Block and Full over PreNorm, timed in turn."""
  network = networks.load(name)
  tokens = network.batch * network.tokens
  size = f"{cost_report.describe(name)}, {tokens} tokens"

  def draw(struct: Any) -> jax.Array:
    key = jax.random.key(0)
    if jnp.issubdtype(struct.dtype, jnp.integer):
      return jax.random.randint(key, struct.shape, 0, network.model.vocab_size)
    return (0.02 * jax.random.normal(key, struct.shape)).astype(struct.dtype)

  def compiled(arm: str) -> Any:
    step, structs = compiled_lib.step(network, arm)
    arguments = jax.jit(lambda: jax.tree.map(draw, structs))()
    program = jax.jit(step).lower(*arguments).compile()
    return functools.partial(program, *arguments)

  with futures.ThreadPoolExecutor(len(_ARMS)) as pool:
    calls = {("step", a): c for a, c in zip(_ARMS, pool.map(compiled, _ARMS))}
  times = measure_lib.in_turn(calls, rounds)
  for ratio in measure_lib.ratios(times):
    arm = ratio["arm"]
    walls = [x.wall * 1e3 for x in times["step", arm]]
    case = functools.partial(row, case=size, arm=f"{arm}, kernels")
    spread = min(walls), max(walls)
    yield case("step", measured=statistics.median(walls), unit="ms",
               spread=spread)  # fmt: skip
    if not measure_lib.is_baseline(arm):
      yield case(
        "step over PreNorm", measured=ratio["ratio"],
        spread=(ratio["ratio_min"], ratio["ratio_max"]),
        reason=f"over {ratio['baseline']}",
      )  # fmt: skip


def training(size: str, short: bool, folder: pathlib.Path) -> Iterator[Row]:
  """Trains by the ordinary loop with a trace, with the first plan by memory.

  `yardstick` is the network with Full AttnRes that others have published.
  """
  scheme = "full_attnres" if size == "yardstick" else "block_attnres"
  batch = {"micro": 2, "yardstick": 2}.get(size, 16) * jax.device_count()
  # A scan stacks what the backward pass needs, and GPUs copy it twice.
  on_gpu = jax.devices()[0].platform == "gpu"
  config = config_lib.load_config(
    f"configs/lm.py:size={size},residual={scheme}",
    {
      "data.batch_size": batch, "data.max_epochs": 1e6,
      "train.steps": 16 if short else 46, "train.log_every": 5,
      "train.eval_every": 0, "train.eval_batches": 1, "train.depth_every": 0,
      "train.profile_steps": (10, 12), "optim.warmup_steps": 2,
      "checkpoint.every_steps": 0,
    } | ({"model.scan_layers": False} if on_gpu else {}),
  )  # fmt: skip
  devices = jax.devices()
  if not short:
    (best, *_), _ = candidates.plans(config, devices)
    config = best.apply(config)
  workdir = folder / f"traced_{size}"
  if workdir.exists():  # An attempt that was ended.
    workdir.rename(tempfile.mkdtemp(prefix="traced_", dir=folder))
  loop.train_and_evaluate(config, workdir)
  tokens = config.data.batch_size * config.data.sequence_length
  lines = (workdir / "metrics.jsonl").read_text().splitlines()
  # The first steps wait for the compiler, and some are traced.
  times = [
    tokens / line["tokens_per_second"] * 1e3
    for line in map(json.loads, lines)
    if line.get("split") == "train" and line["step"] > 15
  ]
  case = f"{config.name}, {tokens} tokens, {len(devices)} devices"
  yield row(
    "step of the training loop", case, scheme, statistics.median(times), "ms",
    (min(times), max(times)),
    reason=f"trace of steps 10 to 12: {workdir / 'profile'}",
  )  # fmt: skip
  used = (devices[0].memory_stats() or {}).get("peak_bytes_in_use")
  status, gib = (OK, used / 2**30) if used else (NOT_HERE, None)
  yield row("peak memory", case, scheme, gib, "GiB", status=status)
