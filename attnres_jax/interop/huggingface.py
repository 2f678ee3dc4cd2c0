# SPDX-License-Identifier: Apache-2.0
"""Networks from folders of safetensors with a config.json, and back.

`read` looks at the headers only, and compares them with the network that the
config.json describes: each tensor is used once or ignored by name, each leaf is
filled once, shapes and dtypes are those expected. `load` then reads every
device's shard of every leaf from the files.
"""

from collections.abc import Mapping
import dataclasses
import json
import os
import pathlib
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attnres_jax import config as config_lib
from attnres_jax import models
from attnres_jax.common import files
from attnres_jax.common import records
from attnres_jax.common import sharding
from attnres_jax.common import trees
from attnres_jax.interop import config_table
from attnres_jax.interop import families
from attnres_jax.interop import mxfp4
from attnres_jax.interop import rules as rules_lib
from attnres_jax.interop import tensor_files
from attnres_jax.interop import weights_folder

CONFIG = "config.json"
# 5 GB is the custom.
SHARD_BYTES = 5 * 10**9
_FREQUENCIES = ".rotary_emb.inv_freq"
_README = "README.md"


@dataclasses.dataclass(frozen=True)
class Source:
  """A folder whose headers describe a known network.

  Attributes:
    folder: of the files.
    family: its key in `families.FAMILIES`.
    config: the network, with float32 activations.
    values: the whole config.json.
    dtype: of most tensors, such as "BF16".
    dtypes: leaf -> that of its tensors, where it is another one.
    rules: one for each leaf.
    tensors: all that the files have, by name.
    head: name of the head, if the files have one that copies the embedding.
  """

  folder: pathlib.Path
  family: str
  config: config_lib.ModelConfig
  values: dict[str, Any]
  dtype: str
  dtypes: dict[str, str]
  rules: tuple[rules_lib.Rule, ...]
  tensors: Mapping[str, tensor_files.Tensor]
  head: str


def read(folder: str | os.PathLike) -> Source:
  """Checks a folder, without reading any weights.

  Raises:
    ConfigError: its config.json describes something that cannot be imported.
    TensorFileError: the files are damaged, or their tensors are not the
      network's.
  """
  folder = pathlib.Path(folder)
  where = str(folder / CONFIG)
  if not (folder / CONFIG).is_file():
    config_lib.fail_argument("--path", str(folder), f"a folder with {CONFIG}")
  values = records.read_object(folder / CONFIG)
  family_name, family = families.of_config_json(values, where)
  config = family.read_config(values, where)
  tensors = _renamed(family, tensor_files.open_folder(folder))
  _check_count(config, len(tensors), where)
  with config_table.naming(where):
    all_rules = family.rules(config)
  # The first tensor of a rule says whether all of them are packed.
  rules = tuple(
    dataclasses.replace(
      rule, packed=rule.columns > 0 and mxfp4.is_packed(rule.names[0], tensors)
    )
    for rule in all_rules
  )
  used = _check(rules, tensors, where)
  head = f"{family.names.prefix}lm_head.weight"
  if not config.tie_embeddings or head not in tensors:
    head = ""
  for name in sorted(tensors.keys() - {*used, head}):
    if not any(re.fullmatch(pattern, name) for pattern in family.unused):
      tensor_files.fail(
        tensors[name].file, f"tensor {name!r} is not part of the network"
      )
  # Codes in four bits become weights of the dtype of the others.
  all_dtypes = [tensors[name].dtype for name in used]
  all_dtypes = [d for d in all_dtypes if d in tensor_files.DTYPES]
  dtype = max(sorted(set(all_dtypes)), key=all_dtypes.count)
  plain = [rule for rule in rules if not rule.packed]
  each = {rule.leaf: {tensors[n].dtype for n in rule.names} for rule in plain}
  # If tensors of a leaf differ, a dtype that rounds none.
  dtypes = {
    leaf: min(stored) if len(stored) == 1 else "F32"
    for leaf, stored in each.items()
    if stored != {dtype}
  }
  return Source(
    folder, family_name, config, values, dtype, dtypes, rules, tensors, head
  )


def _check_count(
  config: config_lib.ModelConfig, count: int, where: str
) -> None:
  """Refuses more layers or experts than there are tensors.

  It does so before anything is built.
  """
  sparse = config.num_layers - config.moe.dense_layers
  for name, least in (
    ("layers", config.num_layers),
    ("experts", config.moe.num_experts * sparse),
  ):
    if least > count:
      what = f"describes {least} {name}, and the files have {count} tensors"
      raise tensor_files.TensorFileError(f"{where}: {what}")


def _renamed(
  family: families.Family, tensors: Mapping[str, tensor_files.Tensor]
) -> dict[str, tensor_files.Tensor]:
  renamed: dict[str, tensor_files.Tensor] = {}
  for name, tensor in tensors.items():
    ours = re.sub(*family.renamed, name)
    if ours in renamed:
      tensor_files.fail(tensor.file, f"tensor {name!r} is there twice")
    renamed[ours] = tensor
  return renamed


def _check(
  rules: tuple[rules_lib.Rule, ...],
  tensors: Mapping[str, tensor_files.Tensor],
  where: str,
) -> list[str]:
  """Compares tensors with leaves; returns the names of the used tensors."""
  used: list[str] = []
  for rule in rules:
    for name, shape, dtypes in rule.stored():
      used.append(name)
      if name not in tensors:
        raise tensor_files.TensorFileError(
          f"{where}: no tensor {name!r} in the files, which {rule.leaf} needs"
        )
      tensor = tensors[name]
      what = f"tensor {name!r} is"
      if tensor.shape != shape:
        what = f"{what} {tensor.shape}, expected {shape}"
        tensor_files.fail(tensor.file, what)
      if tensor.dtype not in dtypes:
        accepted = ", ".join(dtypes)
        what = f"{what} {tensor.dtype}, expected one of {accepted}"
        tensor_files.fail(tensor.file, what)
  if len(set(used)) < len(used):
    raise ValueError("two leaves share a tensor")
  return used


def _check_frequencies(source: Source) -> None:
  """Refuses rotary frequencies, which old files have, of another base."""
  theta, half = source.config.rope_theta, source.config.head_size // 2
  frequencies = theta ** (-np.arange(half) / half)
  for name, tensor in source.tensors.items():
    # Old files have them in 16 bits.
    if name.endswith(_FREQUENCIES) and not (
      tensor.shape == (half,)
      and np.allclose(
        tensor.read().astype(np.float64), frequencies, rtol=1e-2, atol=0
      )
    ):
      words = f"differs from those of rope_theta={theta}"
      tensor_files.fail(tensor.file, f"tensor {name!r} {words}")


def _check_head(source: Source) -> None:
  """Refuses a head that is not needed and differs from the embedding."""
  name = source.head.replace("lm_head", "model.embed_tokens")
  head, table = source.tensors[source.head], source.tensors[name]
  rows = table.shape[0]
  # In pieces, so that little is in memory.
  pieces = [slice(i, min(i + 1024, rows)) for i in range(0, rows, 1024)]
  if head.shape != table.shape or not all(
    (head.read(piece) == table.read(piece)).all() for piece in pieces
  ):
    words = f"differs from {name!r}, which config.json says it copies"
    tensor_files.fail(head.file, f"tensor {source.head!r} {words}")


def load(
  source: Source, mesh: jax.sharding.Mesh | None = None
) -> models.Transformer:
  """The network, sharded over a mesh as in training, or on the first device.

  Weights are float32, or what `parameter_dtype` of the source's config says.

  A host holds one shard of one leaf at a time, besides those already on its
  devices, and one tensor's share of it in the dtype of the files.

  Raises:
    ConfigError: the mesh does not divide a leaf.
    TensorFileError: a file ends too early, a value is not finite, or a tied
      head or rotary frequencies differ from what they copy.
  """
  if source.head:
    _check_head(source)
  _check_frequencies(source)
  abstract: Any = jax.eval_shape(lambda: models.build_model(source.config))
  if mesh is None:
    device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    places = jax.tree.map(lambda _: device, abstract)
  else:
    places = sharding.state_sharding(abstract, mesh)
  shapes = trees.to_flat(abstract)
  flat_places = trees.to_flat(places)
  flat = {
    rule.leaf: _load_leaf(
      source, rule, shapes[rule.leaf], flat_places[rule.leaf]
    )
    for rule in source.rules
  }
  return trees.from_flat(abstract, flat)


def _load_leaf(
  source: Source,
  rule: rules_lib.Rule,
  leaf: jax.ShapeDtypeStruct,
  place: jax.sharding.Sharding,
) -> jax.Array:
  # jax.make_array_from_callback would hold the shards of all devices of this
  # host before it sends any.
  devices_of: dict[Any, list[jax.Device]] = {}
  indices = place.addressable_devices_indices_map(leaf.shape)
  for device, index in indices.items():
    index = index or ()
    bounds = tuple(s.indices(n)[:2] for s, n in zip(index, leaf.shape))
    devices_of.setdefault(bounds, []).append(device)
  arrays = []
  for bounds, devices in devices_of.items():
    index = tuple(slice(*b) for b in bounds)
    dtype = np.dtype(leaf.dtype)
    shard = rule.read(source.tensors, index, dtype)
    sent = [jax.device_put(shard, device) for device in devices]
    arrays += jax.block_until_ready(sent)
    del shard, sent
  return jax.make_array_from_single_device_arrays(leaf.shape, place, arrays)


def export(
  model: models.Transformer,
  folder: str | os.PathLike,
  *,
  dtype: str,
  facts: Mapping[str, Any],
  card: str,
  dtypes: Mapping[str, str] | None = None,
  also: Mapping[str, bytes] | None = None,
  family: str = "",
  shard_bytes: int = SHARD_BYTES,
) -> None:
  """Writes a network for transformers: weights, config.json, card.

  Args:
    model: with the residual scheme `prenorm`.
    folder: new or empty.
    dtype: a key of `tensor_files.DTYPES`; weights are rounded to it.
    facts: further keys of config.json, such as `max_position_embeddings`.
    card: text of README.md.
    dtypes: leaf -> dtype, where it is another one.
    also: further files, such as the tokenizer's.
    family: a key of `families.FAMILIES`; found from the network if empty.
    shard_bytes: size of the largest file, unless a tensor is larger.

  Raises:
    ConfigError: no family can express the network, or the folder is not empty.
  """
  folder = pathlib.Path(folder)
  name = family or families.of_network(model.config)
  config_lib.choose("family", name, families.FAMILIES)
  chosen = families.FAMILIES[name]
  values = chosen.write_config(model.config)
  weights_folder.check_new("--path", str(folder))
  flat = trees.to_flat(model)
  entries: list[tensor_files.Entry] = []
  for rule in chosen.rules(model.config):
    stored_as = (dtypes or {}).get(rule.leaf, dtype)
    added = rule.write(flat[rule.leaf], stored_as)
    if not _is_finite(flat[rule.leaf], tensor_files.DTYPES[stored_as]):
      for entry in added:
        entry.array()  # Says which tensor.
    entries += added
  folder.mkdir(parents=True, exist_ok=True)
  tensor_files.write_folder(folder, entries, shard_bytes)
  named = {np.dtype(t): n for n, t in tensor_files.DTYPES.items()}
  torch_dtype = next(t.name for t, n in named.items() if n == dtype)
  described = {
    "architectures": [chosen.architecture],
    "model_type": name,
    "torch_dtype": torch_dtype,
  }
  # Without them, other ids than the network's would be assumed.
  unknown = dict.fromkeys(config_table.IDS)
  described = unknown | dict(facts) | described | values
  text = json.dumps(described, indent=2, sort_keys=True)
  files.write(folder / CONFIG, text + "\n")
  files.write(folder / _README, card)
  code = {path.name: path.read_bytes() for path in chosen.code}
  for file, content in (code | dict(also or {})).items():
    files.write(folder / file, content)


def _is_finite(leaf: jax.Array, dtype: np.dtype) -> bool:
  """Whether all values are finite in a dtype."""
  narrow = min(dtype, np.dtype(np.float32), key=lambda d: d.itemsize)
  return bool(jnp.isfinite(leaf.astype(narrow)).all())
