# SPDX-License-Identifier: Apache-2.0
"""All residual schemes by name, without importing one.

A file of `models/residuals`, and the classes in it by the names of their
schemes.
"""

SCHEMES = {
  "prenorm": {"prenorm": "PreNorm", "rescaled": "Rescaled"},
  "elmo": {"elmo": "Elmo"},
  "scaled": {"rezero": "ReZero", "layerscale": "LayerScale"},
  "laurel": {"laurel_lr": "LaurelLR"},
  "highway": {"highway": "Highway"},
  "postnorm": {
    "postnorm": "PostNorm", "deepnorm": "DeepNorm", "keel": "Keel",
    "hybridnorm": "HybridNorm",
  },
  "siamesenorm": {"siamesenorm": "SiameseNorm"},
  "gated_residual": {"gated_residual": "GatedResidual"},
  "ddl": {"ddl": "DDL"},
  "hyper_connections": {
    "static_hyper_connections": "StaticHyperConnections",
    "hyper_connections": "HyperConnections",
  },
  "mhc": {"mhc": "MHC", "mhc_lite": "MHCLite"},
  "full_attnres": {"full_attnres": "FullAttnRes"},
  "block_attnres": {"block_attnres": "BlockAttnRes"},
  "delta": {
    "delta_attnres": "DeltaAttnRes", "delta_block": "DeltaBlock",
    "delta_mh": "DeltaHeads",
  },
  "dense": {"densenet": "DenseNet", "denseformer": "DenseFormer", "dwa": "Dwa"},
  "mrla": {
    "mrla": "Mrla", "mrla_light": "MrlaLight", "mrla_linear": "MrlaLinear",
  },
  "mudd": {"mudd": "Mudd"},
}  # fmt: skip
