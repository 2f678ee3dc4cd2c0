# SPDX-License-Identifier: Apache-2.0
"""Device meshes, and how arrays are sharded over them.

The only module with names of mesh axes:

  stage    ranks of a pipeline: each computes chunks of the depth for all rows.
           Between steps, parameters are sharded over it as over fsdp
  data     rows of a batch; parameters are copies of each other
  fsdp     rows of a batch; parameters and optimiser state are sharded, and
           gathered where they are used
  expert   rows of a batch; each device owns some experts, and tokens are sent
           to them. Between uses, fsdp shards the experts of a device: each
           matrix stays in one piece
  tensor   heads, hidden units and vocabulary of every matrix; all devices
           compute on the same rows. Between sublayers, where tokens are
           independent, each has its own tokens (sequence parallelism)

The letters of a parameter's axes say how it is sharded, by `CUTS`. Gains,
pseudo-queries, per-head scalars, short convolutions and biases are not
matrices, and are replicated. Optimiser state follows its parameter, and so do
checkpoints, which restore onto any mesh.

`mesh` has the axes, `parameters` what is cut at rest, `shards` work on the part
of a device.
"""

from attnres_jax.common.sharding.mesh import AXES as AXES
from attnres_jax.common.sharding.mesh import DATA as DATA
from attnres_jax.common.sharding.mesh import EXPERT as EXPERT
from attnres_jax.common.sharding.mesh import FIRST_AXIS as FIRST_AXIS
from attnres_jax.common.sharding.mesh import FSDP as FSDP
from attnres_jax.common.sharding.mesh import HEAD_WEIGHTS as HEAD_WEIGHTS
from attnres_jax.common.sharding.mesh import HEADS as HEADS
from attnres_jax.common.sharding.mesh import QUERIED_TOKENS as QUERIED_TOKENS
from attnres_jax.common.sharding.mesh import ROWS as ROWS
from attnres_jax.common.sharding.mesh import ROWS_AND_HEADS as ROWS_AND_HEADS
from attnres_jax.common.sharding.mesh import SEQUENCES as SEQUENCES
from attnres_jax.common.sharding.mesh import STAGE as STAGE
from attnres_jax.common.sharding.mesh import TENSOR as TENSOR
from attnres_jax.common.sharding.mesh import TOKENS as TOKENS
from attnres_jax.common.sharding.mesh import WHOLE as WHOLE
from attnres_jax.common.sharding.mesh import ambient as ambient
from attnres_jax.common.sharding.mesh import batch_sharding as batch_sharding
from attnres_jax.common.sharding.mesh import check_divides as check_divides
from attnres_jax.common.sharding.mesh import make_mesh as make_mesh
from attnres_jax.common.sharding.mesh import num_row_shards as num_row_shards
from attnres_jax.common.sharding.mesh import replicated as replicated
from attnres_jax.common.sharding.mesh import shard_batch as shard_batch
from attnres_jax.common.sharding.mesh import share_of_rows as share_of_rows
from attnres_jax.common.sharding.parameters import Parameter as Parameter
from attnres_jax.common.sharding.parameters import at_rest as at_rest
from attnres_jax.common.sharding.parameters import axes_at_rest as axes_at_rest
from attnres_jax.common.sharding.parameters import (
  bytes_per_device as bytes_per_device,
)
from attnres_jax.common.sharding.parameters import (
  map_parameters as map_parameters,
)
from attnres_jax.common.sharding.parameters import row_cut as row_cut
from attnres_jax.common.sharding.parameters import (
  state_sharding as state_sharding,
)
from attnres_jax.common.sharding.parameters import (
  with_sharding as with_sharding,
)
from attnres_jax.common.sharding.shards import by_copies as by_copies
from attnres_jax.common.sharding.shards import by_rows as by_rows
from attnres_jax.common.sharding.shards import by_shards as by_shards
from attnres_jax.common.sharding.shards import cut_dim as cut_dim
from attnres_jax.common.sharding.shards import gather_parts as gather_parts
from attnres_jax.common.sharding.shards import gather_tokens as gather_tokens
from attnres_jax.common.sharding.shards import keep_tokens as keep_tokens
from attnres_jax.common.sharding.shards import on_one_device as on_one_device
from attnres_jax.common.sharding.shards import scatter_sum as scatter_sum
from attnres_jax.common.sharding.shards import scattering as scattering
from attnres_jax.common.sharding.shards import scatters as scatters
from attnres_jax.common.sharding.shards import (
  stacked_sequences as stacked_sequences,
)
from attnres_jax.common.sharding.shards import sum_parts as sum_parts
from attnres_jax.common.sharding.shards import unsplit_axes as unsplit_axes
from attnres_jax.common.sharding.shards import within_copies as within_copies
