# SPDX-License-Identifier: Apache-2.0
"""Transfers: planned, received by devices, and carried by links."""

from collections.abc import Iterator, Sequence

from attnres_jax.aot import topology
from attnres_jax.pipeline import layout as layout_lib
from experiments.pipeline_cost import labels
from experiments.pipeline_cost import plans
from experiments.pipeline_cost import programs
from experiments.pipeline_cost import wires

TOPOLOGY = "v5e:2x4"
_NUM_DEVICES = 8
# Each chunk is a body of the program; 32 take the TPU compiler minutes.
_MOST_TPU_CHUNKS = 8


def rows(tpu: bool) -> Iterator[plans.Row]:
  """A row per shape and rule; see the README for its columns.

  Args:
    tpu: also compile for a TPU slice, which needs libtpu.
  """
  for planned in plans.transfers():
    shape = plans.Shape(*(planned[name] for name in "PVK"))
    microbatches = shape.ranks if shape.virtual_stages > 2 else 2 * shape.ranks
    yield planned | measure(shape, planned["rule"], microbatches, tpu)


def measure(
  shape: plans.Shape, rule: str, microbatches: int, tpu: bool
) -> plans.Row:
  """The vectors that one step receives and carries, per microbatch."""
  arrivals, text = labels.receive(shape, rule, microbatches)
  row = dict(M=microbatches) | received(arrivals, shape, microbatches)
  row |= carried("cpu", wires.read(text, shape.ranks), shape)
  if tpu and shape.layout.num_chunks <= _MOST_TPU_CHUNKS:
    copies = _NUM_DEVICES // shape.ranks
    config = labels.make_config(shape, rule, microbatches, copies)
    pipeline = labels.make_pipeline(config, topology.devices(TOPOLOGY))
    compiled = programs.lower(config, pipeline).compile()
    sent = wires.read(compiled.as_text(), shape.ranks, copies)
    row |= carried("tpu", sent, shape, copies)
  return row


def received(
  arrivals: Sequence[labels.Arrival], shape: plans.Shape, microbatches: int
) -> plans.Row:
  """Counts of vectors per microbatch.

  `own` are blocks that the receiver had computed itself, `again` those that it
  had received before. Without both, the minimum remains.
  """
  seen, again, own = set(), 0, 0
  counts = dict.fromkeys(
    ("received", "received_partials", "returned", "returned_partials"), 0
  )
  layout = shape.layout
  made = {
    (layout.rank(chunk), block)
    for chunk in range(layout.num_chunks)
    for block in layout.produced(chunk)
  }
  for arrival in arrivals:
    name = "returned" if arrival.backward else "received"
    counts[name] += len(arrival.blocks)
    counts[f"{name}_partials"] += arrival.partial is not None
    if arrival.backward:
      continue
    for microbatch, block in arrival.blocks:
      copy = (arrival.rank, microbatch, block)
      if (arrival.rank, block) in made:
        own += 1
      else:
        again += copy in seen
      seen.add(copy)
  counts |= dict(again=again, own=own)
  return {name: _each(count, microbatches) for name, count in counts.items()}


def carried(
  target: str, sent: wires.Sent, shape: plans.Shape, copies: int = 1
) -> plans.Row:
  """Vectors on all links for one microbatch, and bytes of a pipeline's step.

  A microbatch takes a rank V ticks, forward and backward.

  Raises:
    ValueError: something other than whole vectors is sent.
  """
  if sent.vector_bytes != {labels.VECTOR_BYTES}:
    raise ValueError(
      f"sent: got arrays of {sorted(sent.vector_bytes)} bytes, expected"
      f" {labels.VECTOR_BYTES}"
    )
  return {
    f"{target}_ticks": sent.ticks,
    f"{target}_forward": shape.virtual_stages * _each(sent.forward, copies),
    f"{target}_backward": shape.virtual_stages * _each(sent.backward, copies),
    f"{target}_bytes": _each(sent.nbytes, copies),
  }


def transitions(shape: plans.Shape) -> Iterator[plans.Row]:
  """What arrived at each boundary, equal for all microbatches (Fig. 3)."""
  microbatches = 2 * shape.ranks
  of_rules = {}
  for rule in layout_lib.RULES:
    arrivals, _ = labels.receive(shape, rule, microbatches)
    of_rules[rule] = by_boundary(arrivals, microbatches)
  for i, same in enumerate(zip(*of_rules.values(), strict=True)):
    blocks = [" ".join(f"b{b}" for b in numbers) for _, numbers, _ in same]
    ((receiver, partial),) = {(rank, rest) for rank, _, rest in same}
    yield dict(chunk=i + 1, receiver=receiver) | dict(
      zip(of_rules, blocks, strict=True), partial=partial
    )


def by_boundary(
  arrivals: Sequence[labels.Arrival], microbatches: int
) -> list[tuple[int, tuple[int, ...], bool]]:
  """(receiver, blocks, whether there is a running sum) in order of time.

  Raises:
    RuntimeError: that is not the same for all microbatches.
  """
  paths = [[] for _ in range(microbatches)]
  for arrival in sorted(arrivals, key=lambda arrival: arrival.tick):
    vectors = [*arrival.blocks]
    if arrival.partial is not None:
      vectors.append(arrival.partial)
    if arrival.backward or not vectors:
      continue
    ((index,),) = {(microbatch,) for microbatch, _ in vectors}
    blocks = tuple(block for _, block in arrival.blocks)
    paths[index].append((arrival.rank, blocks, arrival.partial is not None))
  if any(path != paths[0] for path in paths):
    raise RuntimeError("microbatches received different blocks")
  return paths[0]


def _each(count: int, parts: int) -> int:
  """A fraction of a count, which has to be an integer."""
  if count % parts:
    raise ValueError(f"count: got {count}, expected a multiple of {parts}")
  return count // parts
