# SPDX-License-Identifier: Apache-2.0
"""QK-clip: rescales heads whose logits grow too large (arXiv:2507.20534).

After each update, for every head whose largest logit of the batch, m, exceeds
the threshold tau, with f = tau / m:

  MLA        W_q and W_k of the own part by sqrt(f), W_q of the part whose key
             all heads share by f; the shared key stays as it is
  attention  W_q and W_k by sqrt(f); with grouped queries, whose keys are
             shared, W_q by f

so that the logits of this batch, with the old weights, would be at most tau.
Logits of other heads do not change. Momentum is not rescaled.
"""

from typing import Any

import jax
import jax.numpy as jnp

from attnres_jax import config as config_lib
from attnres_jax.models import residuals
from attnres_jax.models import sublayer
from attnres_jax.models.mixers import probe

# Kind of a sublayer -> its largest logits, [L of this kind, N].
Peaks = dict[str, jax.Array]


def check(config: config_lib.RunConfig) -> None:
  """Refuses networks whose logits do not follow the weights.

  Raises:
    ConfigError: says which field prevents it.
  """
  model, clip = config.model, config.optim.qk_clip
  for prevents, why in (
    (not _kinds(model), "a network with softmax attention"),
    (
      model.qkv_norm
      or model.attention.qk_norm
      or residuals.scheme_of(model).qkv_norm,
      "queries and keys without norms, which undo it",
    ),
    (config.mesh.stage != 1, "mesh.stage=1"),
  ):
    if prevents:
      config_lib.fail("optim.qk_clip", clip, f"0, or {why}")


def with_probes(model: Any) -> Any:
  """The network with a probe in every sublayer that has logits."""
  model = jax.tree.map(lambda a: a, model)
  for kind in _kinds(model.config):
    core = model.sublayers[kind].core
    shape = len(core.query[...]), model.config.num_heads
    core.probe = probe.LogitProbe(jnp.zeros(shape), axes="N")
  return model


def take_peaks(gradient: Any, like: Any) -> tuple[Any, Peaks]:
  """Separates the gradients of `with_probes(like)` and of its probes."""
  peaks = {
    kind: stack.core.probe[...]
    for kind, stack in gradient.sublayers.items()
    if getattr(stack.core, "probe", None) is not None
  }
  is_probe = lambda node: isinstance(node, probe.LogitProbe)
  leaves = jax.tree.leaves(gradient, is_leaf=is_probe)
  leaves = [leaf for leaf in leaves if not is_probe(leaf)]
  return jax.tree.unflatten(jax.tree.structure(like), leaves), peaks


def clip(model: Any, peaks: Peaks, threshold: float) -> Any:
  """The network with its heads rescaled."""
  model = jax.tree.map(lambda a: a, model)

  def clip_core(core, peak_N):
    core.scale_logits(threshold / jnp.maximum(peak_N, threshold))
    return core

  for kind, peak_LN in peaks.items():
    stacked = model.sublayers[kind]
    stacked.core = jax.vmap(clip_core)(stacked.core, peak_LN)
  return model


def _kinds(model: config_lib.ModelConfig) -> list[str]:
  """The kinds of sublayers that have logits."""
  return [
    kind
    for kind in dict.fromkeys(model.sublayer_kinds)
    if hasattr(sublayer.CORES[kind], "scale_logits")
  ]
