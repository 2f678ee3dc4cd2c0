# SPDX-License-Identifier: Apache-2.0
"""Every instruction belongs to a part, and parts make the whole."""

import jax
import jax.numpy as jnp
import pytest

from attnres_jax.common import scopes
from attnres_jax.plan import attribution
from attnres_jax.plan import hlo

# In a loop of five trips: a product of mixer "kda", to which the compiler has
# moved an addition of the residual scheme; a copy to the core that "moe" reads;
# a kernel; and a transfer of "moe". After it, an operation without a part, and
# a copy of its result.
TEXT = """\
%fused (a: bf16[4,6], b: bf16[6,8], c: f32[4,8]) -> f32[4,8] {
  %a = bf16[4,6]{1,0:T(8,128)} parameter(0)
  %b = bf16[6,8]{1,0:T(8,128)} parameter(1)
  %c = f32[4,8]{1,0:T(8,128)} parameter(2)
  %product = f32[4,8]{1,0:T(8,128)} convolution(%a, %b), dim_labels=bf_io->bf, metadata={op_name="jit(f)/jvp()/while/body/part<kda>/dot_general"}
  ROOT %sum = f32[4,8]{1,0:T(8,128)} add(%product, %c), metadata={op_name="jit(f)/jvp()/while/body/part<residual>/add"}
}

%condition (p: (s32[], bf16[4,6])) -> pred[] {
  %limit = s32[]{:T(128)} constant(5)
  %p = (s32[]{:T(128)}, bf16[4,6]{1,0:T(8,128)}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%p), index=0
  ROOT %less = pred[]{:T(512)} compare(%i, %limit), direction=LT
}

%body (q: (s32[], bf16[4,6])) -> (s32[], bf16[4,6]) {
  %q = (s32[]{:T(128)}, bf16[4,6]{1,0:T(8,128)}) parameter(0)
  %j = s32[]{:T(128)} get-tuple-element(%q), index=0
  %left = bf16[4,6]{1,0:T(8,128)} get-tuple-element(%q), index=1
  %in = (bf16[4,6]{1,0:T(8,128)S(1)}, bf16[4,6]{1,0:T(8,128)}, u32[]{:S(2)}) copy-start(%left)
  %here = bf16[4,6]{1,0:T(8,128)S(1)} copy-done(%in)
  %y = f32[4,8]{1,0:T(8,128)} fusion(%left, %left, %left), kind=kOutput, calls=%fused, metadata={op_name="jit(f)/jvp()/while/body/part<residual>/add"}
  %k = f32[4,8]{1,0:T(8,128)} custom-call(%here), custom_call_target="tpu_custom_call", metadata={op_name="jit(f)/transpose(jvp(part<moe>))/pallas_call"}
  %g = bf16[8,6]{1,0:T(8,128)} all-gather(%left), channel_id=4, replica_groups=[4,2]<=[8], dimensions={0}, metadata={op_name="jit(f)/part<pipeline>/part<moe>/all_gather"}
  ROOT %next = (s32[]{:T(128)}, bf16[4,6]{1,0:T(8,128)}) tuple(%j, %left)
}

ENTRY %main (l: bf16[4,6]) -> bf16[4,6] {
  %l = bf16[4,6]{1,0:T(8,128)} parameter(0)
  %zero = s32[]{:T(128)} constant(0)
  %start = (s32[]{:T(128)}, bf16[4,6]{1,0:T(8,128)}) tuple(%zero, %l)
  %loop = (s32[]{:T(128)}, bf16[4,6]{1,0:T(8,128)}) while(%start), condition=%condition, body=%body
  %end = bf16[4,6]{1,0:T(8,128)} negate(%l), metadata={op_name="jit(f)/neg"}
  %out = bf16[4,6]{1,0:T(8,128)} copy(%end), metadata={op_name="l"}
  %half = bf16[4,6]{1,0:T(8,128)} exponential(%out), metadata={op_name="jit(f)/part<optimiser>/exp"}
  ROOT %last = bf16[4,6]{1,0:T(8,128)} copy(%half)
}
"""  # noqa: E501
SMALL, LARGE = 2 * 4 * 6, 4 * 4 * 8


def test_parts_of_a_program():
  costs = attribution.costs(hlo.Program(TEXT))
  product = 2 * 4 * 6 * 8
  assert costs == {
    "kda": attribution.Cost(5 * (3 * SMALL + LARGE), 5 * product),
    # The copy to the core, the kernel's result, and both sides of the transfer.
    "moe": attribution.Cost(
      5 * (SMALL + LARGE + 3 * SMALL), kernels=5, sent_bytes=5 * SMALL
    ),
    "other": attribution.Cost(2 * SMALL),
    # The copies of its operand and of its result.
    "optimiser": attribution.Cost(6 * SMALL),
  }


@pytest.mark.parametrize(
  "name,part",
  [
    ("jit(f)/transpose(jvp(part<head and loss>))/while/mul", "head and loss"),
    ("jit(f)/part<kda>/checkpoint/part<norms>/mul", "norms"),
    ("jit(f)/jit(part)/mul", None),
    ("", None),
  ],
)  # fmt: skip
def test_the_innermost_scope_counts(name, part):
  assert scopes.of_name(name) == part


def test_scopes_survive_transformations():
  """Autodiff, checkpoints and loops, in the program of any platform."""

  def step(x, w):
    with scopes.part("kda"):
      y = jax.checkpoint(lambda x: jnp.tanh(x @ w))(x)
    with scopes.part(scopes.RESIDUAL):
      return jnp.sin(x) + y, None

  def loss(x, ws):
    return jnp.sum(jax.lax.scan(step, x, ws)[0])

  shapes = jnp.ones((2, 4)), jnp.ones((3, 4, 4))
  lowered = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(*shapes)
  names = [
    line.partition('op_name="')[2].partition('"')[0]
    for line in lowered.compile().as_text().splitlines()
  ]
  parts = {(name.rsplit("/", 1)[-1], scopes.of_name(name)) for name in names}
  for primitive, part in (
    ("dot_general", "kda"), ("tanh", "kda"), ("cos", "residual"),
  ):  # fmt: skip
    assert {p for n, p in parts if n == primitive} == {part}
