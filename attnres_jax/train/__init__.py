# SPDX-License-Identifier: Apache-2.0
"""One run: the training loop, its state, checkpoints, metrics and folder.

`loop.train_and_evaluate` reads top to bottom what a run does.

With `common`, the room exceeds its budget by what happens to a run: kills, full
disks, damaged files, object stores and signals, each with a guarantee in
docs/reliability.md.
"""

# The folder of a run that Orbax writes into; a wrong folder has none.
CHECKPOINTS = "checkpoints"
