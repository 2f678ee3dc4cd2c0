# SPDX-License-Identifier: Apache-2.0
"""Former name of `python -m attnres_jax.plan`, until the next release."""

import sys

from attnres_jax.plan import __main__ as plan

if __name__ == "__main__":
  print("attnres_jax.aot is now attnres_jax.plan", file=sys.stderr)
  sys.exit(plan.main())
