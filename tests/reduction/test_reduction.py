"""Distance, alignment, minimal form, horizontal steps, barrier, relational attention."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

from quotientsharp import reduction
from quotientsharp.reduction.distance import product_gaps
from quotientsharp.reduction.horizontal import horizontal_part
from quotientsharp.symmetry import Symmetries, find_symmetries
from quotientsharp.symmetry.check import Probe
from quotientsharp.symmetry.check import distance as change_of_output
from quotientsharp.symmetry.inputs import read_inputs
from tests.symmetry import breakers, zoo

NAMES = ["gpt2", "llama", "gpt_neox", "opt"]
EXAMPLE = torch.randn(2, 24, 16, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def cases() -> dict[str, tuple[nn.Module, Symmetries, Any]]:
    torch.manual_seed(0)
    made: dict[str, Any] = {name: (zoo.build(name), None) for name in NAMES}
    for name in ("Cosine", "Scaled", "ConstantQuery"):
        made[name] = (getattr(breakers, name)(), EXAMPLE)
    made["encoder"] = (nn.TransformerEncoderLayer(16, 4, 32, batch_first=True).eval(), None)
    return {name: (model, find_symmetries(model, x), x) for name, (model, x) in made.items()}


ALL = [*NAMES, "Cosine", "Scaled", "ConstantQuery", "encoder"]
Cases = dict[str, tuple[nn.Module, Symmetries, Any]]


def probe_of(cases: Cases, name: str) -> tuple[Probe, Symmetries, Any]:
    model, found, x = cases[name]
    return Probe(model, *read_inputs(model, x)), found, x


def gap(a: nn.Module, b: nn.Module) -> float:
    return max(float((p - q).abs().max().detach()) for p, q in zip(a.parameters(), b.parameters(), strict=True))


# -- distance -------------------------------------------------------------------------------------------------


def test_the_product_is_compared_without_forming_it() -> None:
    torch.manual_seed(0)
    for dtype in (torch.float64, torch.complex128):
        G, H, G2, H2 = (torch.randn(3, n, 2, dtype=dtype) for n in (6, 5, 6, 5))
        squared, size = product_gaps(G, H, G2, H2)
        W, W2 = G @ H.mH, G2 @ H2.mH
        torch.testing.assert_close(squared, (W - W2).abs().square().sum((1, 2)))
        torch.testing.assert_close(size, W.abs().square().sum((1, 2)))


@pytest.mark.parametrize("name", ALL)
def test_distance_is_zero_on_orbits_symmetric_and_the_same_from_anywhere(cases: Cases, name: str) -> None:
    probe, found, _ = probe_of(cases, name)
    a = probe.model
    b = copy.deepcopy(a)
    found.move_(b, seed=1)
    d = reduction.distance(a, b, found)
    assert d.relative < 1e-12
    assert d.rest[0] == 0
    assert not d.skipped
    other = copy.deepcopy(a)
    with torch.no_grad():
        for p in other.parameters():
            p.add_(0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel()), dtype=p.dtype))
    far = reduction.distance(a, other, found)
    assert all(g > 1e-3 * size for g, size in far.blocks.values())
    moved = copy.deepcopy(other)
    found.move_(moved, seed=2)
    for pair in ((b, other), (a, moved), (moved, b)):
        assert reduction.distance(*pair, found).on_blocks == pytest.approx(far.on_blocks, rel=1e-9)
    assert float(far) == pytest.approx((far.on_blocks**2 + far.rest[0] ** 2) ** 0.5)
    assert far.table().count("\n") == len(found) + 1


def test_a_relu_unit_is_not_its_negative() -> None:
    """(-g, -k) has the same product, and is another function."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2)).double()
    found = find_symmetries(model)
    other = copy.deepcopy(model)
    found[0].write_(other, -found[0].read(model).detach())
    assert reduction.distance(model, other, found).relative > 1
    with pytest.raises(ValueError, match="architecture"):
        reduction.distance(model, nn.Sequential(nn.Linear(4, 5)), found)


# -- alignment ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*NAMES, "encoder"])
def test_alignment_undoes_permutations_and_moves(cases: Cases, name: str) -> None:
    probe, found, x = probe_of(cases, name)
    reference = copy.deepcopy(probe.model)
    places = reduction.permutable(probe.model, found, x)
    assert all(len(place) == (1 if place[0].kind == "rescaling" else 2) for place in places)
    gated = name == "llama"  # its units have a gate that the block does not hold
    assert any(p[0].kind == "rescaling" for p in places) == (name in ("opt", "encoder"))
    assert not (gated and any(p[0].kind == "rescaling" for p in places))
    shuffles = {}
    for index, place in enumerate(places):
        order = torch.randperm(place[0].copies, generator=torch.Generator().manual_seed(index))
        for block in place:
            block.write_(probe.model, block.read(probe.model).detach()[order])
            shuffles[block.name] = order
    found.move_(probe.model, seed=3)
    assert change_of_output(probe.output, probe.run()) < 1e-9
    orders = reduction.align_(probe.model, reference, found, x)
    for block, order in orders.items():
        assert torch.equal(shuffles[block][torch.tensor(order)], torch.arange(len(order)))
    assert change_of_output(probe.output, probe.run()) < 1e-9
    assert gap(probe.model, reference) < 1e-9


def test_alignment_of_strangers_lowers_the_distance_of_weights_and_keeps_the_function(cases: Cases) -> None:
    for name in ("gpt2", "Cosine", "Scaled"):
        probe, found, x = probe_of(cases, name)
        reference = Probe(cases[name][0], *read_inputs(cases[name][0], x), seed=9).model
        found.canonicalize_(reference)
        found.move_(probe.model, seed=4, scale=0.5)
        before = [float((b.read(probe.model) - b.read(reference)).norm().detach()) for b in found]
        reduction.align_(probe.model, reference, found, x)
        after = [float((b.read(probe.model) - b.read(reference)).norm().detach()) for b in found]
        assert change_of_output(probe.output, probe.run()) < 1e-9
        assert all(b < a for a, b in zip(before, after, strict=True))


def test_pairs_of_lower_rank_keep_their_gauge() -> None:
    torch.manual_seed(0)
    model = breakers.Attention().double()
    found = find_symmetries(model, EXAMPLE)
    reference = copy.deepcopy(model)
    with torch.no_grad():
        model.k.weight[:8] = 0
        model.k.bias[:8] = 0
    before = model(EXAMPLE.double())
    reduction.align_(model, reference, found, EXAMPLE, permute=False)
    torch.testing.assert_close(model(EXAMPLE.double()), before, rtol=1e-10, atol=1e-10)
    assert all(bool(p.isfinite().all()) for p in model.parameters())


def test_barrier() -> None:
    a, b = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        a.weight.fill_(-1.0), b.weight.fill_(1.0)
    hill = reduction.barrier(a, b, lambda m: float(2 - m.weight.square().detach() + m.weight.detach()), 5)
    assert hill.losses == pytest.approx([0.0, 1.25, 2.0, 2.25, 2.0])
    assert hill.height == pytest.approx(1.0)
    assert float(a.weight.detach()) == -1.0
    assert reduction.barrier(a, b, lambda m: float(m.weight.square().detach())).height == pytest.approx(0.0)
    with pytest.raises(ValueError, match="points"):
        reduction.barrier(a, b, lambda m: 0.0, 2)
    with pytest.raises(ValueError, match="architecture"):
        reduction.barrier(a, nn.Linear(2, 1), lambda m: 0.0)


# -- minimal form ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*NAMES, "Scaled", "encoder"])
def test_minimal_form_has_as_many_numbers_as_the_quotient_and_the_same_function(cases: Cases, name: str) -> None:
    probe, found, _ = probe_of(cases, name)
    total = sum(p.numel() for p in probe.model.parameters())
    names = set(probe.model.state_dict())
    assert reduction.to_minimal_(probe.model, found) == []
    assert total - sum(p.numel() for p in probe.model.parameters()) == found.dim
    assert change_of_output(probe.output, probe.run()) < 1e-10
    outputs = [t for t in probe.run(grad=True) if t.requires_grad]
    sum(t.square().sum() for t in outputs).backward()  # type: ignore[union-attr]
    assert all(bool(p.grad.isfinite().all()) for p in probe.model.parameters() if p.grad is not None)
    reduction.from_minimal_(probe.model)
    assert set(probe.model.state_dict()) == names
    assert change_of_output(probe.output, probe.run()) < 1e-10
    with pytest.raises(ValueError, match="minimal form"):
        reduction.from_minimal_(probe.model)


def test_minimal_form_has_no_flat_direction_and_trains() -> None:
    """The Jacobian of the product in the free numbers has full rank; that of the plain pair misses h^2 directions."""
    torch.manual_seed(0)
    n, m, h = 7, 5, 3
    layer = nn.Linear(m, n, bias=False).double()
    target = torch.randn(n, h).double() @ torch.randn(h, m).double()
    parametrize.register_parametrization(layer, "weight", reduction.MinimalRank(h))
    step = layer.parametrizations.weight  # type: ignore[union-attr]
    free = step.original
    assert free.numel() == n * h + m * h - h * h
    jacobian = torch.autograd.functional.jacobian(step[0], free.detach()).flatten(0, 1)
    assert int(torch.linalg.matrix_rank(jacobian)) == free.numel()
    G, H = torch.randn(n, h).double(), torch.randn(m, h).double()
    plain = torch.autograd.functional.jacobian(
        lambda x: x[: n * h].reshape(n, h) @ x[n * h :].reshape(m, h).T, torch.cat([G.flatten(), H.flatten()])
    ).flatten(0, 1)
    assert int(torch.linalg.matrix_rank(plain)) == free.numel()
    assert plain.shape[1] == free.numel() + h * h
    optimizer = torch.optim.LBFGS(
        layer.parameters(),
        max_iter=2000,
        max_eval=9000,
        tolerance_grad=1e-9,
        tolerance_change=0.0,
        line_search_fn="strong_wolfe",
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (layer.weight - target).square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    assert float(closure().detach()) < 1e-8
    layer.weight = target
    torch.testing.assert_close(layer.weight, target)
    layer.weight = torch.zeros_like(target)  # of lower rank still
    assert not layer.weight.any()


def test_the_nearest_matrix_of_the_rank_is_taken() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(6, 8).double()
    u, s, vt = torch.linalg.svd(layer.weight.detach())
    parametrize.register_parametrization(layer, "weight", reduction.MinimalRank(2))
    torch.testing.assert_close(layer.weight.detach(), u[:, :2] @ torch.diag(s[:2]) @ vt[:2])
    with pytest.raises(ValueError, match="at least 9"):
        parametrize.register_parametrization(nn.Linear(6, 8), "weight", reduction.MinimalRank(9))
    with pytest.raises(ValueError, match="rank"):
        reduction.MinimalRank(0)


def test_minimal_form_leaves_shared_and_singular_weights_alone() -> None:
    torch.manual_seed(0)
    model = breakers.Attention()
    found = find_symmetries(model, EXAMPLE)
    with torch.no_grad():
        model.q.weight[:8] = 0
        model.q.bias[:8] = 0
    before = model(EXAMPLE)
    model.twin = model.v  # type: ignore[assignment]
    kept = reduction.to_minimal_(model, found)
    assert [reason.split(":")[0] for _, reason in kept] == ["1 of 2 copies", "several modules share its weights"]
    torch.testing.assert_close(model(EXAMPLE), before, rtol=1e-4, atol=1e-5)


# -- horizontal steps -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALL)
def test_the_horizontal_part_is_the_orthogonal_projection(cases: Cases, name: str) -> None:
    """Against least squares on the vertical vectors of the algebra, written out."""
    probe, found, _ = probe_of(cases, name)
    for block in list(found)[:3]:
        x = block.read(probe.model).detach()
        u = torch.randn(x.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        result = horizontal_part(block, x, u)
        wide, vector, new = ((t.unsqueeze(-1) if block.kind == "rescaling" else t)[0] for t in (x, u, result))
        G, H = wide[: block.n], wide[block.n :]
        vertical = torch.stack([torch.cat([-G @ E, H @ E.T]).flatten() for E in block.group.algebra()], 1)
        weights = torch.linalg.lstsq(vertical, vector.flatten()[:, None]).solution
        torch.testing.assert_close(new.flatten(), vector.flatten() - (vertical @ weights)[:, 0], rtol=1e-8, atol=1e-8)
        torch.testing.assert_close(horizontal_part(block, x, result), result, rtol=1e-9, atol=1e-9)


def test_a_gradient_is_horizontal_and_a_singular_pair_is_fine(cases: Cases) -> None:
    probe, found, _ = probe_of(cases, "gpt2")
    sum(t.square().sum() for t in probe.run(grad=True)).backward()  # type: ignore[union-attr]
    for block in found:
        gradient = block.read({n: p.grad for n, p in probe.parameters.items()})  # type: ignore[misc]
        x = block.read(probe.model).detach()
        torch.testing.assert_close(horizontal_part(block, x, gradient), gradient, rtol=1e-9, atol=1e-9)
        assert torch.equal(horizontal_part(block, torch.zeros_like(x), gradient), gradient)


def steps(kind: str, lr: float, what: str | None, count: int, decay: float = 0.1) -> float:
    """Drift of the conserved quantities over some steps on a small attention."""
    torch.manual_seed(0)
    model = breakers.Parallel().double()
    found = find_symmetries(model, EXAMPLE)
    optimizers: dict[str, Any] = {
        "adam": lambda: torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=decay),
        "sgd": lambda: torch.optim.SGD(model.parameters(), lr=lr, weight_decay=decay),
    }
    optimizer = optimizers[kind]()
    hook = reduction.horizontal_(optimizer, model, found, what=what) if what else None
    before = reduction.conserved(model, found)
    x, y = EXAMPLE.double(), torch.randn(2, 24, 16, generator=torch.Generator().manual_seed(1)).double()
    for _ in range(count):
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
    if hook:
        hook.remove()
    assert len(optimizer._optimizer_step_pre_hooks) == 0
    after = reduction.conserved(model, found)
    return max(float((after[k] - before[k]).abs().max()) for k in before)


def test_projected_steps_conserve_what_gradient_flow_conserves() -> None:
    """Over a fixed time the drift falls with the step; without the hook it stays."""
    for kind, lr in (("adam", 2e-3), ("sgd", 2e-1)):
        plain = [steps(kind, lr / k, None, 10 * k) for k in (1, 4)]
        held = [steps(kind, lr / k, "update", 10 * k) for k in (1, 4)]
        assert plain[0] / plain[1] < 1.5
        assert 2.5 < held[0] / held[1] < 6
        assert held[1] < 0.1 * plain[1]
    # Plain gradient descent needs no hook; weight decay in the gradient is taken out by projecting the gradient.
    assert steps("sgd", 1e-2, None, 10, decay=0.0) < 1e-4
    assert steps("sgd", 1e-2, None, 10, decay=1.0) > 1e-2
    with pytest.raises(ValueError, match="what"):
        steps("sgd", 0.1, "momentum", 1)


def test_projecting_the_gradient_removes_a_penalty_along_the_orbit() -> None:
    torch.manual_seed(0)
    model = breakers.Attention().double()
    found = find_symmetries(model, EXAMPLE)
    drifts = []
    for what in (None, "gradient"):
        twin = copy.deepcopy(model)
        optimizer = torch.optim.SGD(twin.parameters(), lr=1e-3)
        if what:
            reduction.horizontal_(optimizer, twin, found, what=what)
        before = reduction.conserved(twin, found)
        for _ in range(5):
            optimizer.zero_grad()
            (twin(EXAMPLE.double()).square().mean() + sum(p.pow(4).sum() for p in twin.parameters())).backward()
            optimizer.step()
        after = reduction.conserved(twin, found)
        drifts.append(max(float((after[k] - before[k]).abs().max()) for k in before))
    assert drifts[1] < 0.02 * drifts[0]


# -- relational attention -------------------------------------------------------------------------------------


def rotation(d: int) -> Tensor:
    return torch.linalg.qr(torch.randn(d, d, generator=torch.Generator().manual_seed(3), dtype=torch.float64))[0]


@pytest.mark.parametrize("causal", [False, True])
def test_relational_attention_is_invariant(causal: bool) -> None:
    torch.manual_seed(0)
    module = reduction.RelationalAttention(12, 3).double()
    x, memory, Q = torch.randn(2, 7, 12).double(), torch.randn(2, 5, 12).double(), rotation(12)
    y, weights = module(x, is_causal=causal, average_attn_weights=False)
    turned, again = module(x @ Q, is_causal=causal, average_attn_weights=False)
    assert weights.shape == (2, 3, 7, 7)
    torch.testing.assert_close(weights, again, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(turned, y @ Q, rtol=1e-10, atol=1e-10)
    mask = torch.zeros(7, 7).double().masked_fill(torch.ones(7, 7, dtype=torch.bool).triu(1), -torch.inf)
    gram = module.forward_gram(x @ x.mT, mask if causal else None)
    torch.testing.assert_close(gram, y @ y.mT, rtol=1e-10, atol=1e-10)
    crossed = module(x, memory, memory)[0]
    torch.testing.assert_close(module(x @ Q, memory @ Q, memory @ Q)[0], crossed @ Q, rtol=1e-10, atol=1e-10)
    assert not torch.allclose(weights[:, 0], weights[:, 1])  # heads differ


def test_relational_attention_takes_the_masks_of_torch() -> None:
    torch.manual_seed(0)
    module = reduction.RelationalAttention(8, 2, batch_first=False).double()
    x = torch.randn(6, 2, 8).double()
    causal = torch.ones(6, 6, dtype=torch.bool).triu(1)
    y, weights = module(x, x, x, attn_mask=causal)
    assert weights.shape == (2, 6, 6)
    assert not weights[:, causal].any()
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 6).double())
    torch.testing.assert_close(y, module(x, is_causal=True)[0])
    torch.testing.assert_close(y, module(x, attn_mask=causal.expand(4, 6, 6))[0])
    changed = x.clone()
    changed[3:] = 5.0
    torch.testing.assert_close(module(changed, is_causal=True)[0][:3], y[:3])  # the future is not seen
    padding = torch.tensor([[False] * 4 + [True] * 2, [False] * 6])
    padded, shown = module(x, key_padding_mask=padding)
    torch.testing.assert_close(padded[:4, 0], module(x[:4, :1])[0][:, 0])
    assert not shown[0, :, 4:].any()
    blind = module(x, key_padding_mask=torch.ones(2, 6, dtype=torch.bool))[0]
    assert not blind.any()
    assert module(x, need_weights=False)[1] is None
    single = module(x[:, 0])
    torch.testing.assert_close(single[0], module(x)[0][:, 0])
    assert single[1].shape == (6, 6)


def test_relational_attention_is_differentiable_and_refuses_other_sizes() -> None:
    torch.manual_seed(0)
    module = reduction.RelationalAttention(6, 2, hidden=3).double()
    x = torch.randn(1, 4, 6).double().requires_grad_()
    assert torch.autograd.gradcheck(lambda z: module(z)[0], (x,))
    module(x)[0].sum().backward()
    assert all(p.grad is not None for p in module.parameters())
    with pytest.raises(ValueError, match="embed_dim"):
        module(torch.zeros(1, 4, 5).double())
    with pytest.raises(ValueError, match="num_heads"):
        reduction.RelationalAttention(6, 0)
