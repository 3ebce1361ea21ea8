"""The ascent against maxima that are known, on plain functions of a vector."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from torch import Tensor

from quotientsharp.ascent import Ascent, Surface, dots, length


class Plain(Surface):
    """A function and its autograd derivative; counts evaluations."""

    def __init__(self, function: object) -> None:
        self.function, self.values, self.gradients = function, 0, 0

    def value(self, z: Tensor) -> tuple[Tensor, None]:
        self.values += 1
        return self.function(z), None

    def gradient(self, z: Tensor, out: Tensor) -> tuple[Tensor, None]:
        self.gradients += 1
        leaf = z.clone().requires_grad_()
        with torch.enable_grad():
            value = self.function(leaf)
            out.copy_(torch.autograd.grad(value, leaf)[0])
        return value.detach(), None


def quadratic(seed: int, size: int = 30, top: float = 5.0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    basis = torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64)).Q
    values = torch.linspace(-2.0, top, size, dtype=torch.float64)
    return basis @ torch.diag(values) @ basis.mT, torch.randn(size, generator=generator, dtype=torch.float64)


def best_of_ball(B: Tensor, g: Tensor, rho: float) -> float:
    """Trust-region maximum by its secular equation, solved with SciPy's root finder."""
    from scipy.optimize import brentq

    values, vectors = np.linalg.eigh(B.numpy())
    slopes = vectors.T @ g.numpy()

    def excess(mu: float) -> float:
        return float(np.linalg.norm(slopes / (mu - values)) - rho)

    low = max(values.max(), 0.0) + 1e-9
    z = slopes / (brentq(excess, low, low + 1e4, xtol=1e-13) - values)
    return float(slopes @ z + (values * z**2).sum() / 2)


@pytest.mark.parametrize("rho", [0.01, 0.3, 3.0])
@pytest.mark.parametrize("seed", range(3))
def test_reaches_the_maximum_of_a_quadratic(seed: int, rho: float) -> None:
    B, g = quadratic(seed)
    best = best_of_ball(B, g, rho)
    surface = Plain(lambda z: z @ g + z @ B @ z / 2)
    peak = Ascent(surface, 0.0, rho, steps=60).run(torch.zeros_like(g))
    assert peak.converged
    assert peak.gain >= (1 - 2e-3) * best
    assert peak.gain <= best * (1 + 1e-9)
    assert length(peak.z) <= rho * (1 + 1e-6)
    assert float(surface.function(peak.z)) == pytest.approx(peak.gain)
    longer = Ascent(surface, 0.0, rho, steps=200, tolerance=0).run(torch.zeros_like(g))
    assert longer.gain == pytest.approx(best, rel=1e-6)
    assert longer.residual < 1e-6


def test_a_maximum_inside_the_ball_is_found() -> None:
    center = torch.tensor([0.3, -0.2, 0.1], dtype=torch.float64)
    surface = Plain(lambda z: torch.exp(-((z - center) ** 2).sum() * 4))
    start = float(surface.function(torch.zeros(3, dtype=torch.float64)))
    peak = Ascent(surface, start, 2.0, steps=100).run(torch.zeros(3, dtype=torch.float64))
    assert peak.gain == pytest.approx(1 - start, rel=1e-3)
    assert length(peak.z - center) < 0.05


def test_steps_that_do_not_rise_are_taken_back() -> None:
    """Where the gradient swings, power steps fail and projected steps take over; SciPy's best of many starts judges."""
    generator = torch.Generator().manual_seed(0)
    A = torch.randn(6, 6, generator=generator, dtype=torch.float64) * 3
    w = torch.rand(6, generator=generator, dtype=torch.float64)

    def function(z: Tensor) -> Tensor:
        return (w * torch.sin(A @ z + 0.3)).sum()

    base = float(function(torch.zeros(6, dtype=torch.float64)))
    peaks = [
        Ascent(Plain(function), base, 1.0, steps=200).run(torch.randn(6, generator=generator, dtype=torch.float64) / 3)
        for _ in range(8)
    ]
    best = -math.inf
    for seed in range(30):
        start = np.random.default_rng(seed).normal(size=6) / 3
        found = minimize(
            lambda z: -float(function(torch.tensor(z))),
            start,
            constraints={"type": "ineq", "fun": lambda z: 1 - z @ z},
            method="SLSQP",
        )
        best = max(best, -found.fun) if found.success else best
    assert max(peak.gain for peak in peaks) == pytest.approx(best - base, rel=2e-3)
    for peak in peaks:
        assert peak.gain == max(peak.gains)


def test_at_most_one_forward_more_than_gradients() -> None:
    B, g = quadratic(1)
    surface = Plain(lambda z: z @ g + z @ B @ z / 2)
    peak = Ascent(surface, 0.0, 0.5, steps=20, tolerance=0).run(torch.zeros_like(g), gradient=g.clone())
    assert (peak.gradients, surface.gradients, surface.values) == (20, 19, 1)


def test_not_a_number_is_never_the_best() -> None:
    def function(z: Tensor) -> Tensor:
        return torch.where(z.sum() > 0.5, torch.tensor(math.nan, dtype=z.dtype), z.sum())

    start = torch.zeros(4, dtype=torch.float64)
    peak = Ascent(Plain(function), 0.0, 1.0, steps=60).run(start)
    assert math.isfinite(peak.gain)
    assert 0.4 < peak.gain <= 0.5


def test_without_a_slope_the_caller_is_told() -> None:
    peak = Ascent(Plain(lambda z: (z**2).sum()), 0.0, 1.0).run(torch.zeros(3, dtype=torch.float64))
    assert peak.z is None
    assert not peak.converged


def test_dots_keep_the_digits_that_single_precision_loses() -> None:
    z = torch.randn(3_000_000, generator=torch.Generator().manual_seed(0)) + 1
    exact = float(z.double() @ z.double())
    assert float(dots([(z, z)])) == pytest.approx(exact, rel=1e-6)
    assert length(z) == pytest.approx(math.sqrt(exact), rel=1e-6)
