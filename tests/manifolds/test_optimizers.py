"""Geoopt's and Pymanopt's optimizers run on the quotients as they are, and do not see the point of the orbit."""

from __future__ import annotations

from collections.abc import Callable

import geoopt
import numpy as np
import pymanopt
import pytest
import torch
from pymanopt.optimizers import ConjugateGradient, SteepestDescent, TrustRegions
from quotientsharp.manifolds import (
    GLQuotient,
    PymanoptGLQuotient,
    PymanoptRescalingQuotient,
    RescalingQuotient,
)
from torch import Tensor

from .cases import PAPER_METRICS, RETRACTIONS, generator, group_element

N, M, H = 12, 9, 3


def _problem() -> tuple[Tensor, float, Tensor, Tensor]:
    """A matrix, the error of its best approximation of rank 3, and two starts on one orbit, cond(A) = 100."""
    gen = generator(0)
    left = torch.linalg.qr(torch.randn(N, M, generator=gen, dtype=torch.float64)).Q
    right = torch.linalg.qr(torch.randn(M, M, generator=gen, dtype=torch.float64)).Q
    s = torch.cat([torch.tensor([1.1, 1.0, 0.9]), torch.full((M - H,), 0.1)]).double()
    target = (left * s) @ right.T
    start = torch.cat([left[:, :H] * s[:H].sqrt(), right[:, :H] * s[:H].sqrt()])
    start = start + 0.05 * torch.randn(start.shape, generator=gen, dtype=torch.float64)
    best = float(torch.linalg.svdvals(target)[H:].square().sum())
    return target, best, start, GLQuotient(N).act(start, group_element(H, 100, batch=()))


def _sgd(p: Tensor) -> torch.optim.Optimizer:
    return geoopt.optim.RiemannianSGD([p], lr=0.1)


def _adam(p: Tensor) -> torch.optim.Optimizer:
    return geoopt.optim.RiemannianAdam([p], lr=0.1)


@pytest.mark.parametrize("retraction", RETRACTIONS)
@pytest.mark.parametrize("metric", PAPER_METRICS)
@pytest.mark.parametrize("make", [_sgd, _adam])
def test_geoopt_optimizers(make: Callable[[Tensor], torch.optim.Optimizer], metric: str, retraction: str) -> None:
    target, best, *starts = _problem()
    manifold = GLQuotient(N, metric=metric, retraction=retraction)
    runs = []
    for start in starts:
        p = geoopt.ManifoldParameter(start.clone(), manifold=manifold)
        optimizer = make(p)
        losses = []
        for step in range(600):
            if make is _adam:
                optimizer.param_groups[0]["lr"] = 0.1 * 0.97**step
            optimizer.zero_grad()
            loss = (manifold.product(p) - target).square().sum()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        runs.append(losses)
    assert np.abs(np.subtract(*runs))[:100].max() < 1e-8
    assert runs[0][-1] - best < 1e-8
    assert runs[1][-1] - best < 1e-8


@pytest.mark.parametrize("metric", PAPER_METRICS)
def test_geoopt_line_search(metric: str) -> None:
    target, best, start, _ = _problem()
    manifold = GLQuotient(N, metric=metric)
    p = geoopt.ManifoldParameter(start.clone(), manifold=manifold)
    optimizer = geoopt.optim.rlinesearch.RiemannianLineSearch([p], cg_method="pr")

    def closure() -> float:
        optimizer.zero_grad()
        loss = (manifold.product(p) - target).square().sum()
        loss.backward()
        return loss.item()

    for _ in range(60):
        optimizer.step(closure)
        if closure() - best < 1e-10:
            break
    assert closure() - best < 1e-8


def _pymanopt_problem(manifold: PymanoptGLQuotient, target: Tensor) -> tuple[pymanopt.Problem, list[float]]:
    """The problem, and a list that takes the loss of every iterate (whose gradient is asked for once)."""
    losses: list[float] = []

    @pymanopt.function.pytorch(manifold)
    def cost(G: Tensor, H: Tensor) -> Tensor:
        return (G @ H.T - target).square().sum()

    plain = pymanopt.Problem(manifold, cost)

    @pymanopt.function.numpy(manifold)
    def gradient(*point: np.ndarray) -> object:
        losses.append(float(plain.cost(point)))
        return manifold.euclidean_to_riemannian_gradient(point, plain.euclidean_gradient(point))

    return pymanopt.Problem(manifold, cost, riemannian_gradient=gradient), losses


@pytest.mark.parametrize("retraction", RETRACTIONS)
@pytest.mark.parametrize("metric", PAPER_METRICS)
@pytest.mark.parametrize("optimizer", [SteepestDescent, ConjugateGradient, TrustRegions])
def test_pymanopt_optimizers(optimizer: type, metric: str, retraction: str) -> None:
    target, best, *starts = _problem()
    manifold = PymanoptGLQuotient(N, M, H, metric=metric, retraction=retraction)
    runs = []
    for start in starts:
        problem, losses = _pymanopt_problem(manifold, target)
        run = optimizer(max_iterations=100, min_gradient_norm=1e-9, verbosity=0)
        result = run.run(problem, initial_point=(start[:N].numpy(), start[N:].numpy()))
        assert result.cost - best < 1e-8
        runs.append(losses)
    # Both runs stop by themselves once they are at the optimum; from there on the loss is constant.
    length = max(map(len, runs))
    first, second = (np.pad(run, (0, length - len(run)), mode="edge") for run in runs)
    assert np.abs(first - second).max() < 1e-8


def _slope(errors: list[float], steps: list[float]) -> float:
    return float(np.polyfit(np.log(steps), np.log(errors), 1)[0])


@pytest.mark.parametrize("relaxation", [0.0, 0.1])
@pytest.mark.parametrize("metric", ["inv", "mix", 0.4])
def test_gradient_and_hessian_slopes(metric: str | float, relaxation: float) -> None:
    """Along geodesics f(t) - f(0) - t <grad, u> falls as t^2, and with the Hessian term as t^3."""
    target, _, start, moved = _problem()
    manifold = PymanoptGLQuotient(N, M, H, metric=metric, relaxation=relaxation)

    @pymanopt.function.pytorch(manifold)
    def cost(G: Tensor, K: Tensor) -> Tensor:
        W = G @ K.T
        return (W - target).square().sum() + W.pow(4).sum()

    problem = pymanopt.Problem(manifold, cost)
    np.random.seed(0)
    point = (moved[:N].numpy(), moved[N:].numpy())
    u = manifold.random_tangent_vector(point)
    gradient = problem.riemannian_gradient(point)
    hessian = problem.riemannian_hessian(point, u)
    assert manifold.norm(point, manifold.projection(point, hessian) - hessian) < 1e-9 * manifold.norm(point, hessian)
    first, second = manifold.inner_product(point, gradient, u), manifold.inner_product(point, hessian, u)
    steps = [0.02, 0.01, 0.005]
    values = [problem.cost(manifold.exp(point, t * u)) - problem.cost(point) for t in steps]
    assert _slope([abs(v - t * first) for v, t in zip(values, steps, strict=True)], steps) == pytest.approx(2, abs=0.1)
    rest = [abs(v - t * first - t * t * second / 2) for v, t in zip(values, steps, strict=True)]
    assert _slope(rest, steps) == pytest.approx(3, abs=0.15)
    # The Hessian is self-adjoint and the same operator at every point of the orbit.
    v = manifold.random_tangent_vector(point)
    other = manifold.inner_product(point, problem.riemannian_hessian(point, v), u)
    assert manifold.inner_product(point, hessian, v) == pytest.approx(other, rel=1e-8)
    assert start.shape == moved.shape


def test_rescaling_in_both_ecosystems() -> None:
    """A diagonal net u * v ~ beta: both libraries reach the target, from two starts on one orbit alike."""
    gen = generator(1)
    beta = 0.5 + torch.rand(6, generator=gen, dtype=torch.float64)
    start = 1 + 0.2 * torch.randn(6, 2, generator=gen, dtype=torch.float64)
    scale = torch.logspace(-1, 1, 6, dtype=torch.float64)
    for metric in PAPER_METRICS:
        flat = RescalingQuotient(1, metric=metric)
        curves = []
        for x in (start, flat.act(start, scale)):
            p = geoopt.ManifoldParameter(x.clone(), manifold=flat)
            optimizer = geoopt.optim.RiemannianSGD([p], lr=0.1)
            losses = []
            for _ in range(200):
                optimizer.zero_grad()
                loss = (flat.product(p).flatten() - beta).square().sum()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
            curves.append(losses)
        assert np.abs(np.subtract(*curves)).max() < 1e-10
        assert curves[0][-1] < 1e-8
        manifold = PymanoptRescalingQuotient(1, 1, 6, metric=metric)

        @pymanopt.function.pytorch(manifold)
        def cost(g: Tensor, k: Tensor) -> Tensor:
            return ((g * k).flatten() - beta).square().sum()

        problem = pymanopt.Problem(manifold, cost)
        result = TrustRegions(verbosity=0).run(problem, initial_point=(start[:, :1].numpy(), start[:, 1:].numpy()))
        assert result.cost < 1e-10


def test_pymanopt_vectors_are_closed_under_arithmetic() -> None:
    manifold = PymanoptGLQuotient(N, M, H)
    np.random.seed(1)
    point = manifold.random_point()
    u, v = manifold.random_tangent_vector(point), manifold.random_tangent_vector(point)
    w = np.float64(2) * u - v / 4 + (-u) + manifold.zero_vector(point)
    assert manifold.norm(point, w - (u - 0.25 * v)) < 1e-12
    assert manifold.norm(point, u) == pytest.approx(1)
    assert manifold.dim == (N + M - H) * H
    middle = manifold.pair_mean(point, manifold.exp(point, u * 0.2))
    assert manifold.dist(point, middle) == pytest.approx(0.1, rel=1e-8)
