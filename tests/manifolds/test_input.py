"""Bad input gets one sentence that names the argument and what would do."""

from __future__ import annotations

import re

import geoopt
import numpy as np
import pytest
import torch
from quotientsharp.manifolds import GLQuotient, PymanoptGLQuotient, PymanoptRescalingQuotient, RescalingQuotient

from .cases import gap, group_element, point, rows, tangent


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"n": 0}, "n must be a positive integer, the number of rows of G, not 0."),
        ({"n": 2.0}, "n must be a positive integer, the number of rows of G, not 2.0."),
        ({"n": 3, "metric": "flat"}, "metric must be 'inv', 'mix' or a number between 0 and 1, not 'flat'."),
        ({"n": 3, "metric": 1.5}, "metric must be 'inv', 'mix' or a number between 0 and 1, not 1.5."),
        ({"n": 3, "metric": float("nan")}, "metric must be 'inv', 'mix' or a number between 0 and 1, not nan."),
        ({"n": 3, "relaxation": -1}, "relaxation must be a finite number that is not negative, not -1."),
        ({"n": 3, "retraction": "qr"}, "retraction must be one of 'first_order', 'christoffel', 'geodesic', not 'qr'."),
    ],
)
@pytest.mark.parametrize("kind", [GLQuotient, RescalingQuotient])
def test_constructors(kind: type, arguments: dict[str, object], sentence: str) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)):
        kind(**arguments)


def test_pymanopt_constructors_and_points() -> None:
    with pytest.raises(ValueError, match=re.escape("h must be at most min(n, m) = min(5, 3), not 4.")):
        PymanoptGLQuotient(5, 3, 4)
    with pytest.raises(ValueError, match=r"units must be a positive integer, not 0\."):
        PymanoptRescalingQuotient(5, 3, 0)
    manifold = PymanoptGLQuotient(5, 4, 2)
    with pytest.raises(ValueError, match=re.escape("shapes (5, 2) and (4, 2), not (5, 2) and (5, 2).")):
        manifold.retraction((np.ones((5, 2)), np.ones((5, 2))), manifold.zero_vector(manifold.random_point()))


@pytest.mark.parametrize(
    ("shape", "sentence"),
    [
        ((5, 2), "x must have more than n = 6 rows (G above H), but it has 5."),
        ((9, 4), "x has h = 4 columns, but h must be at most min(n, m) = min(6, 3)."),
        ((9,), "x must have the shape (..., n + m, h) with n = 6, but it is (9,)."),
    ],
)
def test_shapes(shape: tuple[int, ...], sentence: str) -> None:
    manifold = GLQuotient(6)
    x = torch.ones(shape)
    for call in (
        lambda: manifold.expmap(x, x),
        lambda: manifold.proju(x, x),
        lambda: manifold.product(x),
        lambda: manifold.assert_check_point(x),
        lambda: geoopt.ManifoldParameter(x, manifold=manifold),
    ):
        with pytest.raises(ValueError, match=re.escape(sentence)):
            call()


def test_factors_that_do_not_fit() -> None:
    manifold = GLQuotient(6)
    with pytest.raises(ValueError, match=re.escape("G must have 6 rows")):
        manifold.pack_point(torch.ones(5, 2), torch.ones(6, 2))
    with pytest.raises(ValueError, match=re.escape("G and H must share h and batch axes, not (6, 2), (7, 3).")):
        manifold.pack_point(torch.ones(6, 2), torch.ones(7, 3))
    with pytest.raises(ValueError, match=r"takes the two factors G and H, not 1 tensors\."):
        manifold.pack_point(torch.ones(6, 2))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("metric", ["inv", "mix", 0.5])
def test_rank_loss_names_the_head_and_the_singular_value(metric: str | float, dtype: torch.dtype) -> None:
    manifold = GLQuotient(rows(4), metric=metric)
    x = point(4, batch=(2, 3)).to(dtype)
    x[1, 2, : rows(4), 3] = x[1, 2, : rows(4), :3].sum(-1)  # the last column of G depends on the others
    u = torch.ones_like(x)
    pattern = r"x\[1, 2\] has rank 3, not 4: singular value 4 of G H\^T is .* projx\(x\) gives"
    for call in (manifold.proju, manifold.expmap, manifold.inner, manifold.retr):
        with pytest.raises(ValueError, match=pattern):
            call(x, u)
    ok, reason = manifold.check_point_on_manifold(x, explain=True)
    assert not ok
    assert reason is not None
    assert "rank 3" in reason
    repaired = manifold.projx(x)
    assert manifold.check_point_on_manifold(repaired)
    assert gap(manifold.product(repaired), manifold.product(x)) < 1e-4
    untouched = torch.ones(2, 3, dtype=torch.bool)
    untouched[1, 2] = False
    assert torch.equal(repaired[untouched], x[untouched])


def test_rank_zero_and_nan() -> None:
    manifold = GLQuotient(5)
    x = point(2)[:, :9].clone()
    x[1] = 0
    with pytest.raises(ValueError, match=r"x\[1\] has rank 0, not 2"):
        manifold.proju(x, x)
    assert manifold.check_point_on_manifold(manifold.projx(x))
    x[1, 3, 1] = float("nan")
    with pytest.raises(ValueError, match=r"x\[1\] holds NaN or infinite entries; every weight must be finite."):
        manifold.retr(x, x)
    flat = RescalingQuotient(2)
    y = torch.tensor([[1.0, 2.0, 3.0], [0.0, 0.0, 3.0]])
    with pytest.raises(ValueError, match=r"x\[1\] has rank 0, not 1"):
        flat.proju(y, y)
    assert flat.check_point_on_manifold(flat.projx(y))
    assert torch.equal(flat.projx(y)[0], y[0])
    y[0, 0] = float("inf")
    with pytest.raises(ValueError, match=r"x\[0\] holds NaN or infinite"):
        flat.inner(y, y)


def test_vectors_are_checked() -> None:
    manifold = GLQuotient(rows(3))
    x = point(3)
    u = tangent(manifold, x)
    manifold.assert_check_vector_on_tangent(x, u)
    up = manifold.vertical(x, torch.eye(3, dtype=torch.float64).expand(2, 3, 3))
    with pytest.raises(ValueError, match=r"u\[0\] is not horizontal; proju\(x, u\) is."):
        manifold.assert_check_vector_on_tangent(x, u + up)
    u[1, 0, 0] = float("nan")
    with pytest.raises(ValueError, match=r"u\[1\] holds NaN or infinite entries."):
        manifold.assert_check_vector_on_tangent(x, u)


@pytest.mark.parametrize("h", [1, 2, 4])
def test_a_mix_geodesic_that_ends_says_when(h: int) -> None:
    """Shrinking G H^T to zero takes the mix geodesic 1/2 of this step; inv never gets there."""
    x = torch.cat([torch.eye(h + 2, h), torch.eye(h + 1, h)]).double().expand(3, 2 * h + 3, h).clone()
    u = -x  # W' = -2 W, so W(t) = (1 - 2 t) W
    u[0] *= 0.1
    manifold = GLQuotient(h + 2, metric="mix")
    with pytest.raises(ValueError, match=r"geodesic of x\[1\] under metric 'mix' leaves the manifold .* t = 0\.5"):
        manifold.expmap(x, u)
    assert bool(GLQuotient(h + 2, metric="inv").expmap(x, u).isfinite().all())
    assert gap(manifold.product(manifold.expmap(x[:1], u[:1])), 0.8 * manifold.product(x[:1])) < 1e-12


def test_bad_gauges_are_left_silently_in_float32() -> None:
    """A float32 point whose Gram matrices are singular in float32 is still a point, and treated as one."""
    manifold = GLQuotient(rows(8), metric="inv")
    x = point(8)
    A = group_element(8, 1e5)
    moved = manifold.act(x, A).float()
    u = tangent(manifold, x)
    exact = manifold.inner(x, u)
    assert gap(manifold.inner(moved, manifold.act_tangent(x, u, A).float()).double(), exact) < 2e-2


@pytest.mark.parametrize("retraction", ["first_order", "christoffel", "geodesic"])
@pytest.mark.parametrize(
    ("manifold", "shape"), [(GLQuotient, (11, 3)), (GLQuotient, (11, 1)), (RescalingQuotient, (11,))]
)
def test_vectors_that_do_not_fit(manifold: type, shape: tuple[int, ...], retraction: str) -> None:
    """One row less would still multiply in places: it must not give a number."""
    quotient = manifold(6, retraction=retraction)
    x = quotient.random(2, *shape)
    wrong = torch.ones(2, 10, *shape[1:])
    for method in ("retr", "expmap", "proju", "inner", "egrad2rgrad", "christoffel"):
        with pytest.raises(
            ValueError, match=r"u must have the shape \(\.\.\., 11.*\) of its point x, but it is \(2, 10"
        ):
            getattr(quotient, method)(x, wrong)
        with pytest.raises(ValueError, match=r"u must be of floating point, not torch\.int64\."):
            getattr(quotient, method)(x, torch.ones(x.shape, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"x must be of floating point, not torch\.int64\."):
        quotient.proju(torch.ones(x.shape, dtype=torch.int64), x)


@pytest.mark.parametrize("metric", ["inv", "mix", 0.5])
def test_empty_batches(metric: str | float) -> None:
    manifold = GLQuotient(6, metric=metric)
    x = torch.zeros(0, 11, 3)
    for method in ("retr", "expmap", "proju", "egrad2rgrad", "logmap"):
        assert getattr(manifold, method)(x, x).shape == x.shape
    assert manifold.dist(x, x).shape == (0,)
    assert manifold.canonical(x).shape == manifold.projx(x).shape == x.shape
