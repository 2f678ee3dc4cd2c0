# SPDX-License-Identifier: Apache-2.0
"""Chunked KDA against softmax attention: cost by length, and the crossover.

Forward and backward of both, with the same heads and widths, alternating in one
process, so that the ratio holds on a busy machine too. Softmax attention is
`jax.nn.dot_product_attention`, causal. The growth exponent is the slope of log
seconds over log tokens.

  export PYTHONPATH=.:kernels
  python kernels/benchmarks/kda.py --out kda.csv

Two minutes on two idle cores, and 6 GiB of memory for softmax at 8192 tokens.
"""

import argparse
import statistics

from benchmarks import gpu
from benchmarks import gpu_protocol
import jax
import jax.numpy as jnp
import numpy as np

from attnres_jax import csv_rows
from attnres_kernels import kda
from attnres_kernels.kda import shapes


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--dtype", default="float32")
  parser.add_argument("--rounds", type=int, default=3)
  parser.add_argument("--out", default="")
  options = parser.parse_args()
  print(jax.devices()[0].device_kind, jax.__version__, flush=True)
  times, ratios, rows = [], [], []
  for shape in shapes.CPU:
    # Short calls are noisy but cheap to repeat.
    rounds = max(options.rounds, shapes.CPU[-1].tokens // shape.tokens)
    pairs = compare(shape, options.dtype, rounds)
    spread = [a / b for a, b in pairs]
    ratios.append(statistics.median(spread))
    times.append(tuple(map(min, zip(*pairs))))
    rows.append(
      {
        "shape": str(shape),
        "dtype": options.dtype,
        "kda_ms": f"{times[-1][0] * 1e3:.1f}",
        "softmax_ms": f"{times[-1][1] * 1e3:.1f}",
        "ratio": f"{ratios[-1]:.3f}",
        "ratio_low": f"{min(spread):.3f}",
        "ratio_high": f"{max(spread):.3f}",
      }
    )
    print(*rows[-1].values(), flush=True)
    if options.out:
      csv_rows.write(options.out, rows)
  tokens = np.log([shape.tokens for shape in shapes.CPU])
  for name, seconds in zip(("kda", "softmax"), np.log(times).T):
    print(
      f"{name}: seconds grow as tokens^{np.polyfit(tokens, seconds, 1)[0]:.2f}"
    )
  print(crossing(tokens, np.log(ratios)))


def crossing(log_tokens, log_ratios) -> str:
  """Where the ratio falls below one, interpolated between the lengths."""
  for i in range(1, len(log_ratios)):
    if log_ratios[i] <= 0 < log_ratios[i - 1]:
      share = log_ratios[i - 1] / (log_ratios[i - 1] - log_ratios[i])
      at = log_tokens[i - 1] + share * (log_tokens[i] - log_tokens[i - 1])
      return f"kda is faster from {np.exp(at):.0f} tokens on"
  where = "everywhere" if log_ratios[0] <= 0 else "nowhere"
  return f"kda is faster {where} among these lengths"


def compare(shape, dtype, rounds):
  """Pairs of seconds, KDA and softmax, without the first calls."""
  keys = jax.random.split(jax.random.key(0), 5)
  token = shape.batch, shape.tokens, shape.heads
  q, k = (jax.random.normal(key, (*token, shape.key)) for key in keys[:2])
  k /= jnp.linalg.norm(k, axis=-1, keepdims=True)
  v = jax.random.normal(keys[2], (*token, shape.value))
  g = -jax.nn.softplus(jax.random.normal(keys[3], (*token, shape.key)) - 3)
  beta = jax.nn.sigmoid(jax.random.normal(keys[4], token))
  q, k, v = (x.astype(dtype) for x in (q, k, v))

  def linear(*arguments):
    return jnp.sum(kda(*arguments, implementation="xla")[0] ** 2)

  def softmax(*arguments):
    return jnp.sum(
      jax.nn.dot_product_attention(*arguments, is_causal=True) ** 2
    )

  def arm(function, *arguments):
    call = jax.jit(jax.grad(function, range(len(arguments))))
    run = lambda index: call(*arguments)
    return gpu_protocol.Prepared(run, jax.block_until_ready, lambda _: {})

  arms = dict(kda=arm(linear, q, k, v, g, beta), softmax=arm(softmax, q, k, v))
  samples = gpu.measure(arms, lambda: None, rounds)
  return list(zip(samples["kda"], samples["softmax"]))


if __name__ == "__main__":
  main()
