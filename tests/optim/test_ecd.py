"""Energy conserving descent: the formula, the conserved energy, edges."""

from __future__ import annotations

import copy
import itertools
import math

import numpy as np
import pytest
import torch
from scipy.integrate import solve_ivp
from torch import Tensor

from quotientsharp.optim import ECD

START = torch.tensor([1.0, -0.7, 0.4, 0.9, -0.2], dtype=torch.float64)
CURVES = torch.tensor([1.0, 3.0, 0.5, 2.0, 1.5], dtype=torch.float64)


def loss_of(theta: Tensor) -> Tensor:
    return (CURVES * theta.square()).sum() / 2 + 0.3 * torch.cos(theta).sum() + 1


def run(lr: float, length: float, **options: object) -> tuple[list[float], Tensor, ECD]:
    """Follow the flow over a given length of path, in two tensors."""
    parts = [START[:2].clone().requires_grad_(), START[2:].clone().requires_grad_()]
    optimizer = ECD(parts, lr, **options)  # type: ignore[arg-type]
    energies = []

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(torch.cat(parts))
        loss.backward()
        return loss

    for _ in range(round(length / lr)):
        optimizer.step(closure)
        energies.append(optimizer.energy)
    return energies, torch.cat(parts).detach(), optimizer


def test_one_step_is_the_formula() -> None:
    """Two steps written out on the flat vector."""
    _, theta, _ = run(0.1, 0.2, eta=1.4, F0=-0.5)
    x, p, d = START.clone(), torch.zeros(0), 5
    for index in range(2):
        y = x.clone().requires_grad_()
        loss = loss_of(y)
        (g,) = torch.autograd.grad(loss, y)
        p = -g / g.norm() if index == 0 else p
        p = p - 0.1 * 1.4 * d / (2 * (d - 1) * (float(loss.detach()) + 0.5)) * (g - p * (p @ g))
        p = p / p.norm()
        x = x + 0.1 * p
    torch.testing.assert_close(theta, x, rtol=1e-13, atol=1e-13)


def test_the_energy_is_conserved_to_first_order_in_the_step() -> None:
    drifts = []
    for lr in (0.02, 0.01, 0.005):
        energies, _, _ = run(lr, 4.0, eta=1.4)
        drifts.append(max(abs(e - energies[0]) for e in energies))
    assert drifts[0] < 0.05
    assert all(1.7 < a / b < 2.4 for a, b in itertools.pairwise(drifts))


def test_the_path_is_that_of_the_hamiltonian() -> None:
    """Hamilton's equations of log|P| + U, integrated by SciPy in the time of the Hamiltonian itself."""
    d, eta = 5, 1.4

    def gradient(x: np.ndarray) -> tuple[float, np.ndarray]:
        y = torch.tensor(x, requires_grad=True)
        loss = loss_of(y)
        return float(loss.detach()), torch.autograd.grad(loss, y)[0].numpy()

    def flow(_: float, state: np.ndarray) -> np.ndarray:
        x, momentum = state[:d], state[d : 2 * d]
        loss, g = gradient(x)
        size = momentum @ momentum
        return np.concatenate([momentum / size, -eta * d / (2 * (d - 1)) * g / loss, [1 / math.sqrt(size)]])

    def arrived(_: float, state: np.ndarray) -> float:
        return float(state[-1] - 2.0)  # two units of path

    arrived.terminal = True  # type: ignore[attr-defined]
    g = gradient(START.numpy())[1]
    start = np.concatenate([START.numpy(), -g / np.linalg.norm(g), [0.0]])
    solved = solve_ivp(flow, (0, 50), start, events=arrived, rtol=1e-10, atol=1e-12)
    end = torch.tensor(solved.y_events[0][0][:d])
    gaps = [float((run(lr, 2.0, eta=eta)[1] - end).norm()) for lr in (0.01, 0.005)]
    assert gaps[1] < 0.01
    assert 1.7 < gaps[0] / gaps[1] < 2.3
    per_tensor = run(0.005, 2.0, eta=eta, coupling="tensor")[1]
    assert float((per_tensor - end).norm()) > 10 * gaps[1], "with the product per tensor it is another path"


def test_groups_with_their_own_lr_conserve_it_as_well() -> None:
    drifts = []
    for lr in (0.01, 0.005):
        parts = [START[:2].clone().requires_grad_(), START[2:].clone().requires_grad_()]
        optimizer = ECD([{"params": parts[:1], "lr": 3 * lr}, {"params": parts[1:]}], lr)
        energies = []
        for _ in range(round(3 / lr)):
            optimizer.zero_grad()
            loss = loss_of(torch.cat(parts))
            loss.backward()
            optimizer.step(loss=loss)
            energies.append(optimizer.energy)
        drifts.append(max(abs(e - energies[0]) for e in energies))
    assert drifts[0] < 0.1
    assert 1.6 < drifts[0] / drifts[1] < 2.6


def test_state_goes_on_where_it_stopped() -> None:
    _, whole, _ = run(0.05, 2.0, weight_decay=0.1)
    _, half, optimizer = run(0.05, 1.0, weight_decay=0.1)
    parts = [half[:2].clone().requires_grad_(), half[2:].clone().requires_grad_()]
    other = ECD(parts, 0.05, weight_decay=0.1)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for _ in range(20):
        other.zero_grad()
        loss = loss_of(torch.cat(parts))
        loss.backward()
        other.step(loss=loss)
    torch.testing.assert_close(torch.cat(parts).detach(), whole, rtol=0, atol=0)
    assert math.isfinite(other.energy)


def test_it_descends_and_noise_keeps_the_length_of_the_step() -> None:
    energies, theta, optimizer = run(0.01, 1.2, eta=3.0, nu=0.1)
    assert loss_of(theta) < loss_of(START)
    assert max(abs(e - energies[0]) for e in energies) > 0
    momentum = torch.cat([s["momentum"] for s in optimizer.state.values()])
    assert abs(float(momentum.norm()) - 1) < 1e-12


def test_below_the_bound_the_step_is_straight() -> None:
    _, theta, optimizer = run(0.1, 0.1, F0=100.0)
    y = START.clone().requires_grad_()
    (g,) = torch.autograd.grad(loss_of(y), y)
    torch.testing.assert_close(theta, START - 0.1 * g / g.norm())
    assert math.isnan(optimizer.energy)


def test_half_precision_and_no_gradient() -> None:
    p, q = torch.ones(300, dtype=torch.float16, requires_grad=True), torch.ones(3, requires_grad=True)
    optimizer = ECD([p, q], 0.5)
    assert optimizer.step(loss=1.0) == 1.0  # nothing to do yet
    p.grad = torch.full_like(p, 100.0)
    optimizer.step(loss=1.0)
    assert abs(float((1 - p.detach()).float().norm()) - 0.5) < 1e-2
    assert torch.equal(q, torch.ones(3))
    p.grad = torch.full_like(p, float("nan"))
    with pytest.raises(ValueError, match="finite"):
        optimizer.step(loss=1.0)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"lr": 0.0}, "lr"),
        ({"lr": 0.1, "eta": -1.0}, "eta"),
        ({"lr": 0.1, "nu": -1.0}, "nu"),
        ({"lr": 0.1, "F0": math.inf}, "F0"),
        ({"lr": 0.1, "coupling": "layer"}, "coupling"),
    ],
)
def test_bad_arguments(options: dict[str, float], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        ECD([torch.zeros(3, requires_grad=True)], **options)  # type: ignore[arg-type]


def test_the_loss_is_needed() -> None:
    optimizer = ECD([torch.zeros(3, requires_grad=True)], 0.1)
    with pytest.raises(ValueError, match="loss"):
        optimizer.step()
    with pytest.raises(ValueError, match="two numbers"):
        ECD([torch.zeros(1, requires_grad=True)], 0.1)
