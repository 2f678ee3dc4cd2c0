# SPDX-License-Identifier: Apache-2.0
"""The KDA, MLA and MoE networks that the paper trains.

The paper gives depth, heads, width, expert width and activated parameters of
each network; the rest follows the released Kimi Linear 48B. The number of
experts of the small networks is not published. With 512 experts in every
transformer block and MLA also in the last one, all five counts round to the
paper's. With the released 256, they are 1 to 1.6 percent low.
"""

from typing import TYPE_CHECKING

from attnres_jax import config as config_lib

if TYPE_CHECKING:
  from attnres_jax.flops import parameters  # Counts by JAX, which configs lack.

VOCAB_SIZE = 163_840
# Every fourth transformer block attends; so does the last.
MIXERS = ("kda", "kda", "kda", "mla")
_TOP_K = 8


def network(
  num_layers: int,
  width: int,
  num_heads: int,
  expert_width: int,
  num_experts: int = 512,
  *,
  first_dense: bool = False,
) -> config_lib.ModelConfig:
  """A network; widths of heads and ranks are taken from the released 48B model.

  Args:
    num_layers: transformer blocks (L_b), two sublayers each.
    width: d.
    num_heads: H, of both KDA and MLA.
    expert_width: d_ff, hidden width of one expert.
    num_experts: E, routed; a token activates eight and a shared one.
    first_dense: whether the first transformer block has a dense MLP as wide as
      all activated experts together.
  """
  return config_lib.ModelConfig(
    vocab_size=VOCAB_SIZE,
    width=width,
    num_layers=num_layers,
    num_heads=num_heads,
    mixers=MIXERS,
    last_mixer=MIXERS[-1],
    mlp_width=(_TOP_K + 1) * expert_width,
    moe=config_lib.MoeConfig(
      num_experts=num_experts,
      top_k=_TOP_K,
      expert_width=expert_width,
      dense_layers=int(first_dense),
    ),
    residual=config_lib.ResidualConfig("prenorm"),
  )


KIMI_LINEAR_48B = network(27, 2304, 32, 1024, 256, first_dense=True)


def count(model: config_lib.ModelConfig) -> "parameters.Count":
  """Parameters without embedding and head."""
  from attnres_jax.flops import parameters

  return parameters.total(parameters.of_parts(model), "embedding", "head")


def active_params(model: config_lib.ModelConfig) -> int:
  """Parameters that one token uses and gradients train: no selection biases."""
  return count(model).active - count(model).state
