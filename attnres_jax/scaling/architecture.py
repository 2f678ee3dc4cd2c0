# SPDX-License-Identifier: Apache-2.0
"""The KDA, MLA and MoE networks that the paper trains.

The paper gives depth, heads, width, expert width and activated parameters of
each network; the rest follows the released Kimi Linear 48B. The number of
experts of the small networks is not published. With 512 experts in every
transformer block and MLA also in the last one, all five counts round to those
of the paper; with the released 256 they are 1 to 1.6 percent low.
"""

import dataclasses

from attnres_jax import config as config_lib
from attnres_jax.flops import parameters

VOCAB_SIZE = 163_840
# Every fourth transformer block attends; so does the last.
MIXERS = ("kda", "kda", "kda", "mla")


@dataclasses.dataclass(frozen=True)
class Architecture:
  """A network of KDA or MLA mixers and mixtures of experts.

  Attributes:
    num_layers: transformer blocks (L_b), two sublayers each.
    width: d.
    num_heads: H, of both KDA and MLA.
    expert_width: d_ff, hidden width of one expert.
    num_experts: E, routed.
    experts_per_token: routed experts that a token activates, in addition to a
      shared one.
    first_dense: the first transformer block has a dense MLP as wide as all
      activated experts together.
    router_bias: whether to count the selection bias of each router, which
      gradients do not train.
  """

  num_layers: int
  width: int
  num_heads: int
  expert_width: int
  num_experts: int = 512
  experts_per_token: int = 8
  first_dense: bool = False
  router_bias: bool = False

  @property
  def model(self) -> config_lib.ModelConfig:
    """As a network of this package; widths of heads and ranks are its own
    defaults, those of the released 48B model.
    """
    return config_lib.ModelConfig(
      vocab_size=VOCAB_SIZE,
      width=self.width,
      num_layers=self.num_layers,
      num_heads=self.num_heads,
      mixers=MIXERS,
      last_mixer=MIXERS[-1],
      mlp_width=(self.experts_per_token + 1) * self.expert_width,
      moe=config_lib.MoeConfig(
        num_experts=self.num_experts,
        top_k=self.experts_per_token,
        expert_width=self.expert_width,
        dense_layers=int(self.first_dense),
      ),
      residual=config_lib.ResidualConfig(name="prenorm"),
    )

  @property
  def active_params(self) -> int:
    """Parameters that one token uses, without embedding and head."""
    return self._count.active - self._uncounted

  @property
  def total_params(self) -> int:
    """Parameters without embedding and head."""
    return self._count.total - self._uncounted

  @property
  def _count(self) -> parameters.Count:
    parts = parameters.of_parts(self.model)
    return parameters.total(parts, "embedding", "head")

  @property
  def _uncounted(self) -> int:
    """Selection biases, if they do not count."""
    return 0 if self.router_bias else self._count.state


KIMI_LINEAR_48B = Architecture(
  num_layers=27,
  width=2304,
  num_heads=32,
  expert_width=1024,
  num_experts=256,
  first_dense=True,
  router_bias=True,
)
