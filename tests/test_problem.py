"""A whole model as a Pymanopt problem."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from pymanopt.optimizers import ConjugateGradient, TrustRegions

import quotientsharp as qs

from .tiny import IDS, LABELS, loss_of, make, state

BATCH = {"input_ids": IDS, "labels": LABELS}


def test_pymanopt_trains_a_model() -> None:
    torch.set_num_threads(1)
    model, symmetries = make("shallow")
    before, start = state(model), float(loss_of(model).detach())
    problem = qs.pymanopt_problem(model, [BATCH, BATCH], symmetries)
    assert problem.manifold.dim == sum(p.numel() for p in model.parameters()) - symmetries.dim
    assert abs(problem.cost(problem.initial_point) - start) < 1e-12
    for optimizer in (ConjugateGradient, TrustRegions):
        result = optimizer(max_iterations=4, verbosity=0).run(problem, initial_point=problem.initial_point)
        assert result.cost < start - 0.1
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    problem.write_(model, result.point)
    assert abs(float(loss_of(model).detach()) - result.cost) < 1e-12


def test_derivatives_of_the_problem() -> None:
    """Slopes along a random direction, by differences of the cost and of the gradient along the retraction."""
    model, symmetries = make("shallow")
    problem = qs.pymanopt_problem(model, [BATCH], symmetries)
    manifold, x = problem.manifold, problem.initial_point
    np.random.seed(0)
    u = manifold.random_tangent_vector(x)
    g, h = problem.riemannian_gradient(x), problem.riemannian_hessian(x, u)
    costs = [problem.cost(manifold.retraction(x, t * u)) for t in (1e-4, 0.0, -1e-4)]
    assert abs((costs[0] - costs[2]) / 2e-4 - manifold.inner_product(x, g, u)) < 1e-7
    assert abs((costs[0] - 2 * costs[1] + costs[2]) / 1e-8 - manifold.inner_product(x, h, u)) < 1e-5


def test_bad_input() -> None:
    model, symmetries = make("shallow")
    with pytest.raises(ValueError, match="at least one batch"):
        qs.pymanopt_problem(model, [], symmetries)
    qs.attach(model, symmetries)
    with pytest.raises(ValueError, match="model is attached"):
        qs.pymanopt_problem(model, [BATCH], symmetries)
