# SPDX-License-Identifier: Apache-2.0
"""The tasks of the first hour, and the process of the device that runs them.

Each task makes rows: one number each, with its limit and its estimate. A row of
a task that has begun says so until the task ends; if the process dies or hangs
meanwhile, the next one turns that row into the reason and goes to later tasks.
"""

from collections.abc import Callable, Iterator
import functools
import json
import pathlib
import statistics
import tempfile
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from attnres_jax import config as config_lib
from attnres_jax.common import chips
from attnres_jax.common import csv_rows
from attnres_jax.common import environment
from attnres_jax.plan import candidates
from attnres_jax.plan import report as report_lib
from attnres_jax.train import loop
from attnres_kernels import problems
from experiments import measure as measure_lib
from experiments.cost import compiled as compiled_lib
from experiments.cost import networks
from experiments.cost import report as cost_report
from experiments.cost import run as cost
from experiments.first_hour import tables
from experiments.first_hour import timing

OK, FAILED, NOT_HERE, BEGUN = "ok", "failed", "not here", "begun"
FIELDS = (
  "task", "name", "case", "arm", "status", "measured", "unit", "low", "high",
  "limit", "to_limit", "above_limit", "estimate", "to_estimate", "off_estimate",
  "reason",
)  # fmt: skip
# A file of rows belongs to one of each.
SAME = ("hardware", "commit", "jax", "form")
PARTS = ("rates", "checks", "steps", "training", "operators")
# Device kind -> its name in the compiled tables, and its cores there.
CHIPS = {
  "TPU v4": ("v4", 2),
  "TPU v5 lite": ("v5e", 1),
  "TPU v5": ("v5p", 2),
  "TPU v6 lite": ("v6e", 1),
  "TPU7x": ("tpu7x", 1),
}
_MOST_REASON = 400

Row = dict[str, str]


class Task(NamedTuple):
  """A name, and what makes its rows."""

  part: str
  name: str
  call: Callable[[], Iterator[Row]]


def row(
  name: str,
  case: str = "",
  arm: str = "",
  *,
  measured: float | None = None,
  unit: str = "",
  spread: tuple[float, float] | None = None,
  limit: float | None = None,
  estimate: float | None = None,
  status: str = OK,
  reason: str = "",
) -> Row:
  """A row without its task; differences and ratios follow from the numbers."""
  made = dict.fromkeys(FIELDS, "")
  made |= dict(name=name, case=case, arm=arm, status=status, unit=unit)
  made["reason"] = " ".join(reason.split())[:_MOST_REASON]
  if measured is None:
    return made
  made["measured"] = f"{measured:.5g}"
  if spread is not None:
    made["low"], made["high"] = (f"{x:.5g}" for x in spread)
  for value, of, apart in (
    (limit, "to_limit", "above_limit"),
    (estimate, "to_estimate", "off_estimate"),
  ):
    if value:
      made[of.removeprefix("to_")] = f"{value:.5g}"
      made[of] = f"{measured / value:.3f}"
      made[apart] = f"{measured - value:.5g}"
  return made


def run(folder: pathlib.Path, parts: list[str], short: bool) -> None:
  """Runs the tasks that `folder`/rows.csv lacks, and writes each row at once.

  Raises:
    ConfigError: the rows there are of another device, commit or version.
  """
  facts = environment.facts() | {"form": "short" if short else "full"}
  path = folder / "rows.csv"
  rows = csv_rows.read(path) if path.exists() else []
  for old, name in ((old, name) for old in rows for name in SAME):
    if old[name] != facts[name]:
      raise config_lib.ConfigError(
        f"{path}: got rows with {name} {old[name]!r}, expected"
        f" {facts[name]!r}, as here; choose another folder with --out"
      )
  for old in rows:
    if old["status"] == BEGUN:
      old |= {"status": FAILED, "reason": "the process ended or was stopped"}
      csv_rows.write(path, rows)  # There may be no later task.
  done = {old["task"] for old in rows}
  for task in tasks(jax.devices()[0].platform, short, folder):
    if task.part not in parts or task.name in done:
      continue
    begun = row(task.name, status=BEGUN) | {"task": task.name} | facts
    csv_rows.write(path, [*rows, begun])
    try:
      made = list(task.call())
    except NotImplementedError as error:
      made = [row(task.name, status=NOT_HERE, reason=str(error))]
    except Exception as error:  # Compilers raise many kinds; the others run.
      reason = f"{type(error).__name__}: {error}"
      made = [row(task.name, status=FAILED, reason=reason)]
    rows += [one | {"task": task.name} | facts for one in made]
    csv_rows.write(path, rows)
    jax.clear_caches()  # Programs stay in the memory of a device.


def tasks(platform: str, short: bool, folder: pathlib.Path) -> list[Task]:
  """All of them, the most telling first."""
  kernel = {"tpu": "pallas_tpu", "gpu": "pallas_gpu"}.get(platform, "xla")
  found = [Task("rates", "rates of the device", _rates)]
  add = lambda part, name, call, *args: found.append(
    Task(part, name, functools.partial(call, *args))
  )
  for name, operator in problems.OPERATORS.items():
    for dtype in ("float32", "bfloat16"):
      used = kernel if platform != "gpu" or operator.on_gpu else "xla"
      shape = operator.short if short else operator.check
      add("checks", f"check {name}, {dtype}", check, name, shape, dtype, used)
  for network in _SHORT_STEPS if short else _STEPS:
    add("steps", f"steps, {network}", steps, network, 3 if short else 15)
  add("training", "planned network", training, short, folder)
  for name, operator in problems.OPERATORS.items():
    used = kernel if platform != "gpu" or operator.on_gpu else "xla"
    timed = (operator.short,) if short else dict.fromkeys(operator.timed)
    for shape in timed if operator.timed else ():
      for way in problems.PASSES:
        case = f"{name} {way} {shape}"
        add("operators", case, time_operator, name, way, shape, used, short)
  return found


def _rates() -> Iterator[Row]:
  chip = chips.chip_of(jax.devices()[0].device_kind) or chips.Chip(0.0)
  for name, rate, peak, unit, scale in (
    ("memory, read plus written", timing.copy_rate,
     chip.published_hbm_bytes_per_second, "GB/s", 1e9),
    ("bfloat16 products", timing.product_rate, chip.peak_flops_per_second,
     "TFLOP/s", 1e12),
  ):  # fmt: skip
    limit = peak / scale if peak else None
    yield row(name, measured=rate() / scale, unit=unit, limit=limit)


def check(name: str, shape: Any, dtype: str, implementation: str):
  """The worst of all values and gradients against the reference, in float32.

  A bfloat16 result may be off by twice what storing the exact result is off by;
  a float32 result by 2e-5, or by 1e-4 if the inputs are bfloat16.
  """
  operator = problems.OPERATORS[name]
  problem = operator.build(shape, dtype, problems.draws(0))
  compute = functools.partial(problems.results, problem)
  found = jax.jit(functools.partial(compute, implementation))(*problem.arrays)
  wide = [x.astype(jnp.float32) for x in problem.arrays]
  with jax.default_matmul_precision("highest"):
    exact = jax.jit(functools.partial(compute, problem.reference))(*wide)
  worst = (0.0, 1.0, "")
  for key, wanted in exact.items():
    wanted, got = np.float64(wanted), np.float64(found[key])
    scale = np.sqrt(np.mean(wanted**2)) or 1.0
    error = float(np.sqrt(np.mean((got - wanted) ** 2)) / scale)
    error = error if np.isfinite(error) else np.inf
    allowed = 2e-5 if dtype == "float32" else problem.tolerance or 1e-4
    if found[key].dtype == jnp.bfloat16 and not problem.tolerance:
      stored = np.float64(exact[key].astype(jnp.bfloat16)) - wanted
      allowed = 2 * max(np.sqrt(np.mean(stored**2)) / scale, 2**-9 / 3**0.5)
    worst = max(worst, (error, float(allowed), key), key=lambda x: x[0] / x[1])
  error, allowed, key = worst
  yield row(
    f"error of {name}", f"{shape}, {dtype}", implementation, measured=error,
    limit=allowed, status=OK if error <= allowed else FAILED,
    reason=f"the worst of {len(exact)} results: {key}",
  )  # fmt: skip


def time_operator(
  name: str, way: str, shape: Any, implementation: str, short: bool
) -> Iterator[Row]:
  """Microseconds; the limit is arguments and results over the bandwidth."""
  operator = problems.OPERATORS[name]
  problem = operator.build(shape, "bfloat16", problems.draws(0))

  def function(*arrays: jax.Array) -> Any:
    if way == "forward":
      return problem.function(implementation, *arrays)
    # With one number of each value: compilers would otherwise leave out forward
    # passes that gradients do not need, which the estimates contain.
    named = problems.results(problem, implementation, *arrays)
    is_value = lambda key: key.startswith("result")
    return {k: x[(0,) * x.ndim] if is_value(k) else x for k, x in named.items()}

  seconds = timing.of_calls(
    function, problem.arrays, rounds=3 if short else timing.ROUNDS
  )
  bandwidth, source = timing.bandwidth()
  chip, cores = CHIPS.get(jax.devices()[0].device_kind, ("", 1))
  rows = [
    tables.by_kernel().get((kernel, chip, str(shape)))
    for kernel in operator.kernels[way]
  ]
  estimate = None
  if all(rows):
    known = [one for one in rows if one is not None]
    estimate = sum(
      max(float(one["schedule_us"]), float(one["hbm_us"])) for one in known
    )
  yield row(
    f"{name} {way}", str(shape), implementation, unit="us",
    measured=seconds.median * 1e6,
    spread=(seconds.least * 1e6, seconds.largest * 1e6),
    limit=timing.least_bytes(function, problem.arrays) / bandwidth * 1e6,
    estimate=estimate and estimate / cores,
    reason=f"bandwidth {source}",
  )  # fmt: skip


# Networks of experiments/cost.
_STEPS, _SHORT_STEPS = ("d1024", "d2048"), ("tiny",)


def steps(name: str, rounds: int) -> Iterator[Row]:
  """Block and Full over PreNorm in its faster form, timed in turn."""
  arms = "prenorm", "prenorm scan_layers=True", "block_attnres", "full_attnres"
  network, calls = networks.load(name), {}
  tokens = network.batch * network.tokens
  size = f"{cost_report.describe(name)}, {tokens} tokens"
  for arm in arms:
    step, structs = compiled_lib.step(network, arm)
    key = jax.random.key(0)

    def draw(struct, key=key):
      if jnp.issubdtype(struct.dtype, jnp.integer):
        return jax.random.randint(
          key, struct.shape, 0, network.model.vocab_size
        )
      x = 0.02 * jax.random.normal(key, struct.shape)
      return x.astype(struct.dtype)

    arguments = jax.jit(lambda s=structs: jax.tree.map(draw, s))()
    compiled = jax.jit(step).lower(*arguments).compile()
    calls["step", arm] = functools.partial(compiled, *arguments)
  times = measure_lib.in_turn(calls, rounds)
  chip, _ = CHIPS.get(jax.devices()[0].device_kind, ("", 1))
  known = {
    one["arm"]: float(one["ms"])
    for one in cost.PUBLISHED.read()
    if (one["program"], one["place"], one["network"]) == ("step", chip, name)
    and one["ms"]
  }
  for ratio in cost.ratios(times):
    arm = ratio["arm"]
    found = [one.wall * 1e3 for one in times["step", arm]]
    estimate = known.get(arm, 0.0)
    yield row(
      "step", size, arm, unit="ms", measured=statistics.median(found),
      spread=(min(found), max(found)), estimate=estimate,
    )  # fmt: skip
    if cost.is_baseline(arm):
      continue
    yield row(
      "step over PreNorm", size, arm, measured=ratio["ratio"],
      spread=(ratio["ratio_min"], ratio["ratio_max"]), limit=1.0,
      estimate=estimate and estimate / known["prenorm"],
      reason=f"over {ratio['baseline']}, {rounds} rounds",
    )  # fmt: skip


def training(short: bool, folder: pathlib.Path) -> Iterator[Row]:
  """Trains by the ordinary loop with a trace, beside what `plan` predicts."""
  size, batch = ("micro", 2) if short else ("medium", 16)
  config = config_lib.load_config(
    f"configs/lm.py:size={size},residual=block_attnres",
    {
      "data.batch_size": batch * jax.device_count(), "data.max_epochs": 1e6,
      "train.steps": 16, "train.log_every": 1, "train.eval_every": 0,
      "train.eval_batches": 1,
      "train.depth_every": 0, "train.profile_steps": (10, 12),
      "optim.warmup_steps": 2, "checkpoint.every_steps": 0,
    },
  )  # fmt: skip
  devices, predicted = jax.devices(), {}
  if devices[0].platform == "tpu":
    (best, *_), _ = candidates.plans(config, devices)
    config = best.apply(config)
    report = report_lib.make_report(config, devices)
    seconds = report["step_seconds"]
    predicted = {"seconds": seconds, "peak_bytes": report["peak_bytes"]}
  workdir = folder / "traced"
  if workdir.exists():  # Of an attempt that was ended.
    workdir.rename(tempfile.mkdtemp(prefix="traced_", dir=folder))
  loop.train_and_evaluate(config, workdir)
  lines = (workdir / "metrics.jsonl").read_text().splitlines()
  tokens = config.data.batch_size * config.data.sequence_length
  seconds = [
    tokens / one["tokens_per_second"] * 1e3
    for one in map(json.loads, lines)
    if one.get("split") == "train" and one["step"] < 10
  ][3:]  # The first steps wait for the compiler.
  case = f"{config.name}, {tokens} tokens, {len(devices)} devices"
  yield row(
    "step of the training loop", case, "block_attnres", unit="ms",
    measured=statistics.median(seconds), spread=(min(seconds), max(seconds)),
    estimate=predicted.get("seconds", 0) * 1e3,
    reason=f"trace of steps 10 to 12: {workdir / 'profile'}",
  )  # fmt: skip
  used = (devices[0].memory_stats() or {}).get("peak_bytes_in_use")
  known = {"measured": used / 2**30} if used else {"status": NOT_HERE}
  yield row(
    "peak memory", case, "block_attnres", unit="GiB",
    estimate=predicted.get("peak_bytes", 0) / 2**30,
    reason="" if used else "the device does not say how much it used", **known,
  )  # fmt: skip
