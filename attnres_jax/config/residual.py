# SPDX-License-Identifier: Apache-2.0
"""The residual scheme of a network: its name, and options of its own.

A scheme with options has a subclass of `ResidualConfig` in its file
(`Residual.Options`). The options of depth attention are here, since the default
scheme has them and configs do without JAX.
"""

from collections.abc import Mapping
import dataclasses
import typing
from typing import Any, Literal

from attnres_jax.config import fields


@dataclasses.dataclass(frozen=True)
class DepthReadConfig(fields.Checked, prefix="model.residual.read"):
  """How depth attention scores and weighs its sources; options combine.

  The default is the paper's: a learned query per read, normalised keys, one
  softmax. `query`, `score`, `key_norm`, `window` and `heads` are rows of its
  Table 4. For options without `batched`, the queries of a block cannot be
  answered together, and `DepthAttentionConfig.form` has no effect.

  Attributes:
    heads: H, softmaxes per read, each over its slice of the width (MHAR,
      arXiv:2607.27230; the inverse RMS is over the full width). 0 takes the
      scheme's number: 8 in `delta_mh`, else 1.
    query: `learned`: one vector per read. `input`: a linear map of the newest
      source, normalised. `static`: no queries and keys, but one learned logit
      per source.
    query_init: standard deviation at which queries (or their maps, or static
      logits) start.
    logit_scale: multiplies every logit; 1/sqrt(H) gives one head the
      temperature of H heads.
    score: `softmax`, or `sigmoid` of each logit, without normalisation.
    key_norm: divides each key by its RMS and multiplies it by a learned gain.
    rank: coordinates of a source, its last ones, that are its key, without a
      gain (LR-AttnRes, arXiv:2607.09694); 0 for all.
    window: sources besides the embedding, the newest ones, that a read sees; 0
      for all. The open block counts as one.
    null: a further source, which no sublayer has written (arXiv:2605.17887):
      `zero` adds 1 to the denominator of the softmax, `learned` is a vector per
      read that starts at zero.
    value_query: reads the values of a mixer with another query than its queries
      and keys (RD-AttnRes, arXiv:2608.01075).
    scale: `sum` multiplies a mixture by the number of its sources, so that zero
      queries read what PreNorm reads: networks that were trained with it can
      become Full or Block AttnRes (`attnres_jax.interop.upcycle`).
  """

  heads: fields.Function[fields.Count] = 0
  query: fields.Function[Literal["learned", "input", "static"]] = "learned"
  query_init: fields.Draw[fields.NotNegative] = 0.0
  logit_scale: fields.Function[fields.Positive] = 1.0
  score: fields.Function[Literal["softmax", "sigmoid"]] = "softmax"
  key_norm: fields.Function[bool] = True
  rank: fields.Function[fields.Count] = 0
  window: fields.Function[fields.Count] = 0
  null: fields.Function[Literal["none", "zero", "learned"]] = "none"
  value_query: fields.Function[bool] = False
  scale: fields.Function[Literal["mean", "sum"]] = "mean"

  def __post_init__(self):
    super().__post_init__()
    static, softmax = self.query == "static", self.score == "softmax"
    one_head = self.heads <= 1 or not (static or self.rank)
    require = self.require
    require(one_head, "heads", "1 with query='static' or with a rank")
    require(self.key_norm or not static, "key_norm", "True with query='static'")
    require(not (static and self.rank), "rank", "0 with query='static'")
    require(
      self.query == "learned" or not self.value_query,
      "value_query",
      "False unless query='learned'",
    )
    require(
      softmax or self.null == "none",
      "null",
      "'none' with score='sigmoid', which has no total",
    )
    require(
      not static or self.null != "learned",
      "null",
      "'none' or 'zero' with query='static', which has no keys",
    )
    require(
      self.scale == "mean" or self.sums_to_one,
      "scale",
      "'mean' with a null source or score='sigmoid'",
    )

  @property
  def batched(self) -> bool:
    """Whether phase 1 can answer all queries of a block together."""
    paired = self.query == "learned" and self.score == "softmax"
    return paired and self.key_norm and not self.window

  @property
  def sums_to_one(self) -> bool:
    """Whether the weights of all sources sum to one."""
    return self.score == "softmax" and self.null == "none"


@dataclasses.dataclass(frozen=True)
class ResidualConfig(fields.Checked, prefix="model.residual"):
  """The residual scheme that connects the sublayers, and sizes of blocks.

  A config file gives sizes to all schemes that it compares; those without
  blocks do not read them. `residual_config` makes an instance, of the class of
  the scheme's options.

  Attributes:
    name: a key of `attnres_jax.models.residuals.RESIDUALS`.
    block_size: sublayers per block of Block AttnRes (S; attention and MLP count
      one each). 0 derives it from `num_blocks`.
    num_blocks: blocks of Block AttnRes (N), which gives S = ceil(L / N). Set
      either this or `block_size`.
  """

  name: fields.Function[str] = "block_attnres"
  block_size: fields.Function[fields.Count] = 0
  num_blocks: fields.Function[fields.Count] = 0
  alternatives = (("block_size",), ("num_blocks",))

  def __post_init__(self):
    super().__post_init__()
    self.require(
      not (self.block_size and self.num_blocks),
      "num_blocks",
      f"0 when block_size is given (block_size is {self.block_size})",
    )

  @classmethod
  def of_values(cls, values: Mapping[str, Any], prefix: str = "") -> Any:
    """Options, of the class of the scheme that they name."""
    from attnres_jax.config import load

    return load.residual_config(**values)

  if typing.TYPE_CHECKING:  # A scheme knows the class of its options.

    def __getattr__(self, name: str) -> Any: ...

  def sublayers_per_block(self, num_sublayers: int) -> int:
    """S, given L: `block_size`, or ceil(L / `num_blocks`)."""
    if self.block_size:
      return self.block_size
    accepted = "sublayers per block (or num_blocks above 0)"
    self.require(self.num_blocks, "block_size", accepted)
    return -(-num_sublayers // self.num_blocks)


@dataclasses.dataclass(frozen=True)
class DepthAttentionConfig(ResidualConfig):
  """Options of all schemes with depth attention.

  Attributes:
    form: `two_phase` batches the queries of a block over the completed sources
      and merges the open source (Alg. 1); `one_softmax` is the definition.
    read: how depth attention scores and weighs its sources.
  """

  form: fields.Execution[Literal["two_phase", "one_softmax"]] = "two_phase"
  read: DepthReadConfig = DepthReadConfig()

  @property
  def effective_read(self) -> DepthReadConfig:
    """`read`, with the scheme's own values in place of its defaults."""
    return self.read
