# SPDX-License-Identifier: Apache-2.0
"""Bytes: what residual schemes move, and what decoding keeps.

Residual schemes: Table 1 of arXiv:2603.15031, reads and writes per token and
sublayer in vectors of the model's width. `PRINTED` holds the paper's terms,
with the 3 d that its section 4.2 has for phase 2 of Block AttnRes (the table
prints (N/S) d there, which does not add up to its own total). They count keys
and values as two reads though they are one array, and bound an average.
`COUNTED` is what two phases have to move when each source is read once.
"""

from collections.abc import Callable, Mapping
import dataclasses

from attnres_jax import config as config_lib

# Of activations and of what is kept in float32.
ITEM_BYTES = {"float32": 4, "bfloat16": 2}


@dataclasses.dataclass(frozen=True)
class Traffic:
  """Per token and sublayer, in vectors of the model's width."""

  reads: float
  writes: float

  @property
  def total(self) -> float:
    return self.reads + self.writes


# Of (N, S): blocks, and sublayers per block. In Full AttnRes these are blocks
# of the schedule, which share one phase 1.
Formula = Callable[[float, float], Traffic]


def _plain(n: float, s: float) -> Traffic:
  del n, s
  return Traffic(reads=2, writes=1)


def _full_counted(n: float, s: float) -> Traffic:
  # Phase 1 once per block, then earlier values of the block and the mixture.
  reads = 1 / s + (n - 1) / 2 + (s - 1) / 2 + (s - 1) / s
  return Traffic(reads=reads, writes=1 + (s - 1) / s)


PRINTED: Mapping[str, Formula] = {
  "prenorm": _plain,
  "rescaled": _plain,
  "full_attnres": lambda n, s: Traffic((n - 1) + (s - 1), 2),
  "block_attnres": lambda n, s: Traffic(n / s + 3, 2),
}
COUNTED: Mapping[str, Formula] = {
  "prenorm": _plain,
  "rescaled": _plain,
  "full_attnres": _full_counted,
  # Completed blocks, then the last output, the partial sum and the mixture;
  # mixture, partial sum and h are written.
  "block_attnres": lambda n, s: Traffic((n + 1) / (2 * s) + 3, 3),
}


def of_scheme(
  model: config_lib.ModelConfig, table: Mapping[str, Formula]
) -> Traffic:
  """Of the model's residual scheme, by `PRINTED` or `COUNTED`."""
  name = model.residual.name
  formula = config_lib.choose("model.residual.name", name, table)
  size = model.residual.schedule_size
  if name == "block_attnres":
    size = model.residual.sublayers_per_block(model.num_sublayers)
  size = min(size, model.num_sublayers)
  return formula(-(-model.num_sublayers // size), size)


@dataclasses.dataclass(frozen=True)
class Cache:
  """What one mixer keeps while decoding.

  Attributes:
    token_bytes: per token of the sequence.
    sequence_bytes: per sequence, whatever its length.
  """

  token_bytes: int = 0
  sequence_bytes: int = 0


def _attention_cache(model: config_lib.ModelConfig) -> Cache:
  numbers = 2 * model.kv_heads * model.head_size
  return Cache(token_bytes=numbers * ITEM_BYTES[model.dtype])


def _mla_cache(model: config_lib.ModelConfig) -> Cache:
  numbers = model.mla.latent_rank + model.mla.shared_width
  return Cache(token_bytes=numbers * ITEM_BYTES[model.dtype])


def _kda_cache(model: config_lib.ModelConfig) -> Cache:
  head = model.kda.head_width
  memory = model.num_heads * head**2 * ITEM_BYTES["float32"]
  tails = 3 * (model.kda.conv_width - 1) * model.num_heads * head
  return Cache(sequence_bytes=memory + tails * ITEM_BYTES[model.dtype])


CACHES: Mapping[str, Callable[[config_lib.ModelConfig], Cache]] = {
  "attention": _attention_cache,
  "kda": _kda_cache,
  "mla": _mla_cache,
}


def of_caches(model: config_lib.ModelConfig) -> dict[str, Cache]:
  """All mixers of each kind together."""
  caches: dict[str, Cache] = {}
  for kind in model.sublayer_kinds:
    if kind in CACHES:
      one, sum_ = CACHES[kind](model), caches.get(kind, Cache())
      caches[kind] = Cache(
        sum_.token_bytes + one.token_bytes,
        sum_.sequence_bytes + one.sequence_bytes,
      )
  return caches
