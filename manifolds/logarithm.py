"""Logarithm and distance on the GL(h) quotient, by shooting."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from . import gl
from .gl import Pair

_MEMORY = 8


def reduce_rows(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Coordinates of two tall factors in an orthonormal basis of their common span.

    The geodesics between two points stay inside that span, so a problem with n rows becomes one with at most 2h.

    Args:
        x: ``(..., n, h)``.
        y: ``(..., n, h)``.

    Returns:
        Both in the basis, and the basis; the factors themselves and None where n is at most 2h.
    """
    if x.shape[-2] <= 2 * x.shape[-1]:
        return x, y, None
    basis = torch.linalg.qr(torch.cat([x, y], -1)).Q
    return basis.mT @ x, basis.mT @ y, basis


def shoot(
    residual: Callable[[Tensor], Tensor],
    start: Tensor,
    norm: Callable[[Tensor], Tensor],
    scale: Tensor,
    *,
    goal: float,
    most: int,
) -> tuple[Tensor, Tensor]:
    """Find the zero of a residual close to minus the identity's, batch entry by batch entry.

    Anderson acceleration of ``v <- v + residual(v)``: each entry keeps its own history, and a least-squares problem of
    at
    most eight unknowns picks the combination of past steps with the smallest residual.

    Args:
        residual: Maps vectors ``(batch, d)`` to corrections of the same shape.
        start: First guess, ``(batch, d)``.
        norm: Length of a vector, ``(batch,)``.
        scale: The length that residuals are compared with, ``(batch,)``.
        goal: Relative residual at which to stop.
        most: Largest number of evaluations.

    Returns:
        The vectors and their relative residuals, ``(batch,)``.
    """
    v = start
    steps: list[Tensor] = []
    residuals: list[Tensor] = []
    best, least = v, torch.full_like(norm(v), torch.inf)
    r = residual(v)
    for _ in range(most):
        size = norm(r) / scale
        size = torch.where(size.isfinite(), size, torch.inf)
        better = size < least
        best, least = torch.where(better[:, None], v, best), torch.minimum(size, least)
        if bool((least <= goal).all()):
            break
        steps, residuals = (steps + [v])[-_MEMORY:], (residuals + [r])[-_MEMORY:]
        v = _accelerate(steps, residuals)
        r = residual(v)
    return best, least


def _accelerate(steps: list[Tensor], residuals: list[Tensor]) -> Tensor:
    v, r = steps[-1], residuals[-1]
    if len(steps) == 1:
        return v + r
    moves = torch.stack([v - s for s in steps[:-1]], -1)
    changes = torch.stack([r - q for q in residuals[:-1]], -1)
    changes = torch.nan_to_num(changes)
    normal = changes.mT @ changes
    ridge = 1e-14 * normal.diagonal(dim1=-2, dim2=-1).sum(-1)[:, None, None] + torch.finfo(v.dtype).tiny
    identity = torch.eye(normal.shape[-1], dtype=v.dtype, device=v.device)
    weights = torch.linalg.solve(normal + ridge * identity, changes.mT @ torch.nan_to_num(r)[..., None])
    step: Tensor = ((moves + changes) @ weights).squeeze(-1)
    return v + r - step


def flatten(pair: Pair) -> Tensor:
    """Both factors of a batch of pairs as one vector each.

    Args:
        pair: Factors ``(batch, n, h)`` and ``(batch, m, h)``.

    Returns:
        ``(batch, (n + m) h)``.
    """
    return torch.cat([pair[0].flatten(1), pair[1].flatten(1)], -1)


def unflatten(v: Tensor, like: Pair) -> Pair:
    """Inverse of `flatten`.

    Args:
        v: ``(batch, (n + m) h)``.
        like: A pair of the right shapes.

    Returns:
        The pair.
    """
    size = like[0].shape[1] * like[0].shape[2]
    return v[:, :size].reshape(like[0].shape), v[:, size:].reshape(like[1].shape)


def spread(pair: Pair, bases: tuple[Tensor | None, Tensor | None]) -> Pair:
    """Back from the reduced rows of `reduce_rows`.

    Args:
        pair: A reduced pair.
        bases: The bases of both factors.

    Returns:
        The pair with all its rows.
    """
    first, second = (
        part if basis is None else gl.combine(basis, part) for part, basis in zip(pair, bases, strict=True)
    )
    return first, second
