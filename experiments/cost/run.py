# SPDX-License-Identifier: Apache-2.0
r"""What residual schemes cost: timed here, or compiled for chips elsewhere.

  python -m experiments.cost.run step
  python -m experiments.cost.run step --chips=v5p,v6e --networks=d1024,d2048
  python -m experiments.cost.run decode --chips=v5e --batch=1,8,64
  python -m experiments.cost.run experts --chips=v5p-32,v6e-16

Without --chips, all arms are compiled first and then run in turn, round after
round, in one process on the same tokens. A ratio is an arm's time over that of
the baseline in the same round: of residual schemes the faster form of PreNorm,
for each network and program. A row has the median over rounds and the range,
and the same ratio of processor time, which other processes disturb less.

With --chips, programs are compiled ahead of time with libtpu and not run;
`experiments.cost.compiled` says what is counted. `vectors` counts, in the
programs of the schemes, what the paper's Table 1 counts by hand.

Rows go to results.csv beside this file, in place of rows of the same program,
place, network, arm and sizes; the documents are filled from them. --out=FILE
writes the rows elsewhere and leaves the documents alone.
"""

import argparse
from collections.abc import Iterable, Iterator, Sequence
import itertools
import sys
import time
from typing import Any

import jax

from attnres_jax import config as config_lib
from attnres_jax.common import command_line
from attnres_jax.common import environment
from attnres_jax.config import fields
from attnres_jax.flops import traffic
from attnres_jax.scaling import paper
from experiments import measure as measure_lib
from experiments.cost import networks
from experiments.cost import report

Row = dict[str, Any]

_ATTNRES = ("block_attnres", "full_attnres")
_SERVED = ("prenorm", *_ATTNRES)
_LARGE = ("d1024", "d2048")
_OWN = ((0, 0),)
# Program -> arms, networks, and pairs of rows and tokens, timed here; zeros are
# those of the network.
HERE = {
  "step": (
    (
      "prenorm", "prenorm scan_layers=False",
      "rescaled", "rescaled scan_layers=False", *_ATTNRES,
      *(f"{name} form=one_softmax" for name in _ATTNRES),
    ),
    ("demo", "large"), _OWN,
  ),
  "decode": (
    tuple(f"{n}{form}" for n in _SERVED for form in ("", " layers=separate")),
    ("served_here",), ((1, 128), (1, 2048), (8, 512), (64, 512)),
  ),
  "prefill": (_SERVED, ("served_here",), ((1, 2048),)),
  "experts": (("prenorm",), ("experts_here",), _OWN),
}  # fmt: skip
# The same, compiled for chips.
COMPILED = {
  "step": (("prenorm", "block_attnres"), _LARGE, _OWN),
  "identity": (
    ("prenorm", "block_attnres plain", "block_attnres"),
    ("stack16", "stack32"), _OWN,
  ),
  "decode": (_SERVED, ("served",), ((1, 1024), (8, 1024))),
  "prefill": (_SERVED, ("served",), ((1, 4096),)),
  "experts": (("block_attnres",), ("194m", "436m"), _OWN),
}  # fmt: skip
# Sublayers and those of a block (or of a segment of Full) in Table 1's sense.
DEPTHS = {
  "Table 1": (128, 16), "Table 2, 436M": (32, 4), "48B": (54, 6),
  "Kimi K3": (186, 24),
}  # fmt: skip
_STREAMS = 4
# Flags that not every program has. The compiler can be stopped only if it
# compiles a function named train_step.
_ONLY_OF = {
  "bytes_only": ("step", "identity", "experts"),
  "cached": ("prefill",),
  "length": ("prefill",),
}


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the command; returns its exit status."""
  parser = command_line.Parser("python -m experiments.cost.run", __doc__)
  add = parser.add_argument
  add("what", choices=sorted({*HERE, *COMPILED, "vectors"}))
  add("--chips", default="", help="v5e, v5p, v6e, or slices such as v5p:2x2x2")
  add("--networks", default="", help="names (networks.py), with commas")
  add("--arms", default="", help="separated by ';'")
  add("--batch", default="", help="rows, several with commas")
  add("--tokens", default="", help="of a row, several with commas")
  add("--rounds", type=fields.Few, default=5, help="timed, after a warm-up")
  of_chips = dict(type=fields.Count, default=0, when="chips")
  add(
    "--bytes_only", action="store_true", when="chips",
    help="stop the compiler before machine code: no estimate, in seconds",
  )  # fmt: skip
  add("--cached", **of_chips, help="tokens of a prompt that are in the cache")
  add("--length", **of_chips, help="of the cache of a prompt")
  add("--out", default="", help="another file of rows than the committed one")
  return command_line.run(_main, parser.parse_args(argv))


def _main(options: argparse.Namespace) -> None:
  fields.accept("--rounds", options.rounds, fields.Size)
  for name, programs in _ONLY_OF.items():
    if getattr(options, name) and options.what not in programs:
      config_lib.fail_argument(
        f"--{name}", getattr(options, name), f"it with {' or '.join(programs)}"
      )
  if options.chips:
    jax.config.update("jax_platforms", "cpu")
  rows = vectors() if options.what == "vectors" else _measured(options)
  report.PUBLISHED.measure(_told(rows), report.KEYS, options.out)


def _told(rows: Iterable[Row]) -> Iterator[Row]:
  start = time.perf_counter()
  for row in rows:
    seconds = time.perf_counter() - start
    text = ", ".join(f"{name} {value}" for name, value in row.items())
    print(f"{seconds:4.0f} s: {text}", flush=True)
    yield row


def _measured(options: argparse.Namespace) -> Iterator[Row]:
  table = COMPILED if options.chips else HERE
  arms, names, sizes = config_lib.choose("what", options.what, table)
  arms = options.arms.split(";") if options.arms else arms
  names = options.networks.split(",") if options.networks else names
  if options.batch or options.tokens:
    batches, tokens = map(dict.fromkeys, zip(*sizes))
    sizes = itertools.product(
      _numbers("--batch", options.batch) or batches,
      _numbers("--tokens", options.tokens) or tokens,
    )
  if not (options.chips or any(map(measure_lib.is_baseline, arms))):
    config_lib.fail_argument("--arms", options.arms, "prenorm among them")
  for name, (batch, tokens) in itertools.product(names, sizes):
    network = networks.load(name)
    network = network._replace(
      batch=batch or network.batch, tokens=tokens or network.tokens
    )
    shape = {"network": name, "batch": network.batch, "tokens": network.tokens}
    if options.chips:
      rows = compiled(options, shape, arms)
    else:
      rows = timed(options.what, network, arms, options.rounds)
    for row in rows:
      yield {"place": "here"} | shape | row


def timed(
  what: str, network: networks.Network, arms: Sequence[str], rounds: int
) -> Iterator[Row]:
  """A row for each program and arm, in turn."""
  from experiments.cost import programs

  calls: dict[tuple[str, str], Any] = {}
  times: dict[tuple[str, str], list[measure_lib.Seconds]] = {}
  for arm in arms:
    for program, call in getattr(programs, what)(network, arm).items():
      if isinstance(call, measure_lib.Seconds):
        times[program, arm] = [call]
      else:
        calls[program, arm] = call
  times |= measure_lib.in_turn(calls, rounds)
  yield from measure_lib.ratios(times)


def compiled(
  options: argparse.Namespace, sizes: Row, arms: Sequence[str]
) -> Iterator[Row]:
  """A row for each chip and arm."""
  from experiments.cost import compiled as compiled_lib

  if options.what == "prefill" and sizes["batch"] > 1:
    config_lib.fail_argument("--batch", sizes["batch"], "1 prompt at a time")
  chips = options.chips.split(",")
  for place, arm in itertools.product(chips, arms):
    case = compiled_lib.Case(
      options.what, place, arm=arm, cached=options.cached,
      length=options.length, **sizes,
    )  # fmt: skip
    row = compiled_lib.count if options.bytes_only else compiled_lib.measure
    yield {
      "program": options.what, "place": place, "arm": arm,
      "cached": options.cached or "", "hardware": f"compiled for {place}",
      **environment.compiled(), **row(case),
    }  # fmt: skip


def vectors() -> Iterator[Row]:
  """Vectors that a token moves per sublayer: counted, and as printed."""
  for depth, (sublayers, block_size) in DEPTHS.items():
    for scheme, printed in paper.TABLE_1.items():
      residual = config_lib.residual_config(
        name=scheme, block_size=block_size, schedule_size=block_size,
        streams=_STREAMS,
      )  # fmt: skip
      moved = traffic.of_scheme(
        config_lib.ModelConfig(
          num_layers=sublayers // 2, dtype="bfloat16", residual=residual
        )
      )
      shape = sublayers, -(-sublayers // block_size), block_size, _STREAMS
      yield {
        "program": "vectors", "place": "counted", "network": depth,
        "arm": scheme, "printed": f"{printed(*shape):.4f}",
        "reads": f"{moved.reads:.4f}", "writes": f"{moved.writes:.4f}",
      }  # fmt: skip


def _numbers(flag: str, text: str) -> tuple[int, ...]:
  """Positive integers with commas between; none for an empty text."""
  if not text:
    return ()
  return tuple(
    fields.accept(flag, int(word) if word.isdigit() else word, fields.Size)
    for word in text.split(",")
  )


if __name__ == "__main__":
  sys.exit(main())
