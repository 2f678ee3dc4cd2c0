# SPDX-License-Identifier: Apache-2.0
"""Launches a sweep of two runs on a Ray cluster with simulated TPU slices.

  python -m tests.fake_slices FOLDER

Its nodes are processes of this machine, with the resources and labels that Ray
gives to the hosts of a slice. Once both runs are training, the first slice is
removed. FOLDER/gangs.jsonl says which worker ran where.
"""

import json
import pathlib
import sys
import threading
import time

import jax
import ray
from ray import cluster_utils

from attnres_jax.sweep import folder as folder_lib
from attnres_jax.sweep import launchers
from attnres_jax.sweep.launchers import ray as launcher
from attnres_jax.train import checkpoint

SLICE, POD_TYPE, HOSTS, CHIPS_PER_HOST = "v5p:2x2x2", "v5p-16", 2, 4
_launchers_work = launcher._work


def work(config):
  """The work of a worker, and a line about it."""
  node_id = ray.get_runtime_context().get_node_id()
  (node,) = [node for node in ray.nodes() if node["NodeID"] == node_id]
  row = {
    "run": config["name"],
    "processes": jax.process_count(),
    "slice": node["Labels"]["ray.io/tpu-slice-name"],
    "host": node["Labels"]["ray.io/tpu-worker-id"],
    "time": time.time(),
  }
  with open(pathlib.Path(config["folder"]) / "gangs.jsonl", "a") as file:
    file.write(json.dumps(row) + "\n")
  return _launchers_work(config)


def add_slice(cluster, name):
  """The nodes of one slice."""
  hosts = []
  for host in range(HOSTS):
    resources = {"TPU": CHIPS_PER_HOST, "accelerator_type:TPU-V5P": 1}
    if host == 0:
      resources |= {f"TPU-{POD_TYPE}-head": 1}
    labels = {
      "ray.io/accelerator-type": "TPU-V5P",
      "ray.io/tpu-pod-type": POD_TYPE,
      "ray.io/tpu-slice-name": name,
      "ray.io/tpu-worker-id": str(host),
    }
    node = cluster.add_node(
      num_cpus=2, resources=resources, labels=labels,
      env_vars={"TPU_NAME": name},
    )  # fmt: skip
    hosts.append(node)
  return hosts


def lose(cluster, hosts, workdirs):
  """Ends the nodes once all runs have a checkpoint."""
  while not all(checkpoint.all_steps(workdir) for workdir in workdirs):
    time.sleep(0.1)
  for host in reversed(hosts):
    cluster.remove_node(host, allow_graceful=False)
  print("slice-0 is gone", flush=True)


def main(folder):
  cluster = cluster_utils.Cluster(
    initialize_head=True, head_node_args={"num_cpus": 2}
  )
  first = add_slice(cluster, "slice-0")
  add_slice(cluster, "slice-1")
  ray.init(address=cluster.address)
  launcher._work = work
  runs = folder_lib.read(folder)
  workdirs = [pathlib.Path(folder) / run.name for run in runs]
  threading.Thread(
    target=lose, args=(cluster, first, workdirs), daemon=True
  ).start()
  options = launchers.Options(
    max_parallel=2, settings={"accelerator": SLICE, "max_restarts": "5"}
  )
  return launchers.launch("ray", runs, folder, options)


if __name__ == "__main__":
  sys.exit(main(sys.argv[1]))
