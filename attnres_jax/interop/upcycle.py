# SPDX-License-Identifier: Apache-2.0
r"""Turns a PreNorm network into one with another residual scheme.

  python -m attnres_jax.interop.upcycle --workdir=runs/llama \
    --out=runs/attnres --residual=block_attnres --num_blocks=8
  python -m attnres_jax.main --config=runs/attnres/config.py --workdir=runs/more

The new network computes the same function; training then changes it. No list
says which schemes can do that: logits of random tokens, in float32, are
compared with those before. With Full and Block AttnRes, zero queries
read a mean, so mixtures are multiplied by the number of their sources
(`model.residual.read.scale="sum"`, ours): exact for any sublayer. Without that,
norms see smaller values, which matters as far as their epsilon does. `delta_mh`
adds to the stream, by a factor that starts at zero (arXiv:2607.27230).
"""

import argparse
from collections.abc import Mapping, Sequence
import dataclasses
import sys
from typing import Any, NoReturn

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

# Of the largest logit: reads are summed in another order, in float32.
_TOLERANCE = 1e-4
_TOKENS = 8
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
  """Moves a PreNorm network to a scheme that begins as the same function.

  Reads of Full and Block AttnRes are scaled.

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
  new = residuals.build_residual(config, rngs=nnx.Rngs(params=draws.key(0)))
  flat = {
    name: leaf
    for name, leaf in trees.to_flat(model).items()
    if not name.startswith("residual/")
  }
  flat |= trees.to_flat({"residual": new})
  upcycled = _network(config, flat)
  gap = np.abs(_logits(upcycled) - _logits(model)).max()
  if not gap < _TOLERANCE:
    _fail(config, f"logits of this one differ by {gap:.1g} of the largest")
  return upcycled


def _network(
  config: config_lib.ModelConfig, flat: Mapping[str, Any]
) -> models.Transformer:
  """The network with these leaves; refuses one that has others."""
  abstract = jax.eval_shape(lambda: models.build_model(config))
  if missing := sorted(trees.to_flat(abstract).keys() - flat.keys()):
    _fail(config, f"this one also has {missing[0]}")
  return trees.from_flat(abstract, flat)


def _logits(model: models.Transformer) -> np.ndarray:
  """Logits of random tokens, in float32, over the largest."""
  config = dataclasses.replace(model.config, dtype="float32")
  wide = _network(config, trees.to_flat(model))
  rng = np.random.default_rng(0)
  tokens_BT = rng.integers(0, config.vocab_size, (1, _TOKENS), np.int32)
  with jax.default_matmul_precision("highest"):
    logits_BTV = jax.jit(lambda model: model(tokens_BT))(wide)
  return np.asarray(logits_BTV / jnp.max(jnp.abs(logits_BTV)))


def _fail(config: config_lib.ModelConfig, why: str) -> NoReturn:
  config_lib.fail(
    "model.residual.name", config.residual.name,
    f"a scheme that begins as PreNorm ({why})",
  )  # fmt: skip


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
