# SPDX-License-Identifier: Apache-2.0
"""What a run is, beside its network: data, loss, optimiser, length, disk."""

import dataclasses

from attnres_jax.config import errors
from attnres_jax.config import model as model_lib

# 256 byte values and one separator between documents.
BYTE_VOCAB_SIZE = 257


@dataclasses.dataclass(frozen=True)
class DataConfig:
  """Where tokens come from and how they become batches.

  Attributes:
    source: a key of `attnres_jax.data.sources.SOURCES`: `stdlib` is the running
      Python's own library sources and help topics; the others read `path`.
    path: file, folder or glob of the training split (local or gs://).
    validation_path: the same for validation; empty splits `path` by a hash of
      each document.
    validation_fraction: of documents held out where a source is split by hash.
    text_field: the field or column that holds the text (jsonl, parquet).
    tokenizer: a key of `attnres_jax.data.tokenizer.TOKENIZERS`.
    tokenizer_path: its vocabulary file, where it needs one.
    sequence_length: T, predicted tokens per row.
    batch_size: rows per optimiser step, over all processes.
    segment_ids: number the documents of a row, so that attention and loss stay
      inside them.
    seed: of the global shuffle.
    num_threads: read-ahead threads.
  """

  source: str = "stdlib"
  path: str = ""
  validation_path: str = ""
  validation_fraction: float = 0.05
  text_field: str = "text"
  tokenizer: str = "bytes"
  tokenizer_path: str = ""
  sequence_length: int = 256
  batch_size: int = 12
  segment_ids: bool = False
  seed: int = 0
  num_threads: int = 2

  def __post_init__(self):
    errors.check_positive("data", self, "sequence_length", "batch_size")
    errors.check_not_negative("data", self, "num_threads")
    errors.check(
      0 < self.validation_fraction < 1,
      "data.validation_fraction",
      self.validation_fraction,
      "a number between 0 and 1",
    )
    if self.source != "stdlib" and not self.path:
      errors.fail(
        "data.path", self.path, f"a path, with data.source={self.source!r}"
      )
    if self.tokenizer not in ("bytes", "ids") and not self.tokenizer_path:
      errors.fail(
        "data.tokenizer_path",
        self.tokenizer_path,
        f"a vocabulary file, with data.tokenizer={self.tokenizer!r}",
      )


@dataclasses.dataclass(frozen=True)
class LossConfig:
  """Next-token cross-entropy.

  Attributes:
    z_loss: weight of the squared log-normaliser; 0 for none.
    tile_tokens: tokens whose float32 logits exist at once on a device; 0 takes
      as many as fit in 64 MiB, and 1024 at least.
  """

  z_loss: float = 0.0
  tile_tokens: int = 0

  def __post_init__(self):
    errors.check_not_negative("loss", self, "z_loss", "tile_tokens")


@dataclasses.dataclass(frozen=True)
class OptimConfig:
  """AdamW or Muon, with a schedule.

  Attributes:
    name: a key of `attnres_jax.optimizer.OPTIMIZERS`.
    schedule: a key of `attnres_jax.optimizer.schedules.SCHEDULES`.
    peak_lr: learning rate after warm-up.
    warmup_steps: linear, from 0.
    decay_fraction: of all steps, at the end, in which a `wsd` rate decays.
    decay_shape: of that decay, a key of `...schedules.DECAY_SHAPES`.
    final_lr_fraction: learning rate at the last step, as a part of the peak.
    b1: decay of AdamW's first moment.
    b2: decay of AdamW's second moment.
    eps: added to the root of the second moment.
    muon_momentum: of matrices.
    muon_iterations: of Newton and Schulz.
    muon_update_rms: root mean square of a matrix's update, as a part of the
      learning rate, were it orthogonalised exactly.
    weight_decay: decoupled, on what `attnres_jax.optimizer.groups` says.
    clip_norm: of the whole gradient; 0 for none.
    balance_rate: step of the experts' selection biases, 0 while a `wsd` rate
      decays.
    accumulate_steps: microbatches per optimiser step; divides data.batch_size.
  """

  name: str = "adamw"
  schedule: str = "cosine"
  peak_lr: float = 1e-3
  warmup_steps: int = 50
  decay_fraction: float = 0.2
  decay_shape: str = "cosine"
  final_lr_fraction: float = 0.1
  b1: float = 0.9
  b2: float = 0.95
  eps: float = 1e-8
  muon_momentum: float = 0.95
  muon_iterations: int = 5
  muon_update_rms: float = 0.2
  weight_decay: float = 0.1
  clip_norm: float = 1.0
  balance_rate: float = 1e-3
  accumulate_steps: int = 1

  def __post_init__(self):
    errors.check_positive(
        "optim", self, "peak_lr", "eps", "muon_iterations", "muon_update_rms",
        "accumulate_steps",
    )  # fmt: skip
    errors.check_not_negative(
        "optim", self, "warmup_steps", "weight_decay", "clip_norm",
        "balance_rate",
    )  # fmt: skip
    for name in (
        "b1", "b2", "muon_momentum", "decay_fraction", "final_lr_fraction",
    ):  # fmt: skip
      value = getattr(self, name)
      errors.check(
        0 <= value <= 1, f"optim.{name}", value, "a number from 0 to 1"
      )


@dataclasses.dataclass(frozen=True)
class TrainConfig:
  """Length of the run and what happens along it.

  Attributes:
    steps: optimiser steps.
    log_every: steps between rows of train metrics.
    eval_every: steps between evaluations; 0 evaluates at the end only.
    eval_batches: batches of one evaluation, always the same ones.
    depth_every: steps between rows of the per-depth series; 0 for none.
    on_nan: a loss or gradient that is not finite ends the run (`stop`) or
      leaves the parameters as they were and counts the step (`skip`).
  """

  steps: int = 400
  log_every: int = 1
  eval_every: int = 100
  eval_batches: int = 8
  depth_every: int = 50
  on_nan: str = "stop"

  def __post_init__(self):
    errors.check_positive("train", self, "steps", "log_every", "eval_batches")
    errors.check_not_negative("train", self, "eval_every", "depth_every")
    errors.check_in("train.on_nan", self.on_nan, ("stop", "skip"))


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
  """When checkpoints are written and which are kept.

  Attributes:
    every_steps: steps between saves; 0 saves at the end (and on a signal) only.
    keep_last: newest checkpoints kept.
    keep_every: steps whose multiples are kept for good; 0 for none.
    asynchronous: training goes on while a checkpoint is written.
  """

  every_steps: int = 100
  keep_last: int = 3
  keep_every: int = 0
  asynchronous: bool = True

  def __post_init__(self):
    errors.check_positive("checkpoint", self, "keep_last")
    errors.check_not_negative("checkpoint", self, "every_steps", "keep_every")


@dataclasses.dataclass(frozen=True)
class LogConfig:
  """Where metrics go besides the console and metrics.jsonl.

  Attributes:
    tensorboard: also write TensorBoard event files (needs tensorboardX).
    wandb_project: also log to this Weights & Biases project; empty for none.
  """

  tensorboard: bool = False
  wandb_project: str = ""


@dataclasses.dataclass(frozen=True)
class MeshConfig:
  """How the devices are laid out; see `attnres_jax.sharding`.

  One axis at most may be -1, which takes the devices that the others leave.

  Attributes:
    stage: ranks of a pipeline over the depth, see `PipelineConfig`.
    data: copies of the parameters, each with rows of its own.
    fsdp: parts of the parameters and optimiser state, each with rows of its
      own; gathered where they are used.
    expert: parts of the experts, each with rows of its own.
    tensor: parts of every matrix that work on the same rows.
  """

  stage: int = 1
  data: int = -1
  fsdp: int = 1
  expert: int = 1
  tensor: int = 1

  def __post_init__(self):
    names = [field.name for field in dataclasses.fields(self)]
    for name in names:
      size = getattr(self, name)
      errors.check(
        size == -1 or size > 0,
        f"mesh.{name}",
        size,
        "a number of devices, or -1 for all",
      )
    filled = [name for name in names if getattr(self, name) == -1]
    errors.check(
      len(filled) <= 1,
      f"mesh.{filled[-1] if filled else ''}",
      -1,
      f"a number of devices, since mesh.{filled[0] if filled else ''} is -1",
    )


@dataclasses.dataclass(frozen=True)
class PipelineConfig:
  """How the ranks of `mesh.stage` share the depth and the batch.

  Attributes:
    virtual_stages: chunks of consecutive sublayers that each rank has, a turn
      of the ring apart.
    microbatches: parts of a batch that follow each other; a multiple of
      mesh.stage, and 0 is that many.
    schedule: `1f1b` interleaves forward and backward, so that memory does not
      grow with the microbatches; `gpipe` is autodiff of the forward loop.
    rule: which blocks cross a boundary: all (`naive`), those that the rank has
      not received before (`cached`, the paper's), or also not made (`minimum`).
    gather: when a rank gets the parts of its weights that other devices of
      mesh.fsdp and mesh.expert have: those of a chunk at each `tick`, or all at
      once for a `step`, which sends far less, and holds a rank's weights and
      their float32 gradients whole.
  """

  virtual_stages: int = 1
  microbatches: int = 0
  schedule: str = "1f1b"
  rule: str = "minimum"
  gather: str = "tick"

  def __post_init__(self):
    errors.check_positive("pipeline", self, "virtual_stages")
    errors.check_not_negative("pipeline", self, "microbatches")
    errors.check_in("pipeline.schedule", self.schedule, ("1f1b", "gpipe"))
    errors.check_in("pipeline.rule", self.rule, ("naive", "cached", "minimum"))
    errors.check_in("pipeline.gather", self.gather, ("tick", "step"))


@dataclasses.dataclass(frozen=True)
class RunConfig:
  """Everything that determines a run; written beside its checkpoints.

  Attributes:
    name: of the run, for humans.
    seed: of the initial weights.
  """

  name: str = "run"
  seed: int = 0
  model: model_lib.ModelConfig = model_lib.ModelConfig()
  data: DataConfig = DataConfig()
  loss: LossConfig = LossConfig()
  optim: OptimConfig = OptimConfig()
  train: TrainConfig = TrainConfig()
  checkpoint: CheckpointConfig = CheckpointConfig()
  log: LogConfig = LogConfig()
  mesh: MeshConfig = MeshConfig()
  pipeline: PipelineConfig = PipelineConfig()

  def __post_init__(self):
    if self.data.batch_size % self.optim.accumulate_steps:
      errors.fail(
        "optim.accumulate_steps",
        self.optim.accumulate_steps,
        f"a divisor of data.batch_size={self.data.batch_size}",
      )

  def with_vocab_size(self, vocab_size: int) -> "RunConfig":
    """The same run with the tokenizer's vocabulary filled in.

    Raises:
      ConfigError: the config names a vocabulary smaller than the tokenizer's.
    """
    if self.model.vocab_size >= vocab_size:
      return self
    if self.model.vocab_size:
      errors.fail(
        "model.vocab_size",
        self.model.vocab_size,
        f"at least the tokenizer's {vocab_size} (or 0 to take it)",
      )
    model = dataclasses.replace(self.model, vocab_size=vocab_size)
    return dataclasses.replace(self, model=model)
