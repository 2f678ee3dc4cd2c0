# SPDX-License-Identifier: Apache-2.0
"""A planned network: its predicted step, memory and MFU beside the measured.

On a TPU, `attnres_jax.aot` plans and predicts for one device of the kind at
hand, with this machine's compiler. Elsewhere there is no such report: the
prediction is then the larger of two times, the FLOPs of the model over the
peak and the least bytes of its parts over the bandwidth, which are measured
where they are not published. A second task trains the network by the ordinary
loop, on all devices, and traces three of its steps.
"""

from collections.abc import Iterator
import functools
import json
import pathlib
import shutil
import statistics
import time
from typing import Any

import jax
import numpy as np

from attnres_jax import chips
from attnres_jax import config as config_lib
from attnres_jax import flops
from attnres_jax import sharding
from attnres_jax import train
from attnres_jax import train_state
from attnres_jax.aot import candidates
from attnres_jax.aot import least
from attnres_jax.aot import plan
from attnres_jax.aot import report as report_lib
from experiments.first_hour import budget
from experiments.first_hour import rows as rows_lib
from experiments.first_hour import timing

PART = "training"
_CONFIG = "configs/lm.py:size={size},residual={scheme}"
# A batch for one device; the traced run has one for each.
_FULL = ("medium", {"data.batch_size": 16})
_SHORT = (
  "micro",
  {"data.batch_size": 2, "model.num_layers": 1, "data.sequence_length": 32},
)
_STEPS, _TRACED = 16, (10, 12)
SCHEMES = ("block_attnres", "prenorm")


def tasks(short: bool, folder: pathlib.Path) -> list[budget.Task]:
  """The prediction of two schemes, and a traced run."""
  found = [
    budget.Task(
      PART,
      f"planned step, {scheme}",
      functools.partial(measure, scheme, short),
      15 if short else 240,
      alone=True,
    )
    for scheme in SCHEMES[: 1 if short else 2]
  ]
  call = functools.partial(traced, short, folder)
  found.append(
    budget.Task(PART, "traced run", call, 20 if short else 240, alone=True)
  )
  return found


def config_of(scheme: str, short: bool, rows_of: int = 1, **overrides: Any):
  """The network with a batch for `rows_of` devices."""
  size, fields = _SHORT if short else _FULL
  batch = fields["data.batch_size"] * rows_of
  config = config_lib.load_config(
    _CONFIG.format(size=size, scheme=scheme),
    {"data.batch_size": batch} | overrides,
  )
  return config


def measure(scheme: str, short: bool) -> Iterator[dict[str, str]]:
  """Rows of step time, memory and MFU of one device."""
  devices = jax.devices()[:1]
  kind = devices[0].device_kind
  config = config_of(scheme, short)
  predicted: dict[str, Any] = {}
  note = "prediction: least bytes and FLOPs of its parts"
  if devices[0].platform == "tpu":
    (best, *_), _ = candidates.plans(config, devices)
    config = best.apply(config)
    report = report_lib.make_report(config, devices)
    predicted["peak_bytes"] = report["peak_bytes"]
    predicted["seconds"] = plan.step_seconds(report, chips.CHIPS[kind])
    note = "plan: " + ", ".join(f"{k}={v}" for k, v in best.overrides.items())
  mesh = sharding.make_mesh(config.mesh, devices)
  program = train_state.make_program(config, mesh)
  tokens = config.data.batch_size * config.data.sequence_length
  per_token = flops.flops_per_token(
    config.model, config.data.sequence_length
  ).train
  rates = timing.rates()
  if not predicted:
    needs = least.of_parts(program).values()
    predicted["seconds"] = max(
      per_token * tokens / rates.flops,
      sum(part.moved_bytes or 0.0 for part in needs) / rates.bytes,
    )
  seconds, planned_bytes = _step_seconds(program, 3 if short else 20)
  predicted.setdefault("peak_bytes", planned_bytes)
  case = f"{config.name}, {tokens} tokens"
  make = functools.partial(rows_lib.make, case=case, arm=scheme)
  middle = statistics.median(seconds)
  yield make(
    "step time",
    measured=middle * 1e3,
    spread=(min(seconds) * 1e3, max(seconds) * 1e3),
    unit="ms",
    estimate=predicted["seconds"] * 1e3,
    reason=note,
  )
  yield make(
    "MFU",
    measured=per_token * tokens / middle / rates.flops,
    estimate=per_token * tokens / predicted["seconds"] / rates.flops,
    limit=1.0,
    reason=f"of {rates.flops / 1e12:.3g} TFLOP/s, {rates.source}",
  )
  used = (devices[0].memory_stats() or {}).get("peak_bytes_in_use")
  if used is None:
    reason = "the device does not say how much memory it used"
    yield make("peak memory", status=rows_lib.NOT_HERE, reason=reason)
  else:
    yield make(
      "peak memory",
      measured=used / 2**30,
      unit="GiB",
      estimate=predicted["peak_bytes"] / 2**30,
    )


def _step_seconds(program: Any, rounds: int) -> tuple[list[float], int]:
  """Seconds of each step after the first two, and bytes as compiled."""
  state = program.init_state()
  data = program.config.data
  rng = np.random.default_rng(0)
  shape = data.batch_size, data.sequence_length + 1
  tokens = rng.integers(0, program.config.model.vocab_size, shape)
  batch = sharding.shard_batch(
    {"tokens": tokens.astype(np.int32)}, program.mesh
  )
  step = program.train_step.lower(state, batch).compile()
  memory = step.memory_analysis()
  peak = memory.argument_size_in_bytes + memory.temp_size_in_bytes
  peak += memory.output_size_in_bytes - memory.alias_size_in_bytes
  found = []
  for _ in range(rounds + 2):
    start = time.perf_counter()
    state, metrics = step(state, batch)
    jax.block_until_ready((state, metrics))
    found.append(time.perf_counter() - start)
  return found[2:], peak


def traced(short: bool, folder: pathlib.Path) -> Iterator[dict[str, str]]:
  """Trains by the ordinary loop; rows of its step and of its trace."""
  config = config_of(
    "block_attnres",
    short,
    rows_of=jax.device_count(),
    **{
      "train.steps": _STEPS,
      "train.eval_batches": 1,
      "train.eval_every": 0,
      "train.depth_every": 0,
      "train.profile_steps": _TRACED,
      "optim.warmup_steps": 2,
      "checkpoint.every_steps": 0,
    },
  )
  workdir = folder / "traced"
  shutil.rmtree(workdir, ignore_errors=True)  # Of an attempt that was ended.
  train.train_and_evaluate(config, workdir)
  lines = (workdir / "metrics.jsonl").read_text().splitlines()
  found = [json.loads(line) for line in lines]
  steps = [
    row
    for row in found
    if row.get("split") == "train" and row["step"] < _TRACED[0]
  ]
  # The first steps wait for the compiler.
  seconds = [
    config.data.batch_size
    * config.data.sequence_length
    / row["tokens_per_second"]
    for row in steps[3:]
  ]
  case = f"{config.name}, {jax.device_count()} devices"
  yield rows_lib.make(
    "step of the training loop",
    case,
    "block_attnres",
    measured=statistics.median(seconds) * 1e3,
    spread=(min(seconds) * 1e3, max(seconds) * 1e3),
    unit="ms",
  )
  files = list((workdir / "profile").rglob("*.xplane.pb"))
  size = sum(file.stat().st_size for file in files)
  yield rows_lib.make(
    "trace",
    case,
    "block_attnres",
    measured=size / 1e6,
    unit="MB",
    reason=f"steps {_TRACED[0]} to {_TRACED[1]}: xprof {workdir / 'profile'}",
  )
