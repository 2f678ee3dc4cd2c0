# SPDX-License-Identifier: Apache-2.0
"""Analyses a trained network once and keeps the result in its run."""

import contextlib
import dataclasses
import json
import pathlib
from typing import Any

import numpy as np

from attnres_jax import analysis
from attnres_jax import data
from attnres_jax.common import files
from attnres_jax.common import sharding
from attnres_jax.inference import sample
from attnres_jax.train import checkpoint
from attnres_jax.train import evaluate
from attnres_jax.train import train_state

_BATCHES = 2
_SAMPLE_TOKENS = 240
# More batches than a validation split has.
_EVERYTHING = 100_000


@dataclasses.dataclass(frozen=True)
class Look:
  """The analysis of one run.

  Attributes:
    validation: `loss` in nats per token, `bits_per_byte` and `tokens` of the
      whole validation split.
    depth_weights: of schemes that attend over depth, else None.
    magnitudes: one per validation batch, averaged.
    prompt: the start of the sample.
    sample: the text that the network generated; empty if none was requested.
  """

  validation: dict[str, float]
  depth_weights: analysis.DepthWeights | None
  magnitudes: analysis.Magnitudes
  prompt: str
  sample: str


def inspect_once(
  run: pathlib.Path, prompt: str, *, with_sample: bool = True
) -> Look:
  """Analyses a finished run, or reads the result of an earlier call."""
  file = run / "inspection.json"
  # A damaged file is written again.
  with contextlib.suppress(OSError, ValueError, TypeError, LookupError):
    look = _from_json(json.loads(file.read_text()))
    if look.prompt == prompt and bool(look.sample) == with_sample:
      return look
  look = inspect_run(run, prompt, with_sample=with_sample)
  values = dataclasses.asdict(look)
  files.write(file, json.dumps(values, default=lambda array: array.tolist()))
  return look


def inspect_run(
  run: pathlib.Path, prompt: str, *, with_sample: bool = True
) -> Look:
  """Loads the newest checkpoint and runs it on validation text."""
  config, model = checkpoint.load_model(run)
  dataset = data.open_dataset(config.data, "validation")
  mesh = sharding.make_mesh(config.mesh)
  tokenizer = data.make_tokenizer(config.data)
  whole = dataclasses.replace(config.train, eval_batches=_EVERYTHING)
  evaluator = evaluate.Evaluator(
    dataclasses.replace(config, train=whole),
    dataset,
    mesh,
    train_state.make_program(config, mesh).eval_step,
    tokenizer.separator_id,
  )
  batches = dataset.batches()
  tokens = [next(batches)["tokens"] for _ in range(_BATCHES)]
  batches.close()
  weights = None
  if model.residual.source_labels() is not None:
    weights = analysis.depth_weights(model, tokens[0][:, :-1])
  text = ""
  if with_sample:
    text = sample.sample_text(
      model,
      tokenizer,
      prompt,
      num_tokens=_SAMPLE_TOKENS,
    )
  measured = [analysis.magnitudes(model, batch) for batch in tokens]
  return Look(evaluator(model), weights, _mean(measured), prompt, text)


def _mean(several: list[analysis.Magnitudes]) -> analysis.Magnitudes:
  def mean(field: str) -> Any:
    return np.mean([getattr(m, field) for m in several], axis=0)

  fields = dataclasses.fields(analysis.Magnitudes)
  return analysis.Magnitudes(**{f.name: mean(f.name) for f in fields})


def _from_json(values: dict[str, Any]) -> Look:
  weights = values["depth_weights"]
  return Look(
    validation=values["validation"],
    depth_weights=weights and analysis.DepthWeights(**_arrays(weights)),
    magnitudes=analysis.Magnitudes(**_arrays(values["magnitudes"])),
    prompt=values["prompt"],
    sample=values["sample"],
  )


def _arrays(values: dict[str, Any]) -> dict[str, Any]:
  """Lists of names become tuples, lists of numbers arrays."""
  return {
    name: value
    if not isinstance(value, list)
    else tuple(value)
    if isinstance(value[0], str)
    else np.asarray(value, np.float64)
    for name, value in values.items()
  }
