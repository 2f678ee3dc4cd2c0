# SPDX-License-Identifier: Apache-2.0
"""`python -m experiments.first_hour`."""

import sys

from experiments.first_hour import run

if __name__ == "__main__":
  sys.exit(run.main())
