"""The steps themselves: against torch on plain parameters, against formulas on manifolds, and what goes wrong."""

from __future__ import annotations

import copy
import io
import math
from typing import Any

import geoopt
import pytest
import torch
from quotientsharp.manifolds import GLQuotient, RescalingQuotient
from torch import Tensor, nn

import quotientsharp as qs
from quotientsharp.optim import RiemannianAdam, RiemannianSGD
from quotientsharp.optim.base import dimension
from quotientsharp.optim.launch import resting, spectral_start

from ..tiny import loss_of, make, state

PLAIN: list[tuple[type[torch.optim.Optimizer], type[torch.optim.Optimizer], dict[str, Any]]] = [
    (RiemannianAdam, torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1}),
    (RiemannianAdam, torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.0, "amsgrad": True, "maximize": True}),
    (RiemannianSGD, torch.optim.SGD, {"lr": 1e-2, "weight_decay": 0.1}),
    (RiemannianSGD, torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9, "dampening": 0.1, "maximize": True}),
    (RiemannianSGD, torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
]


@pytest.mark.parametrize(("ours", "theirs", "options"), PLAIN)
def test_plain_parameters_take_torch_steps(
    ours: type[torch.optim.Optimizer], theirs: type[torch.optim.Optimizer], options: dict[str, Any]
) -> None:
    runs = []
    for kind in (ours, theirs):
        model, _ = make()
        optimizer = kind(model.parameters(), **options)  # type: ignore[call-arg]
        for _ in range(5):
            optimizer.zero_grad()
            loss_of(model).backward()
            optimizer.step()
        runs.append(state(model))
    for name in runs[0]:
        torch.testing.assert_close(runs[0][name], runs[1][name], rtol=1e-12, atol=1e-14)


def _point(copies: int = 3) -> tuple[GLQuotient, geoopt.ManifoldParameter, Tensor]:
    gen = torch.Generator().manual_seed(0)
    manifold = GLQuotient(7)
    x = manifold.random(copies, 12, 3, dtype=torch.float64, generator=gen)
    target = torch.randn(copies, 7, 5, dtype=torch.float64, generator=gen)
    return manifold, geoopt.ManifoldParameter(x, manifold=manifold), target


def _backward(manifold: GLQuotient, p: Tensor, target: Tensor) -> None:
    p.grad = None
    (manifold.product(p) - target).square().sum().backward()


def test_adam_by_the_formula() -> None:
    manifold, p, target = _point()
    x, lr, (b1, b2), eps, decay = p.detach().clone(), 0.05, (0.8, 0.9), 1e-3, 0.1
    optimizer = RiemannianAdam([p], lr=lr, betas=(b1, b2), eps=eps, weight_decay=decay)
    m, v = torch.zeros_like(x), torch.zeros(3, 1, 1, dtype=torch.float64)
    assert dimension(manifold, p.shape) == 12 * 3 - 9
    for step in range(1, 4):
        _backward(manifold, p, target)
        g = manifold.egrad2rgrad(x, p.grad)
        m = b1 * manifold.proju(x, m) + (1 - b1) * g
        v = b2 * v + (1 - b2) * manifold.inner(x, g, keepdim=True) / 27
        u = m / (1 - b1**step) / ((v / (1 - b2**step)).sqrt() + eps)
        x = manifold.retr(x, -lr * u) * (1 - lr * decay)
        optimizer.step()
        torch.testing.assert_close(p.detach(), x, rtol=1e-12, atol=1e-14)


def test_sgd_by_the_formula() -> None:
    manifold, p, target = _point()
    x, lr, momentum, decay = p.detach().clone(), 0.01, 0.9, 0.1
    optimizer = RiemannianSGD([p], lr=lr, momentum=momentum, dampening=0.2, weight_decay=decay)
    buffer = None
    for _ in range(3):
        _backward(manifold, p, target)
        u = manifold.egrad2rgrad(x, p.grad) + decay * x
        buffer = u if buffer is None else momentum * manifold.proju(x, buffer) + 0.8 * u
        x = manifold.retr(x, -lr * buffer)
        optimizer.step()
        torch.testing.assert_close(p.detach(), x, rtol=1e-12, atol=1e-14)


def test_weight_decay_shrinks_all_singular_values_alike() -> None:
    manifold, p, _ = _point()
    before = manifold.singular_values(p.detach())
    optimizer = RiemannianAdam([p], lr=0.1, weight_decay=0.5)
    p.grad = torch.zeros_like(p)
    optimizer.step()
    torch.testing.assert_close(manifold.singular_values(p.detach()), before * 0.95**2)


def test_momentum_stays_horizontal() -> None:
    for kind, key in ((RiemannianAdam, "exp_avg"), (RiemannianSGD, "momentum_buffer")):
        manifold, p, target = _point()
        optimizer = kind([p], lr=1e-2, **({"momentum": 0.9} if kind is RiemannianSGD else {}))
        for _ in range(5):
            _backward(manifold, p, target)
            x = p.detach().clone()
            optimizer.step()
            manifold.assert_check_vector_on_tangent(x, optimizer.state[p][key], atol=1e-12, rtol=1e-12)


def test_unattached_single_points_and_half_precision() -> None:
    for shape, dtype in (((12, 3), torch.float64), ((2, 12, 3), torch.bfloat16)):
        manifold = GLQuotient(7)
        x = manifold.random(shape, dtype=dtype, generator=torch.Generator().manual_seed(0))
        p = geoopt.ManifoldParameter(x, manifold=manifold)
        for kind in (RiemannianAdam, RiemannianSGD):
            optimizer = kind([p], lr=1e-2, weight_decay=0.1)
            for _ in range(2):
                _backward(manifold, p, torch.zeros((), dtype=dtype))
                optimizer.step()
        assert p.dtype == dtype
        assert bool(p.isfinite().all())


def test_state_survives_a_checkpoint() -> None:
    model, symmetries = make()
    qs.attach(model, symmetries)
    optimizer = RiemannianAdam(model.parameters(), lr=1e-2)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        loss_of(model).backward()
        optimizer.step()

    for _ in range(3):
        step(model, optimizer)
    buffer = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, buffer)
    buffer.seek(0)
    saved = torch.load(buffer)
    other, _ = make()
    qs.attach(other, symmetries)
    again = RiemannianAdam(other.parameters(), lr=0.5)
    other.load_state_dict(saved["model"])
    again.load_state_dict(saved["optimizer"])
    step(model, optimizer)
    step(other, again)
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=0)


def test_nan_gradients_change_nothing() -> None:
    model, symmetries = make()
    qs.attach(model, symmetries)
    for optimizer in (RiemannianAdam(model.parameters()), RiemannianSGD(model.parameters())):
        loss_of(model).backward()
        model.quotient.stack1.grad[2, 0, 0] = math.nan
        before = state(model)
        with pytest.raises(ValueError, match=r"gradient of manifold parameter 1\[2\] holds NaN"):
            optimizer.step()
        after = model.state_dict()
        assert all(torch.equal(before[name], after[name]) for name in before)
        model.zero_grad()


def test_a_collapsed_rank_is_named() -> None:
    model, symmetries = make()
    stacks = qs.attach(model, symmetries)
    with torch.no_grad():
        stacks.points[0][3, :, 0] = stacks.points[0][3, :, 1]
    loss_of(model).backward()
    before = state(model)
    with pytest.raises(ValueError, match=r"manifold parameter 0: x\[3\] has rank 7, not 8.*No weight was changed"):
        RiemannianAdam(model.parameters()).step()
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_a_frozen_stack_stays() -> None:
    model, symmetries = make()
    stacks = qs.attach(model, symmetries)
    stacks.points[0].requires_grad_(False)
    before = stacks.points[0].detach().clone()
    loss_of(model).backward()
    RiemannianAdam(model.parameters(), lr=0.1, weight_decay=0.1).step()
    assert torch.equal(stacks.points[0], before)
    assert stacks.points[0].grad is None


@pytest.mark.parametrize(
    ("kind", "options", "match"),
    [
        (RiemannianAdam, {"lr": -1}, "lr must be"),
        (RiemannianAdam, {"lr": torch.tensor(0.1)}, "lr must be"),
        (RiemannianAdam, {"betas": (0.9, 1.0)}, "betas must be"),
        (RiemannianAdam, {"eps": math.nan}, "eps must be"),
        (RiemannianAdam, {"weight_decay": -0.1}, "weight_decay must be"),
        (RiemannianSGD, {"lr": math.inf}, "lr must be"),
        (RiemannianSGD, {"momentum": -0.1}, "momentum must be"),
        (RiemannianSGD, {"nesterov": True}, "nesterov needs"),
        (RiemannianSGD, {"dampening": 0.1}, "dampening needs"),
        (RiemannianSGD, {"dampening": "a", "momentum": 0.1}, "dampening must be"),
    ],
)
def test_bad_arguments(kind: type[torch.optim.Optimizer], options: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        kind([nn.Parameter(torch.zeros(2))], **options)  # type: ignore[call-arg]


def test_bad_parameters() -> None:
    sphere = geoopt.ManifoldParameter(torch.tensor([1.0, 0.0]), manifold=geoopt.Sphere())
    sphere.grad = torch.ones(2)
    with pytest.raises(ValueError, match=r"none of quotientsharp's manifolds"):
        RiemannianAdam([sphere]).step()
    table = nn.Embedding(4, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match="sparse gradient"):
        RiemannianSGD(table.parameters()).step()


# -- the spectral start ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["G", "H"])
def test_the_spectral_start_moves_with_the_group(side: str) -> None:
    gen = torch.Generator().manual_seed(0)
    manifold = GLQuotient(7)
    x = manifold.random(2, 12, 3, dtype=torch.float64, generator=gen)
    rows = slice(0, 7) if side == "G" else slice(7, 12)
    x[0, rows] = 0.0
    A = torch.randn(2, 3, 3, dtype=torch.float64, generator=gen)
    target = torch.randn(2, 7, 5, dtype=torch.float64, generator=gen)
    results = []
    for start in (x, manifold.act(x, A)):
        p = start.clone().requires_grad_()
        (manifold.product(p) - target).square().sum().backward()
        assert p.grad is not None
        assert resting(manifold, start).tolist() == [True, False]
        results.append(spectral_start(manifold, start, p.grad, 0.3))
    assert torch.equal(results[0][1], x[1])
    torch.testing.assert_close(manifold.product(results[0]), manifold.product(results[1]), rtol=1e-9, atol=1e-10)
    s = manifold.singular_values(results[0][0])
    torch.testing.assert_close(s, torch.full_like(s, 0.3))
    # Downhill: the loss falls.
    before, after = ((manifold.product(point[0]) - target[0]).square().sum() for point in (x, results[0]))
    assert float(after) < float(before)


def test_pairs_that_cannot_start_stay() -> None:
    manifold, units = GLQuotient(4), RescalingQuotient(2)
    zero = torch.zeros(1, 8, 2, dtype=torch.float64)
    slope = torch.randn(1, 8, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert torch.equal(spectral_start(manifold, zero, slope, 0.1), zero)
    half = torch.cat([torch.zeros(1, 4, 2), torch.ones(1, 4, 2)], 1).double()  # the other factor has rank one
    assert torch.equal(spectral_start(manifold, half, slope, 0.1), half)
    live = torch.cat([torch.zeros(1, 4, 2), torch.eye(4, 2)[None]], 1).double()
    assert torch.equal(spectral_start(manifold, live, torch.zeros_like(slope), 0.1), live)
    moved = spectral_start(units, torch.tensor([[0.0, 0.0, 2.0]]), torch.tensor([[3.0, 4.0, 0.0]]), 1.0)
    torch.testing.assert_close(moved, torch.tensor([[-0.3, -0.4, 2.0]]))


def test_a_dead_pair_that_has_no_gradient_rests_on() -> None:
    manifold = GLQuotient(4)
    x = manifold.random(2, 8, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    x[0] = 0.0
    p = geoopt.ManifoldParameter(x.clone(), manifold=manifold)
    optimizer = RiemannianAdam([p], lr=0.1)
    for _ in range(3):
        _backward(manifold, p, torch.ones((), dtype=torch.float64))
        optimizer.step()
    assert torch.equal(p[0], x[0])
    assert not torch.equal(p[1], x[1])


def _adapter() -> tuple[nn.Module, qs.Symmetries]:
    import peft

    model, _ = make()
    config = peft.LoraConfig(r=4, target_modules=["query", "value"], task_type="SEQ_CLS")
    torch.manual_seed(0)
    adapted: nn.Module = peft.get_peft_model(copy.deepcopy(model), config).double()
    for module in adapted.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return adapted, qs.find_symmetries(adapted)


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_adapters_start_from_zero_and_do_not_see_the_gauge() -> None:
    model, symmetries = _adapter()
    assert {block.kind for block in symmetries} == {"lora"}
    moved = copy.deepcopy(model)
    symmetries.move_(moved, seed=1, scale=3.0)
    for kind in (RiemannianAdam, RiemannianSGD):
        curves = []
        for start in (model, moved):
            net = copy.deepcopy(start)
            before = state(net)
            stacks = qs.attach(net, symmetries)
            assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())
            assert bool(resting(stacks.points[0].manifold, stacks.points[0].detach()).all())
            optimizer = kind([p for p in net.parameters() if p.requires_grad], lr=1e-2)
            losses = []
            for _ in range(30):
                optimizer.zero_grad()
                loss = loss_of(net)
                loss.backward()
                optimizer.step()
                losses.append(float(loss.detach()))
            assert not bool(resting(stacks.points[0].manifold, stacks.points[0].detach()).any())
            curves.append(losses)
        assert curves[0][-1] < curves[0][0] - 0.05
        assert max(abs(a - b) for a, b in zip(*curves, strict=True)) < 1e-6
