# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   outputs: true
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # From Llama to Attention Residuals, without changing its function
#
# [![Open In Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/attnres-jax/attnres-jax/blob/main/notebooks/upcycle.ipynb)
#
# A trained Llama adds up the outputs of its layers. This notebook imports one (a
# small random one, written on the spot in the format of Hugging Face), turns it into
# Block AttnRes, which at first computes the same function, trains that for a few
# steps, looks at what its sublayers have learned to read, and exports it. With
# PyTorch installed, its class in PyTorch then computes the same logits. Under a
# minute on a CPU.

# %%
# Where the library is missing, as on Colab: finds CPU, GPU or TPU, and installs
# what fits. It says so if the session has to be restarted.
import pathlib
import urllib.request

here = pathlib.Path("notebooks/colab.py").exists()
if not here and not pathlib.Path("colab.py").exists():
  source = "https://raw.githubusercontent.com/attnres-jax/attnres-jax/main"
  urllib.request.urlretrieve(f"{source}/notebooks/colab.py", "colab.py")
if here:
  from notebooks import colab
else:
  import colab

colab.prepare("plots")

# %%
import contextlib
import importlib.util
import io
import json
import tempfile

import jax
import matplotlib.pyplot as plt
import numpy as np

from attnres_jax import analysis
from attnres_jax import config as config_lib
from attnres_jax import data
from attnres_jax import models
from attnres_jax.analysis import figures
from attnres_jax.analysis import plots
from attnres_jax.interop import huggingface
from attnres_jax.interop import import_huggingface
from attnres_jax.interop import upcycle
from attnres_jax.train import checkpoint
from attnres_jax.train import loop
from attnres_jax.train import metrics

folder = pathlib.Path(tempfile.mkdtemp(prefix="attnres_"))

# %% [markdown]
# ## A checkpoint
#
# Skip this cell for one of your own: a folder with `config.json`, safetensors and a
# tokenizer. This one has random weights, and its tokens are bytes.

# %%
llama = config_lib.ModelConfig(
  vocab_size=257,
  width=64,
  num_layers=4,
  num_heads=4,
  num_kv_heads=2,
  mlp_width=160,
  residual=config_lib.ResidualConfig(name="prenorm"),
)
huggingface.export(
  models.build_model(llama),
  folder / "llama",
  dtype="F32",
  facts={"max_position_embeddings": 128},
  card="A random Llama.\n",
  family="llama",
)
described = json.loads((folder / "llama" / "config.json").read_text())
print(described["architectures"], described["num_hidden_layers"], "layers")

# %% [markdown]
# ## Import, and upcycle
#
# The commands `import_huggingface` and `upcycle` do this from a shell. Zero queries
# read the mean of their sources; `read.scale="sum"` multiplies it by their number.

# %%
with contextlib.redirect_stdout(io.StringIO()):  # hides names of folders
  import_huggingface.main(
    [
      f"--path={folder}/llama",
      f"--workdir={folder}/imported",
      "--tokenizer=bytes",
    ]
  )
  upcycle.main(
    [
      f"--workdir={folder}/imported",
      f"--out={folder}/attnres",
      "--residual=block_attnres",
      "--num_blocks=4",
    ]
  )
_, before = checkpoint.load_model(folder / "imported")
_, after = checkpoint.load_model(folder / "attnres")
tokens = np.asarray([list(b"for name in sorted(names):")], np.int32)
logits = [np.asarray(model(tokens)) for model in (before, after)]
print("largest difference of logits:", np.abs(logits[1] - logits[0]).max())

# %% [markdown]
# ## Train on
#
# On the standard library of the running Python, which every machine has.

# %%
config = config_lib.load_config(
  f"{folder}/attnres/config.py",
  {
    "train.steps": 50,
    "train.eval_every": 0,
    "train.eval_batches": 1,
    "train.depth_every": 0,
    "optim.peak_lr": 4e-3,
    "optim.warmup_steps": 5,
    "data.sequence_length": 128,
  },
)
with contextlib.redirect_stdout(io.StringIO()):  # hides the progress lines
  summary = loop.train_and_evaluate(config, folder / "more")
rows = metrics.read_rows(folder / "more", "train")
steps, losses = zip(*((row["step"], row["loss"]) for row in rows))
figure, axes = plt.subplots(figsize=(6, 2.6))
axes.plot(steps, losses, **figures.style_of("block_attnres"))
axes.set_xlabel("step")
axes.set_ylabel("loss, nats per byte")
figures.style(axes)
plt.show()

# %% [markdown]
# ## What it reads now
#
# Rows are transformer blocks, columns sources. At first, all weights of a row were
# equal; a minute of training has begun to change them.

# %%
_, trained = checkpoint.load_model(folder / "more")
batches = data.open_dataset(config.data, "validation").batches()
tokens = next(batches)["tokens"][:2, :-1]
batches.close()
plots.depth_weights({"block_attnres": analysis.depth_weights(trained, tokens)})

# %% [markdown]
# ## Export
#
# Attention Residuals have no class in transformers, so the export brings its own,
# `modeling_attnres.py`, which computes and trains the same network in PyTorch.

# %%
huggingface.export(
  trained, folder / "export", dtype="F32", facts={}, card="Trained on.\n"
)
print(sorted(path.name for path in (folder / "export").iterdir()))
packages = "torch", "transformers"
if all(map(importlib.util.find_spec, packages)):
  with contextlib.redirect_stderr(io.StringIO()):  # hides progress bars
    import torch
    import transformers

    twin = transformers.AutoModelForCausalLM.from_pretrained(
      folder / "export", trust_remote_code=True
    )
  with torch.no_grad():
    theirs = twin(torch.tensor(tokens).long()).logits.numpy()
  ours = np.asarray(jax.jit(lambda model, x: model(x))(trained, tokens))
  print("largest difference in PyTorch:", np.abs(ours - theirs).max())
else:
  print("not compared with PyTorch, which is not installed")

# %% [markdown]
# ## Next
#
# [docs/interop.md](https://github.com/attnres-jax/attnres-jax/blob/main/docs/interop.md):
# families of checkpoints, other schemes, scores of tasks, adapters.
