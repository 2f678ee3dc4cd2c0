# SPDX-License-Identifier: Apache-2.0
"""Manifests against the schema, and their command on this machine."""

import math
import os
import pathlib
import re
import socket
import subprocess
import sys

from kubeflow_trainer_api.models import jobset_v1alpha2_job_set
import pytest
import yaml

from attnres_jax import config as config_lib
from attnres_jax.scaling import grid
from attnres_jax.sweep import folder as folder_lib
from attnres_jax.sweep import launchers
from attnres_jax.sweep import state as state_lib
from attnres_jax.sweep.launchers import jobset
from tests import tiny_run

FOLDER = "gs://bucket/sweeps/scaling"
DNS_LABEL = "^[a-z]([-a-z0-9]{0,61}[a-z0-9])?$"


def options(**settings):
  required = {"image": "registry/attnres:1", "slice": "v5p:2x2x2"}
  return launchers.Options(settings=required | settings)


def parsed_of(**settings):
  return jobset.parse(launchers.read(jobset, options(**settings)))


def rendered(run, **settings):
  """The JobSet as a cluster would read it, and its settings."""
  parsed = parsed_of(**settings)
  text = jobset.to_yaml([jobset.job_set(run, FOLDER, parsed)])
  return yaml.safe_load(text), parsed


def job_of(manifest):
  (replicated,) = manifest["spec"]["replicatedJobs"]
  return replicated["template"]["spec"]


def container_of(manifest):
  (container,) = job_of(manifest)["template"]["spec"]["containers"]
  return container


@pytest.mark.parametrize(
  "settings",
  [
    {},
    {"slice": "v6e:1x1", "max_restarts": "0"},
    {"slice": "v5e-256", "slices": "4", "spot": "true"},
    {
      "slice": "tpu7x:4x4x4",
      "namespace": "ml",
      "service_account": "bucket",
      "privileged": "false",
    },
  ],
)
def test_job_set_has_the_fields_of_its_api(settings):
  manifest, parsed = rendered("s-block_attnres-seed1-0123abcd", **settings)
  # Reading fails for values of another type, and drops fields it does not know.
  model = jobset_v1alpha2_job_set.JobsetV1alpha2JobSet.from_dict(manifest)
  assert model is not None
  assert model.to_dict() == manifest
  assert manifest["apiVersion"] == "jobset.x-k8s.io/v1alpha2"
  assert manifest["metadata"]["namespace"] == parsed.namespace
  pod = job_of(manifest)["template"]["spec"]
  assert pod["serviceAccountName"] == parsed.service_account
  context = container_of(manifest)["securityContext"]
  assert context["privileged"] == (settings.get("privileged") != "false")
  assert ("tolerations" in pod) == (settings.get("spot") == "true")


def test_the_parts_of_the_queue_name_each_other():
  parsed = parsed_of(slice="v5e:4x4", slices="2", queue="research")
  documents = yaml.safe_load_all(jobset.to_yaml(jobset.queue(parsed)))
  flavor, cluster, local = documents
  (group,) = cluster["spec"]["resourceGroups"]
  (entry,) = group["flavors"]
  assert entry["name"] == flavor["metadata"]["name"]
  assert group["coveredResources"] == ["google.com/tpu"]
  assert entry["resources"] == [{"name": "google.com/tpu", "nominalQuota": 32}]
  assert local["spec"]["clusterQueue"] == cluster["metadata"]["name"]
  manifest, _ = rendered("run-0", queue="research")
  labels = manifest["metadata"]["labels"]
  assert labels["kueue.x-k8s.io/queue-name"] == local["metadata"]["name"]
  # Manifests of another slice do not replace the queue of the first.
  queues = {parsed_of(slice=s).queue for s in ("v6e-16", "v5p-32")}
  assert len(queues) == 2


@pytest.mark.parametrize(
  "slices,settings,accelerator,shape,hosts,per_host",
  [
    (3, {"slice": "v4-8"}, "tpu-v4-podslice", "2x2x1", 1, 4),
    (3, {"slice": "v5e:1x1"}, "tpu-v5-lite-podslice", "1x1", 1, 1),
    (2, {"slice": "v5litepod-16"}, "tpu-v5-lite-podslice", "4x4", 4, 4),
    (3, {"slice": "v5p-128"}, "tpu-v5p-slice", "4x4x4", 16, 4),
    (1, {"slice": "v6e:2x4"}, "tpu-v6e-slice", "2x4", 2, 4),
    (1, {"slice": "v6e:2x4", "chips_per_host": "8"},
     "tpu-v6e-slice", "2x4", 1, 8),
    (3, {"slice": "tpu7x:2x2x2"}, "tpu7x", "2x2x2", 2, 4),
  ],
)  # fmt: skip
def test_pods_ask_for_the_hosts_of_the_slice(
  slices, settings, accelerator, shape, hosts, per_host
):
  manifest, _ = rendered("run-0", slices=str(slices), **settings)
  (replicated,) = manifest["spec"]["replicatedJobs"]
  job, container = job_of(manifest), container_of(manifest)
  assert replicated["replicas"] == slices
  assert job["parallelism"] == job["completions"] == hosts
  assert job["completionMode"] == "Indexed"
  pod = job["template"]["spec"]
  assert pod["nodeSelector"] == {
    "cloud.google.com/gke-tpu-accelerator": accelerator,
    "cloud.google.com/gke-tpu-topology": shape,
  }
  for kind in ("requests", "limits"):
    assert container["resources"][kind] == {"google.com/tpu": per_host}
  assert hosts * per_host == math.prod(map(int, shape.split("x")))
  several_hosts = "exclusive-topology" in str(manifest["metadata"])
  assert several_hosts == (hosts > 1)
  # One host needs no cluster; several slices are several hosts in any case.
  cluster = "--distributed" in container["command"]
  assert cluster == (slices * hosts > 1)
  # On the network of the host, pods have the account of their node, not their
  # own, so that one slice does without.
  assert ("hostNetwork" in pod) == ("dnsPolicy" in pod) == (slices > 1)


def test_errors_restart_but_for_commands_without_sense():
  manifest, _ = rendered("run-0", max_restarts="7")
  job, policy = job_of(manifest), manifest["spec"]["failurePolicy"]
  (rule,) = job["podFailurePolicy"]["rules"]
  assert rule["onExitCodes"]["containerName"] == container_of(manifest)["name"]
  assert rule["onExitCodes"]["values"] == [2, 3] and rule["action"] == "FailJob"
  (rule,) = policy["rules"]
  assert rule["action"] == "FailJobSet"
  assert rule["onJobFailureReasons"] == ["PodFailurePolicy"]
  assert policy["maxRestarts"] == 7
  # Restarts are the JobSet's: all pods of a run, or none.
  assert job["backoffLimit"] == 0
  assert job["template"]["spec"]["restartPolicy"] == "Never"


@pytest.mark.parametrize(
  "run",
  [
    "s-block_attnres-seed1-0123abcd",
    "0123abcd",
    "peak_lr0.001-B-" + 80 * "x" + "-0123abcd",
  ],
)
def test_names_are_labels_of_dns(run):
  manifest, parsed = rendered(run, slice="v5p-4096", slices="100")
  name = manifest["metadata"]["name"]
  hosts = job_of(manifest)["completions"]
  assert hosts == 512
  last = f"{name}-{manifest['spec']['replicatedJobs'][0]['name']}-99-{hosts}"
  assert re.match(DNS_LABEL, name) and re.match(DNS_LABEL, f"{last}-abcde")
  others = [(run + "0", FOLDER), (run, FOLDER + "2")]
  assert name not in [jobset.name_of(*other, parsed) for other in others]
  for value in manifest["metadata"]["labels"].values():
    assert re.match("^[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?$", value)


@pytest.fixture
def bucket(monkeypatch):
  """A bucket in which only one run is done."""
  done = state_lib.State(status=state_lib.DONE)
  states = {f"{FOLDER}/b": done}
  read = lambda workdir: states.get(str(workdir), state_lib.State())
  monkeypatch.setattr(state_lib, "read", read)
  return [grid.Run(name, {}, {}) for name in "abc"]


def test_launch_writes_what_is_not_done(bucket, tmp_path, capsys):
  target = tmp_path / "manifests"
  chosen = options(manifests=str(target))
  # The second launch leaves nothing of the first.
  for runs, expected in (bucket, "ac"), (bucket[2:], "c"):
    assert launchers.launch("jobset", runs, FOLDER, chosen) == 0
    assert {file.name for file in target.iterdir()} == {
      "queue.yaml", "runs.yaml",
    }  # fmt: skip
    out = capsys.readouterr().out
    assert f"kubectl apply -f {target}" in out
    assert out.startswith(f"# {len(expected)} runs in")
    manifests = yaml.safe_load_all((target / "runs.yaml").read_text())
    for name, manifest in zip(expected, manifests, strict=True):
      command = container_of(manifest)["command"]
      assert f"--folder={FOLDER}" in command and f"--run={name}" in command


@pytest.mark.parametrize(
  "settings,message",
  [
    ({"slice": "v9:2x2"}, "slice: got 'v9:2x2', expected a TPU slice"),
    # Generations that the cluster does not have.
    ({"slice": "v2-8"}, "slice: got 'v2-8', expected"),
    ({"slice": "v3-32"}, "slice: got 'v3-32', expected"),
    ({"slices": "0"}, "slices: got '0', expected a whole number of at least 1"),
    ({"chips_per_host": "3"}, "chips_per_host: got 3, expected a divisor of 8"),
  ],
)
def test_bad_settings_are_named(settings, message):
  with pytest.raises(config_lib.ConfigError, match=re.escape(message)):
    parsed_of(**settings)


def free_job_id():
  """A job of SLURM whose port, which JAX derives from the id, is free."""
  first = 2**16 - 2**12
  for job in range(2**12):
    with socket.socket() as s:
      if s.connect_ex(("127.0.0.1", first + job)):
        return job
  raise AssertionError("no port is free")


@pytest.mark.more
def test_the_command_of_the_container_trains_the_run(tmp_path):
  """On two processes, which find each other as tasks of SLURM do."""
  fields = tiny_run.FIELDS | tiny_run.corpus(tmp_path)
  fields |= {"model.residual.name": "prenorm", "train.steps": 6}
  fields |= {"train.depth_every": 0, "train.eval_every": 0}
  fields["checkpoint.every_steps"] = 0
  resolve = grid.config_resolver(str(tiny_run.ROOT / tiny_run.SPEC))
  (run,) = grid.collect(lambda add: add(**fields), resolve)
  folder_lib.prepare(tmp_path / "sweep", [run], tiny_run.SPEC)

  manifest, _ = rendered(run.name)
  command = container_of(manifest)["command"]
  command = [part.replace(FOLDER, str(tmp_path / "sweep")) for part in command]
  environment = tiny_run.environment()
  python = pathlib.Path(sys.executable).parent
  environment |= {
    "PATH": os.pathsep.join([str(python), environment["PATH"]]),
    "SLURM_JOB_ID": str(free_job_id()),
    "SLURM_STEP_NODELIST": "localhost",
    "SLURM_NTASKS": str(job_of(manifest)["completions"]),
  }
  pods = []
  for index in range(job_of(manifest)["completions"]):
    pod = {"SLURM_PROCID": str(index), "SLURM_LOCALID": str(index)}
    output = open(tmp_path / f"{index}.txt", "w")
    pods.append(
      subprocess.Popen(
        command, cwd=tmp_path, env=environment | pod, stdout=output,
        stderr=subprocess.STDOUT,
      )
    )  # fmt: skip
    output.close()
  try:
    ends = [pod.wait(240) for pod in pods]
  finally:
    for pod in pods:
      pod.kill()
  outputs = [(tmp_path / f"{i}.txt").read_text() for i in range(len(pods))]
  assert ends == [0, 0], outputs
  workdir = tmp_path / "sweep" / run.name
  assert state_lib.read(workdir).status == state_lib.DONE
  (start,) = tiny_run.events(workdir, "start")
  assert start["processes"] == 2
  assert sorted(tiny_run.rows(workdir, "train"))[-1] == 6
