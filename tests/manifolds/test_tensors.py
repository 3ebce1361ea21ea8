"""Devices, dtypes, autograd, vmap: the core is plain batched torch."""

from __future__ import annotations

import copy
from collections.abc import Callable

import geoopt
import pytest
import torch
from quotientsharp.manifolds import GLQuotient, Metric, RescalingQuotient, geodesics, gl, rescaling
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from .cases import METRICS, RETRACTIONS, gap, generator, point, rows, tangent

METHODS = ("inner", "norm", "proju", "egrad2rgrad", "christoffel", "retr", "expmap")


def _all_methods(manifold: GLQuotient, x: Tensor, u: Tensor) -> list[Tensor]:
    results = [getattr(manifold, name)(x, u) for name in METHODS]
    y = manifold.retr(x, u)
    results += [manifold.transp(x, y, u), *manifold.retr_transp(x, u, u), *manifold.expmap_transp(x, u, u)]
    results += [
        manifold.ehess2rhess(x, u, u, u),
        manifold.canonical(x),
        manifold.projx(x),
        manifold.component_inner(x, u),
    ]
    return results


@pytest.mark.parametrize("relaxation", [0.0, 0.1])
@pytest.mark.parametrize("retraction", RETRACTIONS)
@pytest.mark.parametrize("metric", METRICS)
def test_fake_cuda_tensors(metric: str | float, retraction: str, relaxation: float) -> None:
    """Every method on CUDA tensors without a GPU: mixed devices or a read-back in the core would raise."""
    with FakeTensorMode():
        for manifold, shape in (
            (GLQuotient(9, metric=metric, retraction=retraction, relaxation=relaxation), (4, 16, 3)),
            (GLQuotient(9, metric=metric, retraction=retraction, relaxation=relaxation), (4, 16, 1)),
            (RescalingQuotient(9, metric=metric, retraction=retraction, relaxation=relaxation), (4, 16)),
        ):
            x, u = torch.empty(shape, device="cuda"), torch.empty(shape, device="cuda")
            for result in _all_methods(manifold, x, u):
                assert result.device.type == "cuda"
            assert manifold.random(*shape, device="cuda").device.type == "cuda"
            assert manifold.origin(shape, device="cuda").device.type == "cuda"


@pytest.mark.parametrize("metric", METRICS)
def test_core_reads_nothing_back(metric: str | float) -> None:
    """The pure functions alone, where no input is judged: a data-dependent call raises under FakeTensorMode."""
    chosen = Metric.parse(metric)
    with FakeTensorMode():
        G, H = torch.empty(4, 9, 3, device="cuda"), torch.empty(4, 7, 3, device="cuda")
        x, u = (G, H), (torch.empty_like(G), torch.empty_like(H))
        frame = gl.factor(chosen, G, H, spectral=True)
        for pair in (
            gl.gradient(frame, u),
            gl.project(chosen, frame, x, u),
            gl.christoffel(chosen, frame, x, u),
            gl.christoffel(chosen, frame, x, u, x),
            gl.covariant_gradient(chosen, frame, x, u, u, u),
            gl.lift(chosen, frame, x, u),
            geodesics.closed_form(frame, x, u),
            geodesics.split_flow(frame, x, u).point,
            geodesics.geodesic(chosen, frame, x, u)[0],
        ):
            assert pair[0].shape == G.shape
            assert pair[1].device.type == "cuda"
        g, k = torch.empty(4, 9, device="cuda"), torch.empty(4, 7, device="cuda")
        flat = rescaling.factor(chosen, g, k)
        assert rescaling.geodesic(chosen, flat, (g, k), (g, k))[0][0].device.type == "cuda"
        assert rescaling.logarithm(chosen, flat, (g, k), (g, k))[1].shape == (4,)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("retraction", RETRACTIONS)
@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("h", [1, 4, 64])
def test_half_precision(dtype: torch.dtype, metric: str | float, retraction: str, h: int) -> None:
    manifold = GLQuotient(rows(h), metric=metric, retraction=retraction)
    x = point(h)
    u = tangent(manifold, x, 0.2)
    exact = manifold.product(manifold.retr(x, u))
    half = _all_methods(manifold, x.to(dtype), u.to(dtype))
    assert all(result.dtype == dtype and bool(result.isfinite().all()) for result in half)
    rough = manifold.product(manifold.retr(x.to(dtype), u.to(dtype)).double())
    assert gap(rough, exact) < 20 * torch.finfo(dtype).eps


def _differentiable(h: int) -> tuple[Tensor, Tensor]:
    x = point(h, batch=()).requires_grad_()
    u = (0.2 * torch.randn(x.shape, generator=generator(3), dtype=torch.float64)).requires_grad_()
    return x, u


@pytest.mark.parametrize("method", ["inner", "retr", "expmap", "proju"])
@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("h", [1, 2])
def test_gradients(metric: str | float, method: str, h: int) -> None:
    manifold = GLQuotient(rows(h), metric=metric)
    x, u = _differentiable(h)
    assert torch.autograd.gradcheck(getattr(manifold, method), (x, u))


@pytest.mark.parametrize("method", ["inner", "retr", "expmap", "proju"])
@pytest.mark.parametrize("metric", ["inv", "mix"])
def test_gradients_where_singular_values_meet(metric: str, method: str) -> None:
    """At equal singular values eigenvectors have no derivative; the operations have, and double backward too."""
    manifold = GLQuotient(3, metric=metric)
    x = manifold.origin(5, 2, dtype=torch.float64).requires_grad_()
    u = (0.2 * torch.randn(5, 2, generator=generator(3), dtype=torch.float64)).requires_grad_()
    assert torch.autograd.gradcheck(getattr(manifold, method), (x, u))
    assert torch.autograd.gradgradcheck(getattr(manifold, method), (x, u))


@pytest.mark.parametrize("metric", METRICS)
def test_gradients_through_a_bad_gauge(metric: str | float) -> None:
    """Where the operation moves to a better gauge by itself, the derivative is still that of the point given."""
    manifold = GLQuotient(5, metric=metric)
    x = manifold.act(point(2, batch=())[: 5 + 4].clone(), torch.tensor([[30.0, 1.0], [30.0, 1.1]]).double())
    assert manifold.at(x).change is not None  # type: ignore[attr-defined]
    u = manifold.random_tangent(x, generator=generator(1)) * 0.1
    assert torch.autograd.gradcheck(manifold.retr, (x.requires_grad_(), u.requires_grad_()), atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("h", [1, 3])
def test_vmap_equals_the_batch(metric: str | float, h: int) -> None:
    manifold = GLQuotient(rows(h), metric=metric)
    x = point(h, batch=(4,))
    u = tangent(manifold, x, 0.2)
    for name in METHODS:
        method: Callable[[Tensor, Tensor], Tensor] = getattr(manifold, name)
        assert gap(torch.func.vmap(method)(x, u), method(x, u)) < 1e-12


def test_batches_broadcast_and_keep_their_shape() -> None:
    manifold = GLQuotient(rows(3))
    x = point(3, batch=(2, 4))
    u = tangent(manifold, x)
    for i in range(2):
        assert gap(manifold.retr(x, u)[i], manifold.retr(x[i], u[i])) < 1e-13
    assert manifold.inner(x, u).shape == (2, 4)
    assert manifold.inner(x, u, keepdim=True).shape == (2, 4, 1, 1)
    many = torch.stack([u, 2 * u, 3 * u])
    assert gap(manifold.retr(x, many)[1], manifold.retr(x, 2 * u)) < 1e-13
    assert gap(manifold.at(x).proju(many)[2], manifold.proju(x, 3 * u)) < 1e-13


def test_manifold_parameters_survive_copies_and_state_dicts() -> None:
    manifold = GLQuotient(6, metric="inv", retraction="geodesic", relaxation=0.1)
    p = geoopt.ManifoldParameter(manifold.random(10, 3), manifold=manifold)
    clone = copy.deepcopy(p)
    assert clone.manifold.metric == "inv"
    assert clone.manifold.retraction == "geodesic"
    assert clone.manifold.relaxation == 0.1
    assert torch.equal(clone, p)
    assert repr(manifold) == "GLQuotient(n=6, metric='inv', retraction='geodesic', relaxation=0.1) manifold"
    G, H = p.unpack_tensor()
    assert torch.equal(manifold.pack_point(G, H), p)
