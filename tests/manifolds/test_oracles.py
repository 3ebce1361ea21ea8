"""Oracles 1 to 6 of the geometry: exact geodesics, orders, equivariance, projection."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from quotientsharp.manifolds import GLQuotient, RescalingQuotient

from . import reference
from .cases import (
    METRICS,
    PAPER_METRICS,
    RETRACTIONS,
    SIZES,
    arrays,
    gap,
    generator,
    group_element,
    point,
    rows,
    tangent,
)

PRECISIONS = [(torch.float64, 1.0), (torch.float32, 1e6)]  # dtype and what it multiplies a float64 tolerance by


@pytest.mark.parametrize(("dtype", "loss"), PRECISIONS)
@pytest.mark.parametrize("h", SIZES)
@pytest.mark.parametrize("metric", PAPER_METRICS)
def test_geodesic_solves_the_geodesic_equation(metric: str, h: int, dtype: torch.dtype, loss: float) -> None:
    """Oracle 1 (and the same for mix): the exponential map against DOP853 with the printed Christoffel terms."""
    manifold = GLQuotient(rows(h), metric=metric)
    x = point(h)
    u = tangent(manifold, x)
    y = manifold.expmap(x.to(dtype), u.to(dtype)).double()
    for i in range(2):
        (G, H), (a, b) = arrays(manifold, x[i], u[i])
        expected = np.concatenate(reference.geodesic(G, H, a, b, metric))
        assert np.abs(y[i].numpy() - expected).max() < 1e-10 * loss


@pytest.mark.parametrize("h", [1, 2, 8, 64])
@pytest.mark.parametrize("dtype_loss", PRECISIONS)
def test_mix_is_flat_for_square_factors(h: int, dtype_loss: tuple[torch.dtype, float]) -> None:
    """Oracle 2: for n = m = h the product moves on a straight line and |u|^2 = |W'|^2 / 2."""
    dtype, loss = dtype_loss
    manifold = GLQuotient(h, metric="mix")
    x = torch.linalg.qr(torch.randn(3, h, h, generator=generator(0), dtype=torch.float64)).Q.repeat(1, 2, 1)
    x = x + 0.05 / h**0.5 * torch.randn(x.shape, generator=generator(1), dtype=torch.float64)
    u = tangent(manifold, x, 0.3)
    (G, H), (a, b) = manifold.unpack_tensor(x), manifold.unpack_tensor(u)
    speed = a @ H.mT + G @ b.mT
    y = manifold.expmap(x.to(dtype), u.to(dtype)).double()
    assert gap(manifold.product(y), manifold.product(x) + speed) < 1e-10 * loss
    square = manifold.inner(x.to(dtype), u.to(dtype)).double()
    assert gap(square, speed.square().sum((-2, -1)) / 2) < 1e-12 * loss


def _cone(g: np.ndarray, k: np.ndarray, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The product at time 1 by the cone formula of the rescaling quotient, entry by entry."""
    W, speed = np.outer(g, k), np.outer(a, k) + np.outer(g, b)
    s = np.linalg.norm(g) * np.linalg.norm(k)
    u, v = g / np.linalg.norm(g), k / np.linalg.norm(k)
    rate = u @ speed @ v
    du, dv = (speed @ v - rate * u) / s, (speed.T @ u - rate * v) / s
    c = np.sqrt(2 * (du @ du + dv @ dv))
    z = s + rate + 1j * s * c
    angle = np.angle(z) / c
    turned = [
        np.cos(angle * np.linalg.norm(d)) * e + np.sin(angle * np.linalg.norm(d)) * d / np.linalg.norm(d)
        for e, d in ((u, du), (v, dv))
    ]
    assert W.shape == speed.shape
    return np.abs(z) * np.outer(*turned)


@pytest.mark.parametrize(("dtype", "loss"), PRECISIONS)
def test_mix_with_one_column_is_a_cone(dtype: torch.dtype, loss: float) -> None:
    """Oracle 3, first half, far out: a step as long as the point."""
    manifold = RescalingQuotient(4, metric="mix")
    x = torch.randn(5, 7, generator=generator(0), dtype=torch.float64)
    u = manifold.proju(x, torch.randn(5, 7, generator=generator(1), dtype=torch.float64))
    y = manifold.product(manifold.expmap(x.to(dtype), u.to(dtype))).double()
    for i in range(5):
        expected = _cone(x[i, :4].numpy(), x[i, 4:].numpy(), u[i, :4].numpy(), u[i, 4:].numpy())
        assert np.abs(y[i].numpy() - expected).max() < 1e-12 * loss * max(1.0, np.abs(expected).max())


@pytest.mark.parametrize("metric", [*METRICS, 0.2])
@pytest.mark.parametrize("h", SIZES)
def test_speed_and_horizontality_are_kept_along_geodesics(metric: str | float, h: int) -> None:
    """Oracle 3, second half: the velocity, from differences of the path, keeps its length and stays horizontal."""
    manifold = GLQuotient(rows(h), metric=metric)
    x = point(h)
    u = tangent(manifold, x, 0.3)
    step = 1e-3
    for t in (0.25, 0.75):
        around = [manifold.expmap(x, (t + k * step) * u) for k in (-2, -1, 1, 2)]
        velocity = (around[0] - 8 * around[1] + 8 * around[2] - around[3]) / (12 * step)
        y = manifold.expmap(x, t * u)
        assert gap(manifold.norm(y, velocity), torch.full((2,), 0.3, dtype=torch.float64)) < 1e-9
        assert float((manifold.proju(y, velocity) - velocity).abs().max()) < 1e-9


@pytest.mark.parametrize("h", SIZES)
@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize(("retraction", "order"), [("first_order", 2), ("christoffel", 3)])
def test_order_of_retractions(metric: str | float, h: int, retraction: str, order: int) -> None:
    """Oracle 4: the error on G H^T against the geodesic falls as t^2 and t^3."""
    manifold = GLQuotient(rows(h), metric=metric, retraction=retraction)
    x = point(h)
    u = tangent(manifold, x, 1.0)
    times = [0.02, 0.01, 0.005]
    errors = [
        float((manifold.product(manifold.retr(x, t * u)) - manifold.product(manifold.expmap(x, t * u))).norm())
        for t in times
    ]
    slope = np.polyfit(np.log(times), np.log(errors), 1)[0]
    assert slope == pytest.approx(order, abs=0.1)


@pytest.mark.parametrize(("dtype", "condition", "tolerance"), [(torch.float64, 1e4, 1e-10), (torch.float32, 1e2, 1e-3)])
@pytest.mark.parametrize("h", SIZES)
@pytest.mark.parametrize("retraction", RETRACTIONS)
@pytest.mark.parametrize("metric", METRICS)
def test_equivariance(
    metric: str | float, retraction: str, h: int, dtype: torch.dtype, condition: float, tolerance: float
) -> None:
    """Oracle 5: retr(x.A, u.A) = retr(x, u).A, also where A is as badly conditioned as the dtype bears."""
    manifold = GLQuotient(rows(h), metric=metric, retraction=retraction)
    x = point(h)
    u = tangent(manifold, x)
    A = group_element(h, condition)
    moved = manifold.retr(manifold.act(x, A).to(dtype), manifold.act_tangent(x, u, A).to(dtype)).double()
    still = manifold.retr(x, u)
    assert gap(manifold.product(moved), manifold.product(still)) < tolerance
    assert gap(manifold.act(moved, torch.linalg.inv(A)), still) < tolerance * 10


@settings(max_examples=40, deadline=None)
@given(
    h=st.integers(1, 6),
    extra=st.tuples(st.integers(0, 4), st.integers(0, 4)),
    metric=st.one_of(st.sampled_from(["inv", "mix"]), st.floats(0, 1)),
    relaxation=st.sampled_from([0.0, 0.1]),
    exponent=st.floats(0, 4),
    seed=st.integers(0, 10**6),
)
def test_projection_laws_hold_everywhere(
    h: int, extra: tuple[int, int], metric: str | float, relaxation: float, exponent: float, seed: int
) -> None:
    """Oracle 6: idempotent, self-adjoint, kills vertical vectors, equivariant; at any point of any orbit."""
    n, m = h + extra[0], h + extra[1]
    manifold = GLQuotient(n, metric=metric, relaxation=relaxation)
    gen = generator(seed)
    x = torch.eye(n + m, h, dtype=torch.float64) + 0.3 * torch.randn(n + m, h, generator=gen, dtype=torch.float64)
    x[n : n + h] += torch.eye(h, dtype=torch.float64)
    if float(manifold.singular_values(x)[-1]) < 0.05:
        return
    A = group_element(h, 10**exponent, batch=(), seed=seed)
    y = manifold.act(x, A)
    u, v = torch.randn(2, n + m, h, generator=gen, dtype=torch.float64)
    pu, pv = manifold.proju(x, u), manifold.proju(x, v)
    scale = float(manifold.norm(x, u) * manifold.norm(x, v))
    assert gap(manifold.proju(x, pu), pu) < 1e-10
    assert abs(float(manifold.inner(x, pu, v) - manifold.inner(x, u, pv))) < 1e-10 * scale
    L = torch.randn(h, h, generator=gen, dtype=torch.float64)
    up = manifold.vertical(x, L)
    assert float(manifold.norm(x, manifold.proju(x, up))) < 1e-10 * float(manifold.norm(x, up))
    loss = 1e-12 * 10**exponent * 100
    assert gap(manifold.proju(y, manifold.act_tangent(x, u, A)), manifold.act_tangent(x, pu, A)) < loss
    assert float(manifold.inner(y, manifold.act_tangent(x, u, A))) == pytest.approx(
        float(manifold.inner(x, u)), rel=loss
    )


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-11), (torch.float32, 1e-4)])
@pytest.mark.parametrize("h", SIZES)
def test_inv_projection_equals_sylvester(h: int, dtype: torch.dtype, tolerance: float) -> None:
    """Oracle 6: the projection through Cholesky and eigh against scipy.linalg.solve_sylvester."""
    manifold = GLQuotient(rows(h), metric="inv")
    x = point(h)
    u = torch.randn(x.shape, generator=generator(5), dtype=torch.float64)
    projected = manifold.proju(x.to(dtype), u.to(dtype)).double()
    for i in range(2):
        (G, H), (a, b) = arrays(manifold, x[i], u[i])
        expected = np.concatenate(reference.project_inv(G, H, a, b))
        assert np.abs(projected[i].numpy() - expected).max() < tolerance * np.abs(expected).max()


@pytest.mark.parametrize("relaxation", [0.0, 0.2])
@pytest.mark.parametrize("metric", ["inv", "mix", 0.5, 0.3])
@pytest.mark.parametrize("h", [2, 5])
def test_dense_reference(h: int, metric: str | float, relaxation: float) -> None:
    """Inner product, gradient, projection and Christoffel term of every metric against dense linear algebra."""
    manifold = GLQuotient(rows(h), metric=metric, relaxation=relaxation)
    p = {"inv": 0.0, "mix": 1.0}.get(metric, metric) if isinstance(metric, str) else metric
    x = point(h, batch=())
    u, v = torch.randn(2, *x.shape, generator=generator(5), dtype=torch.float64)
    (G, H), (a, b), (c, d) = arrays(manifold, x, u, v)
    assert float(manifold.inner(x, u, v)) == pytest.approx(
        reference.inner(G, H, (a, b), (c, d), p, relaxation), rel=1e-10
    )
    expected = np.concatenate(reference.project_dense(G, H, a, b, p, relaxation))
    assert np.abs(manifold.proju(x, u).numpy() - expected).max() < 1e-10
    K, L = reference.weights(G, H, p, relaxation)
    raw = reference.project_dense(G, H, a @ np.linalg.inv(K), b @ np.linalg.inv(L), p, relaxation)
    assert np.abs(manifold.egrad2rgrad(x, u).numpy() - np.concatenate(raw)).max() < 1e-9
    bend = np.concatenate(reference.christoffel_by_differences(G, H, a, b, p, relaxation))
    assert np.abs(manifold.christoffel(x, u).numpy() - bend).max() < 1e-6 * max(1.0, np.abs(bend).max())
    both = manifold.christoffel(x, u + v) - manifold.christoffel(x, u) - manifold.christoffel(x, v)
    assert gap(2 * manifold.christoffel(x, u, v), both) < 1e-11


@pytest.mark.parametrize("metric", [0.0, 1.0])
def test_the_family_meets_its_ends(metric: float) -> None:
    """The general formulas at exponents next to 0 and 1 agree with the special ones of inv and mix."""
    near = GLQuotient(rows(4), metric=abs(metric - 1e-9))
    end = GLQuotient(rows(4), metric=metric)
    assert end.metric == ("inv" if metric == 0 else "mix")
    x = point(4)
    u = torch.randn(x.shape, generator=generator(5), dtype=torch.float64)
    for method in ("inner", "proju", "christoffel", "egrad2rgrad"):
        assert gap(getattr(near, method)(x, u), getattr(end, method)(x, u)) < 1e-7


@pytest.mark.parametrize("metric", [*METRICS, 0.2])
@pytest.mark.parametrize("h", [1, 2, 8])
def test_logarithm_inverts_the_exponential_and_distance_is_invariant(metric: str | float, h: int) -> None:
    manifold = GLQuotient(rows(h), metric=metric)
    x = point(h)
    u = tangent(manifold, x, 0.4)
    y = manifold.expmap(x, u)
    A, C = group_element(h, 50, seed=4), group_element(h, 100, seed=5)
    assert gap(manifold.logmap(x, manifold.act(y, A)), u) < 1e-9
    distance = manifold.dist(manifold.act(x, C), manifold.act(y, A))
    assert gap(distance, torch.full((2,), 0.4, dtype=torch.float64)) < 1e-9
    assert gap(manifold.dist(y, x), distance) < 1e-9
    assert float(manifold.dist(x, manifold.act(x, A)).max()) < 1e-11


def test_distance_between_unrelated_points() -> None:
    """Far points: for mix with square factors the distance is |W_y - W_x| / sqrt 2 wherever the line keeps its rank."""
    manifold = GLQuotient(4, metric="mix")
    gen = generator(3)
    x = torch.cat([torch.eye(4, dtype=torch.float64)] * 2).expand(3, 8, 4)
    other = x + 0.25 * torch.randn(3, 8, 4, generator=gen, dtype=torch.float64)
    line = (manifold.product(other) - manifold.product(x)).square().sum((-2, -1)).div(2).sqrt()
    assert gap(manifold.dist(x, other), line) < 1e-9


@pytest.mark.parametrize("metric", METRICS)
def test_canonical_point_is_balanced_and_unique(metric: str | float) -> None:
    manifold = GLQuotient(rows(8), metric=metric)
    x = point(8)
    balanced = manifold.canonical(x)
    G, H = manifold.unpack_tensor(balanced)
    s = torch.linalg.svdvals(manifold.product(x))[..., :8]
    assert gap(G.mT @ G, torch.diag_embed(s)) < 1e-12
    assert gap(H.mT @ H, torch.diag_embed(s)) < 1e-12
    assert gap(manifold.product(balanced), manifold.product(x)) < 1e-12
    assert gap(manifold.canonical(manifold.act(x, group_element(8, 100))), balanced) < 1e-9
    assert gap(manifold.canonical(balanced), balanced) < 1e-12


def test_canonical_point_with_equal_singular_values() -> None:
    """With equal singular values the balanced point is not unique, but it is balanced and on the orbit."""
    manifold = GLQuotient(5)
    x = manifold.act(manifold.origin(9, 3, dtype=torch.float64), group_element(3, 30, batch=()))
    balanced = manifold.canonical(x)
    G, _ = manifold.unpack_tensor(balanced)
    assert gap(G.mT @ G, torch.eye(3, dtype=torch.float64)) < 1e-12
    assert gap(manifold.product(balanced), manifold.product(x)) < 1e-12


def test_relaxation_is_invariant_and_bounds_the_weights() -> None:
    """At a nearly singular point the relaxed norm stays bounded, and it is the same on the whole orbit."""
    G = torch.eye(6, 3, dtype=torch.float64) * torch.tensor([1.0, 1.0, 1e-4], dtype=torch.float64)
    x = torch.cat([G, G[:5]])
    u = torch.ones_like(x)
    plain, relaxed = GLQuotient(6, metric="inv"), GLQuotient(6, metric="inv", relaxation=0.1)
    assert float(plain.inner(x, u)) > 1e8
    # Column j is weighed by 1 / (s_j + 0.1 s_max), s = (1, 1, 1e-8).
    assert float(relaxed.inner(x, u)) == pytest.approx(11 * (2 / 1.1 + 1 / (0.1 + 1e-8)), rel=1e-6)
    A = group_element(3, 1000, batch=())
    moved = relaxed.inner(relaxed.act(x, A), relaxed.act_tangent(x, u, A))
    assert float(moved) == pytest.approx(float(relaxed.inner(x, u)), rel=1e-6)


@pytest.mark.parametrize("relaxation", [0.0, 0.2])
def test_nearly_equal_singular_values(relaxation: float) -> None:
    """Inside the family the Christoffel term is as accurate where singular values almost meet as where they do meet."""
    manifold = GLQuotient(6, metric=0.3, relaxation=relaxation)
    s = torch.tensor([2.0, 1.0, 1.0], dtype=torch.float64)
    u = torch.randn(11, 3, generator=generator(1), dtype=torch.float64)

    def bend(values: torch.Tensor) -> torch.Tensor:
        factors = [torch.eye(size, 3, dtype=torch.float64) * values.sqrt() for size in (6, 5)]
        return manifold.christoffel(torch.cat(factors), u)

    near = s + torch.tensor([0.0, 1e-13, 0.0], dtype=torch.float64)
    assert gap(bend(near), bend(s)) < 1e-10


@pytest.mark.parametrize("retraction", RETRACTIONS)
@pytest.mark.parametrize("metric", METRICS)
def test_transported_vectors_are_horizontal_where_they_arrive(metric: str | float, retraction: str) -> None:
    manifold = GLQuotient(rows(4), metric=metric, retraction=retraction)
    x = point(4)
    u, v = tangent(manifold, x), tangent(manifold, x, 1.0, seed=9)
    y, moved = manifold.retr_transp(x, u, v)
    assert torch.equal(y, manifold.retr(x, u))
    manifold.assert_check_vector_on_tangent(y, moved, atol=1e-11, rtol=1e-11)
    assert not manifold.check_vector_on_tangent(y, v, atol=1e-4, rtol=1e-4)
    # A short step hardly changes the vector, a long one changes it by the order of the step.
    assert 1e-3 < float(manifold.norm(y, moved - v).max()) < 1
    for name, end in (("transp_follow_retr", y), ("transp_follow_expmap", manifold.expmap(x, u))):
        assert gap(getattr(manifold, name)(x, u, v), manifold.proju(end, v)) < 1e-12


def test_random_points_and_the_origin() -> None:
    manifold = GLQuotient(200)
    x = manifold.random((3, 500, 4), dtype=torch.float64, generator=generator(0))
    assert gap(manifold.singular_values(x), torch.ones(3, 4, dtype=torch.float64)) < 0.5
    assert torch.equal(manifold.singular_values(manifold.origin(500, 4)), torch.ones(4))
    assert torch.equal(RescalingQuotient(2).origin((2, 5)), torch.tensor([[1.0, 0, 1, 0, 0]] * 2))
    u = manifold.random_tangent(x, generator=generator(1))
    manifold.assert_check_vector_on_tangent(x, u)
    moved = manifold.act(x, group_element(4, 100, batch=(3,)))
    assert gap(manifold.norm(moved, manifold.random_tangent(moved, generator=generator(1))), manifold.norm(x, u)) < 1e-8
