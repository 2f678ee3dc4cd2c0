# SPDX-License-Identifier: Apache-2.0
"""Counts of the paper, and checks of the measurement itself."""

import pytest

from attnres_jax.pipeline import transport
from experiments.pipeline_cost import labels
from experiments.pipeline_cost import plans
from experiments.pipeline_cost import run
from experiments.pipeline_cost import transfers
from experiments.pipeline_cost import wires

# Without and with the embedding, under three rules, and the closed forms.
COUNTS = {
  (4, 2, 1): ((28, 22, 18), (35, 25, 21), (28, 22, 18)),
  (4, 2, 2): ((12, 10, 8), (19, 13, 11), (14, 11, 9)),
  (4, 4, 1): ((120, 54, 42), (135, 57, 45), (120, 54, 42)),
  (8, 4, 1): ((496, 220, 196), (527, 227, 203), (496, 220, 196)),
  (8, 4, 2): ((240, 108, 96), (271, 115, 103), (248, 110, 98)),
}


def _by_shape(rows):
  found = {}
  for row in rows:
    found.setdefault(tuple(row[name] for name in "PVK"), []).append(row)
  return found


def test_planned_counts_and_closed_forms():
  found = _by_shape(plans.transfers())
  for shape, counts in COUNTS.items():
    rows = found[shape]
    assert [row["rule"] for row in rows] == ["naive", "cached", "minimum"]
    names = ("planned_without_embedding", "planned", "closed_form")
    for name, expected in zip(names, counts, strict=True):
      assert tuple(row[name] for row in rows) == expected, (shape, name)
  assert [row["carried"] for row in found[4, 2, 2]][2] == 14
  assert [row["carried"] for row in found[8, 4, 2]][2] == 116
  for shape in plans.ONE_STAGE:
    assert len({row["planned"] for row in found[shape]}) == 1
    assert all(row["carried"] == row["planned"] for row in found[shape])


def test_bubbles():
  rows = list(plans.bubbles())
  assert len(rows) == 6 * 3 * 2
  for row in rows:
    if (row["order"], row["clock"]) == ("1f1b", "lockstep"):
      assert row["bubble"] > 1.5 * row["closed_form"]
    else:
      assert row["bubble"] == row["closed_form"]
  units = {
    row["order"]: row["units_in_flight"]
    for row in rows
    if (row["P"], row["V"]) == (4, 1)
  }
  assert units == {"fused": 7, "1f1b": 4, "gpipe": 16}


@pytest.mark.slow
def test_what_devices_receive_and_links_carry():
  """Fig. 3 with the paper's cache, which sends b1 and b2 to their makers."""
  row = transfers.measure(plans.FIG_3, "cached", 4, tpu=False)
  assert row["received"] == row["returned"] == 13
  assert row["received_partials"] == row["returned_partials"] == 4
  assert (row["own"], row["again"]) == (2, 0)
  # Links carry 2 blocks each at each of two turns, and two of them a sum.
  assert row["cpu_forward"] == row["cpu_backward"] == 2 * (4 * 2 + 2)
  assert row["cpu_ticks"] == 4 * 2 + 8 + 4 - 2
  assert row["cpu_bytes"] == row["cpu_ticks"] * 20 * labels.VECTOR_BYTES


def test_a_wrong_vector_is_noticed(monkeypatch):
  message = transport.Transport.message

  def swapped(self, blocks=(), partial=None):
    return message(self, blocks[::-1], partial)

  monkeypatch.setattr(transport.Transport, "message", swapped)
  with pytest.raises(RuntimeError, match="wrong elements in the inputs"):
    labels.receive(plans.Shape(4, 1, 1), "minimum", 4)


def test_what_else_a_program_might_send():
  line = (
    "%p{} = f32[4]{{0}} collective-permute(%x), channel_id=1,"
    " source_target_pairs={{{{{}}}}}"
  )

  def program(*pairs):
    body = "\n".join(f"  {line.format(i, p)}" for i, p in enumerate(pairs))
    return (
      "ENTRY %main (x: f32[4]) -> f32[4] {\n"
      "  %x = f32[4]{0} parameter(0)\n" + body + "\n}\n"
    )

  text = program("0,1},{1,2", "2,0", "1,0")
  sent = wires.read(text, 3)
  assert sent == (1, 3, 1, 4 * 16, {16})
  assert wires.read(program("0,2},{1,3"), 3, 2)[1:3] == (2, 0)
  with pytest.raises(ValueError, match="is not along a ring: {0,1},{0,2}"):
    wires.read(program("0,1},{0,2"), 4)
  with pytest.raises(ValueError, match="expected one loop with permutes"):
    wires.read(program(), 4)


@pytest.mark.parametrize(
  "given,message",
  [
    ("--only=bubble", "--only: got 'bubble', expected one of bubbles, tr"),
    ("--out=/no/such/folder", "--out: got '/no/such/folder', expected a fold"),
  ],
)
def test_bad_arguments(given, message, capsys):
  assert run.main([given]) == 2
  assert capsys.readouterr().err.startswith(f"error: {message}")


def test_a_part_is_written(tmp_path, capsys):
  assert run.main(["--only=bubbles", f"--out={tmp_path}", "--no-tpu"]) == 0
  lines = (tmp_path / "bubbles.csv").read_text().splitlines()
  assert lines[0].startswith("P,V,M,order,clock,ticks,bubble,closed_form,")
  assert len(lines) == 1 + 36 == 1 + capsys.readouterr().out.count("bubbles")


def test_committed_measurements_are_what_was_planned():
  planned = {
    (*plans.Shape(*(row[name] for name in "PVK")), row["rule"]): row
    for row in plans.transfers()
  }
  rows = run.PUBLISHED.read("transfers")
  assert len(rows) == len(planned)
  for row in rows:
    shape = tuple(int(row[name]) for name in "PVK")
    plan = planned[*shape, row["rule"]]
    for name in ("received", "returned"):
      assert int(row[name]) == plan["planned"]
      assert int(row[f"{name}_partials"]) == plan["partials"]
    spared = int(row["received"]) - int(row["again"]) - int(row["own"])
    assert spared == planned[*shape, "minimum"]["planned"]
    for name in ("cpu_forward", "cpu_backward", "tpu_forward", "tpu_backward"):
      if row[name]:
        assert int(row[name]) == plan["carried"] + plan["carried_partials"]
  assert any(row["tpu_forward"] for row in rows)
