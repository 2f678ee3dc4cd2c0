# SPDX-License-Identifier: Apache-2.0
"""A sublayer: a mixer or an MLP, in most schemes behind its own pre-norm.

f_l(h) = Core_l(Norm_l(h)), without a skip connection: the residual scheme
decides what it reads and where its output goes (arXiv:2603.15031 section 2,
where "layer" means sublayer).

With value residuals, later mixers also use the values of the first one
(ResFormer, arXiv:2410.17897, and its code), under any residual scheme:

  V_n <- (V_1 + V_n) / 2    from the second mixer on

A value is taken after the projection; in KDA, before the short convolution. In
a network with mixers of several kinds, each kind has its own first mixer (our
choice).
"""

from collections.abc import Callable
import dataclasses
from typing import Any

from flax import nnx
import jax

from attnres_jax import config as config_lib
from attnres_jax.common import precision
from attnres_jax.common import scopes
from attnres_jax.common import sharding
from attnres_jax.models import mixers
from attnres_jax.models import mlp
from attnres_jax.models import moe
from attnres_jax.models import norm as norm_lib
from attnres_jax.models import residuals

# Kind -> module that maps the normalised input x_BTD, and the document numbers
# segment_ids_BT or None, to y_BTD. One with `reads_qkv = True` also accepts a
# `residuals.QKV` of normalised inputs. One that can decode has
# `init_cache(batch, length, heads)`, an empty cache with room for so many
# tokens, `cache_specs(heads)`, how a mesh shards it, and `extend(x, cache,
# chunk)`, which maps new tokens to y_BTD and what the cache should add
# (`mixers.cache`). One that DeepNorm can scale has `scale_values(factor)`,
# which multiplies the weights between its input and its output, but for those
# of scores and gates. One with softmax logits has `scale_logits(factor_N)`, for
# `optimizer.qk_clip`, and a `probe` (`mixers.probe`), which is None unless the
# logits are wanted.
CORES: dict[str, Callable[..., nnx.Module]] = {
  "attention": mixers.Attention,
  "kda": mixers.Kda,
  "mla": mixers.Mla,
  "mlp": mlp.SwiGLU,
  "moe": moe.Moe,
}


# V_1 [B, T, K, H] of each kind of mixer that has run; None without the option.
First = dict[str, jax.Array] | None


class Sublayer(nnx.Module):
  """One sublayer of the given kind, a key of `CORES`."""

  def __init__(
    self, kind: str, config: config_lib.ModelConfig, *, rngs: nnx.Rngs
  ):
    scheme = residuals.scheme_of(config)
    self.norm = norm_lib.optional(
      scheme.pre_norm, config.width, config.norm_eps
    )
    if scheme.qkv_norm:
      config = dataclasses.replace(config, qkv_norm=True)
    last = kind == config.last_mixer and kind not in config.mixers
    field = "model.last_mixer" if last else "model.mixers"
    core = config_lib.choose(field, kind, CORES)
    self.core = core(config, rngs=rngs)


def abstract_core(kind: str, config: config_lib.ModelConfig) -> nnx.Module:
  """The core of a sublayer of this kind, with abstract arrays."""
  return jax.eval_shape(
    lambda: Sublayer(kind, config, rngs=nnx.Rngs(params=0)).core
  )


def build_stack(
  kind: str, config: config_lib.ModelConfig, keys: jax.Array
) -> Sublayer:
  """ONE module whose leaves have a leading axis, with a sublayer per key."""
  return jax.vmap(
    lambda key: Sublayer(kind, config, rngs=nnx.Rngs(params=key))
  )(keys)


def apply(
  residual: Any,
  kind: str,
  sublayer: Any,
  before: Any,
  slot: Any,
  segment_ids_BT: jax.Array | None,
  first: First,
) -> tuple[jax.Array, Any, Any]:
  """Runs one sublayer.

  `residual` is anything with `read` of a scheme, `sublayer` anything with a
  `norm` and a `core`. `before` is the carry of the scheme.

  Returns:
    The output, what `first` does not have yet, and the carry for `write` unless
    it is the one given.
  """
  with scopes.part(scopes.RESIDUAL):
    x, carry = residual.read(before, slot, sublayer.norm)
    # An unchanged carry would be copied by `jax.checkpoint`.
    carry = None if carry is before else carry
  if not mixes(sublayer.core):
    x = residuals.base.query_input(x)
  y_BTD, new = _call(sublayer.core, kind, x, segment_ids_BT, first)
  y_BTD = _with_one_gradient(sharding.keep_tokens(y_BTD))
  return y_BTD, new, carry


@jax.custom_jvp
def _with_one_gradient(y_BTD: jax.Array) -> jax.Array:
  """Returns y; its gradient becomes one array of y's dtype.

  What the rest of the network returns is wider, such as the float32 gradient of
  a stream, or a sum. Compilers would make the conversion or the sum a part of
  every matrix product that reads the gradient, which then takes longer.
  """
  return y_BTD


@_with_one_gradient.defjvp
def _with_one_gradient_jvp(
  primals: tuple[jax.Array], tangents: tuple[jax.Array]
) -> tuple[jax.Array, jax.Array]:
  ((y_BTD,), (tangent_BTD,)) = primals, tangents
  return y_BTD, jax.lax.optimization_barrier(tangent_BTD)


def _call(
  core: Any, kind: str, x: Any, segment_ids_BT: jax.Array | None, first: First
) -> tuple[jax.Array, dict[str, jax.Array]]:
  """Runs a sublayer's core on its normalised input.

  Returns:
    y_BTD, and what `first` does not have yet.
  """
  if first is None or not mixes(core):
    return core(x, segment_ids_BT), {}
  query, key, value = core.project(x)
  new = {}
  if kind in first:
    total = precision.widen(first[kind]) + precision.widen(value)
    value = (0.5 * total).astype(value.dtype)
  else:
    new[kind] = value
  return core.finish(x, query, key, value, segment_ids_BT), new


def mixes(core: Any) -> bool:
  """Whether a core is a mixer in parts, `mixers.attention.Mixer`."""
  return getattr(core, "reads_qkv", False)
