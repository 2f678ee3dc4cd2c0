# SPDX-License-Identifier: Apache-2.0
"""The commands for one TPU VM: what they say, and run by a shell."""

import os
import shlex
import stat
import subprocess
import sys
import time

import pytest

from attnres_jax.sweep import launchers
from attnres_jax.sweep.launchers import slices
from attnres_jax.sweep.launchers import tpu_vm

FOLDER = "gs://no-such-bucket/a sweep"


def commands(folder=FOLDER, only="", **settings):
  required = {"slice": "v6e-16", "zone": "us-east5-b"}
  options = launchers.Options(settings=required | settings, only=only)
  planned = tpu_vm.plan([], folder, launchers.read(tpu_vm, options))
  return [text.split("\n", 2)[2] for text in planned.commands]


def flags(command):
  return {x for x in shlex.split(command) if x.startswith("--")}


def test_five_commands_name_the_slice_and_the_folder():
  create, install, start, watch, delete = commands(name="mine", project="p")
  for command in (create, delete):
    assert command.startswith("gcloud compute tpus queued-resources")
    assert " mine " in command
  where = {"--zone=us-east5-b", "--project=p"}
  for command in (create, install, start, delete):
    assert where <= flags(command)
  assert {
    "--node-id=mine", "--accelerator-type=v6e-16", "--spot",
    "--runtime-version=v2-alpha-tpuv6e",
  } <= flags(create)  # fmt: skip
  for command in (install, start):
    assert "--worker=all" in flags(command)
  assert f"--workdir={FOLDER}" in flags(watch)
  assert "--reserved" in flags(commands(reserved="true")[0])


@pytest.mark.parametrize(
  "name,kind,hosts",
  [
    ("v5e-8", "v5litepod-8", 1), ("v5e-16", "v5litepod-16", 4),
    ("v5p-8", "v5p-8", 1), ("v5p-32", "v5p-32", 4), ("v4-8", "v4-8", 1),
    ("v6e:1x1", "v6e-1", 1), ("v6e:4x4", "v6e-16", 4),
    ("v2-8", "v2-8", 1), ("v3-8", "v3-8", 1), ("v3-32", "v3-32", 4),
  ],
)  # fmt: skip
def test_types_and_hosts_of_slices(name, kind, hosts):
  tpu = slices.parse("slice", name)
  assert (tpu.cloud_type, tpu.hosts) == (kind, hosts)
  start = commands(slice=name)[2]
  assert ("--distributed" in start) == (hosts > 1)


@pytest.mark.parametrize("folder,extra", [(FOLDER, "gcs"), ("s3://b/x", "s3")])
def test_hosts_have_the_client_of_the_store(folder, extra):
  install = commands(folder)[1]
  assert f"'attnres-jax[tpu,{extra}] @ git+https://" in install


def test_workers_take_the_runs_of_the_launch():
  start = commands(only="^(64m|124m)-", slice="v6e-8")[2]
  (remote,) = [x for x in shlex.split(start) if x.startswith("--command=")]
  loop = shlex.split(remote.removeprefix("--command="))[3]
  worker = loop.removeprefix("while :; do ").partition("; case")[0]
  assert "--only=^(64m|124m)-" in shlex.split(worker)


# Does on this machine what `ssh` would do on the hosts of a slice.
GCLOUD = """#!/bin/sh
for one; do case $one in --command=*) sh -c "${one#--command=}";; esac; done
"""


def executable(path, text):
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text(text)
  path.chmod(path.stat().st_mode | stat.S_IXUSR)


@pytest.mark.parametrize(
  "statuses", [(0,), (1, 4, 0), (2,), (3,), (4, 2), (137, 127)]
)
def test_workers_start_again_only_where_that_helps(tmp_path, statuses):
  """The printed command, with a worker that ends as requested."""
  left = tmp_path / "statuses"
  left.write_text("\n".join(map(str, statuses)) + "\n")
  executable(
    tmp_path / tpu_vm.PYTHON,
    f"#!{sys.executable}\n"
    "import pathlib, sys\n"
    f"left = pathlib.Path({str(left)!r})\n"
    "first, *rest = left.read_text().split()\n"
    "print(sys.argv[1:], flush=True)\n"
    "left.write_text(' '.join(rest) or 'over')\n"
    "sys.exit(int(first))\n",
  )
  executable(tmp_path / "bin" / "gcloud", GCLOUD)
  executable(tmp_path / "bin" / "sleep", "#!/bin/sh\n")
  path = f"{tmp_path}/bin{os.pathsep}{os.environ['PATH']}"
  subprocess.run(
    ["sh", "-c", commands()[2]], cwd=tmp_path, env=os.environ | {"PATH": path},
    check=True, timeout=60,
  )  # fmt: skip
  deadline = time.monotonic() + 120
  while left.read_text() != "over":
    assert time.monotonic() < deadline
    time.sleep(0.05)
  time.sleep(0.5)  # One more start would fail, and the log would show it.
  lines = (tmp_path / tpu_vm.LOG).read_text().splitlines()
  assert len(lines) == len(statuses)
  expected = ["-m", "attnres_jax.sweep.worker", f"--folder={FOLDER}"]
  assert lines[0].startswith(str(expected)[:-1])
