# SPDX-License-Identifier: Apache-2.0
"""Value residuals: later mixers also use the values of the first one.

ResFormer (arXiv:2410.17897, and its code), under any residual scheme:

  V_n <- (V_1 + V_n) / 2    from the second mixer on

A value is taken after the projection; in KDA, before the short convolution. In
a network with mixers of several kinds, each kind has its own first mixer (our
choice).
"""

from typing import Any

import jax

from attnres_jax.common import precision

# V_1 [B, T, K, H] of each kind of mixer that has run; None without the option.
First = dict[str, jax.Array] | None


def call(
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
