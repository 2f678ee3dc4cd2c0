# SPDX-License-Identifier: Apache-2.0
"""Parameters of the KDA, MLA and MoE networks that the paper trains.

The paper names depth, heads, width and expert width of each network and its
activated parameters; the rest follows the released Kimi Linear 48B. Which
number of experts the small networks have is not published. With 512 experts in
every transformer block and MLA also in the last one, the counts round to all
five of the paper's, with the released 256 they are 1 to 1.6 percent low.
"""

import dataclasses

# Of the released 48B model: widths of heads, of the latent, of the low ranks.
HEAD_WIDTH = 128
MLA_QUERY_WIDTH = 192
MLA_ROPE_WIDTH = 64
MLA_RANK = 512
LOW_RANK = 128
CONV_WIDTH = 4
VOCAB_SIZE = 163_840
# Every fourth transformer block attends; so does the last.
MLA_PERIOD = 4


@dataclasses.dataclass(frozen=True)
class Architecture:
  """A network of KDA or MLA mixers and mixtures of experts.

  Attributes:
    num_layers: transformer blocks (L_b), two sublayers each.
    width: d.
    num_heads: H, of KDA and MLA alike.
    expert_width: d_ff, hidden width of one expert.
    num_experts: E, routed.
    experts_per_token: routed experts that a token activates; a shared one comes
      on top.
    first_dense: the first transformer block has a dense MLP as wide as all
      activated experts together.
    router_bias: count the selection bias of each router, which no gradient
      trains.
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
  def num_sublayers(self) -> int:
    return 2 * self.num_layers

  @property
  def num_mla(self) -> int:
    """Transformer blocks with MLA: multiples of four, and the last."""
    return -(-self.num_layers // MLA_PERIOD)

  @property
  def kda_params(self) -> int:
    """Of one KDA mixer."""
    heads, width = self.num_heads, self.width
    inner = heads * HEAD_WIDTH
    projections = 4 * width * inner + width * heads
    gates = 2 * LOW_RANK * (width + inner)
    convolutions = 3 * CONV_WIDTH * inner
    decay_and_norm = heads + inner + HEAD_WIDTH
    return projections + gates + convolutions + decay_and_norm

  @property
  def mla_params(self) -> int:
    """Of one MLA mixer."""
    heads, width = self.num_heads, self.width
    query = width * heads * MLA_QUERY_WIDTH
    down = width * (MLA_RANK + MLA_ROPE_WIDTH) + MLA_RANK
    up = MLA_RANK * heads * 2 * HEAD_WIDTH
    return query + down + up + heads * HEAD_WIDTH * width

  @property
  def expert_params(self) -> int:
    return 3 * self.width * self.expert_width

  @property
  def router_params(self) -> int:
    return self.num_experts * (self.width + self.router_bias)

  @property
  def active_params(self) -> int:
    """That one token uses; norms count, embedding and head do not."""
    return self._params(self.experts_per_token + 1)

  @property
  def total_params(self) -> int:
    """Without embedding and head."""
    return self._params(self.num_experts + 1)

  def _params(self, experts_per_layer: int) -> int:
    num_kda = self.num_layers - self.num_mla
    mixers = num_kda * self.kda_params + self.num_mla * self.mla_params
    moe_layers = self.num_layers - self.first_dense
    dense_as_experts = self.first_dense * (self.experts_per_token + 1)
    experts = moe_layers * experts_per_layer + dense_as_experts
    routers = moe_layers * self.router_params
    norms = (2 * self.num_layers + 1) * self.width
    return mixers + experts * self.expert_params + routers + norms


KIMI_LINEAR_48B = Architecture(
  num_layers=27,
  width=2304,
  num_heads=32,
  expert_width=1024,
  num_experts=256,
  first_dense=True,
  router_bias=True,
)
