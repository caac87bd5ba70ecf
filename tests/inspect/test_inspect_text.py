"""The names of layouts in `quacklr inspect`, and the pattern of the names of equal layers."""

from __future__ import annotations

import torch

from quacklr import Weight, mha, mla, packed
from quacklr.inspect.layout import layout
from quacklr.util.layer_names import pattern


def test_layouts_have_names() -> None:
    def fused(*segments: tuple[str | None, int, int], repeat: int) -> str:
        q, k = sorted(packed(torch.zeros(24, 2), *segments, repeat=repeat), key=lambda weight: weight.name != "q")
        return layout(mha(q, k), {})

    assert fused(("q", 2, 4), ("k", 2, 4), (None, 2, 4), repeat=1) == "fused [q|k|v]"
    assert fused(("q", 1, 4), ("k", 1, 4), (None, 1, 4), repeat=2) == "fused per head [q,k,v]"
    assert fused(("q", 2, 3), ("k", 1, 3), (None, 1, 3), repeat=2) == "grouped [g, r+2, d]"
    assert fused(("q", 2, 2), (None, 2, 2), ("k", 2, 2), repeat=2) == "fused in 2 parts [q|v|k]"
    (q,), (k,) = packed(torch.zeros(16, 2), ("q", 1, 4), (None, 1, 4), repeat=2), packed(torch.zeros(8, 2), ("k", 2, 4))
    assert layout(mha(q, k), {}) == "separate per head [q,other], k"
    uq, qr = packed(torch.zeros(12, 2), ("uq", 1, 4), ("qr", 1, 2), repeat=2)
    kr, wide = (Weight("kr", torch.zeros(2, width), torch.zeros(2, dtype=torch.long)) for width in (2, 3))
    assert layout(mla(uq, k, qr, kr), {}) == "MLA, full queries"
    assert layout(mla(uq, k, qr, wide), {}) == "MLA, low-rank queries"


def test_names_of_equal_layers_are_written_as_one() -> None:
    assert pattern([f"a.{i}.b" for i in (0, 1, 2, 5, 7)]) == "a.{0-2,5,7}.b"
    assert pattern([f"a.{i}" for i in range(3, 48, 4)]) == "a.{3,7,...,47}"
    assert pattern([f"a.{i}" for i in range(24) if i % 4 != 3]) == "a.{0-2,4-6,...,20-22}"
    assert pattern(["a.0.b.0", "a.0.b.1", "a.1.b.0", "a.1.b.1", "a.2.b.5"]) == "a.{0-1}.b.{0-1}, a.2.b.5"
    assert pattern(["model"]) == "model"
