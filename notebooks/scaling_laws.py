# %% [markdown]
# # Scaling laws of Attention Residuals
#
# The [paper](https://arxiv.org/abs/2603.15031) trains each of its schemes at
# five sizes (Table 2), fits a law $L = A\, C^{-\alpha}$ to their losses over
# compute (Fig. 4), and concludes that the baseline needs 1.25 times the compute
# to reach the loss of Block AttnRes. This notebook fits Table 2 again, with
# three ways to count $C$ and with intervals. Nothing is trained; it takes seconds.

# %%
import matplotlib.pyplot as plt
import numpy as np

from attnres_jax import scaling
from attnres_jax.analysis import figures
from attnres_jax.common import text_table
from attnres_jax.scaling import compute
from attnres_jax.scaling import fit
from attnres_jax.scaling import paper
from attnres_jax.scaling import plots
from notebooks import colab

schemes = tuple(paper.PUBLISHED_LAWS)  # with a printed law


def interval(estimate, digits=3):
  low, high = estimate.low, estimate.high
  return f"{estimate.value:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


# %% [markdown]
# ## Fit Table 2 again
#
# The paper does not say how it counts compute: six FLOPs per activated parameter
# and token (`6nd`), attention over the sequence as well, or the residual scheme
# too. Left: the points with the laws that the paper prints. Right: with our fits
# (least squares in $\ln L$) and 90 % bands, from the distance of sizes to the law.
#
# The advantage is the compute that PreNorm needs for the loss that the other
# scheme reaches at $C$, divided by $C$, here at the largest size. It hardly
# depends on how compute is counted. Its interval is wide: five sizes, one seed.


# %%
def fit_again(counting):
  runs = {scheme: paper.runs(scheme, counting) for scheme in schemes}
  fits = fit.fit_schemes(runs, np.random.default_rng(0))
  largest = max(arm.compute.max() for arm in runs.values())
  figure, (left, right) = plt.subplots(
    1, 2, figsize=(10.5, 4.2), sharey=True, layout="constrained"
  )
  plots.draw_paper(counting, ax=left)
  plots.draw_scaling(
    runs, fits, counting, ax=right, title="Table 2, fitted again",
    advantage=("prenorm", "block_attnres", largest),
  )  # fmt: skip
  plt.show()
  header = ["scheme", "A", "alpha", "printed A", "printed alpha", "advantage"]
  lines = []
  for scheme, fitted in fits.items():
    law = paper.PUBLISHED_LAWS[scheme]
    ratio = scaling.compute_advantage(fits["prenorm"], fitted, largest)
    lines.append([
      figures.name_of(scheme), interval(fitted.coefficient()),
      interval(fitted.exponent(), 4), f"{law.coefficient:.3f}",
      f"{law.exponent:.3f}", interval(ratio, 2),
    ])  # fmt: skip
  print(f"C is {compute.LABELS[counting]}\n")
  print(text_table.table(header, lines))


colab.play(fit_again, counting=["attention", "6nd", "residual"])
