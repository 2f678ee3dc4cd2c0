# SPDX-License-Identifier: Apache-2.0
"""The cost of a configuration, as one JSON object and as tables."""

from collections.abc import Mapping
import dataclasses
from typing import Any

import jax.numpy as jnp

from attnres_jax import config as config_lib
from attnres_jax.common.text_table import table
from attnres_jax.flops import operations
from attnres_jax.flops import parameters
from attnres_jax.flops import traffic
from attnres_jax.models import residuals

Report = Mapping[str, Any]

# Totals: the parts that are left out of the sum.
TOTALS = {
  "without embedding, head and residual": ("embedding", "head", "residual"),
  "without embedding and head": ("embedding", "head"),
  "without embedding": ("embedding",),
  "all": (),
}


def make_report(config: config_lib.RunConfig) -> Report:
  """The cost of a run's network, with its scheme and with the usual ones.

  Raises:
    ConfigError: the vocabulary size or the scheme is unknown.
  """
  model = config.model
  if not model.vocab_size:
    config_lib.fail("model.vocab_size", 0, "the tokenizer's vocabulary size")
  length = config.data.sequence_length
  schemes = {}
  for name in dict.fromkeys([*residuals.headline(), model.residual.name]):
    residual = model.residual
    if name != residual.name:  # It may refuse the scheme's other options.
      residual = config_lib.residual_config(
        name, block_size=residual.block_size, num_blocks=residual.num_blocks
      )
    scheme = dataclasses.replace(model, residual=residual)
    try:
      schemes[name] = _scheme(scheme, length)
    except config_lib.ConfigError:
      if name == model.residual.name:
        raise
      # The config lacks a field of this scheme, such as the block size.
  caches = traffic.of_caches(model)
  parts, totals = parameters.of_parts(model), {}
  for name, without in TOTALS.items():
    count = parameters.total(parts, *without)
    totals[name] = {"total": count.total, "active": count.active}
  return {
    "name": config.name,
    "residual": model.residual.name,
    "sequence_length": length,
    "dtype": model.dtype,
    "parameters": _parameters(model),
    "totals": totals,
    "schemes": schemes,
    "cache": {kind: dataclasses.asdict(c) for kind, c in caches.items()},
  }


def _parameters(model: config_lib.ModelConfig) -> dict[str, Any]:
  rows: dict[str, dict[str, Any]] = {}
  for name, count in parameters.of_parts(model).items():
    number = max(1, model.sublayer_kinds.count(name))
    rows[name] = {
      "number": number,
      "each": count.total // number,
      "total": count.total,
      "active": count.active,
      "untrained": count.state,
    }
    if name in model.sublayer_kinds:
      rows[name]["modules"] = {
        module: {"total": module_count.total, "active": module_count.active}
        for module, module_count in parameters.of_modules(model, name).items()
      }
  return rows


def _scheme(model: config_lib.ModelConfig, length: int) -> dict[str, Any]:
  flops = operations.flops_per_token(model, length)
  moved = traffic.of_scheme(model)
  width_bytes = model.width * jnp.dtype(model.dtype).itemsize
  return {
    "parameters": parameters.of_parts(model)["residual"].total,
    "flops": dataclasses.asdict(flops)
    | {
      "forward": flops.forward,
      "backward": flops.backward,
      "train": flops.train,
    },
    # Per token and sublayer.
    "moved_widths": moved.total,
    "moved_bytes": moved.total * width_bytes,
  }


def to_text(report: Report) -> str:
  """The report as tables for a terminal."""
  used = report["residual"]
  header = (
    f"{report['name']}: {report['dtype']}, {report['sequence_length']} tokens"
    f" per sequence, residual scheme {used}"
  )
  parts = []
  for name, row in report["parameters"].items():
    parts.append(
      (name, row["number"], row["each"], row["total"], row["active"])
    )
    for module, count in row.get("modules", {}).items():
      each = count["total"] // row["number"]
      parts.append((f"  {module}", "", each, count["total"], count["active"]))
  totals = [
    (name, "", "", row["total"], row["active"])
    for name, row in report["totals"].items()
  ]
  schemes = report["schemes"]
  names = list(next(iter(schemes.values()))["flops"])
  flops = [
    (name, *(_short(row["flops"][name]) for row in schemes.values()))
    for name in names
  ]
  traffic_rows = [
    (
      name,
      row["parameters"],
      f"{row['moved_widths']:.4g} d",
      round(row["moved_bytes"]),
    )
    for name, row in schemes.items()
  ]
  caches = [
    (name, row["token_bytes"], row["sequence_bytes"])
    for name, row in report["cache"].items()
  ]
  tokens = sum(row[1] for row in caches)
  caches.append(("all", tokens, sum(row[2] for row in caches)))
  return "\n\n".join(
    [
      header,
      table(("parameters", "number", "each", "total", "activated"), parts),
      table(("sum", "", "", "total", "activated"), totals),
      table(("FLOPs per token", *schemes), flops),
      table(
        (
          "residual scheme, per token and sublayer",
          "parameters",
          "moved",
          "bytes",
        ),
        traffic_rows,
      ),
      table(
        ("kept while decoding", "bytes per token", "bytes per sequence"), caches
      ),
    ]
  )


def _short(flops: float) -> str:
  return f"{flops / 1e6:,.2f}M"
