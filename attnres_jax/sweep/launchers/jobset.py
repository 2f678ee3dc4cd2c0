# SPDX-License-Identifier: Apache-2.0
"""A sweep as Kubernetes manifests: one JobSet per run, queued by Kueue.

Nothing is sent anywhere. The manifests land in a folder, and

  kubectl apply -f MANIFESTS

hands them to a cluster (Google Kubernetes Engine with TPU node pools, and the
controllers of JobSet and Kueue). The runs go on without this machine; the same
folder applied again changes nothing.

A JobSet (jobset.x-k8s.io/v1alpha2) is one indexed Job per slice and one pod per
host. All of them run `worker.command`. When a pod ends with an error, is
preempted or loses its node, all pods of the run are replaced, and the run goes
on from its last checkpoint; only a command that makes no sense ends the run for
good. Kueue holds each JobSet back until all its slices are free. Addresses of
hosts and slices reach JAX through variables that GKE sets in the pods.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import hashlib
import pathlib
import re
from typing import Any

from etils import epath
import yaml

from attnres_jax import claims
from attnres_jax import config as config_lib
from attnres_jax import files
from attnres_jax.scaling import grid
from attnres_jax.sweep import exits
from attnres_jax.sweep import launchers
from attnres_jax.sweep import worker
from attnres_jax.sweep.launchers import settings as settings_lib
from attnres_jax.sweep.launchers import slices

SETTINGS = {
  "image": "container image with this package and jax[tpu]; required",
  "slice": "TPU slice of a run, such as v6e:4x4 or v5p-128; required",
  "slices": "how many of them per run, over the data center network (1)",
  "chips_per_host": "of a slice (4, or all of a smaller slice)",
  "quota": "chips that the sweep may have at a time (of max_parallel runs)",
  "queue": "LocalQueue of Kueue, made by the manifests (attnres)",
  "namespace": "of Kubernetes (default)",
  "service_account": "of Kubernetes, which may use the bucket (default)",
  "spot": "true for capacity that may be taken away (false)",
  "privileged": "false for clusters that forbid it, such as Autopilot's (true)",
  "max_restarts": "of a run (50)",
  "manifests": "folder to write to (jobsets)",
}

SWEEP_LABEL = "attnres-jax/sweep"
CONTAINER = "train"
_JOB = "slice"
_NODE_POOL = "cloud.google.com/gke-nodepool"
_SPOT = "cloud.google.com/gke-spot"
_CHIPS = "google.com/tpu"
# A pod that is told to stop finishes a step and saves a checkpoint.
_GRACE_SECONDS = 300
# Limit of a name in DNS, and what Kubernetes adds to that of a pod: a hyphen
# and five letters.
_MAX_NAME, _POD_SUFFIX = 63, 6


@dataclasses.dataclass(frozen=True)
class Settings:
  """`SETTINGS`, checked."""

  image: str
  slice: slices.Slice
  slices: int
  chips_per_host: int
  quota: int
  queue: str
  namespace: str
  service_account: str
  spot: bool
  privileged: bool
  max_restarts: int
  manifests: str

  @property
  def hosts(self) -> int:
    """Of one slice."""
    return self.slice.chips // self.chips_per_host

  @property
  def node_labels(self) -> dict[str, str]:
    """Of the node pools that a run may use."""
    return {
      "cloud.google.com/gke-tpu-accelerator": self.slice.gke_accelerator,
      "cloud.google.com/gke-tpu-topology": self.slice.shape,
    }


def launch(
  runs: Sequence[grid.Run],
  folder: epath.PathLike,
  options: launchers.Options,
) -> int:
  """Writes the manifests of all runs that are not done; 0.

  Raises:
    ConfigError: a setting or the folder cannot be used.
  """
  settings = parse(options)
  if not files.is_remote(folder):
    raise config_lib.ConfigError(
      f"--workdir: got {str(folder)!r}, expected a bucket such as"
      " gs://BUCKET/NAME, which pods can reach"
    )
  manifests = {"queue.yaml": queue(settings)}
  for run in launchers.todo(runs, folder):
    manifests[f"{run.name}.yaml"] = [job_set(run.name, folder, settings)]
  texts = {file: to_yaml(objects) for file, objects in manifests.items()}
  if options.dry_run:
    print("---\n".join(texts.values()), end="")
    return 0
  target = pathlib.Path(settings.manifests)
  target.mkdir(parents=True, exist_ok=True)
  for file, text in texts.items():
    files.write(target / file, text)
  label = f"{SWEEP_LABEL}={_label(folder)}"
  print(
    f"{len(texts) - 1} runs in {target}\n"
    f"  kubectl apply -f {target}\n"
    f"  kubectl get jobsets -n {settings.namespace} -l {label}"
  )
  return 0


def parse(options: launchers.Options) -> Settings:
  """The settings of a launch.

  Raises:
    ConfigError: one is missing or cannot be used.
  """
  given = options.settings
  for name in ("image", "slice"):
    if not given.get(name):
      settings_lib.fail(name, None, SETTINGS[name])
  tpu = slices.parse("slice", given["slice"])
  number = settings_lib.number(given, "slices", 1)
  per_host = min(slices.CHIPS_PER_HOST, tpu.chips)
  per_host = settings_lib.number(given, "chips_per_host", per_host)
  if tpu.chips % per_host:
    settings_lib.fail(
      "chips_per_host", per_host, f"a divisor of {tpu.chips}, the slice's"
    )
  quota = tpu.chips * number * options.max_parallel
  return Settings(
    image=given["image"],
    slice=tpu,
    slices=number,
    chips_per_host=per_host,
    quota=settings_lib.number(given, "quota", quota),
    queue=given.get("queue", "attnres"),
    namespace=given.get("namespace", "default"),
    service_account=given.get("service_account", "default"),
    spot=settings_lib.switch(given, "spot", False),
    privileged=settings_lib.switch(given, "privileged", True),
    max_restarts=settings_lib.number(given, "max_restarts", 50, least=0),
    manifests=given.get("manifests", "jobsets"),
  )


def job_set(
  run: str, folder: epath.PathLike, settings: Settings
) -> dict[str, Any]:
  """The JobSet of one run, by its name."""
  pod: dict[str, Any] = {
    "serviceAccountName": settings.service_account,
    "restartPolicy": "Never",
    "terminationGracePeriodSeconds": _GRACE_SECONDS,
    "nodeSelector": settings.node_labels,
    "containers": [_container(run, folder, settings)],
  }
  if settings.hosts * settings.slices > 1:
    # Slices talk over the hosts' own network interfaces.
    pod |= {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"}
  if settings.spot:
    pod["nodeSelector"] |= {_SPOT: "true"}
    pod["tolerations"] = [
      {
        "key": _SPOT,
        "operator": "Equal",
        "value": "true",
        "effect": "NoSchedule",
      }
    ]
  job = {
    "completionMode": "Indexed",
    "parallelism": settings.hosts,
    "completions": settings.hosts,
    "backoffLimit": 0,
    "podFailurePolicy": {
      "rules": [
        {
          "action": "FailJob",
          "onExitCodes": {
            "containerName": CONTAINER,
            "operator": "In",
            "values": [int(exits.Exit.UNUSABLE)],
          },
        }
      ]
    },
    "template": {"spec": pod},
  }
  annotations = {"attnres-jax/run": f"{folder}/{run}"}
  if settings.hosts > 1:
    # A slice of several hosts is a node pool, and takes one run at a time.
    annotations["alpha.jobset.sigs.k8s.io/exclusive-topology"] = _NODE_POOL
  return {
    "apiVersion": "jobset.x-k8s.io/v1alpha2",
    "kind": "JobSet",
    "metadata": {
      "name": name_of(run, folder, settings),
      "namespace": settings.namespace,
      "labels": {
        "kueue.x-k8s.io/queue-name": settings.queue,
        SWEEP_LABEL: _label(folder),
      },
      "annotations": annotations,
    },
    "spec": {
      "failurePolicy": {
        "maxRestarts": settings.max_restarts,
        "rules": [
          {
            "name": "unusable",
            "action": "FailJobSet",
            "onJobFailureReasons": ["PodFailurePolicy"],
          }
        ],
      },
      "replicatedJobs": [
        {"name": _JOB, "replicas": settings.slices, "template": {"spec": job}}
      ],
    },
  }


def queue(settings: Settings) -> list[dict[str, Any]]:
  """What Kueue has to know: kind of nodes, quota, and a queue for them."""
  flavor = f"{settings.slice.kind}-{settings.slice.shape}"
  resource = {"name": _CHIPS, "nominalQuota": settings.quota}
  version = "kueue.x-k8s.io/v1beta2"
  return [
    {
      "apiVersion": version,
      "kind": "ResourceFlavor",
      "metadata": {"name": flavor},
      "spec": {"nodeLabels": settings.node_labels},
    },
    {
      "apiVersion": version,
      "kind": "ClusterQueue",
      "metadata": {"name": settings.queue},
      "spec": {
        "namespaceSelector": {},
        "queueingStrategy": "BestEffortFIFO",
        "resourceGroups": [
          {
            "coveredResources": [_CHIPS],
            "flavors": [{"name": flavor, "resources": [resource]}],
          }
        ],
      },
    },
    {
      "apiVersion": version,
      "kind": "LocalQueue",
      "metadata": {"name": settings.queue, "namespace": settings.namespace},
      "spec": {"clusterQueue": settings.queue},
    },
  ]


def name_of(run: str, folder: epath.PathLike, settings: Settings) -> str:
  """A DNS label for a run; short enough for those of its pods."""
  digest = hashlib.sha256(f"{folder}/{run}".encode()).hexdigest()
  digest = digest[: grid.HASH_DIGITS]
  last_pod = f"-{_JOB}-{settings.slices - 1}-{settings.hosts - 1}"
  room = _MAX_NAME - len(last_pod) - _POD_SUFFIX - len(digest) - 1
  slug = re.sub(r"[^a-z0-9]+", "-", run.lower())
  if not slug[:1].isalpha():
    slug = f"run-{slug}"
  return f"{slug[:room].strip('-')}-{digest}"


def to_yaml(objects: Sequence[Mapping[str, Any]]) -> str:
  """Documents in one text, every value spelled out."""
  return yaml.dump_all(objects, Dumper=_Dumper, sort_keys=False)


class _Dumper(yaml.SafeDumper):
  """Without references from one place of a document to another."""

  def ignore_aliases(self, data: Any) -> bool:
    del data
    return True


def _container(
  run: str, folder: epath.PathLike, settings: Settings
) -> dict[str, Any]:
  several = settings.hosts * settings.slices > 1
  flags = ["--distributed"] if several else []
  # After a restart the lease of the worker before may not be over.
  flags.append(f"--patience_seconds={2 * claims.LEASE_SECONDS:.0f}")
  chips = {_CHIPS: settings.chips_per_host}
  return {
    "name": CONTAINER,
    "image": settings.image,
    "securityContext": {"privileged": settings.privileged},
    "command": worker.command(folder, run, *flags),
    "resources": {"requests": chips, "limits": chips},
  }


def _label(folder: epath.PathLike) -> str:
  """The folder's last name, as the value of a label."""
  name = re.sub(r"[^A-Za-z0-9_.-]+", "-", epath.Path(folder).name)
  return name[:_MAX_NAME].strip("-_.")
