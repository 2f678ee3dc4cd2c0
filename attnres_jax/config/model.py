# SPDX-License-Identifier: Apache-2.0
"""What a network is: its sublayers, and the scheme that connects them."""

import dataclasses

from attnres_jax.config import errors


@dataclasses.dataclass(frozen=True)
class ResidualConfig:
  """Which residual scheme connects the sublayers, and its shape.

  Attributes:
    name: a key of `attnres_jax.models.residuals.RESIDUALS`.
    block_size: sublayers per block of Block AttnRes (S; attention and MLP count
      one each). 0 derives it from `num_blocks`.
    num_blocks: blocks of Block AttnRes (N), realised as S = ceil(L / N). Give
      this or `block_size`, not both.
    form: `two_phase` batches the queries of a block over the completed sources
      and merges the open one (Alg. 1); `one_softmax` is the definition.
    schedule_size: sublayers that share one phase 1 in Full AttnRes. Pure
      scheduling: the function does not depend on it.
  """

  name: str = "block_attnres"
  block_size: int = 0
  num_blocks: int = 0
  form: str = "two_phase"
  schedule_size: int = 6

  def __post_init__(self):
    errors.check_not_negative(
      "model.residual", self, "block_size", "num_blocks"
    )
    errors.check_positive("model.residual", self, "schedule_size")
    errors.check_in(
      "model.residual.form", self.form, ("two_phase", "one_softmax")
    )
    if self.block_size and self.num_blocks:
      errors.fail(
        "model.residual.num_blocks",
        self.num_blocks,
        f"0 when block_size is given (block_size is {self.block_size})",
      )

  def sublayers_per_block(self, num_sublayers: int) -> int:
    """S, given L: `block_size`, or ceil(L / `num_blocks`)."""
    if self.block_size:
      return self.block_size
    if not self.num_blocks:
      errors.fail(
        "model.residual.block_size",
        0,
        "sublayers per block (or num_blocks above 0)",
      )
    return -(-num_sublayers // self.num_blocks)


@dataclasses.dataclass(frozen=True)
class KdaConfig:
  """Kimi Delta Attention (spec: kimi_linear section 2).

  Attributes:
    head_width: of keys and of values.
    conv_width: taps of the short causal convolutions.
    gate_rank: of the two low-rank gates (decay, output).
    chunk_size: tokens that the chunkwise form takes at once; does not change
      the function.
  """

  head_width: int = 128
  conv_width: int = 4
  gate_rank: int = 128
  chunk_size: int = 64

  def __post_init__(self):
    names = [field.name for field in dataclasses.fields(self)]
    errors.check_positive("model.kda", self, *names)


@dataclasses.dataclass(frozen=True)
class MlaConfig:
  """Multi-head latent attention without positions (kimi_linear section 3).

  Attributes:
    latent_rank: of what keys and values are made from, and what is cached.
    nope_width: of a head's own query and key.
    shared_width: of the part of the key that all heads share; rotary in other
      models, never rotated here.
    value_width: of a head's value.
    latent_eps: of the RMSNorm of the latent.
  """

  latent_rank: int = 512
  nope_width: int = 128
  shared_width: int = 64
  value_width: int = 128
  latent_eps: float = 1e-6

  def __post_init__(self):
    names = [field.name for field in dataclasses.fields(self)]
    errors.check_positive("model.mla", self, *names)


@dataclasses.dataclass(frozen=True)
class MoeConfig:
  """Fine-grained mixture of experts (kimi_linear section 4).

  Attributes:
    num_experts: routed experts E; 0 makes every MLP dense.
    top_k: experts that a token is routed to.
    expert_width: hidden width of one expert.
    num_shared: experts that every token goes through, as one wider MLP.
    scaling_factor: of the renormalised weights of the routed experts.
    dense_layers: first transformer blocks whose MLP is dense, of
      `model.mlp_width`.
  """

  num_experts: int = 0
  top_k: int = 8
  expert_width: int = 0
  num_shared: int = 1
  scaling_factor: float = 2.446
  dense_layers: int = 0

  def __post_init__(self):
    errors.check_not_negative(
        "model.moe", self, "num_experts", "expert_width", "num_shared",
        "dense_layers",
    )  # fmt: skip
    errors.check_positive("model.moe", self, "top_k", "scaling_factor")
    if not self.num_experts:
      return
    if self.num_experts < self.top_k:
      errors.fail(
        "model.moe.num_experts",
        self.num_experts,
        f"at least model.moe.top_k={self.top_k}, or 0 for dense MLPs",
      )
    errors.check_positive("model.moe", self, "expert_width")


MIXERS = ("attention", "kda", "mla")


@dataclasses.dataclass(frozen=True)
class ModelConfig:
  """A decoder-only transformer.

  Attributes:
    vocab_size: rows of the embedding; 0 takes the tokenizer's.
    width: D, the model width.
    num_layers: transformer blocks; L = 2 * num_layers sublayers.
    mixers: sequence mixers of the transformer blocks, repeated over depth; of
      `attention` (grouped queries), `kda`, `mla`.
    last_mixer: of the last transformer block; empty goes on with `mixers`,
      which then have to fill the depth.
    num_heads: heads of every mixer.
    num_kv_heads: key/value heads of `attention`; 0 means as many as query
      heads.
    head_width: width of a head of `attention`; 0 means width / num_heads.
    mlp_width: hidden width of the SwiGLU MLP; 0 means 8/3 width, rounded up to
      a multiple of 32.
    rope_theta: base of the rotary positions of `attention`; 0 for none.
    norm_eps: added to the mean square in every RMSNorm, depth attention's too.
    tie_embeddings: the head is the transposed embedding table.
    logit_soft_cap: logits become cap * tanh(logits / cap); 0 for none.
    init_std: standard deviation of the normal initialisation of matrices.
    dtype: of activations; master weights are always float32.
    remat: what a sublayer keeps for backward. `none`: what autodiff wants;
      `full`: its running input only (spec: one vector per sublayer plus each
      block once); `dots`: that and the results of matrix products.
    scan_layers: one `lax.scan` over the sublayers of a depth block that repeat
      a pattern, rather than a Python loop: smaller programs, same function.
    kda: shape of `kda` mixers.
    mla: shape of `mla` mixers.
    moe: experts in place of dense MLPs.
    residual: the scheme that connects the sublayers.
  """

  vocab_size: int = 0
  width: int = 128
  num_layers: int = 8
  mixers: tuple[str, ...] = ("attention",)
  last_mixer: str = ""
  num_heads: int = 4
  num_kv_heads: int = 0
  head_width: int = 0
  mlp_width: int = 0
  rope_theta: float = 10_000.0
  norm_eps: float = 1e-6
  tie_embeddings: bool = False
  logit_soft_cap: float = 0.0
  init_std: float = 0.02
  dtype: str = "float32"
  remat: str = "none"
  scan_layers: bool = True
  kda: KdaConfig = KdaConfig()
  mla: MlaConfig = MlaConfig()
  moe: MoeConfig = MoeConfig()
  residual: ResidualConfig = ResidualConfig()

  def __post_init__(self):
    errors.check_positive(
        "model", self, "width", "num_layers", "num_heads", "norm_eps",
        "init_std",
    )  # fmt: skip
    errors.check_not_negative(
        "model", self, "vocab_size", "num_kv_heads", "head_width", "mlp_width",
        "rope_theta", "logit_soft_cap",
    )  # fmt: skip
    errors.check_in("model.dtype", self.dtype, ("float32", "bfloat16"))
    errors.check_in("model.remat", self.remat, ("none", "full", "dots"))
    self._check_pattern()
    if "attention" in self.sublayer_kinds:
      self._check_heads()
    if self.moe.dense_layers > self.num_layers:
      errors.fail(
        "model.moe.dense_layers",
        self.moe.dense_layers,
        f"at most model.num_layers={self.num_layers}",
      )
    block_size = self.residual.block_size
    if block_size > self.num_sublayers:
      errors.fail(
        "model.residual.block_size",
        block_size,
        f"at most the {self.num_sublayers} sublayers of model.num_layers="
        f"{self.num_layers}",
      )

  def _check_pattern(self):
    accepted = f"one to {self.num_layers} (model.num_layers) mixers"
    if not 1 <= len(self.mixers) <= self.num_layers:
      errors.fail("model.mixers", self.mixers, accepted)
    for mixer in self.mixers:
      errors.check_in("model.mixers", mixer, MIXERS)
    if self.last_mixer:
      errors.check_in("model.last_mixer", self.last_mixer, MIXERS)
    elif self.num_layers % len(self.mixers):
      errors.fail(
        "model.num_layers",
        self.num_layers,
        f"a multiple of the {len(self.mixers)} mixers of model.mixers, or an"
        " explicit model.last_mixer",
      )

  def _check_heads(self):
    if not self.head_width and self.width % self.num_heads:
      errors.fail(
        "model.num_heads",
        self.num_heads,
        f"a divisor of model.width={self.width}, or an explicit"
        " model.head_width",
      )
    if self.num_heads % self.kv_heads:
      errors.fail(
        "model.num_kv_heads",
        self.num_kv_heads,
        f"a divisor of model.num_heads={self.num_heads}",
      )
    if self.rope_theta and self.head_size % 2:
      errors.fail(
        "model.head_width",
        self.head_size,
        "an even number with rotary positions (or model.rope_theta=0)",
      )

  @property
  def num_sublayers(self) -> int:
    """L: a mixer and an MLP per transformer block."""
    return 2 * self.num_layers

  @property
  def sublayer_kinds(self) -> tuple[str, ...]:
    """The kind of each of the L sublayers: mixer, MLP, mixer, MLP, ..."""
    kinds = []
    for i in range(self.num_layers):
      dense = not self.moe.num_experts or i < self.moe.dense_layers
      kinds.append(self.mixers[i % len(self.mixers)])
      kinds.append("mlp" if dense else "moe")
    if self.last_mixer:
      kinds[-2] = self.last_mixer
    return tuple(kinds)

  @property
  def kv_heads(self) -> int:
    return self.num_kv_heads or self.num_heads

  @property
  def head_size(self) -> int:
    return self.head_width or self.width // self.num_heads

  @property
  def mlp_size(self) -> int:
    return self.mlp_width or 32 * -(-8 * self.width // (3 * 32))
