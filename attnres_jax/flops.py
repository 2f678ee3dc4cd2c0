# SPDX-License-Identifier: Apache-2.0
"""Analytic matrix-product FLOPs of a step, and what a chip could do.

Model FLOP utilisation is these FLOPs over (step time x peak). They are counted
from the configuration alone: one multiply-add is two FLOPs, causal attention
is halved, backward is twice forward, and recomputation under remat does not
count. `compiled.cost_analysis()` is no substitute, because it counts the body
of a scan once. Norms, activations and plain residual additions are left out;
depth attention (arXiv:2603.15031, Eq. 2-4) is counted, and reported apart.

This module is a leaf: it looks at no device.
"""

from collections.abc import Callable, Mapping
import dataclasses

from attnres_jax import config as config_lib

# Dense bfloat16 peak (float16 where a chip has no bfloat16) per JAX device, by
# the start of `device_kind`. The longest match counts. TPU v2, v3 and 7x show
# two devices per chip.
PEAK_FLOPS_PER_SECOND = {
  "TPU v2": 22.5e12,
  "TPU v3": 61.5e12,
  "TPU v4": 275e12,
  "TPU v4 lite": 138e12,
  "TPU v5 lite": 197e12,
  "TPU v5e": 197e12,
  "TPU v5": 459e12,
  "TPU v5p": 459e12,
  "TPU v6 lite": 918e12,
  "TPU v6e": 918e12,
  "TPU7x": 1153.5e12,
  "TPU v7x": 1153.5e12,
  "NVIDIA B200": 2250e12,
  "NVIDIA GB200": 2500e12,
  "NVIDIA H200": 989e12,
  "NVIDIA H100": 989e12,
  "NVIDIA H100 PCIe": 756e12,
  "NVIDIA GH200": 989e12,
  "NVIDIA A100": 312e12,
  "NVIDIA A10G": 70e12,
  "NVIDIA L4": 121e12,
  "NVIDIA L40S": 362e12,
  "Tesla T4": 65e12,
  "Tesla V100": 125e12,
}


@dataclasses.dataclass(frozen=True)
class FlopsPerToken:
  """Forward FLOPs of one token, part by part.

  Attributes:
    projections: of the mixers (queries, keys, values, output).
    attention: scores and weighted values over the sequence, causal.
    mlp: the feed-forward sublayers.
    head: the vocabulary projection.
    residual: depth attention, zero for schemes without.
  """

  projections: float
  attention: float
  mlp: float
  head: float
  residual: float

  @property
  def forward(self) -> float:
    return sum(dataclasses.astuple(self))

  @property
  def train(self) -> float:
    """Forward and backward: backward makes two products of every one."""
    return 3 * self.forward


def flops_per_token(
  model: config_lib.ModelConfig, sequence_length: int
) -> FlopsPerToken:
  """Forward FLOPs per token at this length, with `model.vocab_size` filled."""
  width, layers = model.width, model.num_layers
  query_width = model.num_heads * model.head_size
  kv_width = model.kv_heads * model.head_size
  return FlopsPerToken(
    projections=layers * 2 * width * (2 * query_width + 2 * kv_width),
    attention=layers * 4 * query_width * sequence_length / 2,
    mlp=layers * 3 * 2 * width * model.mlp_size,
    head=2 * width * model.vocab_size,
    residual=_residual_flops(model),
  )


def peak_flops_per_second(device_kind: str) -> float | None:
  """Peak of one JAX device of this kind; None where the table has no row."""
  rows = [kind for kind in PEAK_FLOPS_PER_SECOND if _matches(device_kind, kind)]
  return PEAK_FLOPS_PER_SECOND[max(rows, key=len)] if rows else None


def model_flop_utilisation(
  flops_per_second: float, device_kind: str, num_devices: int
) -> float | None:
  """Share of the peak of all devices; None on CPU and unknown chips."""
  peak = peak_flops_per_second(device_kind)
  return flops_per_second / (peak * num_devices) if peak else None


def _matches(device_kind: str, row: str) -> bool:
  """Whether `row` starts `device_kind` and ends at the end of one of its words.

  So "NVIDIA A100" takes "NVIDIA A100-SXM4-80GB", and "NVIDIA H100 PCIe" is
  more than "NVIDIA H100", but "NVIDIA L4" does not take "NVIDIA L40S".
  """
  rest = device_kind[len(row) :]
  return device_kind.startswith(row) and not rest[:1].isalnum()


@dataclasses.dataclass(frozen=True)
class DepthReads:
  """How much depth attention a scheme does on one token.

  Attributes:
    pairs: (read, source) pairs, where a read of one source alone is a copy.
    sources: vectors that are scored at all; each is normalised once.
  """

  pairs: int
  sources: int


def full_reads(num_sublayers: int) -> DepthReads:
  """Read l of 2..L+1 sees l sources (Eq. 1-4)."""
  return DepthReads(
    pairs=sum(range(2, num_sublayers + 2)), sources=num_sublayers + 1
  )


def block_reads(num_sublayers: int, block_size: int) -> DepthReads:
  """Completed blocks, and the partial sum past a block's first read (Eq. 5-6).

  A one-sublayer network reads the embedding and then both representations.
  """
  num_blocks = -(-num_sublayers // block_size)
  per_read = [
    1 + sublayer // block_size + (1 if sublayer % block_size else 0)
    for sublayer in range(num_sublayers)
  ]
  per_read.append(num_blocks + 1)
  partials = num_sublayers - num_blocks
  return DepthReads(
    pairs=sum(count for count in per_read if count > 1),
    sources=num_blocks + 1 + partials,
  )


# Residual scheme to its reads. The plain sums have none.
DEPTH_READS: Mapping[str, Callable[[config_lib.ModelConfig], DepthReads]] = {
  "prenorm": lambda model: DepthReads(0, 0),
  "rescaled": lambda model: DepthReads(0, 0),
  "full_attnres": lambda model: full_reads(model.num_sublayers),
  "block_attnres": lambda model: block_reads(
    model.num_sublayers,
    model.residual.sublayers_per_block(model.num_sublayers),
  ),
}


def _residual_flops(model: config_lib.ModelConfig) -> float:
  """A dot product and a weighted sum per pair, a mean square per source."""
  reads = config_lib.choose(
    "model.residual.name", model.residual.name, DEPTH_READS
  )(model)
  return model.width * (4 * reads.pairs + 2 * reads.sources)
