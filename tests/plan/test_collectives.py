"""Collectives read from optimised HLO, in its forms."""

from __future__ import annotations

import pytest

from multilora_jax.plan.collectives import (
    base_formula,
    our_formula,
    read_collectives,
    slora_formula,
    total_sent,
)

HLO = """
ENTRY %main {
  %all-reduce.3 = f32[64,4096]{1,0} all-reduce(%fusion.2), channel_id=1, replica_groups={{0,1}}
  %all-reduce-start.1 = bf16[3,64,512]{2,1,0} all-reduce-start(%x), channel_id=2
  %all-reduce-done.1 = bf16[3,64,512]{2,1,0} all-reduce-done(%all-reduce-start.1)
  %ag = (f32[40,64]{0,1}, s32[40,64]{0,1}, f32[80,64]{0,1}, s32[80,64]{0,1}) all-gather-start(%a, %b), channel_id=3
  ROOT %cp = (f32[2]{0}, s8[2,4]{1,0}) all-reduce(%c, %d), channel_id=4
  %scalar = pred[] all-reduce(%p), channel_id=5
  %fusion = f32[8]{0} fusion(%all-reduce.3), kind=kLoop, calls=%all-reduce_computation
}
"""


def test_kinds_shapes_and_bytes():
    found = read_collectives(HLO)
    assert [(c.kind, c.shapes, c.nbytes) for c in found] == [
        ("all-reduce", ((64, 4096),), 64 * 4096 * 4),
        ("all-reduce", ((3, 64, 512),), 3 * 64 * 512 * 2),
        ("all-gather", ((80, 64), (80, 64)), 2 * 80 * 64 * 4),
        ("all-reduce", ((2,), (2, 4)), 16),
        ("all-reduce", ((),), 1),
    ]
    assert found[3].elements == 10
    assert total_sent(found[:1], 4) == pytest.approx(1.5 * 64 * 4096 * 4)
    assert total_sent(found[2:3], 4) == pytest.approx(0.75 * 2 * 80 * 64 * 4)


def test_formulas_are_the_paper_s():
    """S-LoRA section 6: r = 64 and h = 8192 add 1.95 % to the attention."""
    assert slora_formula(4, 10, 64) / base_formula(4, 10, 8192) == pytest.approx(5 * 64 / (2 * 8192))
    assert slora_formula(4, 10, 64) / base_formula(4, 10, 8192) == pytest.approx(0.0195, abs=1e-4)
    assert our_formula(4, 10, 64, 4) / slora_formula(4, 10, 64) == pytest.approx(8 / 5)
