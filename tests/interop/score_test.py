# SPDX-License-Identifier: Apache-2.0
"""Scores of tasks: ours equal transformers' on the same weights."""

import dataclasses
import json
import logging
import os
import sys
import warnings

import numpy as np
import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")

from attnres_jax import config as config_lib
from attnres_jax.common import sharding
from attnres_jax.data import text_format as text_format_lib
from attnres_jax.interop import import_huggingface
from attnres_jax.interop import score
from attnres_jax.interop import scorer
from tests.interop import small_checkpoint

LM_EVAL = pytest.mark.needs("lm_eval>=0.4.13")
# Tasks of every kind: their file of examples, and the rest of their YAML.
TASKS = dict(
  our_questions=("questions", dict(
    output_type="multiple_choice", num_fewshot=1, fewshot_split="test",
    doc_to_text="Question: {{question}}\nAnswer:", doc_to_target="label",
    doc_to_choice="{{choices}}",
    metric_list=[dict(metric="acc"), dict(metric="acc_norm")],
  )),
  our_letters=("questions", dict(
    output_type="multiple_choice", doc_to_text="{{question}} ",
    doc_to_target="label", doc_to_choice=list("ABCDE"),
    metric_list=[dict(metric="acc")],
  )),
  our_documents=("documents", dict(
    output_type="loglikelihood_rolling", doc_to_text="",
    doc_to_target="{{text}}",
    metric_list=[dict(metric="word_perplexity"), dict(metric="bits_per_byte")],
  )),
  our_answers=("questions", dict(
    output_type="generate_until", doc_to_text="{{question}}",
    doc_to_target="{{choices[0]}}", metric_list=[dict(metric="exact_match")],
    generation_kwargs=dict(until=["e"], max_gen_toks=9, do_sample=False),
  )),
)  # fmt: skip
LENGTH = 64


def write_tasks(parent):
  """Files of the tasks; questions have from one to many words."""
  folder = parent / "tasks"
  folder.mkdir()
  rng = np.random.default_rng(0)
  words = "the depth of a residual stream is what its sources add".split()

  def text(least, most):
    return " ".join(rng.choice(words, rng.integers(least, most)))

  rows = [
    dict(
      question=text(1, 9),
      choices=[text(1, 4) for _ in range(5)],
      label=int(rng.integers(5)),
    )
    for _ in range(8)
  ]
  # Of several windows, and of one.
  documents = [dict(text=text(30, 60)) for _ in range(3)] + [dict(text="a b")]
  for name, lines in (("questions", rows), ("documents", documents)):
    path = folder / f"{name}.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
  for name, (examples, content) in TASKS.items():
    source = {"data_files": {"test": str(folder / f"{examples}.jsonl")}}
    content = (
      dict(
        task=name, dataset_path="json", dataset_kwargs=source, test_split="test"
      )
      | content
    )
    # JSON is YAML.
    (folder / f"{name}.yaml").write_text(json.dumps(content))
  return str(folder)


def checkpoint_folder(folder, bos=False):
  """An export of a Llama with a tokenizer, as others publish theirs."""
  small_checkpoint.write(folder, "llama", vocab_size=258)
  made = json.loads(small_checkpoint.tokenizer_json())
  if bos:
    piece = {"SpecialToken": {"id": "<s>", "type_id": 0}}
    of_text = {"Sequence": {"id": "A", "type_id": 0}}
    made["post_processor"] = {
      "type": "TemplateProcessing", "single": [piece, of_text],
      "pair": [piece, of_text],
      "special_tokens": {"<s>": {"id": "<s>", "ids": [256], "tokens": ["<s>"]}},
    }  # fmt: skip
  (folder / "tokenizer.json").write_text(json.dumps(made))
  described = dict(bos_token="<s>", eos_token="</s>")
  described["tokenizer_class"] = "PreTrainedTokenizerFast"
  (folder / "tokenizer_config.json").write_text(json.dumps(described))
  small_checkpoint.change_config(folder, bos_token_id=256, eos_token_id=257)
  return folder


@pytest.fixture
def quiet(monkeypatch):
  """Without what the harness and its libraries warn of."""
  monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
  monkeypatch.setenv("TQDM_DISABLE", "1")
  logging.disable(logging.WARNING)
  with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    yield
  logging.disable(logging.NOTSET)


def _theirs(folder, tasks):
  """The same tasks by the harness's own class for transformers."""
  from lm_eval import evaluator
  from lm_eval.models import huggingface
  from lm_eval.tasks import TaskManager
  import transformers

  network = transformers.AutoModelForCausalLM.from_pretrained(
    folder, attn_implementation="eager"
  )
  tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
  lm = huggingface.HFLM(
    pretrained=network, tokenizer=tokenizer, device="cpu", batch_size=3,
    max_length=LENGTH,
  )  # fmt: skip
  table = TaskManager(include_path=tasks, include_defaults=False)
  found = evaluator.simple_evaluate(
    lm, tasks=list(TASKS), task_manager=table, bootstrap_iters=0
  )
  return found


def _responses(found, task):
  """What the network answered, in the order of the examples."""
  samples = sorted(found["samples"][task], key=lambda one: one["doc_id"])
  return [one["resps"] for one in samples]


@LM_EVAL
@pytest.mark.needs("torch")
@pytest.mark.needs("transformers>=5")
@pytest.mark.parametrize("bos", [False, True])
def test_scores_are_those_of_transformers(bos, tmp_path, quiet, capsys):
  tasks = write_tasks(tmp_path)
  folder = checkpoint_folder(tmp_path / "llama", bos)
  run = tmp_path / "run"
  assert not import_huggingface.main([f"--path={folder}", f"--workdir={run}"])
  out = tmp_path / "scores.json"
  assert not score.main([
    f"--workdir={run}", f"--tasks={','.join(TASKS)}", f"--out={out}",
    f"--include_path={tasks}", "--log_samples", "--batch_tokens=100",
    f"--length={LENGTH}", "--fsdp=1",
  ])  # fmt: skip
  assert "our_questions" in capsys.readouterr().out
  ours, theirs = json.loads(out.read_text()), _theirs(folder, tasks)
  for task in ("our_questions", "our_letters"):
    pairs = zip(_responses(ours, task), _responses(theirs, task), strict=True)
    for one, other in pairs:
      for (a,), (b,) in zip(one, other, strict=True):
        np.testing.assert_allclose(float(a[0]), float(b[0]), atol=1e-3)
        assert str(a[1]) == str(b[1])
  assert _responses(ours, "our_answers") == _responses(theirs, "our_answers")
  assert any(one[0][0] for one in _responses(ours, "our_answers"))
  for task, metrics in theirs["results"].items():
    for name, value in metrics.items():
      if isinstance(value, float):
        found = ours["results"][task][name]
        np.testing.assert_allclose(found, value, rtol=1e-4, err_msg=name)
  assert ours["run"]["step"] == 0
  assert ours["command"]["opening"] == ([256] if bos else [])


def _without_model(harness):
  mesh = sharding.make_mesh(config_lib.MeshConfig(data=1))
  text_format = text_format_lib.of_data(config_lib.DataConfig())
  return harness.Network(None, text_format, scorer.Scorer(mesh, LENGTH))


@LM_EVAL
@pytest.mark.parametrize(
  "options,temperature",
  [
    (dict(), 0.0),  # As of coqa and drop.
    (dict(do_sample=False, temperature=0.7), 0.0),
    (dict(temperature=0.7), 0.7),
    (dict(do_sample=True, temperature=1.0), 1.0),
  ],
)
def test_answers_are_greedy_unless_a_task_samples(options, temperature, quiet):
  from attnres_jax.interop import harness

  network = _without_model(harness)
  options = dict(until=["e"], max_gen_toks=9) | options
  request, stop = network._prompt("a", options)
  assert request.settings.temperature == temperature and stop == ["e"]


@LM_EVAL
def test_tasks_that_shuffle_do_it_alike(tmp_path, quiet, monkeypatch):
  """GPQA's choices are in an order of Python's random numbers."""
  from attnres_jax.interop import harness

  network, seeds = _without_model(harness), []
  monkeypatch.setattr(
    network, "_scores", lambda pairs: [scorer.Found(0.0, True)] * len(pairs)
  )
  monkeypatch.setattr("random.seed", seeds.append)
  table = harness.find_tasks(["our_letters"], write_tasks(tmp_path))
  harness.evaluate(network, ["our_letters"], table)
  assert seeds == [0]


@LM_EVAL
def test_bad_questions(tmp_path, quiet):
  from attnres_jax.interop import harness

  tasks = write_tasks(tmp_path)
  with pytest.raises(config_lib.ConfigError, match="tasks: got 'no_such'"):
    harness.find_tasks(["our_letters", "no_such"], tasks)
  network = _without_model(harness)
  request = dataclasses.make_dataclass("Request", ["args"])
  for said, message in (
    (dict(num_beams=4), "generation_kwargs.num_beams: got 4"),
    (dict(typical_p=0.5), "generation_kwargs.typical_p: got 0.5"),
    (dict(max_gen_toks=LENGTH), "max_gen_toks: got 64, expected less than"),
  ):
    with pytest.raises(config_lib.ConfigError, match=message):
      network.generate_until([request(("a", said))])
  with pytest.raises(config_lib.RunError, match="score of 0 tokens"):
    network.loglikelihood([request(("a", ""))])
  with pytest.raises(config_lib.RunError, match="score of 65 tokens"):
    network.loglikelihood([request(("a", "b" * 65))])


def test_the_command_refuses(tmp_path, capsys):
  flags = [f"--workdir={tmp_path}", "--tasks=x"]
  for more, message in (
    (["--limit=-1"], "error: --limit: got -1"),
    (["--slots=0"], "error: --slots: got 0"),
    (["--num_fewshot=-5"], "error: --num_fewshot: got -5"),
  ):
    assert score.main([*flags, *more]) == 2
    assert message in capsys.readouterr().err


def test_without_the_harness_the_extra_is_named(tmp_path, monkeypatch, capsys):
  monkeypatch.setitem(sys.modules, "lm_eval", None)
  monkeypatch.delitem(sys.modules, "attnres_jax.interop.harness", raising=False)
  from attnres_jax import interop

  monkeypatch.delattr(interop, "harness", raising=False)
  assert score.main([f"--workdir={tmp_path}", "--tasks=x"]) == 2
  assert 'pip install "attnres-jax[eval]"' in capsys.readouterr().err
