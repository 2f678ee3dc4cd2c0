# %% [markdown]
# # From Llama to Attention Residuals, without changing its function
#
# This notebook imports a Llama (a small random one, written on the spot in the
# format of Hugging Face) and turns it into Block AttnRes, which computes the same
# function. Then it trains the network for a few steps, shows what its sublayers
# have learned to read, and exports it. With PyTorch installed, the exported class
# computes the same logits. It takes less than a minute on a CPU.

# %%
import contextlib
import importlib.util
import io
import pathlib
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
# Skip this cell for one of your own: a folder with `config.json`, safetensors and
# a tokenizer. This one has random weights, and its tokens are bytes.

# %%
llama = config_lib.ModelConfig(
  vocab_size=257, width=64, num_layers=4, num_heads=4, num_kv_heads=2,
  mlp_width=160, residual=config_lib.ResidualConfig(name="prenorm"),
)  # fmt: skip
huggingface.export(
  models.build_model(llama), folder / "llama", dtype="F32",
  facts={"max_position_embeddings": 128}, card="A random Llama.\n",
  family="llama",
)  # fmt: skip

# %% [markdown]
# ## Import and upcycle
#
# These are the functions of two commands. Zero queries read the mean of their
# sources; `upcycle` multiplies it by their number (`read.scale="sum"`).

# %%
with contextlib.redirect_stdout(io.StringIO()):  # hides names of folders
  import_huggingface.main([
    f"--path={folder}/llama", f"--workdir={folder}/imported",
    "--tokenizer=bytes",
  ])  # fmt: skip
  upcycle.main([
    f"--workdir={folder}/imported", f"--out={folder}/attnres",
    "--residual=block_attnres", "--num_blocks=4",
  ])  # fmt: skip
tokens = np.asarray([list(b"for name in sorted(names):")], np.int32)
before, after = (
  np.asarray(checkpoint.load_model(folder / name)[1](tokens))
  for name in ("imported", "attnres")
)
print("largest difference of logits:", np.abs(after - before).max())

# %% [markdown]
# ## Train on
#
# On the standard library of the running Python, which every machine has.

# %%
overrides = {
  "train.steps": 50, "train.eval_every": 0, "train.eval_batches": 1,
  "train.depth_every": 0, "optim.peak_lr": 4e-3, "optim.warmup_steps": 5,
  "data.sequence_length": 128,
}  # fmt: skip
config = config_lib.load_config(f"{folder}/attnres/config.py", overrides)
with contextlib.redirect_stdout(io.StringIO()):  # hides the progress lines
  loop.train_and_evaluate(config, folder / "more")
rows = metrics.read_rows(folder / "more", "train")
steps, losses = zip(*((row["step"], row["loss"]) for row in rows))
figure, axes = plt.subplots(figsize=(6, 2.6), layout="constrained")
axes.plot(steps, losses, **figures.style_of("block_attnres"))
axes.set(xlabel="step", ylabel="training loss, nats per byte")
figures.style(axes)
plt.show()

# %% [markdown]
# Rows are transformer blocks, columns sources. At first, all weights of a row
# were equal. A minute of training has begun to change them.

# %%
_, trained = checkpoint.load_model(folder / "more")
batches = data.open_dataset(config.data, "validation").batches()
tokens = next(batches)["tokens"][:2, :-1]
batches.close()
plots.depth_weights({"block_attnres": analysis.depth_weights(trained, tokens)})

# %% [markdown]
# ## Export
#
# transformers has no class for Attention Residuals, so the export brings its own,
# `modeling_attnres.py`, which computes and trains the same network in PyTorch.

# %%
huggingface.export(
  trained, folder / "export", dtype="F32", facts={}, card="Trained on.\n"
)
print(sorted(path.name for path in (folder / "export").iterdir()))
if all(map(importlib.util.find_spec, ("torch", "transformers"))):
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
# [The page on checkpoints](https://github.com/attnres-jax/attnres-jax/blob/main/docs/interop.md)
# lists families, other schemes, scores of tasks and adapters.
