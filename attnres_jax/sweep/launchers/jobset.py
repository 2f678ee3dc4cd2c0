# SPDX-License-Identifier: Apache-2.0
"""A sweep as Kubernetes manifests: one JobSet per run, queued by Kueue.

This launcher only writes manifests to a folder, from jobset.yaml;

  kubectl apply -f MANIFESTS

submits them to a cluster (Google Kubernetes Engine with TPU node pools, and the
controllers of JobSet and Kueue). The runs do not need this machine any more,
and applying the same folder again changes nothing: a JobSet that has failed has
to be deleted before its run can begin again.

A JobSet (jobset.x-k8s.io/v1alpha2) is one indexed Job per slice and one pod per
host. All of them run `worker.command`. When a pod ends with an error, is
preempted or loses its node, all pods of the run are replaced, and the run
resumes from its last checkpoint. A run that diverged or was refused is not
restarted. Kueue holds each JobSet back until all its slices are free. GKE sets
variables in the pods that give JAX the addresses of hosts and slices.
"""

from collections.abc import Mapping, Sequence
import hashlib
import json
import pathlib
import re
import string
import types
from typing import Any

from etils import epath
import yaml

from attnres_jax.common import exits
from attnres_jax.scaling import grid
from attnres_jax.sweep import launchers
from attnres_jax.sweep import worker
from attnres_jax.sweep.launchers import settings as settings_lib
from attnres_jax.sweep.launchers import slices

Setting = settings_lib.Setting
SETTINGS = {
  "image": Setting(
    "container image with this package and jax[tpu]", required=True
  ),
  "slice": Setting(
    "TPU slice of a run, such as v6e:4x4 or v5p-128", required=True
  ),
  "slices": Setting(
    "number per run, connected by the data center network", 1, int
  ),
  "chips_per_host": Setting(
    "chips per host of the slice (4, or all if there are fewer)", kind=int
  ),
  "quota": Setting(
    "chips that the sweep may use (by default for max_parallel runs)", kind=int
  ),
  "queue": Setting("LocalQueue of Kueue (default: one per kind of slice)"),
  "namespace": Setting("namespace of Kubernetes", "default"),
  "service_account": Setting(
    "service account of Kubernetes with access to the bucket", "default"
  ),
  "spot": Setting("true for preemptible capacity", False, bool),
  "privileged": Setting(
    "false for clusters that forbid it, such as Autopilot", True, bool
  ),
  "max_restarts": Setting("restarts per run", 50, int, least=0),
  "manifests": Setting("folder to write to", "jobsets"),
}

SWEEP_LABEL = "attnres-jax/sweep"
_TEMPLATE = pathlib.Path(__file__).with_suffix(".yaml")
_JOB = "slice"
_SPOT = "cloud.google.com/gke-spot"
# The limit of a DNS name, and what Kubernetes appends to the name of a pod: a
# hyphen and five letters.
_MAX_NAME, _POD_SUFFIX = 63, 6

Manifest = dict[str, Any]


READERS = "pods"


def plan(
  runs: Sequence[grid.Run], folder: str, settings: types.SimpleNamespace
) -> launchers.Launch:
  """The manifests, and how to apply and watch them."""
  settings, target = parse(settings), pathlib.Path(settings.manifests)
  # One file, so that no manifest of an earlier launch is left in the folder.
  manifests: dict[str, Sequence[Manifest]] = {
    "queue.yaml": queue(settings),
    "runs.yaml": [job_set(run.name, folder, settings) for run in runs],
  }
  # The queue starts no worker by itself.
  head = f"# For {launchers.MARKS[0]}\n"
  texts = {
    str(target / file): head + to_yaml(objects)
    for file, objects in manifests.items()
  }
  label = f"{SWEEP_LABEL}={_label(folder)}"
  watch = f"kubectl get jobsets -n {settings.namespace} -l {label}"
  commands = [f"kubectl apply -f {target}", watch]
  return launchers.Launch(texts, commands, "manifests")


def parse(settings: types.SimpleNamespace) -> types.SimpleNamespace:
  """The settings of a launch, with `tpu` (the slice), `hosts` of one slice, and
  `flavor` and `node_labels` of the node pools that a run may use.
  """
  values = settings
  values.tpu = slices.parse("slice", values.slice, "gke_accelerator")
  chips = values.tpu.chips
  values.chips_per_host = values.chips_per_host or min(
    slices.CHIPS_PER_HOST, chips
  )
  if chips % values.chips_per_host:
    settings_lib.fail(
      "chips_per_host",
      values.chips_per_host,
      f"a divisor of {chips}, the slice's",
    )
  values.quota = (
    values.quota or chips * values.slices * values.options.max_parallel
  )
  values.hosts = chips // values.chips_per_host
  values.flavor = f"{values.tpu.kind}-{values.tpu.shape}"
  # Sweeps on other slices of a cluster keep their queue.
  values.queue = values.queue or f"attnres-{values.flavor}"
  values.node_labels = {
    "cloud.google.com/gke-tpu-accelerator": values.tpu.gke_accelerator,
    "cloud.google.com/gke-tpu-topology": values.tpu.shape,
  }
  return values


def job_set(
  run: str, folder: epath.PathLike, settings: types.SimpleNamespace
) -> Manifest:
  """The JobSet of one run, by its name."""
  several = settings.hosts * settings.slices > 1
  flags = ["--distributed"] * several + [launchers.PATIENCE]
  spot = {"key": _SPOT, "operator": "Equal", "value": "true"}
  (manifest,) = _filled(
    "JobSet",
    settings,
    name=name_of(run, folder, settings),
    sweep=_label(folder),
    workdir=f"{folder}/{run}",
    topology="cloud.google.com/gke-nodepool" if settings.hosts > 1 else None,
    final=[int(exits.Exit.NEVER), int(exits.Exit.DIVERGED)],
    node_selector=settings.node_labels
    | ({_SPOT: "true"} if settings.spot else {}),
    # There, pods have the service account of their node, not their own.
    host_network=True if settings.slices > 1 else None,
    dns_policy="ClusterFirstWithHostNet" if settings.slices > 1 else None,
    tolerations=[spot | {"effect": "NoSchedule"}] if settings.spot else None,
    command=worker.command(folder, run, *flags),
    chips={"google.com/tpu": settings.chips_per_host},
  )
  return manifest


def queue(settings: types.SimpleNamespace) -> list[Manifest]:
  """The configuration of Kueue: kind of nodes, quota, and a queue for them."""
  return _filled("ResourceFlavor|ClusterQueue|LocalQueue", settings)


def name_of(
  run: str, folder: epath.PathLike, settings: types.SimpleNamespace
) -> str:
  """A DNS label for a run; short enough for the labels of its pods."""
  digest = hashlib.sha256(f"{folder}/{run}".encode()).hexdigest()
  digest = digest[: grid.HASH_DIGITS]
  last_pod = f"-{_JOB}-{settings.slices - 1}-{settings.hosts - 1}"
  room = _MAX_NAME - len(last_pod) - _POD_SUFFIX - len(digest) - 1
  slug = re.sub(r"[^a-z0-9]+", "-", run.lower())
  if not slug[:1].isalpha():
    slug = f"run-{slug}"
  return f"{slug[:room].strip('-')}-{digest}"


def to_yaml(objects: Sequence[Mapping[str, Any]]) -> str:
  """Documents in one text, without YAML aliases."""
  return yaml.dump_all(objects, Dumper=_Dumper, sort_keys=False)


class _Dumper(yaml.SafeDumper):
  """A dumper without references within a document."""

  def ignore_aliases(self, data: Any) -> bool:
    del data
    return True


def _filled(
  kinds: str, settings: types.SimpleNamespace, **values: Any
) -> list[Manifest]:
  """The manifests of these kinds, with their `$names` filled in."""
  given = vars(settings) | values
  # JSON is valid YAML for any characters.
  texts = {
    name: json.dumps(value)
    for name, value in given.items()
    if name not in ("tpu", "options")
  }
  documents = _TEMPLATE.read_text(encoding="utf-8").split("\n---\n")
  return [
    _without_null(yaml.safe_load(string.Template(text).substitute(texts)))
    for text in documents
    if re.search(rf"^kind: ({kinds})$", text, re.M)
  ]


def _without_null(value: Any) -> Any:
  if isinstance(value, list):
    return [_without_null(item) for item in value]
  if isinstance(value, dict):
    return {k: _without_null(v) for k, v in value.items() if v is not None}
  return value


def _label(folder: epath.PathLike) -> str:
  """The folder's last name, as the value of a label."""
  name = re.sub(r"[^A-Za-z0-9_.-]+", "-", epath.Path(folder).name)
  return name[:_MAX_NAME].strip("-_.")
