"""Breakers and extra readers get the smaller group or a refusal with its reason, never a wrong block."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from quotientsharp.symmetry import Symmetries, find_symmetries
from quotientsharp.symmetry import check as numeric

from . import breakers

VALUES = ("vo", "GL(8)", 2)
SCORES = ("qk", "GL(8)", 2)
CASES: list[tuple[str, list[tuple[str, str, int]], list[tuple[str, str]]]] = [
    ("Attention", [SCORES, VALUES], []),
    ("Clipped", [], [("qk", "clamp"), ("vo", "clamp")]),
    ("Cosine", [("qk", "O(8)", 2), VALUES], []),
    ("NormAfterRotation", [VALUES], [("qk", "length")]),
    ("RotatedValues", [SCORES], [("vo", "mixes")]),
    ("NormBeforeOutput", [SCORES], [("vo", "length")]),
    ("RelativePositions", [SCORES, VALUES], []),
    ("LearnedPositionBias", [VALUES], [("qk", "read elsewhere")]),
    ("RestingClip", [], [("qk", "cannot be followed"), ("vo", "cannot be followed")]),
    ("RestingMask", [VALUES], [("qk", "cannot be followed")]),
    ("RestingGate", [], [("rescaling", "gated unit")]),
    ("ConstantKey", [SCORES, VALUES], []),
    ("ConstantQuery", [("qk", "Aff(7)", 2), VALUES], []),
    ("ConstantRotaryQuery", [VALUES], [("qk", "constant")]),
    ("ComplexRotary", [("qk", "R(8)", 2), VALUES], []),
    ("LinearAttention", [VALUES], []),
    ("GatedOutput", [SCORES, ("rescaling", "Rescaling", 16)], []),
    ("GateReadsQuery", [("rescaling", "Rescaling", 16)], [("qk", "changes the output")]),
    ("Scaled", [("qk", "Diagonal(8)", 2), VALUES], []),
    ("Tanh", [VALUES], [("qk", "tanh")]),
    ("SharedQueryKey", [VALUES], [("qk", "both queries and keys")]),
    ("TwoLayers", [SCORES], [("vo", "read elsewhere")]),
    ("Parallel", [SCORES, VALUES, ("rescaling", "Rescaling", 24)], []),
    ("Gated", [("rescaling", "Rescaling", 24)], []),
    ("ShiftedGate", [], [("rescaling", "constant")]),
    ("ClippedGate", [], [("rescaling", "gated unit")]),
    ("SquaredRelu", [], [("rescaling", "1/c^2")]),
    ("ReadTwice", [], [("rescaling", "elsewhere")]),
]


def find(name: str) -> tuple[nn.Module, Symmetries]:
    torch.manual_seed(0)
    model = getattr(breakers, name)()
    return model, find_symmetries(model, torch.randn(2, 24, 16))


@pytest.mark.parametrize(("name", "blocks", "refused"), CASES)
def test_breaker(name: str, blocks: list[tuple[str, str, int]], refused: list[tuple[str, str]]) -> None:
    _, found = find(name)
    assert [(b.kind, str(b.group), b.copies) for b in found] == blocks
    assert len(found.refused) == len(refused)
    for (place, reason), (kind, word) in zip(found.refused, refused, strict=True):
        assert place.endswith(kind)
        assert word in reason
        assert word in found.table()


@pytest.mark.parametrize("name", [name for name, _, _ in CASES])
def test_what_is_accepted_does_hold(name: str) -> None:
    """An independent look: other weights, other inputs, plain float64, every block by itself."""
    model, found = find(name)
    model = model.double()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) / 2)
    x = torch.randn(3, 24, 16, dtype=torch.float64)
    for index in range(len(found)):
        before = model(x)
        Symmetries([found[index]], [], 1).move_(model, seed=index)
        for a, b in zip(numeric.tensors(before), numeric.tensors(model(x)), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


META = [
    "GateReadsQuery",
    "RelativePositions",
    "LearnedPositionBias",
    "TwoLayers",
    "Cosine",
    "ShiftedGate",
    "NormBeforeOutput",
    "ReadTwice",
]


@pytest.mark.parametrize("name", [*META, "Attention", "Parallel"])
def test_the_meta_device_accepts_no_more_than_the_check(name: str) -> None:
    checked = {(b.name, str(b.group)) for b in find(name)[1]}
    with torch.device("meta"):
        model = getattr(breakers, name)()
    found = find_symmetries(model, torch.randn(2, 24, 16))
    assert {(b.name, str(b.group)) for b in found} <= checked
    assert not any(b.verified for b in found)
    assert (name in META) == bool(found.refused)


def test_keys_that_a_later_layer_uses_again_join_its_queries() -> None:
    _, found = find("TwoLayers")
    assert found[0].parameters == (
        "first.q.weight", "first.q.bias", "q2.weight", "q2.bias", "first.k.weight", "first.k.bias",
    )  # fmt: skip


def test_a_position_projection_joins_the_keys() -> None:
    _, found = find("RelativePositions")
    assert found[0].parameters == ("q.weight", "q.bias", "u", "k.weight", "k.bias", "r.weight")


def test_a_block_with_a_group_too_large_is_told() -> None:
    from quotientsharp.symmetry.groups import general_linear

    model, found = find("Cosine")
    found[0].group = general_linear(8)
    with pytest.raises(ValueError, match="Not a symmetry of Cosine: qk"):
        found.verify(model, torch.randn(2, 24, 16))
    assert not found[0].verified
    assert found[1].verified


def test_finite_moves_decide_where_derivatives_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the derivative test switched off the finite move must still refuse."""
    monkeypatch.setattr("quotientsharp.symmetry.find.SLOPE", 1e9)
    _, found = find("Cosine")
    assert [str(b.kind) for b in found] == ["vo"]
    assert "finite move" in found.refused[0][1]
