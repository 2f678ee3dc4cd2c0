# SPDX-License-Identifier: Apache-2.0
"""Chunked KDA against softmax attention: cost by length, and the crossover.

Forward and backward of both, with the same heads and widths, alternating in one
process, so that the ratio holds on a busy machine too. Softmax attention is
`jax.nn.dot_product_attention`, causal. The growth exponent is the slope of log
seconds over log tokens.

  export PYTHONPATH=kernels
  python kernels/benchmarks/kda.py --out kda.csv

Two minutes on two idle cores, and 6 GiB of memory for softmax at 8192 tokens.
"""

import argparse
import csv
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np

from attnres_kernels import kda
from attnres_kernels.kda import shapes

FIELDS = (
  "shape",
  "dtype",
  "kda_ms",
  "softmax_ms",
  "ratio",
  "ratio_low",
  "ratio_high",
)


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
      with open(options.out, "w", newline="") as file:
        writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
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

  calls = (
    (jax.jit(jax.grad(linear, range(5))), (q, k, v, g, beta)),
    (jax.jit(jax.grad(softmax, range(3))), (q, k, v)),
  )
  for function, arguments in calls:
    jax.block_until_ready(function(*arguments))
  pairs = []
  for _ in range(rounds):
    pair = []
    for function, arguments in calls:
      start = time.perf_counter()
      jax.block_until_ready(function(*arguments))
      pair.append(time.perf_counter() - start)
    pairs.append(tuple(pair))
  return pairs


if __name__ == "__main__":
  main()
