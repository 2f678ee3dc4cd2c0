# SPDX-License-Identifier: Apache-2.0
"""The description of a run except its network: data, loss, optimiser, disk."""

from collections.abc import Mapping
import dataclasses
import math
import re
from typing import Annotated, Any, Literal, Self, TypeVar

from attnres_jax.config import errors
from attnres_jax.config import fields
from attnres_jax.config import model as model_lib

# 256 byte values and one separator between documents.
BYTE_VOCAB_SIZE = 257
_T = TypeVar("_T")
# They also change the program of a step.
BatchShape = Annotated[_T, fields.affects("batches", "step")]
UpdateStep = Annotated[_T, fields.affects("update", "step")]
# A condition of `fields.acts`.
_PIPELINED = fields.Accepted(lambda n: n != 1, "more than 1 by mesh.stage")


@dataclasses.dataclass(frozen=True)
class DataConfig(fields.Checked, prefix="data"):
  """Where tokens come from and how they become batches.

  Attributes:
    source: a key of `attnres_jax.data.sources.SOURCES`: `stdlib` is the source
      code and help topics of the running Python's standard library; the others
      read `path`.
    path: file, folder, glob, or several of them with commas between (local or
      gs://). Where names of files say `train` and `val` or `test` as whole
      words, they decide the split.
    paths: several of these in place of `path`, to be mixed.
    weights: for each of `paths`, its share of the rows; they add up to 1.
    validation_path: the same for validation; empty splits each path by the
      names of its files, or by a hash of each document, or a single text file
      by position, and mixes both splits with the same weights.
    validation_fraction: of documents (of the single text) held out then.
    text_field: the field or column that holds the text (jsonl, parquet).
    tokenizer: a key of `attnres_jax.data.tokenizer.TOKENIZERS`.
    tokenizer_path: its vocabulary file, or a folder with a `tokenizer.json`.
    separator: the special token between documents, such as `<|endoftext|>`;
      empty takes the usual one of the vocabulary.
    sequence_length: T, predicted tokens per row.
    batch_size: rows per optimiser step, over all processes.
    segment_ids: number the documents of a row, so that attention and loss stay
      inside them.
    max_epochs: a run that would pass over its text more often is refused.
    seed: of the global shuffle.
    num_threads: read-ahead threads.
  """

  alternatives = (("path",), ("paths", "weights"))
  source: fields.Text[
    Literal["stdlib", "text", "jsonl", "parquet", "tokens"]
  ] = "stdlib"
  path: fields.Place[fields.Path] = ""
  paths: fields.Place[tuple[fields.Path, ...]] = ()
  weights: fields.Text[tuple[fields.Positive, ...]] = ()
  validation_path: fields.Place[fields.Path] = ""
  validation_fraction: fields.Text[fields.Share] = fields.acts(
    0.05, validation_path=("",)
  )
  text_field: fields.Text[str] = fields.acts(
    "text", source=("jsonl", "parquet")
  )
  tokenizer: fields.Text[Literal["bytes", "hf", "ids"]] = "bytes"
  tokenizer_path: fields.Place[fields.Path] = fields.acts("", tokenizer=("hf",))
  separator: fields.Text[str] = fields.acts("", tokenizer=("hf",))
  sequence_length: BatchShape[fields.Size] = 256
  batch_size: BatchShape[fields.Size] = 12
  segment_ids: BatchShape[bool] = False
  max_epochs: fields.Log[fields.Positive] = 4.0
  seed: fields.Batches[fields.Seed] = 0
  num_threads: fields.Log[fields.Threads] = 2

  def __post_init__(self):
    super().__post_init__()
    self._check_mixture()
    self.require(
      self.source == "stdlib" or self.path or self.paths,
      "path",
      f"a path, with data.source={self.source!r}",
    )
    self.require(
      self.tokenizer in ("bytes", "ids") or self.tokenizer_path,
      "tokenizer_path",
      f"a vocabulary file, with data.tokenizer={self.tokenizer!r}",
    )

  def each_path(self) -> tuple["DataConfig", ...]:
    """A config for each of `paths`; this one without any."""
    return tuple(
      dataclasses.replace(self, path=path, paths=(), weights=())
      for path in self.paths
    ) or (self,)

  def _check_mixture(self):
    number = len(self.paths)
    self.require(not (number and self.path), "path", "nothing, with data.paths")
    self.require(
      len(self.weights) == number,
      "weights",
      f"a number for each of the {number} data.paths",
    )
    is_1 = not self.weights or abs(sum(self.weights) - 1) <= 1e-6
    self.require(is_1, "weights", "numbers that add up to 1")


@dataclasses.dataclass(frozen=True)
class LossConfig(fields.Checked, prefix="loss"):
  """Next-token cross-entropy.

  Attributes:
    z_loss: weight of the squared log-normaliser; 0 for none.
    tile_tokens: tokens whose float32 logits exist at the same time on a device;
      0 for as many as fit in 64 MiB, but at least 4096.
  """

  z_loss: UpdateStep[fields.NotNegative] = 0.0
  tile_tokens: fields.Execution[fields.Count] = 0


def _check_pattern(field: str, value: tuple[str, ...], pattern: str) -> None:
  try:
    re.compile(pattern)
  except re.error as error:
    errors.fail(field, value, f"regular expressions ({error} in {pattern!r})")


@dataclasses.dataclass(frozen=True)
class OptimConfig(fields.Checked, prefix="optim"):
  """AdamW or Muon, with a schedule.

  Attributes:
    name: a key of `attnres_jax.optimizer.OPTIMIZERS`.
    schedule: a key of `attnres_jax.optimizer.schedules.SCHEDULES`.
    peak_lr: learning rate after warm-up.
    warmup_steps: linear, from 0.
    decay_fraction: fraction of all steps, at the end, in which a `wsd` rate
      decays.
    decay_shape: shape of that decay, a key of `...schedules.DECAY_SHAPES`.
    final_lr_fraction: learning rate at the last step, as a fraction of the
      peak.
    b1: decay of AdamW's first moment.
    b2: decay of AdamW's second moment.
    eps: added to the root of the second moment.
    muon_momentum: momentum of matrices.
    muon_iterations: Newton-Schulz iterations.
    muon_update_rms: root mean square of an exactly orthogonalised update, as a
      fraction of the learning rate.
    weight_decay: decoupled; `attnres_jax.optimizer` says for which
      parameters.
    clip_norm: of the whole gradient; 0 for none.
    qk_clip: largest attention logit, above which a head's weights of queries
      and keys are scaled down (`attnres_jax.optimizer.qk_clip`); 0 for none.
    balance_rate: step size of the experts' selection biases; 0 while a `wsd`
      rate decays.
    freeze: regular expressions; parameters in whose names one is found are not
      trained (`attnres_jax.optimizer.groups`).
    rates: the same with factors of the rate, such as `^residual/=10`; the first
      one that is found counts.
    accumulate_steps: microbatches per optimiser step; divides data.batch_size.
      0 for the plan of this config and these devices, with its mesh and
      `model.remat` (`attnres_jax.common.plans`).
  """

  name: UpdateStep[str] = "adamw"
  schedule: fields.Update[Literal["constant", "linear", "cosine", "wsd"]] = (
    "cosine"
  )
  peak_lr: fields.Update[fields.Positive] = 1e-3
  warmup_steps: fields.Update[fields.Count] = 50
  decay_fraction: fields.Update[fields.Fraction] = fields.acts(
    0.2, schedule=("wsd",)
  )
  decay_shape: fields.Update[str] = "cosine"
  final_lr_fraction: fields.Update[fields.Fraction] = fields.acts(
    0.1, schedule=("linear", "cosine", "wsd")
  )
  b1: fields.Update[fields.Decay] = 0.9
  b2: fields.Update[fields.Decay] = 0.95
  eps: fields.Update[fields.Positive] = 1e-8
  muon_momentum: fields.Update[fields.Decay] = fields.acts(0.95, name=("muon",))
  muon_iterations: fields.Update[fields.Iterations] = fields.acts(
    5, name=("muon",)
  )
  muon_update_rms: fields.Update[fields.Positive] = fields.acts(
    0.2, name=("muon",)
  )
  weight_decay: fields.Update[fields.NotNegative] = 0.1
  clip_norm: fields.Update[fields.NotNegative] = 1.0
  qk_clip: UpdateStep[fields.NotNegative] = 0.0
  balance_rate: fields.Update[fields.NotNegative] = 1e-3
  freeze: fields.Update[tuple[str, ...]] = ()
  rates: fields.Update[tuple[str, ...]] = ()
  accumulate_steps: fields.Execution[fields.Count] = 1

  def __post_init__(self):
    super().__post_init__()
    for pattern in self.freeze:
      _check_pattern("optim.freeze", self.freeze, pattern)
    for rate in self.rates:
      pattern, equals, factor = rate.rpartition("=")
      try:
        is_factor = bool(equals) and 0 < float(factor) < math.inf
      except ValueError:
        is_factor = False
      self.require(
        is_factor,
        "rates",
        "patterns with factors above 0, such as ('^residual/=10',)",
      )
      _check_pattern("optim.rates", self.rates, pattern)


@dataclasses.dataclass(frozen=True)
class TrainConfig(fields.Checked, prefix="train"):
  """The length of the run and what happens during it.

  Attributes:
    steps: optimiser steps.
    start_from: folder of a finished run of the same network, or one of a run's
      checkpoints, whose weights and optimiser state this run begins with; empty
      for new weights.
    log_every: steps between rows of train metrics.
    eval_every: steps between evaluations; 0 to evaluate at the end only.
    eval_batches: batches of the evaluation at the end, always the same.
    eval_sample: batches of an evaluation before the end, if fewer than
      `eval_batches`; 0 for all of them.
    depth_every: steps between rows of the per-depth series; 0 for none.
    on_nan: whether a loss or gradient that is not finite ends the run (`stop`)
      or leaves the parameters unchanged and counts the step (`skip`).
    max_skipped_share: fraction of all steps; a run of a sweep fails if it skips
      more.
    average_last: fraction of all steps, at the end, whose weights are averaged;
      evaluations and commands then use the average. 0 for none.
    profile_steps: first and last step, counted from 1, of which the run writes
      a trace to WORKDIR/profile, for XProf; empty for none.
    compiler_options: of XLA, such as ("xla_flag=value",), for the training
      step; on top of `attnres_jax.common.compiler.OPTIONS`.
  """

  steps: fields.Update[fields.Size] = 400
  start_from: fields.Draw[fields.Path] = ""
  log_every: fields.Log[fields.Size] = 1
  eval_every: fields.Log[fields.Count] = 100
  eval_batches: fields.Batches[fields.Size] = 8
  eval_sample: fields.Batches[fields.Count] = 0
  depth_every: fields.Log[fields.Count] = 50
  on_nan: fields.Log[Literal["stop", "skip"]] = "stop"
  max_skipped_share: fields.Log[fields.Fraction] = fields.acts(
    0.5, on_nan=("skip",)
  )
  average_last: UpdateStep[fields.Fraction] = 0.0
  profile_steps: fields.Log[tuple[int, ...]] = ()
  compiler_options: fields.Execution[tuple[str, ...]] = ()

  def __post_init__(self):
    super().__post_init__()
    steps = self.profile_steps
    self.require(
      not steps or (len(steps) == 2 and 1 <= steps[0] <= steps[1]),
      "profile_steps",
      "() or two steps, such as (10, 12)",
    )
    self.require(
      all(re.fullmatch(r"\w+=.+", o) for o in self.compiler_options),
      "compiler_options",
      "options with values, such as ('xla_flag=value',)",
    )


@dataclasses.dataclass(frozen=True)
class CheckpointConfig(fields.Checked, prefix="checkpoint"):
  """When checkpoints are written and which are kept.

  Attributes:
    every_steps: steps between saves; 0 to save at the end (and on a signal)
      only.
    keep_last: newest checkpoints kept.
    keep_every: checkpoints at multiples of this step are kept forever; 0 for
      none.
    asynchronous: training continues while a checkpoint is written.
  """

  every_steps: fields.Log[fields.Count] = 100
  keep_last: fields.Log[fields.Size] = 3
  keep_every: fields.Log[fields.Count] = 0
  asynchronous: fields.Log[bool] = True


@dataclasses.dataclass(frozen=True)
class MeshConfig(fields.Checked, prefix="mesh"):
  """How the devices are arranged; see `attnres_jax.common.sharding`.

  At most one axis may be -1, which takes all remaining devices.

  Attributes:
    stage: ranks of a pipeline over the depth, see `PipelineConfig`.
    data: copies of the parameters, each with different rows.
    fsdp: shards of the parameters and optimiser state, each with different
      rows; gathered where they are used.
    expert: groups of experts, each with different rows.
    tensor: shards of every matrix that work on the same rows.
  """

  stage: fields.Execution[fields.Devices] = 1
  data: fields.Execution[fields.Devices] = -1
  fsdp: fields.Execution[fields.Devices] = 1
  expert: fields.Execution[fields.Devices] = 1
  tensor: fields.Execution[fields.Devices] = 1

  def __post_init__(self):
    super().__post_init__()
    filled = [name for name, size in vars(self).items() if size == -1]
    if len(filled) > 1:
      errors.fail(
        f"mesh.{filled[-1]}",
        -1,
        f"a number of devices, since mesh.{filled[0]} is -1",
      )


@dataclasses.dataclass(frozen=True)
class PipelineConfig(fields.Checked, prefix="pipeline"):
  """How the ranks of `mesh.stage` share the depth and the batch.

  Attributes:
    virtual_stages: chunks of consecutive sublayers per rank, one turn of the
      ring apart.
    microbatches: parts of a batch, one after the other; a multiple of
      mesh.stage, or 0 for mesh.stage.
    schedule: `fused` runs a forward and a backward in every tick, so that
      memory does not grow with the number of microbatches; `gpipe` is autodiff
      of the forward loop.
    rule: which blocks cross a boundary: all (`naive`), blocks that the rank has
      not received before (`cached`, as in the paper), or blocks that it has
      neither received nor computed (`minimum`).
    gather: when a rank gathers its weights from the other devices of mesh.fsdp
      and mesh.expert. `tick` gathers a chunk's weights whenever it runs. `step`
      gathers all at once, which sends far less but holds a rank's whole weights
      and their float32 gradients.
  """

  virtual_stages: fields.Execution[fields.Size] = 1
  microbatches: fields.Execution[fields.Count] = 0
  schedule: fields.Execution[Literal["fused", "gpipe"]] = "fused"
  rule: fields.Execution[Literal["naive", "cached", "minimum"]] = "minimum"
  gather: fields.Execution[Literal["tick", "step"]] = "tick"


@dataclasses.dataclass(frozen=True)
class RunConfig(fields.Checked):
  """Everything that determines a run; saved in its folder.

  Attributes:
    name: of the run, for readers.
    seed: of the initial weights.
  """

  name: fields.Log[str] = "run"
  seed: fields.Draw[fields.Seed] = 0
  model: model_lib.ModelConfig = model_lib.ModelConfig()
  data: DataConfig = DataConfig()
  loss: LossConfig = LossConfig()
  optim: OptimConfig = OptimConfig()
  train: TrainConfig = TrainConfig()
  checkpoint: CheckpointConfig = CheckpointConfig()
  mesh: MeshConfig = MeshConfig()
  pipeline: PipelineConfig = fields.acts(PipelineConfig(), stages=_PIPELINED)

  def __post_init__(self):
    super().__post_init__()
    parts = self.optim.accumulate_steps
    self.optim.require(
      not parts or self.data.batch_size % parts == 0,
      "accumulate_steps",
      f"a divisor of data.batch_size={self.data.batch_size}",
    )
    # What adds small numbers to weights needs them in float32.
    is_wide = self.model.parameter_dtype == "float32"
    for prevents, why in (
      (self.train.average_last, "train.average_last"),
      (self.optim.qk_clip, "optim.qk_clip"),
      (self.mesh.stage != 1, "a pipeline (mesh.stage)"),
    ):
      accepted = f"'float32' with {why}"
      self.model.require(is_wide or not prevents, "parameter_dtype", accepted)

  @classmethod
  def of_values(
    cls, values: Mapping[str, Any], prefix: str = "config."
  ) -> Self:
    """The run that config.json describes."""
    # Older runs have a part `log`, of loggers.
    described = {name: values[name] for name in values if name != "log"}
    run = super().of_values(described, prefix)
    is_bytes = run.data.tokenizer == "bytes"
    return run.with_vocab_size(BYTE_VOCAB_SIZE) if is_bytes else run

  @property
  def stages(self) -> int:
    """Ranks of a pipeline; 0 if a plan will say."""
    return self.mesh.stage if self.optim.accumulate_steps else 0

  def with_vocab_size(self, vocab_size: int) -> Self:
    """This run with the tokenizer's vocabulary size filled in.

    Raises:
      ConfigError: the config names a vocabulary smaller than the tokenizer's.
    """
    if self.model.vocab_size >= vocab_size:
      return self
    self.model.require(
      not self.model.vocab_size,
      "vocab_size",
      f"at least the tokenizer's {vocab_size} (or 0 to take it)",
    )
    model = dataclasses.replace(self.model, vocab_size=vocab_size)
    return dataclasses.replace(self, model=model)
