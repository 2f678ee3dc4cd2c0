# SPDX-License-Identifier: Apache-2.0
"""Samples text from a trained run, one token at a time.

  python -m attnres_jax.inference.sample --workdir=runs/tiny --prompt="def "

Every token recomputes the whole window, at a fixed length so that one compiled
program serves all tokens. This is simple, works with every residual scheme, and
is fast enough for small networks. Once the window (the length that the network
was trained on) is full, the oldest token is dropped.
"""

import argparse
from collections.abc import Sequence
import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np

from attnres_jax import checkpoint
from attnres_jax import command_line
from attnres_jax import config as config_lib
from attnres_jax import data
from attnres_jax import files
from attnres_jax import models
from attnres_jax.config import fields


def main(argv: Sequence[str] | None = None) -> int:
  """The command; returns its exit status."""
  return command_line.run(_sample_run, _parser().parse_args(argv))


def _sample_run(options: argparse.Namespace) -> None:
  _check(options.num_tokens, options.temperature, options.seed)
  try:
    options.prompt.encode()
  except UnicodeEncodeError:
    config_lib.fail_argument("--prompt", options.prompt, "UTF-8 text")
  folder = files.check_folder("--workdir", options.workdir)
  steps = checkpoint.all_steps(folder)
  if not steps:
    config_lib.fail_argument(
      "--workdir", options.workdir, "the folder of a run with a checkpoint"
    )
  if options.step is not None and options.step not in steps:
    known = ", ".join(map(str, steps))
    config_lib.fail_argument("--step", options.step, f"one of {known}")
  config, model = checkpoint.load_model(folder, options.step)
  text = sample_text(
    model,
    data.make_tokenizer(config.data),
    options.prompt,
    num_tokens=options.num_tokens,
    window=config.data.sequence_length,
    temperature=options.temperature,
    seed=options.seed,
  )
  print(options.prompt + text)


def sample_text(
  model: models.Transformer, tokenizer: data.Tokenizer, prompt: str, **options
) -> str:
  """Continues `prompt` as the start of a document, with options of `sample`."""
  prompt_ids = [tokenizer.separator_id, *tokenizer.encode(prompt)]
  ids = sample(model, np.asarray(prompt_ids, np.int32), **options)
  return tokenizer.decode(ids)


def sample(
  model: models.Transformer,
  prompt_ids: np.ndarray,
  *,
  num_tokens: int,
  window: int,
  temperature: float = 0.8,
  seed: int = 0,
) -> np.ndarray:
  """Draws `num_tokens` ids after `prompt_ids`.

  Args:
    model: any network.
    prompt_ids: [n], at least one; only the last `window` are used.
    num_tokens: how many to draw.
    window: how many tokens the network sees.
    temperature: divides the logits; 0 for the most likely token.
    seed: the same seed draws the same ids.

  Raises:
    ConfigError: the prompt is empty, or a number cannot be used.
  """
  _check(num_tokens, temperature, seed)
  kept = np.asarray(prompt_ids, np.int32)[-window:]
  if not kept.size:
    config_lib.fail_argument("prompt_ids", [], "at least one token")
  tokens_T = np.zeros(window, np.int32)
  tokens_T[: kept.size] = kept
  ids = _sample(
    model,
    tokens_T,
    jnp.int32(kept.size),
    jnp.float32(temperature),
    jax.random.key(seed),
    num_tokens,
  )
  return np.asarray(ids)


def _check(num_tokens: int, temperature: float, seed: int) -> None:
  for name, value, kind in (
    ("--num_tokens", num_tokens, fields.Tokens),
    ("--temperature", temperature, fields.NotNegative),
    ("--seed", seed, fields.Seed),
  ):
    fields.accept(name, value, kind)


@functools.partial(jax.jit, static_argnums=5)
def _sample(model, tokens_T, filled, temperature, key, num_tokens):
  def one(carry, key):
    tokens_T, filled = carry
    h_BTD = model.hidden(tokens_T[None])
    last_B1D = jax.lax.dynamic_slice_in_dim(h_BTD, filled - 1, 1, axis=1)
    logits_V = model.embedding.decode(last_B1D)[0, 0]
    drawn = jax.random.categorical(
      key, logits_V / jnp.maximum(temperature, 1e-6)
    )
    token = jnp.where(temperature > 0, drawn, jnp.argmax(logits_V))
    token = token.astype(tokens_T.dtype)
    # Positions after `filled` are never attended to, so zeros are fine as
    # padding.
    full = filled == tokens_T.size
    tokens_T = jnp.where(full, jnp.roll(tokens_T, -1), tokens_T)
    filled = jnp.where(full, filled - 1, filled)
    tokens_T = tokens_T.at[filled].set(token)
    return (tokens_T, filled + 1), token

  keys = jax.random.split(key, num_tokens)
  _, ids = jax.lax.scan(one, (tokens_T, filled), keys)
  return ids


def _parser() -> command_line.Parser:
  parser = command_line.Parser(
    "python -m attnres_jax.inference.sample", __doc__
  )
  add = parser.add_argument
  add("--workdir", required=True, help="folder of a run")
  add("--prompt", default="", help="text to continue")
  add("--num_tokens", type=int, default=256, help="how many tokens to add")
  add(
    "--temperature", type=float, default=0.8, help="0 for the most likely token"
  )
  add("--seed", type=int, default=0, help="seed of the random choices")
  add("--step", type=int, help="checkpoint to use; the newest by default")
  return parser


if __name__ == "__main__":
  sys.exit(main())
