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
# # Which part of Attention Residuals matters, and how certain is it?
#
# [![Open In Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/attnres-jax/attnres-jax/blob/main/notebooks/ablations.ipynb)
#
# The paper's Table 4 trains each variant once. The project's experiments train
# small networks in pairs: same initial weights, same order of the data, another
# residual scheme. This notebook reads their rows, or your own, and shows the
# differences with intervals. Nothing is trained, and it takes a few seconds.

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
import html
import statistics

from IPython.display import HTML
from IPython.display import display
import matplotlib.pyplot as plt
import numpy as np

from attnres_jax.analysis import figures
from attnres_jax.common import csv_rows
from attnres_jax.scaling import pairs
from attnres_jax.scaling import paper

# %% [markdown]
# ## Choose the rows
#
# A study of the project (committed rows), or the file that `collect` wrote for
# your own sweep, such as `runs/ablations/rows.csv`. Change a choice and run the
# cells below again.

# %%
# One of ablations, block_size and depth_heads, or a file of rows.
study = "ablations"  # @param {type: "string"}
baseline = "prenorm"  # @param {type: "string"}
level = 0.9  # @param {type: "number"}


# %%
def find(study):
  """Rows of a file, of this clone, or of the repository."""
  if study.endswith(".csv"):
    return csv_rows.read(study)
  path = pathlib.Path("experiments") / study / "results.csv"
  if not path.exists():
    source = "https://raw.githubusercontent.com/attnres-jax/attnres-jax/main"
    path = pathlib.Path(f"{study}.csv")
    urllib.request.urlretrieve(
      f"{source}/experiments/{study}/results.csv", path
    )
  return csv_rows.read(path)


rows = [
  row
  for row in find(study)
  # At the chosen rate and budget only.
  if not row.get("optim.peak_lr") and not row.get("budget")
]
losses = pairs.losses(rows, "variant")
residual_of = {row["variant"]: row["residual"] for row in rows}
assert baseline in losses, f"baseline: expected one of {', '.join(losses)}"
apart = pairs.differences(losses, baseline, control="control", level=level)
print(
  f"{len(rows)} runs of {len(losses)} variants, up to"
  f" {max(map(len, losses.values()))} seeds each;"
  f" {len({row['commit'] for row in rows})} commit(s)"
)

# %% [markdown]
# ## The table
#
# Click on a column to sort by it. `interval` is that of the mean difference, in
# nats per token; all variants share one standard deviation, because a few pairs
# say little about their own. `settled` says whether the interval leaves out
# zero. The paper's differences are those of networks with 436M activated
# parameters, trained once.

# %%
SORT = """
<script>
for (const head of document.querySelectorAll("table.sortable th")) {
  head.style.cursor = "pointer";
  head.onclick = () => {
    const body = head.closest("table").tBodies[0];
    const place = [...head.parentNode.children].indexOf(head);
    const value = (row) => {
      const text = row.children[place].textContent;
      const number = parseFloat(text.replace("\\u2212", "-"));
      return isNaN(number) ? text : number;
    };
    const sign = head.dataset.up === "1" ? -1 : 1;
    head.dataset.up = sign === 1 ? "1" : "";
    [...body.rows]
      .sort((a, b) => (value(a) > value(b) ? sign : -sign))
      .forEach((row) => body.appendChild(row));
  };
}
</script>
"""


def table(header, lines):
  cell = lambda tag, text: f"<{tag}>{html.escape(str(text))}</{tag}>"
  line = lambda tag, cells: f"<tr>{''.join(cell(tag, c) for c in cells)}</tr>"
  body = "".join(line("td", cells) for cells in lines)
  return HTML(
    f"<table class=sortable><thead>{line('th', header)}</thead>"
    f"<tbody>{body}</tbody></table>{SORT}"
  )


def line_of(variant):
  own, found = losses[variant], apart.get(variant)
  mean = f"{statistics.fmean(own.values()):.4f}"
  published = paper.TABLE_4.get(variant)
  printed = ""
  if published and baseline in paper.TABLE_4 and variant != baseline:
    printed = f"{published - paper.TABLE_4[baseline]:+.3f}"
  if found is None:
    return [variant, mean, "", "", "", len(own), printed]
  if found.margin is None:
    return [variant, mean, f"{found.mean:+.4f}", "", "", 1, printed]
  low, high = found.mean - found.margin, found.mean + found.margin
  settled = "yes" if low > 0 or high < 0 else "no"
  return [
    variant, mean, f"{found.mean:+.4f}", f"[{low:+.4f}, {high:+.4f}]", settled,
    len(found.by_seed), printed,
  ]  # fmt: skip


header = (
  "variant", "loss", f"less {baseline}", f"{level:.0%} interval", "settled",
  "pairs", "in the paper",
)  # fmt: skip
display(table(header, [line_of(variant) for variant in losses]))

# %% [markdown]
# ## The same as a figure
#
# Small dots are pairs of runs. `control` is the baseline with other rounding:
# what differs there is noise, and the least that there can be. Variants that
# failed to train would leave no room for the others.

# %%
trained = [name for name, one in apart.items() if one.mean <= pairs.FAILED]
order = sorted(trained, key=lambda variant: apart[variant].mean)
for name in sorted(apart.keys() - set(trained)):
  print(f"failed: {name} ({apart[name].mean:+.2f})")
figure, axes = plt.subplots(
  figsize=(7.4, 1.0 + 0.3 * len(order)), layout="constrained"
)
for height, variant in enumerate(order):
  found, look = apart[variant], figures.look_of(residual_of[variant])
  values = list(found.by_seed.values())
  axes.plot(values, [height] * len(values), ".", color=look.colour, alpha=0.5)
  axes.errorbar(
    found.mean,
    height,
    xerr=found.margin,
    fmt=look.marker,
    color=look.colour,
    capsize=4,
  )
axes.axvline(0.0, color="grey", linewidth=0.8)
axes.set_yticks(range(len(order)), order)
axes.invert_yaxis()
axes.set_xlabel(f"loss less that of {baseline}, nats per token")
figures.style(axes)
plt.show()

# %% [markdown]
# ## How many pairs would it take?
#
# The number of pairs at which a difference of a given size is twice its
# standard error, from the spread of the pairs in the figure.

# %%
# All that trained share it; the control has its own.
spread = next(apart[name].spread for name in trained if name != "control")
if spread is not None:
  deviation = spread.deviation
  print(
    f"standard deviation of a difference between pairs: {deviation:.4f} nats"
  )
  for size in (0.05, 0.02, 0.01, 0.005):
    print(f"{size:.3f} nats: {int(np.ceil((2 * deviation / size) ** 2))} pairs")
else:
  print("no variant has two pairs yet")
