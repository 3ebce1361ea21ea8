"""Ratios of the geometry: 288 pairs of 769 x 64 and 768 x 64, the heads of a BERT-large with its biases."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import TYPE_CHECKING

import numpy as np
import scipy.linalg
import torch
from quotientsharp.manifolds import GLQuotient
from torch import Tensor

if TYPE_CHECKING:
    from .__main__ import Ratio

HEADS, N, M, H = 288, 769, 768, 64


@cache
def _data(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    gen = torch.Generator().manual_seed(0)
    x = GLQuotient(N).random(HEADS, N + M, H, dtype=dtype, generator=gen)
    return x, 1e-3 * torch.randn(x.shape, dtype=dtype, generator=gen)


def _ratio(
    name: str,
    ours: Callable[[], object],
    other: Callable[[], object],
    target: float,
    faster: bool = False,
) -> Ratio:
    from .__main__ import Ratio

    return Ratio(name, torch.no_grad()(ours), torch.no_grad()(other), target, faster)


def _four_products(x: Tensor, u: Tensor) -> None:
    G, H_, a, b = x[:, :N], x[:, N:], u[:, :N], u[:, N:]
    first, second = G.mT @ a, H_.mT @ b
    G @ first, H_ @ second


def project_factored(metric: str, dtype: torch.dtype) -> Ratio:
    """A vector projected at a factored point against the four tall products that takes."""
    x, u = _data(dtype)
    point = GLQuotient(N, metric=metric).at(x)
    name = f"project, point factored / its four tall products ({metric}, {dtype})"
    return _ratio(name, lambda: point.proju(u), lambda: _four_products(x, u), 1.6)


def _sylvester_loop(x: np.ndarray, u: np.ndarray) -> None:
    for point, vector in zip(x, u, strict=True):
        G, K, a, b = point[:N], point[N:], vector[:N], vector[N:]
        SG, SK = G.T @ G, K.T @ K
        A = SG @ SK
        X = scipy.linalg.solve_sylvester(A, A, SG @ (K.T @ b) - (a.T @ G) @ SK)
        a + G @ X.T, b - K @ X


def project_against_sylvester(dtype: torch.dtype) -> Ratio:
    """Factoring and projecting together against a loop over SciPy's Sylvester solver."""
    x, u = _data(dtype)
    manifold = GLQuotient(N, metric="inv")
    name = f"loop over scipy solve_sylvester / factor and project (inv, {dtype})"
    return _ratio(name, lambda: manifold.proju(x, u), lambda: _sylvester_loop(x.numpy(), u.numpy()), 3.0, faster=True)


def _sum_and_grams(x: Tensor, u: Tensor) -> None:
    G, H_, a, b = x[:, :N], x[:, N:], u[:, :N], u[:, N:]
    x + u
    G.mT @ a, H_.mT @ b, a.mT @ a, b.mT @ b


def christoffel(metric: str, factored: bool, dtype: torch.dtype) -> Ratio:
    """The Christoffel retraction against `x + u` and four Gram products."""
    x, u = _data(dtype)
    manifold = GLQuotient(N, metric=metric, retraction="christoffel")
    point = manifold.at(x)
    ours: Callable[[], object] = (lambda: point.retr(u)) if factored else (lambda: manifold.retr(x, u))
    how = "point factored" if factored else "from scratch"
    name = f"Christoffel retraction, {how} / x + u and four Grams ({metric}, {dtype})"
    return _ratio(name, ours, lambda: _sum_and_grams(x, u), 3.0)


RATIOS: list[Callable[[], Ratio]] = [
    *(partial(project_factored, metric, torch.float32) for metric in ("inv", "mix")),
    *(partial(project_against_sylvester, dtype) for dtype in (torch.float32, torch.float64)),
    *(partial(christoffel, metric, factored, torch.float32) for factored in (True, False) for metric in ("inv", "mix")),
]
