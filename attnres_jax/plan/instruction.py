# SPDX-License-Identifier: Apache-2.0
"""One instruction of a compiled program, read from its line of text."""

from collections.abc import Iterator, Mapping
import dataclasses
import functools
import math
import re

import numpy as np

_BYTES = {
  "pred": 1, "s4": 0.5, "u4": 0.5, "s8": 1, "u8": 1, "s16": 2, "u16": 2,
  "f16": 2, "bf16": 2, "s32": 4, "u32": 4, "f32": 4, "s64": 8, "u64": 8,
  "f64": 8, "f8e4m3fn": 1, "f8e5m2": 1,
}  # fmt: skip
_SHAPE = re.compile(r"\b([a-z]\w*)\[([\d,]*)\](?:\{([^}]*)\})?")
# What calls a Pallas kernel, on a TPU and on a GPU.
_KERNELS = '="tpu_custom_call"', '="mosaic_gpu'
# A piece of a collective beside other work, with the numbers of that work's
# results.
_PIECE = re.compile(
  r'"continuation_config":\{"output_tuple_original_start":"(\d+)",'
  r'"output_tuple_original_end":"(\d+)"'
)
_ALIASES = re.compile(r"\{(\d+)\}: \((\d+), \{\}\)")
# Parts of an operation's name that say where in the program it is.
_CONTROL_NAME = re.compile(
  r"shard_map|while|body|cond|branch_\d+_fun|eval_jaxpr|closed_call|checkpoint"
  r"|pjit|jvp\(\)"
)


@dataclasses.dataclass(frozen=True)
class Array:
  """An array result, or part of a tuple.

  It is in HBM, or else in a memory of the core. If whole tiles are counted, it
  is padded to these sizes.
  """

  dtype: str
  dims: tuple[int, ...]
  in_hbm: bool
  padded: tuple[int, ...] | None = None

  @property
  def nbytes(self) -> float:
    dims = self.dims if self.padded is None else self.padded
    return math.prod(dims) * _BYTES.get(self.dtype, 0)

  def __str__(self) -> str:
    return f"{self.dtype}[{','.join(map(str, self.dims))}]"


@dataclasses.dataclass(frozen=True)
class Instruction:
  """One line of a computation: results, names of operands, attributes.

  Its place is its computation and its name in there.
  """

  place: tuple[str, str]
  op: str
  arrays: tuple[Array, ...]
  operands: tuple[str, ...]
  attributes: str

  @property
  def name(self) -> str:
    return self.place[1]

  @functools.cached_property
  def op_name(self) -> str:
    """The operation of the traced program, with all enclosing ones, or ""."""
    match = re.search(r'op_name="([^"]*)"', self.attributes)
    return match[1] if match else ""

  @functools.cached_property
  def is_kernel(self) -> bool:
    """Whether it runs a Pallas kernel, whose FLOPs are not in the text."""
    return any(target in self.attributes for target in _KERNELS)

  @property
  def starts_collective(self) -> bool:
    """Whether it is the first piece of a collective that is cut into pieces."""
    return self.name.startswith("%async-collective-start")

  @property
  def ends_collective(self) -> bool:
    """Whether it is the last of these pieces."""
    return self.name.startswith("%async-collective-done")

  @functools.cached_property
  def carried(self) -> Mapping[int, int | None]:
    """Results that are operands, handed on by a piece of a collective.

    Every piece is given the arrays of the whole, so the bytes of a collective
    are those of its first piece. Keys are numbers of results, values of the
    operand, or None if this piece reads it.
    """
    piece = _PIECE.search(self.attributes)
    first = self.starts_collective
    if piece is None and not first:
      return {}
    low, high = map(int, piece.groups()) if piece else (0, -1)
    return {
      int(result): None if first else int(operand)
      for result, operand in _ALIASES.findall(self.attributes)
      if not low <= int(result) <= high
    }

  @property
  def made(self) -> tuple[Array, ...]:
    """The arrays that are not carried."""
    return tuple(a for i, a in enumerate(self.arrays) if i not in self.carried)

  def source(self) -> str:
    """The operation of the traced program that it comes from, if known.

    Without enclosing loops and branches, so that the name is the same in all
    layers.
    """
    parts = re.sub(r"^jit\(\w+\)/", "", self.op_name).split("/")
    return "/".join(part for part in parts if not _CONTROL_NAME.fullmatch(part))

  def called(self) -> Iterator[tuple[str, str]]:
    """(role, name) of the computations that it runs."""
    for role, names in re.findall(
      r"\b(calls|body|condition|to_apply|branch_computations)="
      r"(\{[^}]*\}|%[\w.\-]+)",
      self.attributes,
    ):
      for name in re.findall(r"%[\w.\-]+", names):
        yield role, name


def parse(
  computation: str, line: str, tiled: bool = False
) -> Instruction | None:
  """The instruction of a line of `compiled.as_text()`, or None.

  With `tiled`, arrays have whole tiles.
  """
  match = re.match(r"\s+(?:ROOT )?(%[\w.\-]+) = (.*)$", line)
  if not match:
    return None
  name, rest = match[1], match[2]
  if rest.startswith("("):
    end = _closing(rest, 0) + 1
  else:
    end = rest.index(" ")
  result, rest = rest[:end], rest[end:].lstrip()
  op, _, _ = rest.partition("(")
  start = len(op)
  stop = _closing(rest, start)
  inside = rest[start + 1 : stop]
  # Constants and parameters have their number as first attribute.
  numbered = op in ("constant", "parameter")
  attributes = rest[start + 1 :] if numbered else rest[stop + 1 :]
  return Instruction(
    (computation, name), op, _arrays(result, tiled),
    tuple(re.findall(r"%[\w.\-]+", inside)), attributes,
  )  # fmt: skip


def _closing(text: str, start: int) -> int:
  """The position of the parenthesis that closes the one at `start`."""
  depth = 0
  for i in range(start, len(text)):
    depth += (text[i] == "(") - (text[i] == ")")
    if depth == 0:
      return i
  return len(text)


def _arrays(text: str, tiled: bool) -> tuple[Array, ...]:
  # Layouts may contain parentheses, as in {1,0:T(8,128)S(1)}; S is a memory.
  arrays = []
  for dtype, sizes, layout in _SHAPE.findall(text):
    if dtype in _BYTES:
      dims = tuple(int(size) for size in sizes.split(",") if size)
      padded = _in_tiles(dims, layout) if tiled else None
      arrays.append(Array(dtype, dims, "S(" not in layout, padded))
  return tuple(arrays)


def _in_tiles(dims: tuple[int, ...], layout: str) -> tuple[int, ...]:
  """Sizes rounded up to the tile of a layout such as 1,0:T(8,128)(2,1).

  The order names the fastest dimension first, the tile names it last. Further
  tiles are within the first.
  """
  tile = re.search(r"T\(([\d,]+)\)", layout)
  order = re.match(r"[\d,]+", layout)
  if not (tile and order):
    return dims
  padded = list(dims)
  sizes = reversed(tile[1].split(","))
  for dimension, size in zip(map(int, order[0].split(",")), map(int, sizes)):
    padded[dimension] += -padded[dimension] % size
  return tuple(padded)


def product_flops(
  instruction: Instruction, body: Mapping[str, Instruction]
) -> float:
  """Multiply-adds times two; the TPU compiler writes products as convolutions.

  Batch dimensions appear as spatial ones, with padding and dilation such that
  most window positions are outside the input. Only the others count.
  """
  labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", instruction.attributes)
  operands = [body.get(name) for name in instruction.operands[:2]]
  if labels is None or None in operands:
    return 0.0
  left, right = (o.arrays[0].dims for o in operands if o is not None)
  out = instruction.arrays[0].dims
  total = 2.0 * out[labels[3].index("b")] * out[labels[3].index("f")]
  total *= right[labels[2].index("i")]
  for d, window in enumerate(_windows(instruction.attributes)):
    label = str(d)
    total *= _meetings(
      left[labels[1].index(label)],
      right[labels[2].index(label)],
      out[labels[3].index(label)],
      window,
    )
  return total


def _windows(attributes: str) -> list[dict[str, int]]:
  """Stride, padding and dilations of each spatial dimension."""
  match = re.search(r"window=\{([^}]*)\}", attributes)
  if match is None:
    return []
  fields = dict(item.split("=") for item in match[1].split())
  count = len(fields["size"].split("x"))
  windows = []
  for d in range(count):
    pick = lambda name, default, d=d: fields.get(
      name, "x".join([default] * count)
    ).split("x")[d]
    windows.append(
      dict(
        stride=int(pick("stride", "1")),
        low=int(pick("pad", "0_0").split("_")[0]),
        left=int(pick("lhs_dilate", "1")),
        right=int(pick("rhs_dilate", "1")),
      )
    )
  return windows


def _meetings(left: int, right: int, out: int, window: dict[str, int]) -> int:
  """Number of pairs of an output and a window position inside the input."""
  position = (
    np.arange(out)[:, None] * window["stride"]
    + np.arange(right)[None, :] * window["right"]
    - window["low"]
  )
  inside = (position >= 0) & (position <= (left - 1) * window["left"])
  return int(np.sum(inside & (position % window["left"] == 0)))


def number(instruction: Instruction) -> int:
  """The number of a constant or parameter."""
  match = re.match(r"(\d+)\)", instruction.attributes)
  assert match is not None, instruction
  return int(match[1])
