# SPDX-License-Identifier: Apache-2.0
"""xHC against its equations in NumPy loops."""

import numpy as np
import pytest

from tests.models import trunks

pytestmark = pytest.mark.usefixtures("float64")


def xhc(module, sublayers, embedding):
  """One token after the other, except for the convolutions."""
  b, t, d = np.asarray(embedding).shape
  streams = [np.asarray(embedding) + 0j for _ in range(16)]
  for l, f in enumerate(sublayers):
    router, router_bias, weight, bias, scale = (
      np.asarray(a[...])[l] for a in (
        module.router, module.router_bias, module.projection, module.bias,
        module.scale,
      )
    )  # fmt: skip
    h = np.zeros((b, t, d), complex)
    plan = {}
    for at in np.ndindex(b, t):
      x = [s[at] for s in streams]
      scores = [
        trunks.sigmoid(
          scale[3] * (trunks.rms_norm(x[2 + i], trunks.EPS) @ router[i])
          + router_bias[i]
        )
        for i in range(14)
      ]
      best = sorted(range(14), key=lambda i: -scores[i].real)[:2]
      active = [0, 1, 2 + best[0], 2 + best[1]]
      gate = [1, 1, scores[best[0]], scores[best[1]]]
      seen = trunks.rms_norm(np.concatenate([x[i] for i in active]), trunks.EPS)
      z = bias + scale[:3].repeat(16) * (seen @ weight.reshape(4 * d, 48))
      h[at] = sum(trunks.sigmoid(z[i]) * x[i] for i in range(16))
      mix = np.exp(z[32:].reshape(4, 4))
      for _ in range(20):
        mix = mix / mix.sum(axis=1, keepdims=True)
        mix = mix / mix.sum(axis=0, keepdims=True)
      plan[at] = active, gate, 2 * trunks.sigmoid(z[16:32]).reshape(4, 4), mix
    y = f(h)
    convolved = []
    if l % 2:
      for taps in module.taps:
        tap = np.asarray(taps[...])[l // 2]
        o = np.zeros((b, t, d), complex)
        for w in range(len(tap)):
          for now in range(w, t):
            o[:, now] += tap[-1 - w] * y[:, now - w]
        convolved.append(o)
    new = [s.copy() for s in streams]
    for at, (active, gate, write, mix) in plan.items():
      updates = [y[at]]
      for o in convolved:
        o = o[at]
        for other in updates:
          o = o - (o @ other) / (other @ other) * other
        updates.append(o)
      for j, stream in enumerate(active):
        new[stream][at] = sum(
          mix[i, j] * streams[active[i]][at] for i in range(4)
        ) + gate[j] * sum(w * o for w, o in zip(write[j], updates))
    streams = new
  return sum(streams)


def test_is_its_definition_with_its_gradients():
  trunks.check_gradients("xhc", xhc, 2, rtol=1e-7, scale=2.0)
