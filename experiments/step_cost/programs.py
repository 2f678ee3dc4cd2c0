# SPDX-License-Identifier: Apache-2.0
"""The programs of whole stacks: to compile for a chip, or to time on one.

An arm is a residual scheme: "prenorm", "block, kernels", and for identity
stacks "block, plain JAX"; for training steps any other scheme by its name, with
options of it, its reads or the model: "block_attnres heads=16 depth_loop=scan".
"norms=kernel" makes every norm an operator, instead of a part of the products
around it.
Options are sublayers, block, batch, tokens, width and vocabulary.
"""

import ast
import functools
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp

import attnres_jax
from attnres_jax import config as config_lib
from attnres_jax.models import loss as loss_lib
from attnres_jax.models import norm as norm_lib
import attnres_kernels


def training(arm, options, *, scan_layers=False):
  """The gradient of a transformer's loss; and its arguments, as shapes."""
  name, *given = arm.split()
  if arm == "block, kernels":
    name, given = "block_attnres", []
  fields: dict[str, Any] = {"scan_layers": scan_layers}
  fields |= map(_option, given)
  norms = fields.pop("norms", "fused")
  read = config_lib.DepthReadConfig(
    **_taken(fields, config_lib.DepthReadConfig)
  )
  of_residual = _taken(fields, config_lib.ResidualConfig)
  config = config_lib.ModelConfig(
    vocab_size=options.vocabulary,
    width=options.width,
    num_layers=options.sublayers // 2,
    num_heads=options.width // 128,
    dtype="bfloat16",
    residual=config_lib.ResidualConfig(
      name=name, block_size=options.block, read=read, **of_residual
    ),
    **fields,
  )
  model = jax.eval_shape(lambda: attnres_jax.build_model(config))
  if norms == "kernel":
    for _, module in nnx.iter_modules(model):
      if type(module) is norm_lib.RMSNorm:
        module.__class__ = _KernelNorm
  tokens_BT = jax.ShapeDtypeStruct((options.batch, options.tokens), jnp.int32)

  def loss(model, tokens_BT, target_BT):
    sums = loss_lib.cross_entropy(
      model.hidden(tokens_BT),
      model.embedding.head_DV(),
      target_BT,
      jnp.ones(tokens_BT.shape, jnp.float32),
    )
    return sums.total / tokens_BT.size

  return jax.value_and_grad(loss), (model, tokens_BT, tokens_BT)


class _KernelNorm(norm_lib.RMSNorm):
  """A norm that is never part of a matrix product."""

  def __call__(self, x):
    return self.in_one_pass(x)


def _option(text):
  """A field and its value, from field=value."""
  field, value = text.split("=")
  try:
    return field, ast.literal_eval(value)
  except ValueError:
    return field, value  # A name.


def _taken(fields, kind):
  """Removes the options of a kind of config, and returns them."""
  own = fields.keys() & kind.__dataclass_fields__
  return {name: fields.pop(name) for name in own}


def identity(arm, options):
  """A stack whose sublayers cost nothing, both passes; and its arguments."""
  shape = (options.batch, options.tokens, options.width)
  rows = (options.sublayers + 1, options.width)

  def step(x, query, gain, cotangent):
    out, vjp = jax.vjp(
      lambda *a: _stack(arm, options.sublayers, options.block, *a),
      x,
      query,
      gain,
    )
    return out, vjp(cotangent)

  wide = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
  row = jax.ShapeDtypeStruct(rows, jnp.float32)
  return step, (wide, row, row, wide)


def _stack(arm, sublayers, block, x, query, gain):
  # An identity that the compiler can neither see through nor fuse across, like
  # the matrix products of a real sublayer.
  def sublayer(h):
    return jax.lax.optimization_barrier(h)

  if arm == "prenorm":
    for l in range(sublayers):
      x = x + sublayer(_rms_norm(x, gain[l]))
    return _rms_norm(x, gain[sublayers])

  implementation = "xla" if arm == "block, plain JAX" else "pallas_tpu"
  attend = functools.partial(
    attnres_kernels.depth_attention, implementation=implementation
  )
  merge = functools.partial(
    attnres_kernels.depth_merge_norm, implementation=implementation
  )
  sources = [x]
  for start in range(0, sublayers, block):
    stop = min(start + block, sublayers)
    out, lse = attend(query[start:stop], sources)
    out, lse = (
      [y[0] for y in jax.lax.split(z, [1] * (stop - start))] for z in (out, lse)
    )
    partial = sublayer(_rms_norm(out[0], gain[start]))
    for i in range(1, stop - start):
      l = start + i
      h = merge(out[i], lse[i], query[l], partial, gain[l])
      partial += sublayer(h)
    sources.append(partial)
  out, _ = attend(query[sublayers:], sources)
  return _rms_norm(out[0], gain[sublayers])


def _rms_norm(x, gain):
  wide = x.astype(jnp.float32)
  square = jnp.mean(wide * wide, axis=-1, keepdims=True)
  return (wide * jax.lax.rsqrt(square + 1e-6) * gain).astype(x.dtype)
