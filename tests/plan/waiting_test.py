# SPDX-License-Identifier: Apache-2.0
"""What nothing hides is waited for."""

import pytest

from attnres_jax.common import chips
from attnres_jax.plan import hlo
from attnres_jax.plan import waiting

# Two transfers of 48 bytes, and one of 96 that is not asynchronous; between the
# start of the first and its end, something reads and writes 144 bytes.
TEXT = """\
HloModule jit_f, is_scheduled=true

ENTRY %main (l: bf16[4,6]) -> bf16[8,6] {
  %l = bf16[4,6]{1,0:T(8,128)} parameter(0)
  %p1 = bf16[4,6]{1,0:T(8,128)} collective-permute-start(%l), channel_id=1, source_target_pairs={{0,1},{1,0}}
  %x = bf16[4,6]{1,0:T(8,128)} add(%l, %l)
  %p2 = bf16[4,6]{1,0:T(8,128)} collective-permute-start(%l), channel_id=1, source_target_pairs={{0,1},{1,0}}
  %q1 = bf16[4,6]{1,0:T(8,128)} collective-permute-done(%p1)
  %q2 = bf16[4,6]{1,0:T(8,128)} collective-permute-done(%p2)
  ROOT %g = bf16[8,6]{1,0:T(8,128)} all-gather(%x), channel_id=1, replica_groups={{0,1}}
}
"""  # noqa: E501


@pytest.mark.parametrize(
  ("hbm", "expected"), [(144.0, 143), (6.0, 120), (1.0, 96)]
)
def test_work_hides_what_takes_no_longer(hbm, expected):
  chip = chips.Chip(1.0, 0.0, hbm, 1.0)
  assert waiting.seconds(hlo.Program(TEXT), chip) == pytest.approx(expected)


def test_products_hide_too():
  product = TEXT.replace("add(%l, %l)", "convolution(%l, %l)")
  product = product.replace("(%l, %l)\n", "(%l, %l), dim_labels=bf_oi->bf\n")
  flops = hlo.Program(product).flops()
  assert flops > 0
  chip = chips.Chip(flops / 30, 0.0, 144.0, 1.0)
  assert waiting.seconds(hlo.Program(product), chip) == pytest.approx(114)
