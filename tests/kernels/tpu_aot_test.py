# SPDX-License-Identifier: Apache-2.0
"""Every TPU kernel compiles for every chip, at every named shape.

Needs libtpu but no TPU; skipped on machines without libtpu.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest

from attnres_jax.common import topology
from attnres_jax.plan import hlo
from attnres_kernels import depth_attention
from attnres_kernels import problems
from attnres_kernels.depth_attention import shapes
from attnres_kernels.experts import pallas_tpu as experts

CHIPS = {
  "v5e": "v5e:2x2",
  "v5p": "v5p:2x2x1",
  "v6e": "v6e:2x2",
  "tpu7x": "tpu7x:2x2x1",
}
# Has a quarter of the VMEM of the smallest of these.
OLDER = {"v4": "v4:2x2x1"}
# By default, the smallest and the newest: they differ most.
MAIN_CHIPS = [
  pytest.param(chip, marks=() if chip in ("v5e", "tpu7x") else pytest.mark.slow)
  for chip in CHIPS
]

# Of each array: 2^31 elements and a last tile that is a part of one.
HUGE = shapes.Shape("huge", 1, 1, 2**18 + 8, 8192)

pytestmark = pytest.mark.needs("libtpu")


@functools.cache
def device(chip):
  return topology.devices((CHIPS | OLDER)[chip])[0]


def program(name, shape, implementation=None):
  """Forward and backward of an operator, and the shapes of its arguments."""
  draw = lambda *sizes, dtype="float32": jnp.zeros(sizes, dtype)
  made = []

  def build():
    made.append(problems.OPERATORS[name].build(shape, "bfloat16", draw))
    return made[0].arrays

  def both(*arrays):
    call = functools.partial(made[0].function, implementation)
    values, pull = jax.vjp(call, *arrays)
    return values, pull(values)

  return both, [(x.shape, x.dtype) for x in jax.eval_shape(build)]


def attention(shape):
  return program("depth_attention", shape)


def merge(shape):
  return program("depth_merge_norm", dataclasses.replace(shape, sources=1))


def compile_for(chip, function, arguments, dtype):
  place = jax.sharding.SingleDeviceSharding(device(chip))
  structs = [
    jax.ShapeDtypeStruct(s, d or dtype, sharding=place) for s, d in arguments
  ]
  return jax.jit(function).lower(*structs).compile().as_text()


class TestTpuCompile:
  @pytest.mark.parametrize("op", ("attention", "merge"))
  def test_tiles_fit_the_vmem_of_v4(self, op):
    # Its larger tiles would need 20 MiB, and those of the merge 19.
    shape = shapes.Shape("large", 9, 8, 256, 1536)
    function, arguments = attention(shape)
    if op == "merge":
      shape = shapes.Shape("large", 1, 1, 256, 6144)
      function, arguments = merge(shape)
    mesh = jax.sharding.Mesh([device("v4")], ("chip",))
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
      text = compile_for("v4", function, arguments, "bfloat16")
    assert "backward" in text

  def test_separate_sources_are_not_stacked(self):
    shape = shapes.Shape("small", 4, 5, 512, 1024)
    text = compile_for("v5e", *attention(shape), "bfloat16")
    assert "bf16[5,512,1024]" not in text

  @pytest.mark.slow
  def test_mixtures_that_are_taken_apart_are_never_stacked(self):
    """Nor are their gradients, of four sublayers that read one each."""

    def f(query, *sources):
      def g(query, *sources):
        out, lse = depth_attention(query, sources)
        parts = jax.lax.split(out, [1] * 4)
        tops = [jnp.tanh(x[0]) for x in parts]
        return sum(x.astype(jnp.float32).sum() for x in tops) + lse.sum()

      return jax.value_and_grad(g, tuple(range(1 + len(sources))))(
        query, *sources
      )

    source = ((512, 1024), None)
    text = compile_for(
      "v5p", f, [((4, 1024), jnp.float32), source, source], "bfloat16"
    )
    assert "depth_attention_backward" in text
    assert "bf16[4,512,1024]" not in text


# Heads own registers, share them, or share them unevenly; keys of any width.
HEADS = (
  shapes.Shape("heads", 4, 5, 200, 2048, heads=16),
  shapes.Shape("heads", 2, 3, 40, 448, heads=14),
  shapes.Shape("heads", 3, 2, 200, 1152, heads=16),
  shapes.Shape("heads", 24, 2, 40, 1792, heads=4),
  shapes.Shape("rank", 4, 3, 200, 960, rank=64),
  shapes.Shape("rank", 2, 20, 40, 448, rank=200),
)


@pytest.mark.slow
class TestHeadsAndRank:
  @pytest.mark.parametrize("heads", (16, 64))
  def test_bytes_of_one_head(self, heads):
    """Forward and backward of both operators, by the compiler's count."""
    moved = []
    for count in (1, heads):
      shape = shapes.Shape("bytes", 4, 5, 2048, 2048, count)
      programs = attention(shape), merge(shape)
      moved.append(
        [
          hlo.Program(compile_for("v5p", *f, "bfloat16")).hbm_bytes()
          for f in programs
        ]
      )
    for single, several in zip(*moved, strict=True):
      assert single < several <= 1.1 * single


@pytest.mark.slow
class TestNamedShapes:
  """What `benchmarks/tpu_static.py` does not compile for its table.

  That table has, for each chip, both directions of every kernel separately, at
  both ends and the middle of each family of named shapes.
  """

  @pytest.mark.parametrize("chip", tuple(CHIPS))
  @pytest.mark.parametrize(
    "shape",
    tuple(s for s in shapes.NAMED if s not in shapes.TABLE)
    + (*shapes.ODD, *HEADS),
  )
  def test_attention(self, chip, shape):
    text = compile_for(chip, *attention(shape), "bfloat16")
    for name in ("depth_attention_forward", "depth_attention_backward"):
      assert name in text

  @pytest.mark.parametrize("chip", tuple(CHIPS))
  @pytest.mark.parametrize("shape", (*shapes.MERGE, *HEADS))
  def test_merge(self, chip, shape):
    text = compile_for(chip, *merge(shape), "bfloat16")
    for name in ("depth_merge_forward", "depth_merge_backward"):
      assert name in text

  @pytest.mark.parametrize("chip", tuple(CHIPS))
  def test_more_than_2_to_31_elements(self, chip):
    """In all sources; in one array, on chips whose memory holds them."""
    shape = shapes.Shape("huge", 1, 9, 32768, 8192)
    compile_for(chip, *attention(shape), "bfloat16")
    if chip != "v5e":
      compile_for(chip, *attention(HUGE), "bfloat16")
    if chip in ("v5p", "tpu7x"):
      compile_for(chip, *merge(HUGE), "bfloat16")


@pytest.mark.parametrize("chip", MAIN_CHIPS)
def test_experts(chip):
  """Experts of the sweep's size and of the 48B network's, which are sliced."""
  mesh = jax.sharding.Mesh([device(chip)], ("chip",))

  def step(x, weight, sizes, gate_and_up, down, dy, token, *sums):
    options = dict(units=lambda gate, up: jax.nn.silu(gate) * up)
    operands = x, weight, sizes, gate_and_up, down
    y = experts.forward(*operands, **options)
    gradients = experts.backward(*operands, dy, *sums, **options)
    return experts.sum_rows(y, token, 256), gradients

  for hidden, width, added in ((528, 1168, True), (1024, 2304, False)):
    matrices = (4, 2, hidden, width), (4, hidden, width)
    row = (1000, width), None
    arguments = [
      row, ((1000,), jnp.float32), ((4,), jnp.int32),
      *((shape, None) for shape in matrices), row, ((1000,), jnp.int32),
      *((shape, jnp.float32) for shape in matrices if added),
    ]  # fmt: skip
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
      text = compile_for(chip, step, arguments, "bfloat16")
    for name in ("forward", "backward", "sum_rows"):
      assert f"experts_{name}" in text
