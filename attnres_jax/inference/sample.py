# SPDX-License-Identifier: Apache-2.0
"""Samples text from a trained run, one token at a time.

  python -m attnres_jax.inference.sample --workdir=runs/tiny --prompt="def "

Every token recomputes the whole window, at one fixed length so that one
compiled program serves all of them: simple, right for every residual scheme,
and quick enough for small networks. Once the window (the length that the
network was trained on) is full, the oldest token falls out.
"""

from collections.abc import Sequence
import functools

from absl import app
from absl import flags
import jax
import jax.numpy as jnp
import numpy as np

from attnres_jax import checkpoint
from attnres_jax import data
from attnres_jax import models

_WORKDIR = flags.DEFINE_string(
  "workdir", None, "Folder of a run.", required=True
)
_PROMPT = flags.DEFINE_string("prompt", "", "Text to go on from.")
_NUM_TOKENS = flags.DEFINE_integer(
  "num_tokens", 256, "How many to add.", lower_bound=1
)
_TEMPERATURE = flags.DEFINE_float(
  "temperature", 0.8, "0 takes the likeliest token.", lower_bound=0.0
)
_SEED = flags.DEFINE_integer("seed", 0, "Of the random choices.")
_STEP = flags.DEFINE_integer("step", None, "Checkpoint; default the newest.")


def main(argv: Sequence[str]) -> None:
  if len(argv) > 1:
    raise app.UsageError(f"unexpected argument {argv[1]!r}")
  config, model = checkpoint.load_model(_WORKDIR.value, _STEP.value)
  text = sample_text(
    model,
    data.make_tokenizer(config.data),
    _PROMPT.value,
    num_tokens=_NUM_TOKENS.value,
    window=config.data.sequence_length,
    temperature=_TEMPERATURE.value,
    seed=_SEED.value,
  )
  print(_PROMPT.value + text)


def sample_text(
  model: models.Transformer,
  tokenizer: data.Tokenizer,
  prompt: str,
  *,
  num_tokens: int,
  window: int,
  temperature: float = 0.8,
  seed: int = 0,
) -> str:
  """What the network adds to `prompt`, taken as the start of a document."""
  prompt_ids = [tokenizer.separator_id, *tokenizer.encode(prompt)]
  ids = sample(
    model,
    np.asarray(prompt_ids, np.int32),
    num_tokens=num_tokens,
    window=window,
    temperature=temperature,
    seed=seed,
  )
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
    prompt_ids: [n], at least one; the last `window` of them count.
    num_tokens: how many to draw.
    window: how many tokens the network sees at once.
    temperature: the logits are divided by it; 0 takes the likeliest.
    seed: the same seed draws the same ids.

  Raises:
    ValueError: the prompt is empty.
  """
  kept = np.asarray(prompt_ids, np.int32)[-window:]
  if not kept.size:
    raise ValueError("prompt_ids: got none, expected at least one token")
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
    # What is right of `filled` is never attended to, so zeros do as padding.
    full = filled == tokens_T.size
    tokens_T = jnp.where(full, jnp.roll(tokens_T, -1), tokens_T)
    filled = jnp.where(full, filled - 1, filled)
    tokens_T = tokens_T.at[filled].set(token)
    return (tokens_T, filled + 1), token

  keys = jax.random.split(key, num_tokens)
  _, ids = jax.lax.scan(one, (tokens_T, filled), keys)
  return ids


if __name__ == "__main__":
  app.run(main)
