# SPDX-License-Identifier: Apache-2.0
"""What clients of the server get, over real connections."""

from concurrent import futures
import contextlib

import jax
import numpy as np
import pytest

from attnres_jax import config as config_lib
from attnres_jax import data
from attnres_jax.inference import draw
from attnres_jax.inference import engine as engine_lib
from tests.inference import texts
from tests.inference.serving import local_server

LENGTH = local_server.LENGTH
TOKENIZER = data.make_tokenizer(config_lib.DataConfig())
SEPARATOR = TOKENIZER.separator_id


@pytest.fixture(scope="module")
def alone(model):
  """Draws a text by the engine alone."""
  engine = local_server.make_engine(model)

  def alone(prompt, num_tokens=16, stream=0, **settings):
    settings = draw.Settings(**dict(temperature=0.0) | settings)
    ids = prompt if isinstance(prompt, list) else _ids(prompt)
    request = engine_lib.Request(ids, num_tokens, settings, stream=stream)
    return [token.id for token in texts.run(engine, [request])]

  return alone


def _ids(text):
  return [SEPARATOR, *text.encode()]


def _text(ids):
  return TOKENIZER.decode(ids)


def test_prompts_in_every_form(server, alone):
  """The circle is complete, though its characters are split across tokens."""
  fields = dict(past_end=True)
  assert server.texts("é", **fields) == [("✓𝄞é" * 2)[:5]]
  assert server.texts(_ids("é"), **fields) == [("✓𝄞é" * 2)[:5]]
  expected = [_text(alone(text)) for text in ("ab", "é", "x" * 40)]
  assert server.texts(["ab", "é", "x" * 40], **fields) == expected
  ids = [_ids("ab"), _ids("é")]
  assert server.texts(ids, **fields) == expected[:2]
  # Without a separator it is another text.
  assert server.texts([97, 98], **fields) == [_text(alone([97, 98]))]


def test_choices_have_their_own_seeds(server, alone):
  fields = dict(temperature=1.5, top_p=0.9, past_end=True)
  found = server.texts(["ab", "cd"], n=2, seed=7, **fields)
  expected = [
    _text(alone(text, stream=stream, temperature=1.5, top_p=0.9, seed=7))
    for text, streams in (("ab", (0, 1)), ("cd", (2, 3)))
    for stream in streams
  ]
  assert found == expected and len(set(found)) == 4
  # Neighbouring seeds and equal prompts share nothing.
  fields |= dict(max_tokens=30)
  found = server.texts(["ab"] * 2, n=2, seed=7, **fields)
  found += server.texts("ab", n=2, seed=8, **fields)
  assert len(set(found)) == 6
  first = server.texts("ab", **fields)
  assert server.texts("ab", **fields) != first


def test_a_stream_is_the_whole_in_parts(server):
  fields = dict(
    max_tokens=12,
    logprobs=2,
    n=2,
    temperature=1.0,
    seed=1,
    past_end=True,
    return_token_ids=True,
  )
  whole = server.complete(["aé", "b"], **fields)
  usage = dict(include_usage=True)
  connection, events = server.stream(
    ["aé", "b"], stream_options=usage, **fields
  )
  with contextlib.closing(connection):
    *events, last, done = events
  assert done == "[DONE]" and not last["choices"]
  prompt_tokens = last["usage"]["prompt_tokens"]
  assert prompt_tokens == 4 + 2
  assert last["usage"] == whole["usage"]
  assert last["usage"]["total_tokens"] == prompt_tokens + 4 * 12
  for choice in whole["choices"]:
    parts = [
      part
      for event in events
      for part in event["choices"]
      if part["index"] == choice["index"]
    ]
    assert len(parts) == 12 and len(choice["token_ids"]) == 12
    assert "".join(part["text"] for part in parts) == choice["text"]
    for name, values in choice["logprobs"].items():
      assert sum((part["logprobs"][name] for part in parts), []) == values
    assert [part["finish_reason"] for part in parts][-2:] == [None, "length"]
    assert choice["prompt_token_ids"] == parts[0]["prompt_token_ids"]
  assert {event["id"] for event in events} == {last["id"]} != {whole["id"]}
  assert all(event["usage"] is None for event in events)


@pytest.mark.parametrize("prompt", ["aé b", [97, 195, 169, 256, 98]])
def test_logprobs_are_those_of_the_forward_pass(server, model, prompt):
  """After a prompt in chunks."""
  before = prompt if isinstance(prompt, list) else _ids(prompt)
  before = before * 9  # Three chunks.
  answer = server.complete(
    before, logprobs=3, max_tokens=5, return_token_ids=True
  )
  (choice,) = answer["choices"]
  assert choice["prompt_token_ids"] == before
  ids = choice["token_ids"]
  logprob_TV = local_server.logprobs(model, before + ids)[len(before) - 1 :]
  found = choice["logprobs"]
  expected = [row[i] for row, i in zip(logprob_TV, ids)]
  np.testing.assert_allclose(found["token_logprobs"], expected, atol=1e-4)
  for row, top, one in zip(logprob_TV, found["top_logprobs"], ids):
    values = sorted({*np.sort(row)[-3:], row[one]})
    np.testing.assert_allclose(sorted(top.values()), values, atol=1e-4)
  for token, i in zip(found["tokens"], ids, strict=True):
    if i < 128:
      assert token == chr(i)
    else:
      assert token == ("<|endoftext|>" if i == 256 else f"token_id:{i}")
  for offset, i in zip(found["text_offset"], ids, strict=True):
    if i < 128 and offset < len(choice["text"]):
      assert choice["text"][offset] == chr(i)


def test_stops(server):
  fields = dict(max_tokens=40, past_end=True)
  answer = server.complete("é", stop="𝄞é", **fields)
  (choice,) = answer["choices"]
  assert (choice["text"], choice["finish_reason"]) == ("✓", "stop")
  # Its tokens are drawn before it is known.
  assert answer["usage"]["completion_tokens"] == 3 + 4 + 2
  assert server.texts("é", stop=["no", "é", "x", "y"], **fields) == ["✓𝄞"]
  local_server.until(server.is_idle)


def test_a_stop_in_the_first_token(server):
  """Another one is drawn in the same step of the engine."""
  fields = dict(temperature=8.0, past_end=True)
  seed, first = next(
    (seed, text)
    for seed in range(100)
    for text in server.texts("a", seed=seed, max_tokens=1, **fields)
    if text and text.isascii()
  )
  fields |= dict(seed=seed, max_tokens=9)
  assert server.texts("a", stop=first, **fields) == [""]
  assert server.texts("a", **fields)[0].startswith(first)


def test_ends_of_documents(server, alone):
  """A drawn separator ends a text and does not belong to it."""
  fields = dict(temperature=8.0, seed=0, max_tokens=LENGTH - 8)
  drawn = alone("a", LENGTH - 8, temperature=8.0, seed=0)
  end = drawn.index(SEPARATOR)
  answer = server.complete("a", logprobs=0, **fields)
  (choice,) = answer["choices"]
  assert choice["finish_reason"] == "stop"
  assert choice["text"] == _text(drawn[:end])
  assert answer["usage"]["completion_tokens"] == end + 1
  assert choice["logprobs"]["tokens"][-1] == "<|endoftext|>"


def test_models_and_health(server):
  status, models, _ = server.call("/v1/models")
  assert status == 200 and models["object"] == "list"
  (entry,) = models["data"]
  assert entry["id"] == "tiny" and entry["max_model_len"] == LENGTH
  assert server.call("/v1/models/tiny")[1] == entry
  assert server.call("/v1/models/other")[0] == 404
  assert server.call("/health")[:2] == (200, {"status": "ok"})


def test_the_page_needs_nothing_else(server):
  connection, response = server.request("/")
  with contextlib.closing(connection):
    page = response.read().decode()
  assert response.status == 200
  assert response.getheader("content-type") == "text/html; charset=utf-8"
  for outside in ("http:", "https:", "src=", "@import", "url("):
    assert outside not in page


def test_depth_weights_are_those_of_the_definition(server, model):
  ids = _ids("depth é")
  status, found, _ = server.call("/depth_weights", dict(prompt="depth é"))
  assert status == 200
  read = jax.jit(
    lambda model, tokens: model.residual.depth_weights(
      model.trace(tokens).values
    )
  )
  expected = read(model, np.asarray([ids], np.int32))
  labels = model.residual.source_labels()
  names = ["1 attention", "2 MLP", "3 attention", "4 MLP", "output"]
  for name, read, weight_MBT, sources in zip(
    names, found["reads"], expected, labels, strict=True
  ):
    assert read["name"] == name and read["sources"] == list(sources)
    np.testing.assert_allclose(
      read["weights"], weight_MBT[:, 0, -1], rtol=0, atol=1e-4
    )
  again = server.call("/depth_weights", dict(prompt=ids))[1]
  assert again == found
  for prompt in ([], ["a", "b"], "x" * LENGTH, [300]):
    status, answer, _ = server.call("/depth_weights", dict(prompt=prompt))
    assert status == 400 and answer["error"]["param"] == "prompt"


def test_schemes_without_depth_weights_say_so():
  model = local_server.make_model("prenorm")
  with contextlib.closing(local_server.Server(model)) as server:
    status, answer, _ = server.call("/depth_weights", dict(prompt="a"))
  assert status == 400 and answer["error"]["code"] == "no_depth_weights"
  assert "prenorm does not attend over depth" in answer["error"]["message"]


def test_many_clients_on_few_slots(server, alone):
  """Each gets what it would get alone; nothing remains."""
  prompts = ["abcdefgh"[i % 8] * (1 + 7 * (i % 5)) for i in range(40)]
  expected = {
    (prompt, seed): _text(alone(prompt, 12, temperature=1.0, seed=seed))
    for seed, prompt in enumerate(prompts)
  }

  def one(seed):
    fields = dict(max_tokens=12, temperature=1.0, seed=seed, past_end=True)
    if seed % 2:
      return server.texts(prompts[seed], **fields)[0]
    connection, events = server.stream(prompts[seed], **fields)
    with contextlib.closing(connection):
      *events, _ = events
    return "".join(event["choices"][0]["text"] for event in events)

  with futures.ThreadPoolExecutor(len(prompts)) as pool:
    found = list(pool.map(one, range(len(prompts))))
  assert found == [*expected.values()]
  local_server.until(server.is_idle)


@pytest.mark.needs("openai")
def test_the_official_client(server, alone):
  import openai

  client = openai.OpenAI(
    base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0
  )
  with client:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "attnres-jax"
    fields = dict(model="tiny", temperature=0, extra_body=dict(past_end=True))
    answer = client.completions.create(
      prompt=["ab", "é"], logprobs=2, max_tokens=9, **fields
    )
    texts = [choice.text for choice in answer.choices]
    assert texts == [_text(alone("ab", 9)), "✓𝄞é"]
    assert len(answer.choices[0].logprobs.top_logprobs) == 9
    assert answer.usage.total_tokens == 3 + 3 + 2 * 9
    stream = client.completions.create(
      prompt="é",
      max_tokens=9,
      stream=True,
      stream_options=dict(include_usage=True),
      **fields,
    )
    *parts, last = stream
    text = "".join(part.choices[0].text for part in parts)
    assert text == "✓𝄞é" and last.usage.completion_tokens == 9
    with pytest.raises(openai.NotFoundError) as error:
      client.completions.create(model="other", prompt="a")
    assert (
      error.value.code == "model_not_found" and error.value.param == "model"
    )
    with pytest.raises(openai.BadRequestError) as error:
      client.completions.create(model="tiny", prompt="a", suffix="b")
    assert error.value.param == "suffix"
