# SPDX-License-Identifier: Apache-2.0
"""Commands tell what is wrong before they import what takes seconds.

Modules are counted, not seconds: JAX with Flax takes 3 s of a processor, Orbax
and Grain 1 s more, SciPy's distributions and Matplotlib 1 to 2 s each.
"""

import json
import subprocess
import sys

from tests import tiny_run

HEAVY = (
  "jax", "flax", "optax", "orbax", "grain", "tensorstore", "scipy.stats",
  "matplotlib", "pandas",
)  # fmt: skip
# All that can be imported: NumPy, configs, the flags of commands.
MOST_MODULES = 700
CONFIG = "--config=configs/lm.py:size=tiny"
CASES = (
  ("attnres_jax.main", ["--help"], 0, ""),
  ("attnres_jax.main", ["--help_config"], 0, ""),
  ("attnres_jax.main", ["--nope"], 2, "--nope"),
  ("attnres_jax.main", ["--config=none.py", "--workdir=x"], 2, "none.py"),
  ("attnres_jax.main", [CONFIG, "--config.nope=1"], 2, "config.nope"),
  ("attnres_jax.main", [CONFIG], 2, "--workdir: missing"),
  ("attnres_jax.main", [CONFIG, "--workdir=setup.cfg/x"], 2, "setup.cfg"),
  ("attnres_jax.inference.sample", ["--workdir=docs"], 2, "checkpoint"),
  ("attnres_jax.inference.sample", ["--help"], 0, ""),
  ("attnres_jax.plan", ["--topology=v5e:4x4"], 2, "--config: missing"),
  ("attnres_jax.flops", ["--config=none.py"], 2, "none.py"),
  ("attnres_jax.pipeline", ["--stage=0"], 2, "stage"),
  ("attnres_jax.data.prepare", ["--help"], 0, ""),
  ("attnres_jax.sweep.worker", ["--help"], 0, ""),
  ("attnres_jax.sweep.worker", ["--folder=x", "--nope"], 2, "--nope"),
  ("attnres_jax.sweep.worker", ["--folder=docs"], 2, "a sweep"),
  ("experiments.demo.run", ["--help"], 0, ""),
  ("experiments.demo.run", ["--workdir=setup.cfg/x"], 2, "setup.cfg"),
  ("experiments.scaling_law.run", ["--nope"], 2, "--nope"),
  ("experiments.scaling_law.run", ["--config.nope=1"], 2, "nope"),
)
# All in one process, whose modules add up.
PROGRAM = """
import contextlib, io, json, runpy, sys

cases, heavy = json.loads(sys.argv[1])
for module, args in cases:
  sys.argv = ["", *args]
  out, err = io.StringIO(), io.StringIO()
  status = None
  with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
    try:
      runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
      status = end.code
  imported = [name for name in heavy if name in sys.modules]
  print(json.dumps([status, err.getvalue(), imported, len(sys.modules)]))
"""


def test_errors_come_before_imports(tmp_path):
  (tmp_path / "setup.cfg").touch()
  for name in ("configs", "experiments", "docs"):
    (tmp_path / name).symlink_to(tiny_run.ROOT / name)
  given = [[module, args] for module, args, _, _ in CASES], HEAVY
  environment = tiny_run.environment()
  result = subprocess.run(
    [sys.executable, "-c", PROGRAM, json.dumps(given)],
    cwd=tmp_path, env=environment, capture_output=True, text=True,
  )  # fmt: skip
  lines = result.stdout.splitlines()
  assert len(lines) == len(CASES), result.stderr
  for line, (module, args, expected, words) in zip(lines, CASES):
    status, error, imported, count = json.loads(line)
    case = f"{module} {' '.join(args)}"
    assert not imported, f"{case} imports {imported}"
    assert count < MOST_MODULES, f"{case} imports {count} modules"
    assert (status, words in error) == (expected, True), (case, status, error)
