"""Riemannian Hessians against closed forms and dense references."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from torch import Tensor, nn
from torch.nn import functional

import quotientsharp as qs
from quotientsharp.curvature import lanczos, trust_region

from .models import classifier, diagonal_problem, squares
from .test_sharpness import moved


def test_hessian_of_a_diagonal_net_in_the_invariant_metric() -> None:
    """``beta = beta0 exp(2 b)``, and ``sqrt(2) b`` are orthonormal coordinates: ``8 beta0^2 - 4 beta0 beta*``."""
    model, batch, beta, target = diagonal_problem()
    expected = (8 * beta**2 - 4 * beta * target).sort(descending=True).values
    result = qs.hessian(model, batch, loss=squares, metric="inv", eigenvalues=6, samples=200)
    assert result.eigenvalues == pytest.approx(expected.tolist(), rel=1e-6)
    assert abs(result.trace - float(expected.sum())) < 4 * result.trace_error
    assert result.gradient_norm == pytest.approx(float((4 * beta * (beta - target)).norm() / math.sqrt(2)), rel=1e-9)


def test_hessian_of_a_diagonal_net_in_the_mixed_metric() -> None:
    """The quotient is flat: ``|beta - beta*|^2`` with ``d = sqrt(2) xi`` has the Hessian 4."""
    model, batch, _, _ = diagonal_problem()
    result = qs.hessian(model, batch, loss=squares, metric="mix", eigenvalues=3)
    assert result.eigenvalues == pytest.approx([4.0] * len(result.eigenvalues), rel=1e-6)


def test_euclidean_hessian_against_a_dense_one() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    x, y = torch.randn(16, 4, dtype=torch.float64), torch.randint(0, 3, (16,))
    names, tensors = zip(*model.named_parameters(), strict=True)
    sizes = [tensor.numel() for tensor in tensors]

    def loss(flat: Tensor) -> Tensor:
        parts = {
            name: part.view(tensor.shape)
            for name, part, tensor in zip(names, torch.split(flat, sizes), tensors, strict=True)
        }
        return functional.cross_entropy(torch.func.functional_call(model, parts, (x,)), y)

    flat = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
    dense = torch.func.hessian(loss)(flat)
    expected = torch.linalg.eigvalsh(dense).flip(0)
    result = qs.hessian(model, [(x, y)], geometry="euclidean", eigenvalues=4, samples=300, iterations=43)
    assert result.eigenvalues == pytest.approx(expected[:4].tolist(), rel=1e-5)
    assert abs(result.trace - float(dense.trace())) < 4 * result.trace_error
    slope = torch.func.grad(loss)(flat)
    for rho in (0.01, 0.5):
        values, vectors = torch.linalg.eigh(dense)
        exact = trust_region((vectors.mT @ slope).numpy(), values.numpy(), rho)
        assert result.sharpness(rho) == pytest.approx(exact, rel=1e-5)
    weight = model[2].weight
    block = dense[sizes[0] + sizes[1] :, sizes[0] + sizes[1] :][: sizes[2], : sizes[2]].reshape(3, 5, 3, 5)
    kappa = float(torch.einsum("st,siti->", (weight @ weight.mT).detach(), block))
    found, error = qs.relative_flatness(model, [(x, y)], samples=600)
    assert abs(found - kappa) < 4 * error
    assert error < 0.2 * abs(kappa)


def test_riemannian_eigenvalues_are_constant_along_orbits() -> None:
    model, batch = classifier()
    symmetries = qs.find_symmetries(model, batch[0])
    for metric in ("inv", "mix"):
        here = qs.hessian(model, batch, metric=metric, eigenvalues=2, symmetries=symmetries)
        there = qs.hessian(moved(model, symmetries, 10.0), batch, metric=metric, eigenvalues=2, symmetries=symmetries)
        assert there.eigenvalues == pytest.approx(here.eigenvalues, rel=1e-5)
        assert there.sharpness(0.05) == pytest.approx(here.sharpness(0.05), rel=1e-5)


def test_second_order_estimate_approaches_sharpness() -> None:
    model, batch = classifier()
    symmetries = qs.find_symmetries(model, batch[0])
    model_of = qs.hessian(model, batch, symmetries=symmetries)
    options = {"symmetries": symmetries, "free": "geodesic", "tolerance": 1e-6}
    errors = [
        abs(model_of.sharpness(rho) - qs.sharpness(model, batch, rho, **options).value)
        for rho in (0.002, 0.001, 0.0005)
    ]
    assert errors[0] / errors[1] == pytest.approx(8, rel=0.3)
    assert errors[1] / errors[2] == pytest.approx(8, rel=0.3)


@pytest.mark.parametrize("rho", [0.1, 1.0, 5.0])
def test_trust_region_against_scipy(rho: float) -> None:
    generator = np.random.default_rng(0)
    slopes, values = generator.normal(size=4), np.array([2.0, -1.0, 0.5, -3.0])
    for g in (slopes, slopes * [0, 1, 1, 1]):
        best = 0.0
        for seed in range(20):
            start = np.random.default_rng(seed).normal(size=4)
            found = minimize(
                lambda z, g=g: -(g @ z + (values * z**2).sum() / 2),
                start * rho / np.linalg.norm(start),
                constraints={"type": "ineq", "fun": lambda z: rho**2 - z @ z},
                method="SLSQP",
                options={"ftol": 1e-12},
            )
            best = max(best, -found.fun)
        assert trust_region(g, values, rho) == pytest.approx(best, rel=1e-5)
    assert trust_region(slopes, -np.abs(values), 100.0) == pytest.approx(float((slopes**2 / np.abs(values)).sum() / 2))


def test_lanczos_finds_all_of_a_small_spectrum() -> None:
    torch.manual_seed(0)
    matrix = torch.randn(12, 12, dtype=torch.float64)
    matrix = matrix + matrix.mT
    start = torch.randn(12, dtype=torch.float64)
    values, errors, vectors = lanczos(lambda v: matrix @ v, start / start.norm(), 12)
    assert values == pytest.approx(torch.linalg.eigvalsh(matrix).flip(0).tolist(), abs=1e-9)
    assert max(errors) < 1e-6
    assert float((matrix @ vectors[0] - values[0] * vectors[0]).norm()) < 1e-8


def test_wrong_arguments_are_named() -> None:
    model, batch = classifier()
    with pytest.raises(ValueError, match="eigenvalues must be a positive integer"):
        qs.hessian(model, batch, eigenvalues=0)
    with pytest.raises(ValueError, match="layer must name a linear layer"):
        qs.relative_flatness(model, batch, layer="nose")
