"""The law: two starts on one orbit give the same losses, for every optimizer, with momentum, weight decay and SAM."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from functools import partial

import geoopt
import pytest
import torch
from torch import Tensor, nn

import quotientsharp as qs
from quotientsharp.optim import GeodesicSAM, RiemannianAdam, RiemannianSGD

from ..tiny import loss_of, make

STEPS = 200
Maker = Callable[[Iterable[Tensor]], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Maker] = {
    "adam": partial(RiemannianAdam, lr=1e-2, weight_decay=0.1),
    "amsgrad": partial(RiemannianAdam, lr=1e-2, weight_decay=0.1, amsgrad=True),
    "sgd": partial(RiemannianSGD, lr=1e-2, weight_decay=0.1),
    "momentum": partial(RiemannianSGD, lr=1e-2, momentum=0.9, weight_decay=0.1),
    "nesterov": partial(RiemannianSGD, lr=1e-2, momentum=0.9, nesterov=True, weight_decay=0.1),
}


def element(block: qs.symmetry.Block, gen: torch.Generator) -> Tensor:
    """Group elements; all of condition 100 where the group is GL(h)."""
    if block.group.dim != block.h**2 or block.h == 1:
        return block.group.random(block.copies, 3.0, gen)
    noise = torch.randn(2, block.copies, block.h, block.h, dtype=torch.float64, generator=gen)
    left, right = torch.linalg.qr(noise).Q
    return (left * torch.logspace(-1, 1, block.h, dtype=torch.float64)) @ right


def starts(kind: str = "shallow") -> tuple[list[nn.Module], qs.Symmetries]:
    """A model, and the same function at another point of the orbit."""
    model, symmetries = make(kind)
    moved, gen = copy.deepcopy(model), torch.Generator().manual_seed(3)
    for block in symmetries:
        block.write_(moved, block.act(block.read(model).detach(), element(block, gen)))
    torch.testing.assert_close(loss_of(moved), loss_of(model), rtol=1e-10, atol=0)
    return [model, moved], symmetries


def gap(models: list[nn.Module], optimizers: list[torch.optim.Optimizer], steps: int = STEPS) -> float:
    """Largest difference of the loss curves; the first one must fall."""
    curves = []
    for model, optimizer in zip(models, optimizers, strict=True):
        losses = []
        for _ in range(steps):

            def closure(model: nn.Module = model, optimizer: torch.optim.Optimizer = optimizer) -> Tensor:
                optimizer.zero_grad()
                loss = loss_of(model)
                loss.backward()
                return loss

            losses.append(float(optimizer.step(closure).detach()))
        curves.append(losses)
    assert curves[0][-1] < 0.7 * curves[0][0]
    return max(abs(a - b) for a, b in zip(*curves, strict=True))


@pytest.mark.parametrize(
    ("name", "metric"), [*((name, "mix") for name in OPTIMIZERS), ("adam", "inv"), ("momentum", "inv"), ("adam", 0.5)]
)
def test_optimizers_do_not_see_the_point_of_the_orbit(name: str, metric: str | float) -> None:
    models, symmetries = starts()
    for model in models:
        qs.attach(model, symmetries, metric=metric)
    assert gap(models, [OPTIMIZERS[name](model.parameters()) for model in models]) < 1e-6


@pytest.mark.parametrize("retraction", ["first_order", "geodesic"])
def test_whatever_the_retraction(retraction: str) -> None:
    models, symmetries = starts()
    for model in models:
        qs.attach(model, symmetries, retraction=retraction)
    assert gap(models, [OPTIMIZERS["adam"](model.parameters()) for model in models], 100) < 1e-6


def test_smaller_groups_and_hidden_units() -> None:
    """Llama's norms round to float32 whatever the dtype; Adam, which magnifies small gradients, is left out."""
    models, symmetries = starts("llama")
    assert {block.kind for block in symmetries} == {"qk", "vo", "rescaling"}
    for model in models:
        qs.attach(model, symmetries)
    assert gap(models, [OPTIMIZERS["momentum"](model.parameters()) for model in models]) < 1e-6


@pytest.mark.parametrize("name", ["adam", "momentum"])
def test_sam_does_not_see_it_either(name: str) -> None:
    models, symmetries = starts()
    for model in models:
        qs.attach(model, symmetries)
    sams = [GeodesicSAM(model, OPTIMIZERS[name](model.parameters()), rho=0.1) for model in models]
    assert gap(models, sams) < 1e-6


@pytest.mark.parametrize(
    "make_optimizer",
    [
        partial(torch.optim.AdamW, lr=1e-2),
        partial(torch.optim.SGD, lr=1e-2, momentum=0.9),
    ],
)
@pytest.mark.parametrize("sam", [False, True])
def test_plain_optimizers_do_see_it(make_optimizer: Maker, sam: bool) -> None:
    """AdamW and SGD on plain weights, alone or as the base of SAM: the law above is no triviality."""
    models, symmetries = starts()
    optimizers = [make_optimizer(model.parameters()) for model in models]
    if sam:
        optimizers = [
            GeodesicSAM(model, optimizer, symmetries=symmetries)
            for model, optimizer in zip(models, optimizers, strict=True)
        ]
    assert gap(models, optimizers, 100) > 1e-2


def test_geoopt_with_momentum_or_weight_decay_does_see_it() -> None:
    """What the subclasses are for."""
    for maker in (
        partial(geoopt.optim.RiemannianSGD, lr=1e-2, momentum=0.9),
        partial(geoopt.optim.RiemannianAdam, lr=1e-2, weight_decay=0.1),
    ):
        models, symmetries = starts()
        for model in models:
            qs.attach(model, symmetries)
        assert gap(models, [maker(model.parameters()) for model in models], 100) > 1e-3
