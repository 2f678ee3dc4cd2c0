# SPDX-License-Identifier: Apache-2.0
"""Segments of the trunk: which sublayers run together, and their parameters.

A segment is what a scheme opens together, such as a block of Block AttnRes. Its
sublayers are runs, of which some repeat a pattern; with a scan over depth,
segments that repeat are one.
"""

from collections.abc import Callable, Mapping, Sequence, Set
import functools
import itertools
from typing import Any, NamedTuple

from flax import nnx
import jax
import numpy as np

from attnres_jax import config as config_lib
from attnres_jax.common import scopes
from attnres_jax.models import layer_stacks
from attnres_jax.models.residuals import base

Sublayers = Mapping[str, Any]


class Segment(NamedTuple):
  """Sublayers start..stop-1, which the scheme opens together, as runs.

  Attributes:
    start: the first sublayer.
    stop: the sublayer after the last one.
    runs: the sublayers.
    blocks: the same as one scan over blocks, or None.
  """

  start: int
  stop: int
  runs: tuple[layer_stacks.Run, ...]
  blocks: layer_stacks.Run | None = None


def plan(
  kinds: Sequence[str], residual: base.Residual, start: int, scan: bool,
  depth_loop: str = "unrolled", apart: Set[int] = frozenset(),
) -> list[Segment]:  # fmt: skip
  """The segments, or parts of segments, from sublayer `start` on.

  With a scan over depth, blocks that repeat are one. Sublayers `apart` are
  like no other.
  """
  cut = layer_stacks.no_runs
  if scan and residual.scannable:
    cut = layer_stacks.find_runs
  end = start + len(kinds)
  labels = [(kind, i if i in apart else None) for i, kind in enumerate(kinds)]

  def runs(first: int, stop: int) -> tuple[layer_stacks.Run, ...]:
    return tuple(
      layer_stacks.Run(tuple(kind for kind, _ in run.kinds), run.repeats)
      for run in cut(labels[first - start : stop - start])
    )

  parts = [(max(a, start), min(b, end)) for a, b in residual.segments()]
  segments = [Segment(a, b, runs(a, b)) for a, b in parts if a < b]
  if depth_loop != "scan":
    return segments
  joined, remaining = [], iter(segments)
  for blocks in blocks_of(kinds, residual, start):
    parts = list(itertools.islice(remaining, blocks.length))
    if blocks.repeats > 1:
      run = sublayers_of(blocks)
      parts = [Segment(parts[0].start, parts[-1].stop, (run,), blocks)]
    joined += parts
  return joined


def blocks_of(
  kinds: Sequence[str], residual: base.Residual, start: int
) -> list[layer_stacks.Run]:
  """Segments of a part of a network, as runs of blocks of which some repeat.

  The kinds of a run are blocks, each the kinds of its sublayers. `start`
  sublayers of the network are before the part.
  """
  labels: list[Any] = []
  for first, end in residual.segments():
    begin, stop = max(first, start), min(end, start + len(kinds))
    if begin < stop:
      is_complete = stop - begin == residual.block_size
      block = tuple(kinds[begin - start : stop - start])
      labels.append((block, None if is_complete else begin))
  return [
    layer_stacks.Run(tuple(block for block, _ in run.kinds), run.repeats)
    for run in layer_stacks.find_runs(labels)
  ]


def sublayers_of(blocks: layer_stacks.Run) -> layer_stacks.Run:
  """A run of blocks as a run of sublayers."""
  flat = tuple(itertools.chain.from_iterable(blocks.kinds))
  return layer_stacks.Run(flat, blocks.repeats)


def check(
  kinds: Sequence[str], ends: Sequence[int], residual: base.Residual
) -> None:
  """Refuses networks that are no scan over blocks.

  `ends` are of the parts that run separately, such as the chunks of a pipeline.

  Raises:
    ConfigError: names the reason: the scheme or an option, or that no part
      repeats any blocks.
  """
  if not residual.scans_blocks:
    reason = f"with {type(residual).__name__}, or with its reads"
  else:
    parts = zip((0, *ends), ends)
    runs = [
      blocks_of(kinds[start:end], residual, start) for start, end in parts
    ]
    if any(run.repeats > 1 for run in itertools.chain(*runs)):
      return
    reason = "where no two blocks in a row have the same kinds of sublayers"
  config_lib.fail("model.depth_loop", "scan", f"'unrolled' {reason}")


def sources(
  sublayers: Sublayers, segments: Sequence[Segment], remat: str
) -> list[tuple[Any, Callable[[Any], list[Sublayers]]]]:
  """For each segment (source, take); take(source) gives the parts of its runs.

  The parts come from one split, whose gradient is one concatenation. With
  activation checkpointing, each source is the whole stack, split inside the
  checkpoint, which would keep a copy of anything split outside; but layers that
  are separate are not copied.
  """
  sizes = {
    kind: [run.count(kind) for segment in segments for run in segment.runs]
    for kind in sublayers
  }
  ends = {kind: np.cumsum([0, *counts]) for kind, counts in sizes.items()}

  def cut(runs: Sequence[layer_stacks.Run], first: int, source: Any) -> Any:
    """Parts of runs, of which the first one has this number."""
    parts = []
    for i, run in enumerate(runs, first):
      parts.append({})
      for kind in dict.fromkeys(run.kinds):
        begin, end = ends[kind][i : i + 2]
        with scopes.part(kind):
          parts[-1][kind] = jax.tree.map(
            lambda a, b=begin, e=end: a[b:e], source[kind]
          )
    return parts

  before = itertools.accumulate((len(s.runs) for s in segments), initial=0)
  if remat != "none" and not are_separate(sublayers):
    return [
      (sublayers, functools.partial(cut, segment.runs, first))
      for segment, first in zip(segments, before)
    ]
  split = {k: layer_stacks.split(sublayers[k], sizes[k]) for k in sublayers}
  return [
    (
      [
        {kind: split[kind][i] for kind in dict.fromkeys(run.kinds)}
        for i, run in enumerate(segment.runs, first)
      ],
      lambda parts: list(map(layer_stacks.joined, parts)),
    )
    for segment, first in zip(segments, before)
  ]


def are_separate(sublayers: Sublayers) -> bool:
  """Whether they are `layer_stacks.separated`, or stacks."""
  return any(isinstance(layers, nnx.List) for layers in sublayers.values())
