"""The rescaling quotient: closed forms against the general GL(h) code and against elementary formulas."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from quotientsharp.manifolds import GLQuotient, Metric, RescalingQuotient, geodesics, gl

from .cases import gap, generator


def _random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=generator(seed), dtype=torch.float64)


@pytest.mark.parametrize("relaxation", [0.0, 0.3])
@pytest.mark.parametrize("metric", ["inv", "mix", 0.5, 0.3])
def test_closed_forms_equal_the_general_code(metric: str | float, relaxation: float) -> None:
    """h = 1 through eigh, Cholesky and the integrators against the closed forms."""
    n = 4
    manifold = RescalingQuotient(n, metric=metric, relaxation=relaxation)
    chosen = Metric.parse(metric, relaxation)
    x, u, v = _random(3, 7), 0.3 * _random(3, 7, seed=1), _random(3, 7, seed=2)
    G, H = x[:, :n, None], x[:, n:, None]

    def split(w: torch.Tensor) -> gl.Pair:
        return w[:, :n, None], w[:, n:, None]

    def pack(pair: gl.Pair) -> torch.Tensor:
        return torch.cat(pair, -2).squeeze(-1)

    frame = gl.factor(chosen, G, H, spectral=True)
    assert gap(manifold.inner(x, u, v), gl.inner(frame, split(u), split(v))) < 1e-12
    assert gap(manifold.proju(x, u), pack(gl.project(chosen, frame, (G, H), split(u)))) < 1e-12
    assert gap(manifold.christoffel(x, u), pack(gl.christoffel(chosen, frame, (G, H), split(u)))) < 1e-11
    assert gap(manifold.christoffel(x, u, v), pack(gl.christoffel(chosen, frame, (G, H), split(u), split(v)))) < 1e-11
    moved = gl.covariant_gradient(chosen, frame, (G, H), split(v), split(u), split(u))
    second = pack(gl.project(chosen, frame, (G, H), moved))
    assert gap(manifold.ehess2rhess(x, v, u, u), second) < 1e-10
    step = manifold.proju(x, u)
    path, _ = geodesics.geodesic(chosen, frame, (G, H), split(step), steps=8)
    assert gap(manifold.expmap(x, step), pack(path)) < 1e-10


@settings(max_examples=50, deadline=None)
@given(g=st.floats(0.1, 10), k=st.floats(0.1, 10), b=st.floats(-0.45, 0.9))
def test_scalar_pairs(g: float, k: float, b: float) -> None:
    """n = m = 1: inv multiplies both by exp(b), mix by sqrt(1 + 2 b)."""
    x = torch.tensor([g, k], dtype=torch.float64)
    u = b * x
    inv = RescalingQuotient(1, metric="inv").expmap(x, u)
    mix = RescalingQuotient(1, metric="mix").expmap(x, u)
    assert gap(inv, x * math.exp(b)) < 1e-13
    assert gap(mix, x * math.sqrt(1 + 2 * b)) < 1e-13


@settings(max_examples=50, deadline=None)
@given(metric=st.floats(0, 1, allow_subnormal=False), seed=st.integers(0, 10**6), length=st.floats(0.01, 0.5))
def test_logarithm_and_distance(metric: float, seed: int, length: float) -> None:
    manifold = RescalingQuotient(3, metric=metric)
    x = _random(2, 5, seed=seed)
    u = manifold.random_tangent(x, generator=generator(seed + 1))
    s = manifold.singular_values(x) ** metric
    u = u * s * (length / manifold.norm(x, u, keepdim=True))
    y = manifold.expmap(x, u)
    c = torch.tensor([-3.0, 0.01], dtype=torch.float64)
    assert gap(manifold.logmap(x, manifold.act(y, c)), u) < 1e-7
    assert gap(manifold.dist(manifold.act(x, c), y), manifold.norm(x, u)) < 1e-7
    assert float(manifold.dist(x, manifold.act(x, c)).max()) < 1e-7


def test_distance_through_the_apex_and_between_components() -> None:
    mix = RescalingQuotient(3, metric="mix")
    x = torch.tensor([1.0, 0, 0, 1, 0], dtype=torch.float64)
    y = torch.tensor([0.0, 1, 0, 0, 1], dtype=torch.float64)  # seen from the apex under the angle pi
    assert float(mix.dist(x, y)) == pytest.approx((1 + 1) / math.sqrt(2))
    assert math.isinf(float(RescalingQuotient(1).dist(torch.tensor([1.0, 1.0]), torch.tensor([1.0, -1.0]))))
    inv = RescalingQuotient(3, metric="inv")
    opposite = torch.tensor([-1.0, 0, 0, 1, 0], dtype=torch.float64)
    assert float(inv.dist(x, opposite)) == pytest.approx(math.pi)


def test_it_is_the_gl1_quotient() -> None:
    flat, column = RescalingQuotient(4, metric="mix"), GLQuotient(4, metric="mix")
    x = _random(3, 7)
    u = flat.proju(x, _random(3, 7, seed=1)) * 0.2
    assert torch.equal(flat.expmap(x, u), column.expmap(x[..., None], u[..., None])[..., 0])
    assert flat.inner(x, u, keepdim=True).shape == (3, 1)
    assert torch.equal(flat.dist(x, flat.expmap(x, u)), column.dist(x[..., None], flat.expmap(x, u)[..., None]))
    balanced = flat.canonical(flat.act(x, torch.tensor([2.0, -5.0, 0.1], dtype=torch.float64)))
    assert gap(balanced, flat.canonical(x)) < 1e-13
    assert gap(balanced[:, :4].norm(dim=-1), balanced[:, 4:].norm(dim=-1)) < 1e-13
    assert gap(flat.product(balanced), flat.product(x)) < 1e-13
    up = flat.vertical(x, torch.ones(3, dtype=torch.float64))
    assert float(flat.proju(x, up).abs().max()) < 1e-14
    assert gap(flat.act_tangent(x, up, torch.full((3,), 2.0, dtype=torch.float64))[:, 4:], 2 * up[:, 4:]) < 1e-14
