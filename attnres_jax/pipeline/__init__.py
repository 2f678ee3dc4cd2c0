# SPDX-License-Identifier: Apache-2.0
"""Pipeline parallelism for Block AttnRes (paper, section 4.1).

The plan: `layout` says where the sublayers are and what crosses each boundary,
`schedule` which rank works on what at each tick, and `memory` what a rank
holds. None of them needs a device.

The program that executes it: `transport` sends, `stage` computes a chunk
forward and backward, `placement` brings parameters to their ranks, and `spmd`
is the loop over ticks. `config.mesh.stage` and `config.pipeline` turn it on.

The room exceeds its budget of 2,000 lines by sends that hide behind work.
"""
