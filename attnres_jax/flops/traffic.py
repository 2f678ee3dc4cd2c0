# SPDX-License-Identifier: Apache-2.0
"""Bytes that residual schemes move, and that decoding keeps.

The traffic of a scheme is counted in its own program, in the form that training
uses: one kernel opens a segment, one writes an output and reads the next input,
one closes the segment. Each reads its operands once and writes its results
once. (Table 1 of arXiv:2603.15031 is in `scaling.paper`; it bounds an average,
and counts keys and values as two reads although they are one array.)
"""

from collections.abc import Callable
import dataclasses
from typing import Any

import jax

from attnres_jax import config as config_lib
from attnres_jax.flops import programs
from attnres_jax.models import residuals
from attnres_jax.models import sublayer
from attnres_jax.models import transformer

# Enough tokens to make everything that does not grow with them negligible.
_TOKENS = 2**22


@dataclasses.dataclass(frozen=True)
class Traffic:
  """Traffic per token and sublayer, in vectors of the model's width."""

  reads: float
  writes: float

  @property
  def total(self) -> float:
    return self.reads + self.writes


def of_scheme(model: config_lib.ModelConfig) -> Traffic:
  """The traffic of the residual scheme, without its `init` and readout."""
  scheme, vector = _abstract(model)
  moved = []

  def run(function: Callable[..., Any], *args: Any) -> Any:
    results, sizes = programs.moved(function, *args, least=vector.size)
    moved.append(sizes)
    return results

  state = jax.eval_shape(type(scheme).init, scheme, vector)
  for start, stop in scheme.segments():
    carry, slots = run(
      lambda scheme, state, a=start, b=stop: scheme.open(state, a, b),
      scheme, state,
    )  # fmt: skip
    slot = jax.tree.map(
      lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), slots
    )
    run(residuals.base.before_norm, scheme, carry, slot)
    for _ in range(start + 1, stop):
      carry, _ = run(_write_and_read, scheme, carry, slot, vector)
    state = run(
      lambda scheme, state, carry, slot, y_BTD, b=stop: scheme.close(
        state, scheme.write(carry, slot, y_BTD), b
      ),
      scheme, state, carry, slot, vector,
    )  # fmt: skip
  reads, writes = (sum(n) / vector.size for n in zip(*moved))
  return Traffic(reads / model.num_sublayers, writes / model.num_sublayers)


def _write_and_read(scheme, carry, slot, y_BTD):
  carry = scheme.write(carry, slot, y_BTD)
  return carry, residuals.base.before_norm(scheme, carry, slot)


def _abstract(model: config_lib.ModelConfig) -> tuple[Any, Any]:
  """The scheme, and a vector of each token."""
  scheme = residuals.abstract_residual(model)
  shape = 1, _TOKENS, model.width
  return scheme, jax.ShapeDtypeStruct(shape, model.dtype)


@dataclasses.dataclass(frozen=True)
class Cache:
  """What decoding keeps, per token of a sequence and besides per sequence."""

  token_bytes: int = 0
  sequence_bytes: int = 0


def of_caches(model: config_lib.ModelConfig) -> dict[str, Cache]:
  """The sum over all mixers of each kind, and what a scheme looks back at."""
  scheme, _ = _abstract(model)
  heads, before = transformer.scheme_while_decoding(model, scheme, 1)
  caches: dict[str, Cache] = {}
  for kind in dict.fromkeys(model.sublayer_kinds):
    core = sublayer.abstract_core(kind, model)
    if not hasattr(core, "init_cache"):
      continue
    empty, one_token = (
      _bytes(
        jax.eval_shape(lambda core, n=n: core.init_cache(1, n, heads), core)
      )
      for n in (0, 1)
    )
    number = model.sublayer_kinds.count(kind)
    caches[kind] = Cache(number * (one_token - empty), number * empty)
  if before:
    caches["residual"] = Cache(sequence_bytes=_bytes(before))
  return caches


def _bytes(tree: Any) -> int:
  return sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(tree))
