# SPDX-License-Identifier: Apache-2.0
"""Lets Orbax keep checkpoints in S3, as it keeps them in Google's stores.

Orbax marks a checkpoint of an object store as complete with a last object, and
reads and writes arrays through TensorStore's driver of the store. It does so
for gs:// only, although TensorStore has a driver for S3, too. `teach` adds s3://
to the places of Orbax that decide this. They are private, so `teach` refuses an
Orbax that lacks one of them; tests/sweep/bucket_test.py trains on both stores.
"""

import importlib
import os
from typing import Any

from attnres_jax import config as config_lib

_SCHEMES = "gs://", "s3://"
_PATHS = "orbax.checkpoint._src.path.gcs_utils"
_ARRAYS = "orbax.checkpoint._src.serialization.tensorstore_utils"
_REPLACED = {
  _PATHS: ("_GCS_PATH_PREFIX", "get_kvstore_for_gcs"),
  _ARRAYS: ("_use_gcs_driver", "_normalize_path"),
}


def teach() -> None:
  """Makes Orbax take s3:// paths, in this process; may be called again.

  Raises:
    ConfigError: this version of Orbax is built differently.
  """
  paths: Any = importlib.import_module(_PATHS)
  arrays: Any = importlib.import_module(_ARRAYS)
  for module, names in zip((paths, arrays), _REPLACED.values()):
    for name in names:
      if not hasattr(module, name):
        raise config_lib.ConfigError(
          "s3://: checkpoints there need orbax-checkpoint 0.12; this version"
          f" has no {name}"
        )
  if paths._GCS_PATH_PREFIX == _SCHEMES:
    return
  of_gcs, normalize = paths.get_kvstore_for_gcs, arrays._normalize_path
  paths._GCS_PATH_PREFIX = _SCHEMES
  paths.get_kvstore_for_gcs = lambda path: (
    _store(path) if path.startswith("s3://") else of_gcs(path)
  )
  arrays._use_gcs_driver = lambda path: path.startswith(_SCHEMES)
  # Orbax itself only restores the slashes of gs://.
  arrays._normalize_path = lambda path: normalize(path).replace(
    "s3:/", "s3://", 1
  )


def _store(path: str) -> dict[str, Any]:
  """TensorStore's description of a path, by the variables of AWS's clients."""
  bucket, _, key = path.removeprefix("s3://").partition("/")
  spec: dict[str, Any] = {"driver": "s3", "bucket": bucket, "path": key}
  variables = {
    "AWS_ENDPOINT_URL": "endpoint",
    "AWS_ENDPOINT_URL_S3": "endpoint",
    "AWS_DEFAULT_REGION": "aws_region",
    "AWS_REGION": "aws_region",
  }
  for name, field in variables.items():  # The last one counts.
    if os.environ.get(name):
      spec[field] = os.environ[name]
  if os.environ.get("AWS_ACCESS_KEY_ID"):
    # Without this it looks for files of profiles, too, and complains.
    spec["aws_credentials"] = {"type": "environment"}
  return spec
