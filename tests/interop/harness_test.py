# SPDX-License-Identifier: Apache-2.0
"""Scores of tasks: training's losses, and transformers' on the same weights."""

import dataclasses
import json
import logging
import os
import re
import shlex
import sys
import warnings

import numpy as np
import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")

from attnres_jax import config as config_lib
from attnres_jax.common import sharding
from attnres_jax.interop import import_huggingface
from attnres_jax.train import checkpoint
from attnres_jax.train import train_state
from tests import tiny_run
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


def _theirs(folder, tasks, names, **options):
  """Runs the tasks with the harness's own class for transformers."""
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
    max_length=LENGTH, **options,
  )  # fmt: skip
  table = TaskManager(include_path=tasks, include_defaults=False)
  results = evaluator.simple_evaluate(
    lm, tasks=names, task_manager=table, bootstrap_iters=0
  )
  return results


def _responses(results, task):
  """The network's answers, in the order of the examples."""
  samples = sorted(results["samples"][task], key=lambda s: s["doc_id"])
  return [sample["resps"] for sample in samples]


def _imported(tmp_path, bos=False):
  folder, run = tmp_path / "llama", tmp_path / "run"
  checkpoint_folder(folder, bos)
  assert not import_huggingface.main([f"--path={folder}", f"--workdir={run}"])
  return folder, run


@LM_EVAL
@pytest.mark.needs("torch")
@pytest.mark.needs("transformers>=5")
@pytest.mark.parametrize("bos", [False, True])
def test_scores_are_those_of_transformers(bos, tmp_path, quiet):
  from lm_eval import evaluator
  from lm_eval.tasks import TaskManager

  from attnres_jax.interop import harness

  tasks = write_tasks(tmp_path)
  folder, run = _imported(tmp_path, bos)
  network = harness.Network(run, max_length=LENGTH, batch_size="5")
  assert (network.tok_encode("a")[0] == 256) == bos
  ours = evaluator.simple_evaluate(
    network, tasks=list(TASKS), bootstrap_iters=0,
    task_manager=TaskManager(include_path=tasks, include_defaults=False),
  )  # fmt: skip
  # With add_bos_token, it puts the opening in front of documents twice.
  *others, documents = sorted(TASKS, key=lambda name: name == "our_documents")
  theirs = _theirs(folder, tasks, others)
  rolled = _theirs(folder, tasks, [documents], add_bos_token=False)
  for task in ("our_questions", "our_letters"):
    pairs = zip(_responses(ours, task), _responses(theirs, task), strict=True)
    for mine, other in pairs:
      for (a,), (b,) in zip(mine, other, strict=True):
        np.testing.assert_allclose(float(a[0]), float(b[0]), atol=1e-3)
        assert str(a[1]) == str(b[1])
  assert _responses(ours, "our_answers") == _responses(theirs, "our_answers")
  assert any(resps[0][0] for resps in _responses(ours, "our_answers"))
  for task, metrics in (theirs["results"] | rolled["results"]).items():
    for name, value in metrics.items():
      if isinstance(value, float):
        mine = ours["results"][task][name]
        np.testing.assert_allclose(mine, value, rtol=1e-4, err_msg=name)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
  """A run of ours that reads bytes, with Block AttnRes."""
  folder = tmp_path_factory.mktemp("harness")
  fields = tiny_run.corpus(folder) | {
    "train.steps": 1, "train.eval_every": 0, "train.depth_every": 0,
    "data.sequence_length": LENGTH, "mesh.data": 1, "optim.warmup_steps": 0,
  }  # fmt: skip
  tiny_run.train_here(folder / "run", fields)
  return folder / "run"


def _trained_losses(workdir, rows):
  """Sums of the losses that a training run counts for rows of ids."""
  config, model = checkpoint.load_model(workdir)
  mesh = sharding.make_mesh(config_lib.MeshConfig(data=1))
  program = train_state.make_program(config, mesh)
  return [
    float(program.eval_step(model, {"tokens": np.int32([row])})["loss_sum"])
    for row in rows
  ]


def _requests(*args):
  request = dataclasses.make_dataclass("Request", ["args"])
  return [request(each) for each in args]


@LM_EVAL
@pytest.mark.parametrize("kind", ["ours", "imported", "imported with BOS"])
def test_a_document_scores_its_losses_in_training(kind, run, tmp_path, quiet):
  """A text opens once, whether it is scored as one or continues another."""
  from attnres_jax.interop import harness

  if kind != "ours":
    _, run = _imported(tmp_path, "BOS" in kind)
  network = harness.Network(run, max_length=LENGTH, batch_size=3)
  texts = ["x", "the sources", "a" * LENGTH, ""]
  ids = [network.tok_encode(t, add_special_tokens=False) for t in texts]
  prefix = network.prefix_token_id
  assert prefix not in ids[1] and len(ids[2]) == LENGTH
  scores = network.loglikelihood_rolling(_requests(*((t,) for t in texts)))
  losses = _trained_losses(run, [[prefix, *row] for row in ids[:3]])
  np.testing.assert_allclose(scores, [*(-x for x in losses), 0], rtol=1e-4)
  first, rest = network.loglikelihood(
    _requests(("", "the"), ("the", " sources"))
  )
  np.testing.assert_allclose(first[0], network.loglikelihood_rolling(
    _requests(("the",))
  )[0], rtol=1e-5)  # fmt: skip
  if kind != "imported":  # Whose contexts do not open.
    np.testing.assert_allclose(first[0] + rest[0], scores[1], rtol=1e-4)
  # Rows of training overlap by one token; the last window has more context.
  long = "b" * LENGTH + "a" * LENGTH
  (score,) = network.loglikelihood_rolling(_requests((long,)))
  ids = network.tok_encode(long, add_special_tokens=False)
  rows = [[prefix, *ids[:LENGTH]], ids[LENGTH - 1 :]]
  np.testing.assert_allclose(score, -sum(_trained_losses(run, rows)), rtol=1e-4)


@LM_EVAL
def test_scores_depend_neither_on_order_nor_on_company(run, quiet):
  from attnres_jax.interop import harness

  rng = np.random.default_rng(0)
  pairs = [
    tuple(rng.integers(0, 256, rng.integers(1, 40)).tolist() for _ in range(2))
    for _ in range(11)
  ]
  network = harness.Network(run, max_length=LENGTH, batch_size=4)
  together = network._scores(pairs)
  assert network._scores(pairs[::-1])[::-1] == together
  config, model = checkpoint.load_model(run)
  for (context, end), (score, greedy) in zip(pairs, together, strict=True):
    ids = [*context, *end][-(LENGTH + 1) :]
    inputs_BT = np.zeros((1, LENGTH), np.int32)
    inputs_BT[0, : len(ids) - 1] = ids[:-1]
    logits_TV = np.asarray(model(inputs_BT)[0], np.float64)
    logprob_TV = logits_TV - np.logaddexp.reduce(logits_TV, -1, keepdims=True)
    at = range(len(ids) - 1 - len(end), len(ids) - 1)
    expected = sum(logprob_TV[t, ids[t + 1]] for t in at)
    np.testing.assert_allclose(score, expected, rtol=1e-5)
    assert greedy == all(logprob_TV[t].argmax() == ids[t + 1] for t in at)
  # Of all tokens, one is drawn; their probabilities sum to one.
  every = network._scores([([1, 2, 3], [i]) for i in range(257)])
  np.testing.assert_allclose(np.exp([s for s, _ in every]).sum(), 1, rtol=1e-5)
  assert sum(greedy for _, greedy in every) == 1


@LM_EVAL
@pytest.mark.parametrize(
  "options,temperature",
  [
    (dict(), 0.0),  # As of coqa and drop.
    (dict(do_sample=False, temperature=0.7, num_beams=1), 0.0),
    (dict(temperature=0.7), 0.7),
    (dict(do_sample=True, temperature=1.0), 1.0),
  ],
)
def test_answers_are_greedy_unless_a_task_samples(
  options, temperature, run, quiet
):
  from attnres_jax.interop import harness

  options = dict(until=["e"], max_gen_toks=9) | options
  request, stop = harness.Network(run)._prompt("a", options)
  assert request.settings.temperature == temperature and stop == ["e"]


@LM_EVAL
def test_bad_questions(run, quiet):
  from attnres_jax.interop import harness

  network = harness.Network(run, max_length=LENGTH)
  for options, message in (
    (dict(num_beams=4), "generation_kwargs.num_beams: got 4"),
    (dict(typical_p=0.5), "generation_kwargs.typical_p: got 0.5"),
    (dict(max_gen_toks=LENGTH), "max_gen_toks: got 64, expected less than"),
  ):
    with pytest.raises(config_lib.ConfigError, match=message):
      network.generate_until(_requests(("a", options)))
  with pytest.raises(config_lib.RunError, match="score of 0 tokens"):
    network.loglikelihood(_requests(("a", "")))
  with pytest.raises(config_lib.RunError, match="score of 65 tokens"):
    network.loglikelihood(_requests(("a", "b" * 65)))


@LM_EVAL
@pytest.mark.parametrize(
  "arguments,message",
  [
    (dict(workdir="no_such"), "--workdir: got 'no_such'"),
    (dict(step=7), "--step: got 7"),
    (dict(batch_size="auto"), "--batch_size: got 'auto'"),
    (dict(batch_size="0"), "--batch_size: got 0"),
    (dict(max_length=-1), "max_length: got -1"),
    (dict(device="cuda:0", pretrained="x"), "--model_args: pretrained: got"),
  ],
)
def test_bad_arguments(arguments, message, run, quiet):
  from attnres_jax.interop import harness

  with pytest.raises(config_lib.ConfigError, match=message):
    harness.Network(**dict(workdir=run) | arguments)


def _table_3():
  """The command of docs/paper.md, as words, and the names of its tasks."""
  text = (tiny_run.ROOT / "docs/paper.md").read_text()
  block = re.search(
    r"python -m attnres_jax.interop.harness(.|\n)*?\n```", text, re.M
  )
  words = shlex.split(block.group().removesuffix("```").replace("\\\n", " "))
  (names,) = (w for w in words if w.startswith("--tasks="))
  return words, names.removeprefix("--tasks=").split(",")


@LM_EVAL
def test_the_harness_has_the_tasks_of_table_3(quiet):
  from lm_eval.tasks import TaskManager

  _, names = _table_3()
  assert len(names) == 14 and not set(names) - set(TaskManager().all_tasks)


@LM_EVAL
def test_the_command_of_table_3(run, tmp_path, quiet, monkeypatch, capsys):
  """With tasks that need no hub, on a network of ours."""
  from attnres_jax.interop import harness

  tasks, out = write_tasks(tmp_path), tmp_path / "scores"
  changed = {
    "--tasks": ",".join(TASKS), "--model_args": f"workdir={run}",
    "--output_path": str(out),
  }  # fmt: skip
  words = _table_3()[0][3:]
  for i, word in enumerate(words):
    name = word.split("=")[0]
    words[i] = f"{name}={changed.pop(name)}" if name in changed else word
  assert not changed
  monkeypatch.setattr(sys, "argv", ["x", *words, f"--include_path={tasks}"])
  assert harness.main() == 0
  assert "our_questions" in capsys.readouterr().out
  (file,) = out.rglob("results_*.json")
  results = json.loads(file.read_text())["results"]
  assert results.keys() == TASKS.keys()
  # A uniform guess has 8 bits.
  assert 5 < results["our_documents"]["bits_per_byte,none"] < 12


def test_without_the_harness_the_extra_is_named(monkeypatch):
  monkeypatch.setitem(sys.modules, "lm_eval", None)
  monkeypatch.delitem(sys.modules, "attnres_jax.interop.harness", raising=False)
  with pytest.raises(ImportError, match=r"attnres-jax\[eval\]"):
    import attnres_jax.interop.harness  # noqa: F401
