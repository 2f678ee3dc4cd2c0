# SPDX-License-Identifier: Apache-2.0
r"""Turns a PreNorm network into one with another residual scheme.

  python -m attnres_jax.interop.upcycle --workdir=runs/llama \
    --out=runs/attnres --residual=block_attnres --num_blocks=8
  python -m attnres_jax.main --config=runs/attnres/config.py --workdir=runs/more

The new network computes the same function; training then changes it. No list
says which schemes can do that: their reads at the start, of random values in
float32, are compared with PreNorm's. With Full and Block AttnRes, zero queries
read a mean, so mixtures are multiplied by the number of their sources
(`model.residual.read.scale="sum"`, ours): exact for any sublayer. Without that,
norms see smaller values, which matters as far as their epsilon does. `delta_mh`
adds to the stream, by a factor that starts at zero (arXiv:2607.27230).
"""

import argparse
from collections.abc import Sequence
import dataclasses
import sys
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

from attnres_jax import config as config_lib
from attnres_jax import models
from attnres_jax.common import command_line
from attnres_jax.common import draws
from attnres_jax.common import trees
from attnres_jax.config import errors
from attnres_jax.config import fields
from attnres_jax.inference import trained
from attnres_jax.interop import weights_folder
from attnres_jax.models import residuals
from attnres_jax.models.residuals import base

# Reads of the same values, summed in another order, in float32.
_TOLERANCE = 1e-5
_FROM = "prenorm"


def main(argv: Sequence[str] | None = None) -> int:
  """The command; returns its exit status."""
  parser = command_line.Parser("python -m attnres_jax.interop.upcycle", __doc__)
  add = parser.add_argument
  trained.add_flags(parser)
  add("--out", required=True, help="new folder")
  add("--residual", required=True, help="the scheme, such as block_attnres")
  for name, words in {
    "num_blocks": "of schemes with blocks",
    "block_size": "sublayers per block, in place of --num_blocks",
    "heads": "softmaxes per read; 0: the scheme's",
    "rank": "of low-rank maps; 0: the scheme's",
  }.items():
    add(f"--{name}", type=fields.Count, default=0, help=words)
  return command_line.run(_upcycle_run, parser.parse_args(argv))


def upcycle(
  model: models.Transformer, residual: config_lib.ResidualConfig
) -> models.Transformer:
  """Moves a network to another scheme, which begins as the same function.

  Args:
    model: with PreNorm.
    residual: the scheme; with Full and Block AttnRes, its reads are scaled.

  Raises:
    ConfigError: the network has another scheme, or the new one does not begin
      as PreNorm; says why.
  """
  old = model.config
  if old.residual.name != _FROM:
    config_lib.fail(
      "model.residual.name",
      old.residual.name,
      f"{_FROM!r}: of another, no scheme computes the same function",
    )
  scheme = residuals.scheme_named(residual.name)
  if getattr(scheme, "attends_last", False):
    read = dataclasses.replace(residual.read, scale="sum")
    residual = config_lib.residual_config(**vars(residual) | {"read": read})
  config = dataclasses.replace(old, residual=residual)
  config.check_num_blocks()
  check_begins_as_prenorm(config)
  new = residuals.build_residual(config, rngs=nnx.Rngs(params=draws.key(0)))
  flat = {
    name: leaf
    for name, leaf in trees.to_flat(model).items()
    if not name.startswith("residual/")
  }
  flat |= trees.to_flat({"residual": new})
  abstract = jax.eval_shape(lambda: models.build_model(config))
  return trees.from_flat(abstract, flat)


def check_begins_as_prenorm(config: config_lib.ModelConfig) -> None:
  """Refuses a scheme whose function at its start is not PreNorm's.

  Raises:
    ConfigError: says what differs.
  """
  name = config.residual.name
  scheme = residuals.scheme_of(config)

  def fail(why: str) -> None:
    config_lib.fail(
      "model.residual.name", name, f"a scheme that begins as PreNorm ({why})"
    )

  for differs, why in (
    (not scheme.pre_norm, "sublayers of this one have no pre-norm"),
    (not scheme.final_norm, "this one has no norm before the head"),
    (scheme.qkv_norm, "mixers of this one normalise queries, keys and values"),
    (
      scheme.normed is not base.Residual.normed,
      "mixers of this one have further norms, which know no trained gains",
    ),
    (
      scheme.prepare is not base.Residual.prepare,
      "sublayers of this one start at other weights",
    ),
  ):
    if differs:
      fail(why)
  our_reads = _reads(config)
  plain = dataclasses.replace(
    config, residual=config_lib.residual_config(_FROM)
  )
  for l, (ours, expected) in enumerate(zip(our_reads, _reads(plain)), 1):
    for value in ours:
      gap = np.abs(value - expected[0]).max() / np.abs(expected[0]).max()
      if not gap < _TOLERANCE:
        which = "readout" if l > config.num_sublayers else f"read {l}"
        fail(f"{which} of this one differs by {gap:.1g} of its largest entry")


def _reads(config: config_lib.ModelConfig) -> list[Any]:
  """All reads of random values, of any size; several where q, k, v differ."""
  config = dataclasses.replace(config, dtype="float32")
  residual = residuals.build_residual(
    config, rngs=nnx.Rngs(params=draws.key(0))
  )
  rng = np.random.default_rng(0)
  shape = config.num_sublayers + 1, 1, 3, config.width
  sizes = 10.0 ** rng.uniform(-2, 1, (shape[0], 1, 1, 1))
  values = jnp.asarray(sizes * rng.standard_normal(shape), jnp.float32)

  def run(residual: base.Residual, values: jax.Array) -> list[Any]:
    reads: list[Any] = []

    def sublayer(l: int, carry: Any, slot: Any) -> jax.Array:
      reads.append(jax.tree.leaves(base.before_norm(residual, carry, slot)))
      return values[l + 1]

    state = base.run_through(residual, values[0], sublayer)
    return [*reads, [residual.readout(state)]]

  return jax.device_get(jax.jit(run)(residual, values))


def _upcycle_run(options: argparse.Namespace) -> None:
  out = weights_folder.check_new("--out", options.out)
  errors.check_in("--residual", options.residual, residuals.RESIDUALS)
  name = options.residual
  residual = config_lib.residual_config(
    name=name, num_blocks=options.num_blocks, block_size=options.block_size,
    rank=options.rank,
    read=config_lib.DepthReadConfig(heads=options.heads),
  )  # fmt: skip
  config, model, _ = trained.load(options)
  new = upcycle(model, residual)
  config = dataclasses.replace(
    config, name=f"{config.name}_{name}", model=new.config,
    train=dataclasses.replace(config.train, start_from=""),
  )  # fmt: skip
  facts, also = weights_folder.origin(options.workdir, config)
  if facts:  # Of an import, whose family has no such network.
    facts = facts | {"upcycled_from": options.workdir}
  weights_folder.write(out, config, new, facts, also)
  count = sum(leaf.size for leaf in jax.tree.leaves(new.residual))
  print(f"{name}, {count:,} new parameters: {out}")


if __name__ == "__main__":
  sys.exit(main())
