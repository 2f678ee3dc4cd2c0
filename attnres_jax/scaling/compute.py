# SPDX-License-Identifier: Apache-2.0
"""Training compute, counted in three ways, in PFLOP/s-days.

The paper gives losses against compute but not how it counts. The choices are

  6nd        six FLOPs per activated parameter and token, without embedding and
             head;
  attention  plus the causal attention over the sequence;
  residual   plus the residual scheme's own work, as counted by `flops`.

None includes the recurrence of linear attention. A fit or figure over compute
must always name its way of counting.
"""

import dataclasses

from attnres_jax import config as config_lib
from attnres_jax import flops as flops_lib
from attnres_jax.scaling import architecture

PFLOPS_DAY = 1e15 * 24 * 3600
COUNTINGS = ("6nd", "attention", "residual")
# Labels for axes and tables.
LABELS = {
  "6nd": "6ND",
  "attention": "6ND + causal attention",
  "residual": "6ND + causal attention + depth attention",
}


@dataclasses.dataclass(frozen=True)
class TokenFlops:
  """Forward FLOPs of one token; the backward pass takes twice as many.

  Attributes:
    matmul: two per activated parameter outside embedding and head.
    attention: scores and weighted values over the sequence, causal.
    residual: of the residual scheme.
  """

  matmul: float
  attention: float = 0.0
  residual: float = 0.0


def pflops_days(flops: TokenFlops, tokens: float, counting: str) -> float:
  """Training compute of `tokens` tokens under one of `COUNTINGS`."""
  if counting not in COUNTINGS:
    config_lib.fail_argument(
      "counting", counting, "one of " + ", ".join(COUNTINGS)
    )
  forward = flops.matmul
  if counting != "6nd":
    forward += flops.attention
  if counting == "residual":
    forward += flops.residual
  return 3 * forward * tokens / PFLOPS_DAY


def of_run(flops: flops_lib.FlopsPerToken) -> TokenFlops:
  """From the counts of `flops.flops_per_token` for a model of this package."""
  return TokenFlops(
    matmul=flops.projections + flops.mlp,
    attention=flops.attention,
    residual=flops.residual,
  )


def of_network(
  model: config_lib.ModelConfig,
  scheme: str,
  sequence_length: int,
  *,
  active_params: float | None = None,
  block_size: int = 4,
) -> TokenFlops:
  """Counts a KDA, MLA and MoE network.

  Args:
    model: the network.
    scheme: the name of its residual scheme.
    sequence_length: T.
    active_params: N, to use a published number.
    block_size: sublayers per block of Block AttnRes.
  """
  residual = config_lib.ResidualConfig(name=scheme, block_size=block_size)
  model = dataclasses.replace(model, residual=residual)
  parts = flops_lib.flops_per_token(model, sequence_length)
  if active_params is None:
    active_params = architecture.active_params(model)
  return TokenFlops(
    matmul=2 * active_params,
    attention=parts.attention,
    residual=parts.residual,
  )
