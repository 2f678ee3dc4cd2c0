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
# # Scaling laws of Attention Residuals
#
# [![Open In Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/attnres-jax/attnres-jax/blob/main/notebooks/scaling_laws.ipynb)
#
# The [paper](https://arxiv.org/abs/2603.15031) trains each of its schemes at
# five sizes (Table 2), fits a law $L = A\, C^{-\alpha}$ to their losses over
# compute (Fig. 4), and concludes that the baseline needs 1.25 times the compute
# to reach the loss of Block AttnRes.
#
# This notebook fits Table 2 again, with three ways to count $C$ and with
# intervals, and then compares your own runs with it. Nothing is trained, and it
# takes a few seconds.

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
import itertools
import pathlib

from IPython.display import display
import matplotlib.pyplot as plt
import numpy as np

from attnres_jax import scaling
from attnres_jax.analysis import figures
from attnres_jax.common import csv_rows
from attnres_jax.common import text_table
from attnres_jax.scaling import compute
from attnres_jax.scaling import fit
from attnres_jax.scaling import paper
from attnres_jax.scaling import plots
from attnres_jax.sweep import rows

schemes = tuple(paper.PUBLISHED_LAWS)  # those with a printed law
labels = {scheme: figures.name_of(scheme) for scheme in schemes}

# %% [markdown]
# ## What was published
#
# Within a row, only the scheme differs. The gaps do not shrink with size.

# %%
header = ["size", "tokens, B", *labels.values(), "Block - PreNorm"]
table = []
for size in paper.TABLE_2:
  losses = [size.loss(scheme) for scheme in schemes]
  gap = size.loss("block_attnres") - size.loss("prenorm")
  table.append([size.name, size.tokens / 1e9, *losses, f"{gap:+.3f}"])
print(text_table.table(header, table))

# %% [markdown]
# ## Choose how to count compute
#
# The paper does not say how it counts. Change the choice and rerun the cells
# below:
#
# - `6nd`: six FLOPs per activated parameter and token;
# - `attention`: plus attention over the sequence;
# - `residual`: plus the residual scheme itself.

# %%
counting = "attention"  # @param ["6nd", "attention", "residual"]

# %% [markdown]
# ## Fit it again
#
# Least squares in $\ln L$. There is one run per size, so the 90 % intervals
# come from resampling the sizes, the same ones for all schemes.


# %%
def fit_paper(counting):
  runs = {scheme: paper.runs(scheme, counting) for scheme in schemes}
  draws = np.random.default_rng(0)
  return runs, fit.fit_schemes(runs, draws, over=("sizes",))


def interval(estimate, digits=3):
  low, high = estimate.low, estimate.high
  return f"{estimate.value:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


runs, fits = fit_paper(counting)
header = ["scheme", "A", "alpha", "printed A", "printed alpha"]
table = []
for scheme, found in fits.items():
  law = paper.PUBLISHED_LAWS[scheme]
  table.append(
    [
      labels[scheme],
      interval(found.coefficient()),
      interval(found.exponent(), 4),
      f"{law.coefficient:.3f}",
      f"{law.exponent:.3f}",
    ]
  )
print(f"C is {compute.LABELS[counting]}\n")
print(text_table.table(header, table))

# %% [markdown]
# ## Fig. 4, printed and fitted again
#
# Left: the points of Table 2, counted as chosen above, with the laws that the
# paper prints. Points that are off their lines must have been counted or fitted
# differently. Right: the same points with our fits and 90 % bands.

# %%
figure, axes = plt.subplots(
  1, 2, figsize=(10.5, 4.2), sharey=True, layout="constrained"
)
plots.draw_paper(counting, ax=axes[0])
largest = max(own.compute.max() for own in runs.values())
plots.draw_scaling(
  runs,
  fits,
  counting,
  ax=axes[1],
  advantage=("prenorm", "block_attnres", largest),
  title="Table 2, fitted again",
)
plt.show()

# %% [markdown]
# ## How much compute is saved
#
# The advantage is the compute that PreNorm needs for the loss that the other
# scheme reaches at $C$, divided by $C$. First from the printed laws, at the
# paper's 5.6 PFLOP/s-days:

# %%
at = paper.PUBLISHED_COMPUTE
printed = paper.PUBLISHED_LAWS
for scheme in schemes:
  ratio = scaling.compute_advantage(printed["prenorm"], printed[scheme], at)
  print(f"{labels[scheme]:15} {printed[scheme](at):.3f}  {ratio.value:.2f}x")

# %% [markdown]
# Printed laws have three decimals. How much can the advantage vary within this
# rounding?

# %%
half = 0.0005
ratios = []
for signs in itertools.product((-half, half), repeat=4):
  laws = [
    fit.PowerLaw(law.coefficient + a, law.exponent + b)
    for law, (a, b) in zip(
      (printed["prenorm"], printed["block_attnres"]),
      (signs[:2], signs[2:]),
    )
  ]
  ratios.append(scaling.compute_advantage(*laws, at).value)
print(f"Block AttnRes: {min(ratios):.2f}x to {max(ratios):.2f}x from rounding")

# %% [markdown]
# Now from the fits, for each way of counting, with intervals, at the compute of
# the largest size. The advantage hardly depends on how compute is counted, and
# with five sizes and one seed its interval is wide.

# %%
header = ["C", "at", *list(labels.values())[1:]]
table = []
for name in compute.COUNTINGS:
  own_runs, own_fits = fit_paper(name)
  largest = max(one.compute.max() for one in own_runs.values())
  ratios = [
    interval(
      scaling.compute_advantage(own_fits["prenorm"], own_fits[scheme], largest),
      2,
    )
    for scheme in schemes[1:]
  ]
  table.append([compute.LABELS[name], f"{largest:.2f}", *ratios])
print(text_table.table(header, table))

# %% [markdown]
# ## An irreducible loss?
#
# $L = A\, C^{-\alpha} + E$ has one more parameter. Five points do not determine
# it:

# %%
for scheme in schemes:
  own = runs[scheme]
  law = scaling.fit_power_law(own.compute, own.loss, irreducible=True)
  print(
    f"{labels[scheme]:15} A {law.coefficient:.3f}  alpha {law.exponent:.3f}"
    f"  E {law.irreducible:.3f}"
  )

# %% [markdown]
# ## Your own runs
#
# A sweep gives one row per finished run:
#
# ```
# python -m experiments.scaling_law.run --workdir=runs/scaling
# python -m experiments.scaling_law.run collect --workdir=runs/scaling --out=rows.csv
# ```
#
# Enter the file here; in a clone of the repository, the default is its laptop
# sweep. Losses on other data and tokenizers cannot share an axis with the
# paper's, so there are two panels: slopes and gaps can be compared, values
# cannot.

# %%
own_rows = "experiments/scaling_law/results.csv"  # @param {type: "string"}

# Jupyter may run in the clone or in its notebooks folder.
places = (pathlib.Path(folder, own_rows) for folder in (".", ".."))
path = next((path for path in places if path.exists()), None)
if path is None:
  print(f"{own_rows} not found")
else:
  own_runs = rows.by_scheme(csv_rows.read(path), counting)
  several = {
    scheme: one for scheme, one in own_runs.items() if len({*one.size}) > 1
  }
  own_fits = fit.fit_schemes(several, np.random.default_rng(0))
  figure = plots.figure_4(
    own_runs, own_fits, counting, paper_counting=counting, title=own_rows
  )
  display(figure)
