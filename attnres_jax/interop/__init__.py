# SPDX-License-Identifier: Apache-2.0
"""Checkpoints in and out: Hugging Face folders, and upcycling.

  import_huggingface   a folder of safetensors becomes the folder of a run
  export_huggingface   the other way
  upcycle              a PreNorm network becomes AttnRes, the same function

A checkpoint family is a table of names in `families`, and one line there.

The room exceeds its budget by what libraries lack: AttnRes, KDA and MLA as a
class in PyTorch, errors that name key and tensor before weights are read, and
reads of one device's shard.
"""
