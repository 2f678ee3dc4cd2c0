# SPDX-License-Identifier: Apache-2.0
"""lm_eval scores an export as training did; the command of Table 3."""

import json
import logging
import os
import re
import shlex
import warnings

import numpy as np
import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")

from attnres_jax import config as config_lib
from attnres_jax.common import sharding
from attnres_jax.interop import export_huggingface
from attnres_jax.train import checkpoint
from attnres_jax.train import train_state
from tests import tiny_run

pytestmark = [
  pytest.mark.needs("lm_eval>=0.4.13"),
  pytest.mark.needs("transformers>=5"),
  pytest.mark.needs("torch"),
]
LENGTH = 64
TEXTS = ["the sources of a block", "x", "add up, what a query reads " * 2]
TASKS = dict(
  documents=dict(
    output_type="loglikelihood_rolling", doc_to_text="",
    doc_to_target="{{text}}", metric_list=[dict(metric="bits_per_byte")],
  ),
  answers=dict(
    output_type="generate_until", doc_to_text="{{text}}", doc_to_target="a",
    metric_list=[dict(metric="exact_match")],
    generation_kwargs=dict(until=["e"], max_gen_toks=5, do_sample=False),
  ),
)  # fmt: skip


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


def _write_tasks(folder):
  folder.mkdir()
  path = folder / "texts.jsonl"
  path.write_text("".join(json.dumps({"text": t}) + "\n" for t in TEXTS))
  source = {"data_files": {"test": str(path)}}
  for name, fields in TASKS.items():
    task = dict(task=name, dataset_path="json", test_split="test")
    task |= dict(dataset_kwargs=source) | fields
    (folder / f"{name}.yaml").write_text(json.dumps(task))  # JSON is YAML.
  return str(folder)


def _trained_losses(workdir):
  """The losses that a training run counts for the texts, in nats."""
  config, model = checkpoint.load_model(workdir)
  mesh = sharding.make_mesh(config_lib.MeshConfig(data=1))
  step = train_state.make_program(config, mesh).eval_step
  rows = [np.int32([[256, *text.encode()]]) for text in TEXTS]
  return [float(step(model, {"tokens": row})["loss_sum"]) for row in rows]


@pytest.mark.more
def test_an_export_scores_its_losses_in_training(tmp_path, quiet, monkeypatch):
  from lm_eval import evaluator
  from lm_eval.tasks import TaskManager

  monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "code"))
  run, out = tmp_path / "run", tmp_path / "out"
  fields = tiny_run.corpus(tmp_path) | {
    "train.steps": 1, "train.eval_every": 0, "train.depth_every": 0,
    "data.sequence_length": LENGTH, "mesh.data": 1, "optim.warmup_steps": 0,
  }  # fmt: skip
  tiny_run.train_here(run, fields)
  argv = [f"--workdir={run}", f"--path={out}"]
  assert export_huggingface.main(argv) == 0
  flags = _table_3()
  results = evaluator.simple_evaluate(
    flags["model"], tasks=list(TASKS), bootstrap_iters=0, batch_size=2,
    # Without it, lm_eval opens documents twice.
    model_args=flags["model_args"].replace("runs/48b/out", str(out))
    + ",add_bos_token=False",
    device="cpu",
    task_manager=TaskManager(
      include_path=_write_tasks(tmp_path / "tasks"), include_defaults=False
    ),
  )  # fmt: skip
  samples = sorted(results["samples"]["documents"], key=lambda s: s["doc_id"])
  scores = [-float(sample["resps"][0][0]) for sample in samples]
  np.testing.assert_allclose(scores, _trained_losses(run), rtol=1e-4)
  assert len(results["samples"]["answers"]) == len(TEXTS)


def _table_3():
  """The flags of the command of docs/paper.md."""
  text = (tiny_run.ROOT / "docs/paper.md").read_text()
  command = re.search(r"^.*lm_eval (--model(.|\n)*?)\n```", text, re.M)[1]
  words = shlex.split(command.replace("\\\n", " "))
  return dict(word.removeprefix("--").partition("=")[::2] for word in words)


def test_the_harness_has_the_tasks_of_table_3(quiet):
  from lm_eval.tasks import TaskManager

  names = _table_3()["tasks"].split(",")
  assert len(names) == 14 and not set(names) - set(TaskManager().all_tasks)
