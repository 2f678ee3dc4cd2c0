# SPDX-License-Identifier: Apache-2.0
"""The description of a network: its sublayers."""

import dataclasses
from typing import Literal

from attnres_jax.config import fields
from attnres_jax.config import residual as residual_lib


@dataclasses.dataclass(frozen=True)
class AttentionConfig(fields.Checked, prefix="model.attention"):
  """Variants of `attention` that published networks have.

  Attributes:
    qkv_bias: queries, keys and values have biases (Qwen2).
    output_bias: so has the output (Llama's `attention_bias`, with `qkv_bias`).
    qk_norm: queries and keys are normalised per head, each with a gain, before
      positions (Qwen3).
  """

  qkv_bias: fields.Function[bool] = False
  output_bias: fields.Function[bool] = False
  qk_norm: fields.Function[bool] = False


@dataclasses.dataclass(frozen=True)
class RopeConfig(fields.Checked, prefix="model.rope"):
  """How rotary positions reach further than in the first training.

  Attributes:
    scaling: `llama3` divides the frequencies of channels that turn fewer than
      `low_turns` times in `original_length` tokens by `factor`, keeps those
      above `high_turns`, and interpolates between, linearly in turns (Llama
      3.1); or `none`.
    factor: see `scaling`.
    low_turns: see `scaling`.
    high_turns: see `scaling`.
    original_length: tokens per sequence of the first training.
  """

  scaling: fields.Function[Literal["none", "llama3"]] = "none"
  factor: fields.Function[fields.Positive] = fields.acts(
    8.0, scaling=("llama3",)
  )
  low_turns: fields.Function[fields.Positive] = fields.acts(
    1.0, scaling=("llama3",)
  )
  high_turns: fields.Function[fields.Positive] = fields.acts(
    4.0, scaling=("llama3",)
  )
  original_length: fields.Function[fields.Size] = fields.acts(
    8192, scaling=("llama3",)
  )

  def __post_init__(self):
    super().__post_init__()
    accepted = f"a number above model.rope.low_turns={self.low_turns}"
    self.require(self.high_turns > self.low_turns, "high_turns", accepted)


@dataclasses.dataclass(frozen=True)
class ActivationConfig(fields.Checked, prefix="model.activation"):
  """The activation of gated MLPs and experts (`attnres_jax.models.mlp`).

  Attributes:
    name: `silu`, or `situ` (Kimi K3).
    gate_bound: of SiTU's gate.
    up_bound: of the factor beside the gate.
  """

  name: fields.Function[Literal["silu", "situ"]] = "silu"
  gate_bound: fields.Function[fields.Positive] = fields.acts(
    4.0, name=("situ",)
  )
  up_bound: fields.Function[fields.Positive] = fields.acts(25.0, name=("situ",))


@dataclasses.dataclass(frozen=True)
class KdaConfig(fields.Checked, prefix="model.kda"):
  """Kimi Delta Attention (spec: kimi_linear section 2).

  Attributes:
    head_width: of keys and of values.
    conv_width: taps of the short causal convolutions.
    gate_rank: rank of the two low-rank gates (decay, output).
    chunk_size: tokens per chunk of the chunkwise form; does not change the
      function.
    save: what the TPU kernels keep for the backward pass beside the arguments
      of the recurrence: `chunks`, what they found in every chunk (not where
      `model.remat` discards it), or `arguments`, nothing else, for less memory
      and more time.
    full_rank_gate: the output gate is one matrix (Kimi K3).
    decay_bound: the largest negative log-decay, -bound sigmoid(exp(a) (W_f x +
      b)) (5 in Kimi K3); 0 for none, -exp(a) softplus(W_f x + b).
  """

  head_width: fields.Function[fields.Size] = 128
  conv_width: fields.Function[fields.Size] = 4
  gate_rank: fields.Function[fields.Size] = 128
  chunk_size: fields.Execution[fields.Size] = 64
  save: fields.Execution[Literal["chunks", "arguments"]] = "chunks"
  full_rank_gate: fields.Function[bool] = False
  decay_bound: fields.Function[fields.NotNegative] = 0.0


@dataclasses.dataclass(frozen=True)
class MlaConfig(fields.Checked, prefix="model.mla"):
  """Multi-head latent attention (kimi_linear section 3, interop section 1).

  Attributes:
    latent_rank: of the latent, from which keys and values are computed and
      which is cached.
    nope_width: of the separate part of each head's query and key.
    shared_width: of the part of the key that all heads share.
    value_width: of a head's value.
    latent_eps: of the RMSNorm of latents.
    query_rank: of a latent from which queries are computed (Kimi K3); 0
      computes them from the input.
    output_gate: heads are multiplied by the sigmoid of a linear map of the
      input (Kimi K3).
  """

  latent_rank: fields.Function[fields.Size] = 512
  nope_width: fields.Function[fields.Size] = 128
  shared_width: fields.Function[fields.Size] = 64
  value_width: fields.Function[fields.Size] = 128
  latent_eps: fields.Function[fields.Positive] = 1e-6
  query_rank: fields.Function[fields.Count] = 0
  output_gate: fields.Function[bool] = False


@dataclasses.dataclass(frozen=True)
class MoeConfig(fields.Checked, prefix="model.moe"):
  """Fine-grained mixture of experts (kimi_linear section 4).

  Attributes:
    num_experts: routed experts E; 0 makes every MLP dense.
    top_k: experts that a token is routed to.
    expert_width: hidden width of one expert.
    num_shared: experts that process every token, as one wider MLP.
    scaling_factor: of the renormalised weights of the routed experts.
    dense_layers: number of transformer blocks, from the first, whose MLP is
      dense, of `model.mlp_width`.
    latent_width: routed experts read and write a latent of this width, in place
      of the model's; a matrix leads to it and one back (Kimi K3). 0 for none.
    latent_norm: the weighted sum of their outputs is normalised.
  """

  num_experts: fields.Function[fields.Count] = 0
  top_k: fields.Function[fields.Size] = fields.acts(8, num_experts=fields.SOME)
  expert_width: fields.Function[fields.Count] = fields.acts(
    0, num_experts=fields.SOME
  )
  num_shared: fields.Function[fields.Count] = fields.acts(
    1, num_experts=fields.SOME
  )
  scaling_factor: fields.Function[fields.Positive] = fields.acts(
    2.446, num_experts=fields.SOME
  )
  dense_layers: fields.Function[fields.Count] = fields.acts(
    0, num_experts=fields.SOME
  )
  latent_width: fields.Function[fields.Count] = fields.acts(
    0, num_experts=fields.SOME
  )
  latent_norm: fields.Function[bool] = fields.acts(
    False, num_experts=fields.SOME
  )

  def __post_init__(self):
    super().__post_init__()
    none = not self.num_experts
    self.require(
      none or self.num_experts >= self.top_k,
      "num_experts",
      f"at least model.moe.top_k={self.top_k}, or 0 for dense MLPs",
    )
    self.require(none or self.expert_width, "expert_width", "a number above 0")
    self.require(
      self.latent_width or not self.latent_norm,
      "latent_norm",
      "False with model.moe.latent_width=0",
    )


@dataclasses.dataclass(frozen=True)
class ModelConfig(fields.Checked, prefix="model"):
  """A decoder-only transformer.

  Attributes:
    vocab_size: rows of the embedding; 0 for the tokenizer's size.
    width: D, the model width.
    num_layers: transformer blocks; L = 2 * num_layers sublayers.
    mixers: sequence mixers of the transformer blocks, repeated over depth: keys
      of `attnres_jax.models.sublayer.CORES`.
    last_mixer: mixer of the last transformer block; empty to continue with
      `mixers`, which then have to divide the depth.
    num_heads: heads of every mixer.
    num_kv_heads: key/value heads of `attention`; 0 means as many as query
      heads.
    head_width: width of a head of `attention`; 0 means width / num_heads.
    mlp_width: hidden width of the gated MLP; 0 means 8/3 of `width`, rounded up
      to 32s.
    attention_kernel: of softmax attention (`attention`, `mla`). `auto` selects
      a fused kernel for the platform that a program is lowered for; `tiled` is
      plain JAX on any platform; `splash` (TPU) and `cudnn` (NVIDIA) run or
      fail.
    qkv_norm: mixers normalise queries, keys and values per head, each with a
      gain, unless they are normalised anyway.
    rope_theta: base of the rotary positions of `attention`; 0 for none.
    norm_eps: added to the mean square in every RMSNorm, including depth
      attention's.
    tie_embeddings: the head is the transposed embedding table.
    logit_soft_cap: logits become cap * tanh(logits / cap); 0 for none.
    init_std: standard deviation of the normal initialisation of matrices.
    dtype: of activations.
    parameter_dtype: of the matrices of sublayers, token table and head, between
      steps. With `bfloat16` they take half as much memory, but an update that
      is less than about 1/500 of a weight is lost. Vectors, the router and the
      small gates of KDA stay float32, and so do optimiser state and the sums of
      gradients.
    remat: what a sublayer keeps for the backward pass. `none`: everything that
      autodiff saves; `full`: only its running input, or the output from which
      that is computed again (one vector per sublayer), and each block once;
      `attention`: also the outputs of softmax attention, which is then not
      recomputed; `dots`: also the results of matrix products.
    scan_layers: run the sublayers of a depth block that repeat a pattern as one
      `lax.scan` instead of a Python loop: smaller programs, same function.
    depth_loop: how the depth blocks of Block AttnRes run, outside of decoding.
      `unrolled`: one after the other; `scan`: blocks that repeat kinds of
      sublayers as one loop, whose program does not grow with depth
      (`attnres_jax.models.block_scan`). In a pipeline, each chunk has a loop.
    attention: variants of `attention` mixers.
    rope: scaling of rotary positions.
    activation: of MLPs and experts.
    kda: shape of `kda` mixers.
    mla: shape of `mla` mixers.
    moe: experts that replace dense MLPs.
    residual: the scheme that connects the sublayers.
    value_residual: whether the values of a mixer are the mean of its own and
      of those of the first mixer of its kind (`models.sublayer`).
  """

  vocab_size: fields.Function[fields.Count] = 0
  width: fields.Function[fields.Size] = 128
  num_layers: fields.Function[fields.Layers] = 8
  mixers: fields.Function[tuple[str, ...]] = ("attention",)
  last_mixer: fields.Function[str] = ""
  num_heads: fields.Function[fields.Size] = 4
  num_kv_heads: fields.Function[fields.Count] = 0
  head_width: fields.Function[fields.Count] = 0
  attention_kernel: fields.Execution[
    Literal["auto", "tiled", "splash", "cudnn"]
  ] = "auto"
  mlp_width: fields.Function[fields.Count] = 0
  qkv_norm: fields.Function[bool] = False
  rope_theta: fields.Function[fields.NotNegative] = 10_000.0
  norm_eps: fields.Function[fields.Positive] = 1e-6
  tie_embeddings: fields.Function[bool] = False
  logit_soft_cap: fields.Function[fields.NotNegative] = 0.0
  init_std: fields.Draw[fields.Positive] = 0.02
  dtype: fields.Precision[Literal["float32", "bfloat16"]] = "float32"
  parameter_dtype: fields.Precision[Literal["float32", "bfloat16"]] = "float32"
  remat: fields.Execution[Literal["none", "full", "attention", "dots"]] = "none"
  scan_layers: fields.Execution[bool] = True
  depth_loop: fields.Execution[Literal["unrolled", "scan"]] = "unrolled"
  attention: AttentionConfig = fields.acts(
    AttentionConfig(), sublayer_kinds=fields.has("attention")
  )
  rope: RopeConfig = fields.acts(RopeConfig(), rope_theta=fields.SOME)
  activation: ActivationConfig = ActivationConfig()
  kda: KdaConfig = fields.acts(KdaConfig(), sublayer_kinds=fields.has("kda"))
  mla: MlaConfig = fields.acts(MlaConfig(), sublayer_kinds=fields.has("mla"))
  moe: MoeConfig = MoeConfig()
  residual: residual_lib.ResidualConfig = residual_lib.DepthAttentionConfig()
  value_residual: fields.Function[bool] = False

  def __post_init__(self):
    super().__post_init__()
    self._check_pattern()
    if "attention" in self.sublayer_kinds:
      self._check_heads()
    self.moe.require(
      self.moe.dense_layers <= self.num_layers,
      "dense_layers",
      f"at most model.num_layers={self.num_layers}",
    )
    self.require(
      not (self.value_residual and self.depth_loop == "scan"),
      "depth_loop",
      "'unrolled' with model.value_residual=True",
    )
    self.residual.require(
      self.residual.block_size <= self.num_sublayers,
      "block_size",
      f"at most the {self.num_sublayers} sublayers of model.num_layers="
      f"{self.num_layers}",
    )

  def check_num_blocks(self):
    """Refuses a number of blocks that no size of blocks gives.

    Networks of old runs, which have fewer blocks than they asked for, load.
    """
    number, depth = self.residual.num_blocks, self.num_sublayers
    built = {-(-depth // size) for size in range(1, depth + 1)}
    lower = max((n for n in built if n < number), default=1)
    upper = min((n for n in built if n > number), default=depth)
    self.residual.require(
      not number or number in built,
      "num_blocks",
      f"a number that a block size gives, such as {lower} or {upper} with the"
      f" {depth} sublayers of model.num_layers={self.num_layers}",
    )

  def _check_pattern(self):
    accepted = f"one to {self.num_layers} (model.num_layers) mixers"
    number = len(self.mixers)
    self.require(1 <= number <= self.num_layers, "mixers", accepted)
    mixing = {*self.mixers, self.last_mixer} - {"", "mlp", "moe"}
    self.require(mixing, "mixers", "one that mixes tokens, as 'attention' does")
    self.require(
      self.last_mixer or self.num_layers % number == 0,
      "num_layers",
      f"a multiple of the {number} mixers of model.mixers, or an explicit"
      " model.last_mixer",
    )

  def _check_heads(self):
    self.require(
      self.head_width or self.width % self.num_heads == 0,
      "num_heads",
      f"a divisor of model.width={self.width}, or an explicit model.head_width",
    )
    accepted = f"a divisor of model.num_heads={self.num_heads}"
    self.require(self.num_heads % self.kv_heads == 0, "num_kv_heads", accepted)
    fits = not self.rope_theta or self.head_size % 2 == 0
    self.require(
      fits or self.head_width,
      "width",
      f"a multiple of {2 * self.num_heads}, for an even width of each of the"
      f" model.num_heads={self.num_heads} with rotary positions (or"
      " model.head_width, or model.rope_theta=0)",
    )
    accepted = "an even number with rotary positions (or model.rope_theta=0)"
    self.require(fits, "head_width", accepted)

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
