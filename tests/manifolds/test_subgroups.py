"""Quotients by subgroups of GL(h): the projection removes the subgroup's directions and nothing else."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from quotientsharp.manifolds import GLQuotient, SubgroupQuotient
from torch import Tensor

from . import reference
from .cases import METRICS, arrays, gap, generator, group_element, point, rows


def _all(h: int) -> Tensor:
    return torch.eye(h * h, dtype=torch.float64).reshape(h * h, h, h)


def _rotary(h: int) -> Tensor:
    """Scaling and rotation of each pair (i, i + h/2)."""
    basis = torch.zeros(h, h, h, dtype=torch.float64)
    for i in range(h // 2):
        j = i + h // 2
        basis[i, i, i] = basis[i, j, j] = 1
        basis[j, i, j], basis[j, j, i] = 1, -1
    return basis


def _skew(h: int) -> Tensor:
    pairs = [(i, j) for i in range(h) for j in range(i)]
    basis = torch.zeros(len(pairs), h, h, dtype=torch.float64)
    for k, (i, j) in enumerate(pairs):
        basis[k, i, j], basis[k, j, i] = 1, -1
    return basis


@pytest.mark.parametrize("metric", METRICS)
def test_the_whole_algebra_gives_the_gl_quotient(metric: str | float) -> None:
    full = SubgroupQuotient(rows(4), _all(4), metric=metric)
    plain = GLQuotient(rows(4), metric=metric)
    x = point(4)
    u = torch.randn(x.shape, generator=generator(1), dtype=torch.float64)
    for method in ("proju", "egrad2rgrad", "retr", "expmap", "inner"):
        assert gap(getattr(full, method)(x, 0.1 * u), getattr(plain, method)(x, 0.1 * u)) < 1e-10
    assert gap(full.ehess2rhess(x, u, u, plain.proju(x, u)), plain.ehess2rhess(x, u, u, plain.proju(x, u))) < 1e-9


@pytest.mark.parametrize("algebra", [_rotary(4), _skew(4), torch.eye(4, dtype=torch.float64)[None]])
@pytest.mark.parametrize("metric", METRICS)
def test_projection_against_least_squares(metric: str | float, algebra: Tensor) -> None:
    """Dense least squares in the metric's own coordinates, and also where the operation changes gauge by itself."""
    manifold = SubgroupQuotient(rows(4), algebra, metric=metric)
    p = {"inv": 0.0, "mix": 1.0}.get(metric, 0.3) if isinstance(metric, str) else metric
    x = point(4, batch=())
    u = torch.randn(x.shape, generator=generator(1), dtype=torch.float64)
    (G, H), (a, b) = arrays(manifold, x, u)
    roots = [np.linalg.cholesky(weight) for weight in reference.weights(G, H, p)]
    columns = [np.concatenate([(-G @ E @ roots[0]).ravel(), (H @ E.T @ roots[1]).ravel()]) for E in algebra.numpy()]
    target = np.concatenate([(a @ roots[0]).ravel(), (b @ roots[1]).ravel()])
    weights = np.linalg.lstsq(np.stack(columns, 1), target, rcond=None)[0]
    field = np.einsum("k,kij->ij", weights, algebra.numpy())
    expected = torch.from_numpy(np.concatenate([a + G @ field, b - H @ field.T]))
    assert gap(manifold.proju(x, u), expected) < 1e-10
    up = manifold.vertical(x, algebra[0])
    assert float(manifold.norm(x, manifold.proju(x, up))) < 1e-10 * float(manifold.norm(x, up))
    # A direction of GL(h) outside the subgroup is not removed.
    other = manifold.vertical(x, torch.diag(torch.tensor([1.0, 2.0, -3.0, 5.0], dtype=torch.float64)))
    assert float(manifold.norm(x, manifold.proju(x, other))) > 0.1 * float(manifold.norm(x, other))


@pytest.mark.parametrize("metric", METRICS)
def test_invariance_under_the_subgroup_and_bad_gauges(metric: str | float) -> None:
    algebra = _rotary(4)
    manifold = SubgroupQuotient(rows(4), algebra, metric=metric, retraction="geodesic")
    # A badly conditioned gauge, then a move inside the subgroup.
    x = manifold.act(point(4), group_element(4, 1e4))
    assert manifold.at(x).change is not None  # type: ignore[attr-defined]
    up = manifold.vertical(x, algebra[1])
    assert float((manifold.norm(x, manifold.proju(x, up)) / manifold.norm(x, up)).max()) < 1e-8
    element = torch.linalg.matrix_exp(torch.einsum("k,kij->ij", torch.linspace(-1, 1, 4, dtype=torch.float64), algebra))
    u = manifold.random_tangent(x, generator=generator(2))
    u = 0.2 * u / manifold.norm(x, u, keepdim=True)
    moved, along = manifold.act(x, element), manifold.act_tangent(x, u, element)
    assert gap(manifold.proju(moved, along), along) < 1e-7
    assert gap(manifold.act(manifold.retr(x, u), element), manifold.retr(moved, along)) < 1e-7


def test_refusals() -> None:
    with pytest.raises(
        ValueError, match=r"algebra must be a basis of h x h matrices, shape \(r, h, h\), not \(4, 4\)\."
    ):
        SubgroupQuotient(6, torch.eye(4))
    with pytest.raises(ValueError, match="linearly dependent"):
        SubgroupQuotient(6, torch.eye(2).expand(2, 2, 2))
    manifold = SubgroupQuotient(rows(4), _rotary(4))
    with pytest.raises(ValueError, match=r"x must have h = 4 columns, as the matrices of algebra have, not 2\."):
        manifold.proju(torch.ones(20, 2), torch.ones(20, 2))
    with pytest.raises(ValueError, match="no logmap and no dist"):
        manifold.dist(point(4), point(4))
    with pytest.raises(ValueError, match="no canonical point"):
        manifold.canonical(point(4))
    assert "dim=4" in repr(manifold)
