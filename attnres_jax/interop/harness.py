# SPDX-License-Identifier: Apache-2.0
"""Our networks as a model of EleutherAI's lm-evaluation-harness.

  python -m attnres_jax.interop.harness --model=attnres \
    --model_args=workdir=runs/llama --tasks=arc_easy,lambada_openai

is lm_eval's command, with all of its flags. Needs the extra `eval` (lm_eval
0.4.13). Contexts are cut and split as lm_eval does it for transformers. A text
opens once, as the run's text format says: the score of a document is the sum of
the losses of its tokens in training.
"""

import argparse
from collections.abc import Mapping, Sequence
import functools
import itertools
import math
import os
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attnres_jax import config as config_lib
from attnres_jax import models
from attnres_jax.common import command_line
from attnres_jax.common import sharding
from attnres_jax.config import fields
from attnres_jax.data import text_format as text_format_lib
from attnres_jax.inference import draw
from attnres_jax.inference import engine as engine_lib
from attnres_jax.inference import text as text_lib
from attnres_jax.inference import trained
from attnres_jax.interop import config_table
from attnres_jax.interop import weights_folder
from attnres_jax.models import loss as loss_lib
from attnres_jax.train import checkpoint

try:
  from lm_eval import __main__ as lm_eval_main
  from lm_eval.api import model as model_lib
  from lm_eval.api import registry
  from lm_eval.models import utils as gen_utils
except ImportError as error:
  raise ImportError(f'{error}: pip install "attnres-jax[eval]"') from error

# Tokens of an answer, where the task does not say.
_MOST_TOKENS = 256
# Batches are padded to this or twice as many tokens, and so on.
_LEAST_LENGTH = 64
_SETTINGS = ("temperature", "top_k", "top_p")


def main() -> int:
  """Runs lm_eval's command; returns its exit status."""
  return command_line.run(lm_eval_main.cli_evaluate)


@registry.register_model("attnres")
class Network(model_lib.TemplateLM):
  """The network of a run; --model_args gives its arguments.

  Attributes:
    max_length: most tokens of a context with its continuation.
  """

  def __init__(
    self,
    workdir: str,
    step: int | None = None,
    max_length: int = 0,
    batch_size: int | str = 1,
    **unknown: Any,
  ):
    """Loads the network, sharded over the devices of this host.

    Args:
      workdir: folder of the run.
      step: of its checkpoint; the newest by default.
      max_length: see above; 0 for as many as the network was trained on.
      batch_size: texts that are scored or generated at once, at least.
      **unknown: refused.
    """
    super().__init__()
    unknown.pop("device", None)  # JAX chooses; lm_eval says cuda:0 by default.
    for name, value in unknown.items():
      expected = "workdir, step or max_length"
      config_lib.fail_argument(f"--model_args: {name}", value, expected)
    size = int(batch_size) if str(batch_size).isdigit() else batch_size
    fields.accept("--batch_size", size, fields.Size)
    fields.accept("--model_args: max_length", max_length, fields.Count)
    options = argparse.Namespace(workdir=str(workdir), step=step)
    folder, step = trained.find(options)
    self._mesh = sharding.make_mesh(config_lib.MeshConfig(data=1, fsdp=-1))
    shards = sharding.num_row_shards(self._mesh)
    self._rows = -(-int(size) // shards) * shards
    config, self._model = checkpoint.load_model(folder, step, self._mesh)
    self._format = text_format_lib.of_data(config.data, folder)
    values = weights_folder.origin(folder, config)[0].get("config", {})
    longest = next(filter(None, map(values.get, config_table.LENGTHS)), 0)
    self.max_length = max_length or max(longest, config.data.sequence_length)
    self._opening = list(self._format.open_ids) or [self.prefix_token_id]
    self._num_answers = 0
    # lm_eval would fork; a fork of a process that runs JAX may wait forever.
    os.environ.setdefault("DISABLE_MULTIPROC", "1")

  @property
  def eot_token_id(self) -> int:
    return next(iter(self._format.end_ids), self.prefix_token_id)

  prefix_token_id = property(lambda self: self._format.prefix_id)

  def tok_encode(
    self, string: str, add_special_tokens: bool | None = None, **unused: Any
  ) -> list[int]:
    """Encodes a text and its opening, unless `add_special_tokens` is False."""
    del unused
    opening = () if add_special_tokens is False else self._format.open_ids
    return [*opening, *self._format.encode(string)]

  def _loglikelihood_tokens(self, requests, **unused):
    del unused
    # A continuation without a context begins a document.
    first = self._opening
    return self._scores(
      [(c if text[0] else first, e) for text, c, e in requests]
    )

  def loglikelihood_rolling(self, requests, disable_tqdm=False):
    """The log-probability of texts, without their ends, after their opening.

    Texts are cut into windows as lm_eval cuts them: the last has more context.
    """
    del disable_tqdm
    pairs, owners, most = [], [], self.max_length
    for number, request in enumerate(requests):
      ids = [*self._opening, *self._format.encode(request.args[0])]
      cuts = [len(self._opening), *range(most + 1, len(ids), most), len(ids)]
      for start, stop in itertools.pairwise(cuts):
        if start < stop:
          pairs.append((ids[:start], ids[start:stop]))
          owners.append(number)
    sums = np.zeros(len(requests))
    np.add.at(sums, owners, [logprob for logprob, _ in self._scores(pairs)])
    return sums.tolist()

  def _scores(
    self, pairs: Sequence[tuple[list[int], list[int]]]
  ) -> list[tuple[float, bool]]:
    """The log-probability of each end, and whether greedy decoding draws it.

    A pair is (context, end). Contexts are cut on the left.
    """
    texts = []
    for context, end in pairs:
      if not 1 <= len(end) <= self.max_length or not context:
        raise config_lib.RunError(
          f"a task asks for the score of {len(end)} tokens after"
          f" {len(context)}: expected 1 to {self.max_length}"
        )
      texts.append([*context, *end][-(self.max_length + 1) :])
    scores = [(0.0, False)] * len(texts)
    # Batches depend on the texts alone, not on their order.
    order = sorted(range(len(texts)), key=lambda i: (-len(texts[i]), texts[i]))
    for start in range(0, len(order), self._rows):
      batch = order[start : start + self._rows]
      longest = 1 << (len(texts[batch[0]]) - 2).bit_length()
      length = min(max(_LEAST_LENGTH, longest), self.max_length)
      tokens_BT = np.zeros((self._rows, length + 1), np.int32)
      for row, i in enumerate(batch):
        tokens_BT[row, : len(texts[i])] = texts[i]
      placed = jax.device_put(tokens_BT, sharding.batch_sharding(self._mesh))
      scored = _next_tokens(self._model, placed, mesh=self._mesh)
      logprob_BT, best_BT = jax.device_get(scored)
      for row, i in enumerate(batch):
        stop, end = len(texts[i]) - 1, pairs[i][1]
        at = slice(stop - len(end), stop)
        greedy = best_BT[row, at].tolist() == [*end]
        scores[i] = math.fsum(map(float, logprob_BT[row, at])), greedy
    return scores

  def generate_until(self, requests, disable_tqdm=False):
    """The texts after contexts, up to a stop; greedy unless a task samples."""
    del disable_tqdm
    prompts = [self._prompt(*request.args) for request in requests]
    sizes = [len(p.prompt) + p.num_tokens for p, _ in prompts]
    engine = engine_lib.Engine(
      self._model, slots=self._rows, length=max(sizes), mesh=self._mesh
    )
    answers = [""] * len(prompts)
    for piece in text_lib.complete(engine, self._format, prompts):
      answers[piece.index] += piece.text
    return answers

  def _prompt(
    self, context: str, options: Mapping[str, Any]
  ) -> tuple[engine_lib.Request, list[str]]:
    """The request of a context, and the texts that end its answer."""
    given = dict(gen_utils.normalize_gen_kwargs(dict(options), _MOST_TOKENS))
    stop = [text for text in given.pop("until") if text]
    count = given.pop("max_gen_toks")
    samples, fail = given.pop("do_sample"), config_lib.fail_argument
    if given.get("num_beams") == 1:
      del given["num_beams"]
    for name in sorted(given.keys() - set(_SETTINGS)):
      expected = f"until, max_gen_toks, do_sample or one of {_SETTINGS}"
      fail(f"generation_kwargs.{name}", given[name], expected)
    room = self.max_length - count
    if room < 1:
      expected = f"less than the {self.max_length} tokens of the network"
      fail("generation_kwargs.max_gen_toks", count, expected)
    values = {n: value for n, value in given.items() if value is not None}
    if not samples:  # Without it, there may be no temperature.
      values["temperature"] = 0.0
    ids = self.tok_encode(context)[-room:] or self._opening
    # Each answer has other random numbers, repeats of a question too.
    self._num_answers += 1
    settings, ends = draw.Settings(**values), frozenset(self._format.end_ids)
    stream = self._num_answers
    return engine_lib.Request(ids, count, settings, ends, stream), stop


@functools.partial(jax.jit, static_argnames="mesh")
def _next_tokens(
  model: models.Transformer, tokens_BT: jax.Array, *, mesh: jax.sharding.Mesh
) -> tuple[jax.Array, ...]:
  """Log-probabilities of tokens 1..T, and the likeliest ones instead."""
  with sharding.ambient(mesh):
    h_BTD = model.hidden(tokens_BT[:, :-1])
    rows, length, _ = h_BTD.shape
    local = rows // sharding.num_row_shards(mesh)
    tile = loss_lib.TILE_BYTES // (4 * local * model.config.vocab_size)
    tile = min(length, max(1, tile))

    def of_tile(xs):
      h_BCD, target_BC = xs
      logprob_BCV = jax.nn.log_softmax(model.embedding.decode(h_BCD))
      target_BC1 = target_BC[..., None]
      logprob_BC1 = jnp.take_along_axis(logprob_BCV, target_BC1, axis=-1)
      return logprob_BC1[..., 0], jnp.argmax(logprob_BCV, axis=-1)

    tiles = jax.lax.map(of_tile, loss_lib.cut(tile, h_BTD, tokens_BT[:, 1:]))
    joined = (jnp.moveaxis(a, 0, 1).reshape(rows, -1) for a in tiles)
    return tuple(a_BT[:, :length] for a_BT in joined)


if __name__ == "__main__":
  sys.exit(main())
