"""GeodesicSAM: where it ascends to, that it comes back bit for bit, and its interfaces."""

from __future__ import annotations

import copy
import math
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

import quotientsharp as qs
from quotientsharp.optim import Ascent, GeodesicSAM, RiemannianAdam, RiemannianSGD
from quotientsharp.space import Geometry, ParameterSpace

from ..tiny import IDS, LABELS, assert_same, loss_of, make, state


def value(model: nn.Module) -> float:
    return float(loss_of(model).detach())


def test_the_ascended_point_is_that_of_the_parameter_space() -> None:
    """Another route to the same loss: the space of the sharpness measures, in its balanced gauge."""
    for retraction in ("first_order", "christoffel", "geodesic"):
        model, symmetries = make()
        loss_of(model).backward()
        ascent = Ascent(model, 0.3, symmetries=symmetries, retraction=retraction)
        length = ascent.up_()
        found = value(model)
        ascent.back_()
        space = ParameterSpace(model, Geometry.parse("geodesic", "mix", retraction), symmetries)
        z = space.zeros()
        space.move_(z)  # the space works in the balanced gauge, so its gradient is taken there
        model.zero_grad()
        loss_of(model).backward()
        gradients = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()}
        slope = space.pull(gradients, z, torch.empty_like(z))
        torch.testing.assert_close(length, slope.norm(), rtol=1e-9, atol=0)
        space.move_(0.3 * slope / slope.norm())
        assert abs(found - value(model)) < 1e-9
        space.restore_()


@pytest.mark.parametrize("kind", ["bert", "gpt2"])
def test_attached_and_plain_models_ascend_alike(kind: str) -> None:
    losses = []
    for attach in (False, True):
        model, symmetries = make(kind)
        if attach:
            qs.attach(model, symmetries)
        loss_of(model).backward()
        ascent = Ascent(model, 0.2, symmetries=None if attach else symmetries)
        ascent.up_()
        losses.append(value(model))
    assert losses[0] > value(make(kind)[0])
    assert abs(losses[0] - losses[1]) < 1e-10


@pytest.mark.parametrize("attach", [False, True])
def test_weights_come_back_bit_for_bit(attach: bool) -> None:
    model, symmetries = make("gpt2")
    model.float()
    if attach:
        qs.attach(model, symmetries)
    before = state(model)
    ascent = Ascent(model, 0.5, symmetries=None if attach else symmetries)
    loss_of(model).backward()
    ascent.up_()
    moved = state(model)
    assert any(not torch.equal(moved[name], before[name]) for name in before)
    assert all(bool((moved[name][before[name] == 0] == 0).all()) for name in before if "ln_" in name)  # zeros stay
    ascent.back_()
    assert_same(before, model.state_dict())


def test_the_three_interfaces_agree() -> None:
    def closure_run(model: nn.Module, sam: GeodesicSAM) -> None:
        def closure() -> Tensor:
            sam.zero_grad()
            loss = loss_of(model)
            loss.backward()
            return loss

        assert isinstance(sam.step(closure), Tensor)

    def two_calls(model: nn.Module, sam: GeodesicSAM) -> None:
        loss_of(model).backward()
        sam.first_step(zero_grad=True)
        loss_of(model).backward()
        sam.second_step(zero_grad=True)

    def scaled(model: nn.Module, sam: GeodesicSAM) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        scaler.scale(loss_of(model)).backward()
        sam.first_step(zero_grad=True)
        scaler.scale(loss_of(model)).backward()
        sam.second_step(zero_grad=True, scaler=scaler)
        scaler.update()

    def accumulated(model: nn.Module, sam: GeodesicSAM) -> None:
        for step in (sam.first_step, sam.second_step):
            for rows in ([0, 1], [2, 3]):
                (model(input_ids=IDS[rows], labels=LABELS[rows]).loss / 2).backward()
            step(zero_grad=True)

    results = []
    for run in (closure_run, two_calls, scaled, accumulated):
        model, symmetries = make()
        qs.attach(model, symmetries)
        sam = GeodesicSAM(model, RiemannianAdam(model.parameters(), lr=1e-3), rho=0.1)
        for _ in range(3):
            run(model, sam)
        results.append(value(model))
    assert max(abs(value - results[0]) for value in results) < 1e-10


def test_adamw_as_base_and_autocast() -> None:
    model, symmetries = make()
    model.float()
    sam = GeodesicSAM(model, torch.optim.AdamW(model.parameters(), lr=1e-2), symmetries=symmetries)
    scheduler = torch.optim.lr_scheduler.LinearLR(sam, total_iters=5)
    start = value(model)
    for _ in range(10):

        def closure() -> Tensor:
            sam.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = loss_of(model)
            loss.backward()
            return loss

        sam.step(closure)
        scheduler.step()
    assert value(model) < start - 0.1
    saved = sam.state_dict()
    sam.load_state_dict(saved)
    assert sam.param_groups is sam.base_optimizer.param_groups
    assert sam.param_groups[0]["lr"] == pytest.approx(1e-2)


def test_overflow_skips_the_step_and_keeps_the_weights() -> None:
    model, symmetries = make()
    qs.attach(model, symmetries)
    sam = GeodesicSAM(model, RiemannianSGD(model.parameters(), lr=0.1))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    before = state(model)
    scaler.scale(loss_of(model)).backward()
    model.quotient.stack0.grad[0, 0, 0] = math.inf
    assert math.isnan(float(sam.first_step()))
    assert not sam.ascent.ascended
    sam.second_step(scaler=scaler)
    scaler.update()
    assert_same(before, model.state_dict())
    assert scaler.get_scale() == 512.0


def test_an_error_between_the_steps_restores_the_weights() -> None:
    model, symmetries = make()
    sam = GeodesicSAM(model, torch.optim.SGD(model.parameters(), lr=0.1), symmetries=symmetries)
    before, calls = state(model), []

    def closure() -> Tensor:
        calls.append(1)
        if len(calls) == 2:
            raise KeyError("data")
        loss = loss_of(model)
        loss.backward()
        return loss

    with pytest.raises(KeyError):
        sam.step(closure)
    assert_same(before, model.state_dict())


def test_adapters_at_rank_zero_stay_in_the_ascent() -> None:
    pair = nn.Sequential(nn.Linear(6, 2, bias=False), nn.Linear(2, 5, bias=False)).double()
    nn.init.zeros_(pair[1].weight)
    symmetries = qs.find_symmetries(
        nn.Sequential(nn.Linear(6, 2, bias=False), nn.Linear(2, 5, bias=False)), torch.ones(3, 6)
    )
    assert len(symmetries) == 1
    x = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    pair(x).sum().backward()
    before = state(pair)
    Ascent(pair, 0.1, symmetries=symmetries).up_()
    assert_same(before, pair.state_dict())


def test_bad_input() -> None:
    model, symmetries = make()
    base = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="rho must be"):
        GeodesicSAM(model, base, rho=-1.0, symmetries=symmetries)
    with pytest.raises(ValueError, match="base_optimizer must be"):
        GeodesicSAM(model, torch.optim.SGD, symmetries=symmetries)  # type: ignore[arg-type]
    other = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    with pytest.raises(ValueError, match="model does not have"):
        GeodesicSAM(model, other, symmetries=symmetries)
    sam = GeodesicSAM(model, base, symmetries=symmetries)
    with pytest.raises(ValueError, match="closure"):
        sam.step()
    with pytest.raises(ValueError, match="no parameter has a gradient"):
        sam.first_step()
    loss_of(model).backward()
    sam.first_step()
    with pytest.raises(RuntimeError, match="ascended already"):
        sam.first_step()
    sam.restore()
    qs.attach(model, symmetries)
    with pytest.raises(ValueError, match="symmetries cannot be given"):
        Ascent(model, symmetries=symmetries)


# -- two processes -----------------------------------------------------------------------------------------------------


def _train(model: nn.Module, net: nn.Module, rows: Tensor) -> None:
    sam = GeodesicSAM(net, RiemannianAdam(model.parameters(), lr=1e-2, weight_decay=0.1), rho=0.1)
    for _ in range(3):
        for step in (sam.first_step, sam.second_step):
            net(input_ids=IDS[rows], labels=LABELS[rows]).loss.backward()
            step(zero_grad=True)


def _worker(rank: int, folder: str, model: nn.Module, symmetries: qs.Symmetries) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    qs.attach(model, symmetries)
    _train(model, nn.parallel.DistributedDataParallel(model, find_unused_parameters=True), torch.arange(4)[rank::2])
    torch.save(model.state_dict(), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore")
def test_two_gloo_processes_train_as_one(tmp_path: Path) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    model, symmetries = make("shallow")
    alone = copy.deepcopy(model)
    mp.start_processes(_worker, (str(tmp_path), model, symmetries), nprocs=2, start_method="fork")
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1))
    assert_same(first, second)
    qs.attach(alone, symmetries)
    _train(alone, alone, torch.arange(4))
    for name, value in alone.state_dict().items():
        torch.testing.assert_close(first[name], value, rtol=1e-9, atol=1e-12)
