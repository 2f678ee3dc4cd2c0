# SPDX-License-Identifier: Apache-2.0
"""What a run is, beside its network: data, loss, optimiser, length, disk."""

import dataclasses
from typing import Literal

from attnres_jax.config import errors
from attnres_jax.config import fields
from attnres_jax.config import model as model_lib

# 256 byte values and one separator between documents.
BYTE_VOCAB_SIZE = 257


@dataclasses.dataclass(frozen=True)
class DataConfig(fields.Checked, prefix="data"):
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
  validation_fraction: fields.Share = 0.05
  text_field: str = "text"
  tokenizer: str = "bytes"
  tokenizer_path: str = ""
  sequence_length: fields.Size = 256
  batch_size: fields.Size = 12
  segment_ids: bool = False
  seed: fields.Seed = 0
  num_threads: fields.Threads = 2

  def __post_init__(self):
    super().__post_init__()
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
class LossConfig(fields.Checked, prefix="loss"):
  """Next-token cross-entropy.

  Attributes:
    z_loss: weight of the squared log-normaliser; 0 for none.
    tile_tokens: tokens whose float32 logits exist at once on a device; 0 takes
      as many as fit in 64 MiB, and 1024 at least.
  """

  z_loss: fields.NotNegative = 0.0
  tile_tokens: fields.Count = 0


@dataclasses.dataclass(frozen=True)
class OptimConfig(fields.Checked, prefix="optim"):
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
  peak_lr: fields.Positive = 1e-3
  warmup_steps: fields.Count = 50
  decay_fraction: fields.Fraction = 0.2
  decay_shape: str = "cosine"
  final_lr_fraction: fields.Fraction = 0.1
  b1: fields.Decay = 0.9
  b2: fields.Decay = 0.95
  eps: fields.Positive = 1e-8
  muon_momentum: fields.Decay = 0.95
  muon_iterations: fields.Iterations = 5
  muon_update_rms: fields.Positive = 0.2
  weight_decay: fields.NotNegative = 0.1
  clip_norm: fields.NotNegative = 1.0
  balance_rate: fields.NotNegative = 1e-3
  accumulate_steps: fields.Size = 1


@dataclasses.dataclass(frozen=True)
class TrainConfig(fields.Checked, prefix="train"):
  """Length of the run and what happens along it.

  Attributes:
    steps: optimiser steps.
    log_every: steps between rows of train metrics.
    eval_every: steps between evaluations; 0 evaluates at the end only.
    eval_batches: batches of one evaluation, always the same ones.
    depth_every: steps between rows of the per-depth series; 0 for none.
    on_nan: a loss or gradient that is not finite ends the run (`stop`) or
      leaves the parameters as they were and counts the step (`skip`).
    max_skipped_share: of all steps; a run of a sweep that skipped more of them
      has failed.
  """

  steps: fields.Size = 400
  log_every: fields.Size = 1
  eval_every: fields.Count = 100
  eval_batches: fields.Size = 8
  depth_every: fields.Count = 50
  on_nan: Literal["stop", "skip"] = "stop"
  max_skipped_share: fields.Fraction = 0.5


@dataclasses.dataclass(frozen=True)
class CheckpointConfig(fields.Checked, prefix="checkpoint"):
  """When checkpoints are written and which are kept.

  Attributes:
    every_steps: steps between saves; 0 saves at the end (and on a signal) only.
    keep_last: newest checkpoints kept.
    keep_every: steps whose multiples are kept for good; 0 for none.
    asynchronous: training goes on while a checkpoint is written.
  """

  every_steps: fields.Count = 100
  keep_last: fields.Size = 3
  keep_every: fields.Count = 0
  asynchronous: bool = True


@dataclasses.dataclass(frozen=True)
class LogConfig(fields.Checked, prefix="log"):
  """Where metrics go besides the console and metrics.jsonl.

  Attributes:
    tensorboard: also write TensorBoard event files (needs tensorboardX).
    wandb_project: also log to this Weights & Biases project; empty for none.
  """

  tensorboard: bool = False
  wandb_project: str = ""


@dataclasses.dataclass(frozen=True)
class MeshConfig(fields.Checked, prefix="mesh"):
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

  stage: fields.Devices = 1
  data: fields.Devices = -1
  fsdp: fields.Devices = 1
  expert: fields.Devices = 1
  tensor: fields.Devices = 1

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
    virtual_stages: chunks of consecutive sublayers that each rank has, a turn
      of the ring apart.
    microbatches: parts of a batch that follow each other; a multiple of
      mesh.stage, and 0 is that many.
    schedule: `fused` runs a forward and a backward in every tick, so that
      memory does not grow with the microbatches (it was called `1f1b`, a word
      that old runs may still use); `gpipe` is autodiff of the forward loop.
    rule: which blocks cross a boundary: all (`naive`), those that the rank has
      not received before (`cached`, the paper's), or also not made (`minimum`).
    gather: when a rank gets the parts of its weights that other devices of
      mesh.fsdp and mesh.expert have: those of a chunk at each `tick`, or all at
      once for a `step`, which sends far less, and holds a rank's weights and
      their float32 gradients whole.
  """

  virtual_stages: fields.Size = 1
  microbatches: fields.Count = 0
  schedule: Literal["fused", "gpipe"] = "fused"
  rule: Literal["naive", "cached", "minimum"] = "minimum"
  gather: Literal["tick", "step"] = "tick"

  def __post_init__(self):
    if self.schedule == "1f1b":
      object.__setattr__(self, "schedule", "fused")
    super().__post_init__()


@dataclasses.dataclass(frozen=True)
class RunConfig(fields.Checked):
  """Everything that determines a run; written beside its checkpoints.

  Attributes:
    name: of the run, for humans.
    seed: of the initial weights.
  """

  name: str = "run"
  seed: fields.Seed = 0
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
    super().__post_init__()
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
