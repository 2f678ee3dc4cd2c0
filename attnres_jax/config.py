# SPDX-License-Identifier: Apache-2.0
"""What a run is: a locked ConfigDict outside, frozen dataclasses inside.

A file in `configs/` returns a `ConfigDict` (`get_config(arg)`), users override
fields on the command line, and `build_run_config` turns the result once into a
`RunConfig`. Every dataclass checks itself when it is built, so a bad value
stops a run before anything compiles, with one line that names the field, the
value and what is accepted. Values derived from others (head width, number of
blocks) are computed from these fields at the place of use: overrides arrive
after `get_config` has returned.

This module is a leaf: it imports neither JAX nor anything else of the package.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import difflib
import importlib.util
import json
import pathlib
import types
from typing import Any, NoReturn, TypeVar, get_type_hints

import ml_collections

T = TypeVar("T")

# 256 byte values and one separator between documents.
BYTE_VOCAB_SIZE = 257


class ConfigError(ValueError):
  """A field of the configuration holds a value that cannot be used."""


def fail(field: str, value: Any, accepted: str) -> NoReturn:
  """Raises the one-line error every bad field gets."""
  raise ConfigError(f"config.{field}: got {value!r}, expected {accepted}")


def choose(field: str, name: str, table: Mapping[str, T]) -> T:
  """Looks `name` up in a registry, or says which names there are."""
  if name not in table:
    hint = difflib.get_close_matches(name, table, n=1)
    suffix = f" (did you mean {hint[0]!r}?)" if hint else ""
    fail(field, name, "one of " + ", ".join(sorted(table)) + suffix)
  return table[name]


def _check(ok: bool, field: str, value: Any, accepted: str) -> None:
  if not ok:
    fail(field, value, accepted)


def _check_in(field: str, value: str, names: Sequence[str]) -> None:
  choose(field, value, dict.fromkeys(names))


def _check_positive(prefix: str, config: Any, *names: str) -> None:
  for name in names:
    value = getattr(config, name)
    _check(value > 0, f"{prefix}.{name}", value, "a number above 0")


def _check_not_negative(prefix: str, config: Any, *names: str) -> None:
  for name in names:
    value = getattr(config, name)
    _check(value >= 0, f"{prefix}.{name}", value, "a number of at least 0")


@dataclasses.dataclass(frozen=True)
class ResidualConfig:
  """Which residual scheme connects the sublayers, and its shape.

  Attributes:
    name: a key of `attnres_jax.models.residuals.RESIDUALS`.
    block_size: sublayers per block of Block AttnRes (S; attention and MLP count
      one each). 0 derives it from `num_blocks`.
    num_blocks: blocks of Block AttnRes (N), realised as S = ceil(L / N). Give
      this or `block_size`, not both.
    form: `two_phase` batches the queries of a block over the completed sources
      and merges the open one (Alg. 1); `one_softmax` is the definition.
    schedule_size: sublayers that share one phase 1 in Full AttnRes. Pure
      scheduling: the function does not depend on it.
  """

  name: str = "block_attnres"
  block_size: int = 0
  num_blocks: int = 0
  form: str = "two_phase"
  schedule_size: int = 6

  def __post_init__(self):
    _check_not_negative("model.residual", self, "block_size", "num_blocks")
    _check_positive("model.residual", self, "schedule_size")
    _check_in("model.residual.form", self.form, ("two_phase", "one_softmax"))
    if self.block_size and self.num_blocks:
      fail(
        "model.residual.num_blocks",
        self.num_blocks,
        f"0 when block_size is given (block_size is {self.block_size})",
      )

  def sublayers_per_block(self, num_sublayers: int) -> int:
    """S, given L: `block_size`, or ceil(L / `num_blocks`)."""
    if self.block_size:
      return min(self.block_size, num_sublayers)
    if not self.num_blocks:
      fail(
        "model.residual.block_size",
        0,
        "sublayers per block (or num_blocks above 0)",
      )
    return -(-num_sublayers // self.num_blocks)


@dataclasses.dataclass(frozen=True)
class ModelConfig:
  """A decoder-only transformer.

  Attributes:
    vocab_size: rows of the embedding; 0 takes the tokenizer's.
    width: D, the model width.
    num_layers: transformer blocks; L = 2 * num_layers sublayers.
    num_heads: query heads.
    num_kv_heads: key/value heads; 0 means as many as query heads.
    head_width: width of a head; 0 means width / num_heads.
    mlp_width: hidden width of the SwiGLU MLP; 0 means 8/3 width, rounded up to
      a multiple of 32.
    rope_theta: base of the rotary positions; 0 for none.
    norm_eps: added to the mean square in every RMSNorm, depth attention's too.
    tie_embeddings: the head is the transposed embedding table.
    logit_soft_cap: logits become cap * tanh(logits / cap); 0 for none.
    init_std: standard deviation of the normal initialisation of matrices.
    dtype: of activations; master weights are always float32.
    remat: what a sublayer keeps for backward. `none`: what autodiff wants;
      `full`: its running input only (spec: one vector per sublayer plus each
      block once); `dots`: that and the results of matrix products.
    scan_layers: one `lax.scan` over the transformer blocks that share a depth
      block, rather than a Python loop: smaller programs, same function.
    residual: the scheme that connects the sublayers.
  """

  vocab_size: int = 0
  width: int = 128
  num_layers: int = 8
  num_heads: int = 4
  num_kv_heads: int = 0
  head_width: int = 0
  mlp_width: int = 0
  rope_theta: float = 10_000.0
  norm_eps: float = 1e-6
  tie_embeddings: bool = False
  logit_soft_cap: float = 0.0
  init_std: float = 0.02
  dtype: str = "float32"
  remat: str = "none"
  scan_layers: bool = True
  residual: ResidualConfig = ResidualConfig()

  def __post_init__(self):
    _check_positive(
        "model", self, "width", "num_layers", "num_heads", "norm_eps",
        "init_std",
    )  # fmt: skip
    _check_not_negative(
        "model", self, "vocab_size", "num_kv_heads", "head_width", "mlp_width",
        "rope_theta", "logit_soft_cap",
    )  # fmt: skip
    _check_in("model.dtype", self.dtype, ("float32", "bfloat16"))
    _check_in("model.remat", self.remat, ("none", "full", "dots"))
    if not self.head_width and self.width % self.num_heads:
      fail(
        "model.num_heads",
        self.num_heads,
        f"a divisor of model.width={self.width}, or an explicit"
        " model.head_width",
      )
    if self.num_heads % self.kv_heads:
      fail(
        "model.num_kv_heads",
        self.num_kv_heads,
        f"a divisor of model.num_heads={self.num_heads}",
      )
    if self.rope_theta and self.head_size % 2:
      fail(
        "model.head_width",
        self.head_size,
        "an even number with rotary positions (or model.rope_theta=0)",
      )

  @property
  def num_sublayers(self) -> int:
    """L: a mixer and an MLP per transformer block."""
    return 2 * self.num_layers

  @property
  def kv_heads(self) -> int:
    return self.num_kv_heads or self.num_heads

  @property
  def head_size(self) -> int:
    return self.head_width or self.width // self.num_heads

  @property
  def mlp_size(self) -> int:
    return self.mlp_width or 32 * -(-8 * self.width // (3 * 32))


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
    _check_positive("data", self, "sequence_length", "batch_size")
    _check_not_negative("data", self, "num_threads")
    _check(
      0 < self.validation_fraction < 1,
      "data.validation_fraction",
      self.validation_fraction,
      "a number between 0 and 1",
    )
    if self.source != "stdlib" and not self.path:
      fail("data.path", self.path, f"a path, with data.source={self.source!r}")
    if self.tokenizer not in ("bytes", "ids") and not self.tokenizer_path:
      fail(
        "data.tokenizer_path",
        self.tokenizer_path,
        f"a vocabulary file, with data.tokenizer={self.tokenizer!r}",
      )


@dataclasses.dataclass(frozen=True)
class LossConfig:
  """Next-token cross-entropy.

  Attributes:
    z_loss: weight of the squared log-normaliser; 0 for none.
    tile_tokens: tokens whose float32 logits exist at once; 0 takes as many as
      fit in 64 MiB.
  """

  z_loss: float = 0.0
  tile_tokens: int = 0

  def __post_init__(self):
    _check_not_negative("loss", self, "z_loss", "tile_tokens")


@dataclasses.dataclass(frozen=True)
class OptimConfig:
  """AdamW with a schedule.

  Attributes:
    name: a key of `attnres_jax.optimizer.OPTIMIZERS`.
    schedule: a key of `attnres_jax.optimizer.SCHEDULES`.
    peak_lr: learning rate after warm-up.
    warmup_steps: linear, from 0.
    final_lr_fraction: learning rate at the last step, as a part of the peak.
    b1: decay of the first moment.
    b2: decay of the second moment.
    eps: added to the root of the second moment.
    weight_decay: decoupled, on every parameter but the pseudo-queries.
    clip_norm: of the whole gradient; 0 for none.
    accumulate_steps: microbatches per optimiser step; divides data.batch_size.
  """

  name: str = "adamw"
  schedule: str = "cosine"
  peak_lr: float = 1e-3
  warmup_steps: int = 50
  final_lr_fraction: float = 0.1
  b1: float = 0.9
  b2: float = 0.95
  eps: float = 1e-8
  weight_decay: float = 0.1
  clip_norm: float = 1.0
  accumulate_steps: int = 1

  def __post_init__(self):
    _check_positive("optim", self, "peak_lr", "eps", "accumulate_steps")
    _check_not_negative(
      "optim", self, "warmup_steps", "weight_decay", "clip_norm"
    )
    for name in ("b1", "b2", "final_lr_fraction"):
      value = getattr(self, name)
      _check(0 <= value <= 1, f"optim.{name}", value, "a number from 0 to 1")


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
    _check_positive("train", self, "steps", "log_every", "eval_batches")
    _check_not_negative("train", self, "eval_every", "depth_every")
    _check_in("train.on_nan", self.on_nan, ("stop", "skip"))


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
    _check_positive("checkpoint", self, "keep_last")
    _check_not_negative("checkpoint", self, "every_steps", "keep_every")


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
  """How the devices are laid out.

  Attributes:
    data: data-parallel devices; -1 takes all that are visible.
  """

  data: int = -1

  def __post_init__(self):
    _check(
      self.data == -1 or self.data > 0,
      "mesh.data",
      self.data,
      "a number of devices, or -1 for all",
    )


@dataclasses.dataclass(frozen=True)
class RunConfig:
  """Everything that determines a run; written beside its checkpoints.

  Attributes:
    name: of the run, for humans.
    seed: of the initial weights.
  """

  name: str = "run"
  seed: int = 0
  model: ModelConfig = ModelConfig()
  data: DataConfig = DataConfig()
  loss: LossConfig = LossConfig()
  optim: OptimConfig = OptimConfig()
  train: TrainConfig = TrainConfig()
  checkpoint: CheckpointConfig = CheckpointConfig()
  log: LogConfig = LogConfig()
  mesh: MeshConfig = MeshConfig()

  def __post_init__(self):
    if self.data.batch_size % self.optim.accumulate_steps:
      fail(
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
      fail(
        "model.vocab_size",
        self.model.vocab_size,
        f"at least the tokenizer's {vocab_size} (or 0 to take it)",
      )
    model = dataclasses.replace(self.model, vocab_size=vocab_size)
    return dataclasses.replace(self, model=model)


def default_config() -> ml_collections.ConfigDict:
  """The defaults of `RunConfig` as an unlocked ConfigDict, to be edited."""
  config = ml_collections.ConfigDict(dataclasses.asdict(RunConfig()))
  return config


def build_run_config(config: Mapping[str, Any]) -> RunConfig:
  """Checks a ConfigDict (or plain nested dict) and freezes it.

  Raises:
    ConfigError: naming the first bad field, its value and what is accepted.
  """
  if isinstance(config, ml_collections.ConfigDict):
    config = config.to_dict()
  run = _build(RunConfig, config, "")
  if run.data.tokenizer == "bytes":
    run = run.with_vocab_size(BYTE_VOCAB_SIZE)
  return run


def load_config(
  spec: str, overrides: Mapping[str, Any] | None = None
) -> RunConfig:
  """Loads `path/to/file.py:key=value,...`, overrides fields, freezes.

  Args:
    spec: a config file with a `get_config(arg)`, then optionally a colon and
      the argument, as on the command line.
    overrides: dotted field name to value, such as {"optim.peak_lr": 3e-4}.

  Raises:
    ConfigError: no such file, field or accepted value.
  """
  path, _, arg = spec.partition(":")
  config = _get_config_of(path)(arg)
  for name, value in (overrides or {}).items():
    _set(config, name, value)
  return build_run_config(config)


def to_dict(config: RunConfig) -> dict[str, Any]:
  """Nested plain dict, ready for JSON."""
  return dataclasses.asdict(config)


def to_json(config: RunConfig) -> str:
  return json.dumps(to_dict(config), indent=2) + "\n"


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
  """Nested dict to {dotted name: value}."""
  flat = {}
  for key, value in config.items():
    name = f"{prefix}{key}"
    if isinstance(value, Mapping):
      flat.update(flatten(value, name + "."))
    else:
      flat[name] = value
  return flat


def differences(
  old: Mapping[str, Any], new: Mapping[str, Any]
) -> dict[str, tuple[Any, Any]]:
  """Dotted names whose values differ, as {name: (old, new)}; None if absent."""
  old, new = flatten(old), flatten(new)
  return {
    name: (old.get(name), new.get(name))
    for name in sorted(old | new)
    if old.get(name) != new.get(name)
  }


def parse_arg(arg: str | None, **defaults: Any) -> types.SimpleNamespace:
  """Parses `key=value,flag` against defaults that give each key its type.

  A key without a value is the boolean True. Used by `get_config(arg)`.

  Raises:
    ConfigError: an unknown key, or a value of another type than the default's.
  """
  values = dict(defaults)
  for item in filter(None, (arg or "").split(",")):
    key, given, text = item.partition("=")
    if key not in defaults:
      raise ConfigError(
        f"config argument {key!r}: unknown, expected one of "
        + ", ".join(sorted(defaults))
      )
    values[key] = _parse_value(key, text if given else "true", defaults[key])
  return types.SimpleNamespace(**values)


def _parse_value(key: str, text: str, default: Any) -> Any:
  kind = type(default)
  if kind is bool:
    if text.lower() in ("true", "1", "yes", "false", "0", "no"):
      return text.lower() in ("true", "1", "yes")
  elif kind in (int, float):
    try:
      return kind(text)
    except ValueError:
      pass
  else:
    return text
  raise ConfigError(
    f"config argument {key!r}: got {text!r}, expected {kind.__name__}"
  )


def _build(cls: type[T], values: Mapping[str, Any], prefix: str) -> T:
  hints = get_type_hints(cls)
  for name in values:
    if name not in hints:
      choose((prefix + name), name, hints)
  kwargs = {}
  for name, value in values.items():
    kind = hints[name]
    if dataclasses.is_dataclass(kind):
      if not isinstance(value, Mapping):
        fail(prefix + name, value, f"fields of {kind.__name__}")
      kwargs[name] = _build(kind, value, f"{prefix}{name}.")
    else:
      kwargs[name] = _coerce(prefix + name, value, kind)
  return cls(**kwargs)


def _coerce(field: str, value: Any, kind: type) -> Any:
  if kind is float and isinstance(value, int) and not isinstance(value, bool):
    return float(value)
  if not isinstance(value, kind) or (
    isinstance(value, bool) and kind is not bool
  ):
    fail(field, value, f"a value of type {kind.__name__}")
  return value


def _set(config: ml_collections.ConfigDict, name: str, value: Any) -> None:
  *parents, leaf = name.split(".")
  node = config
  for depth, part in enumerate(parents):
    if part not in node or not isinstance(node[part], type(config)):
      choose(".".join(parents[: depth + 1]), part, dict(node))
      fail(name, value, "the name of a field")
    node = node[part]
  if leaf not in node:
    choose(name, leaf, dict(node))
  with node.unlocked(), node.ignore_type():
    node[leaf] = value


def _get_config_of(path: str) -> Any:
  file = pathlib.Path(path)
  if not file.is_file():
    raise ConfigError(f"config file {path!r}: not found")
  spec = importlib.util.spec_from_file_location(f"config_{file.stem}", file)
  assert spec is not None and spec.loader is not None
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  if not hasattr(module, "get_config"):
    raise ConfigError(f"config file {path!r}: defines no get_config(arg)")
  return module.get_config
