# SPDX-License-Identifier: Apache-2.0
"""A sublayer: a mixer or an MLP, in most schemes behind its own pre-norm.

f_l(h) = Core_l(Norm_l(h)), without a skip connection: the residual scheme
decides what it reads and where its output goes (arXiv:2603.15031 section 2,
where "layer" means sublayer).
"""

from collections.abc import Callable
import dataclasses

from flax import nnx
import jax

from attnres_jax import config as config_lib
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
