"""The first step of a pair of rank zero, such as an adapter ``(B, A)`` with ``B = 0``.

Such a pair is no point of the manifold: the metrics need the inverse of ``G^T G``. But the product ``W = G H^T`` has
a gradient there. With ``G = 0`` the partial derivatives are ``dG = dW H`` and ``dH = 0``, and the gradient of the
metric mix has the limit ``(dG SH^-1, 0)``, ``SH = H^T H``. Its singular values differ by orders of magnitude, so a
step along it would leave a pair that has full rank only on paper. The spectral start keeps the directions and makes
the singular values equal: with ``dG SH^(-1/2) = U S V^T``

    G <- -t U V^T SH^(-1/2),

after which all singular values of ``W`` are ``t``. The rule commutes with GL(h): ``H -> H A^T`` turns ``dG`` into
``dG A^T`` and ``SH^(-1/2)`` into ``A^-T SH^(-1/2) Q`` with an orthogonal ``Q``, so the new ``G`` becomes ``G A^-1``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..manifolds import GLQuotient, RescalingQuotient
from ..manifolds.frame import small_dtype

Manifold = GLQuotient | RescalingQuotient


def resting(manifold: Manifold, x: Tensor) -> Tensor:
    """Which copies have rank zero because a whole factor is zero.

    Args:
        manifold: The manifold.
        x: The point.

    Returns:
        Booleans of the batch shape.
    """
    first, second = (_zero(_columns(manifold, part)) for part in manifold.unpack_tensor(x))
    return first | second


def spectral_start(manifold: Manifold, x: Tensor, gradient: Tensor, size: float | None) -> Tensor:
    """First step of pairs of rank zero.

    Args:
        manifold: The manifold.
        x: The points; those of full rank are not touched.
        gradient: The partial derivatives there.
        size: The singular value ``t`` of ``W`` after the step; the mean singular value of ``dG SH^(-1/2)`` if None.

    Returns:
        The points after the step. A pair stays as it is if both factors are zero, if the factor that is not zero lacks
        full column rank, or if the gradient is zero.
    """
    wide = small_dtype(x)
    G, H = (_columns(manifold, part).to(wide) for part in manifold.unpack_tensor(x))
    dG, dH = (_columns(manifold, part).to(wide) for part in manifold.unpack_tensor(gradient))
    left, right = _zero(G), _zero(H)
    moved = torch.cat(
        [
            torch.where((left & ~right)[..., None, None], _step(dG, H, size), G),
            torch.where((right & ~left)[..., None, None], _step(dH, G, size), H),
        ],
        -2,
    )
    return (moved.squeeze(-1) if manifold.ndim == 1 else moved).to(x.dtype)


def _columns(manifold: Manifold, part: Tensor) -> Tensor:
    return part.unsqueeze(-1) if manifold.ndim == 1 else part


def _zero(factor: Tensor) -> Tensor:
    return factor.eq(0).flatten(-2).all(-1)


def _step(slope: Tensor, other: Tensor, size: float | None) -> Tensor:
    """``-t U V^T S^(-1/2)`` from the slope and the factor that is not zero."""
    squares, vectors = torch.linalg.eigh(other.mT @ other)
    limit = other.shape[-2] * torch.finfo(squares.dtype).eps * squares[..., -1:]
    sound = squares[..., :1] > limit
    root = (vectors * torch.where(sound, squares, 1.0).rsqrt().unsqueeze(-2)) @ vectors.mT
    whitened = slope @ root
    live = sound.squeeze(-1) & whitened.isfinite().flatten(-2).all(-1) & ~_zero(whitened)
    u, s, vt = torch.linalg.svd(torch.where(live[..., None, None], whitened, 0.0), full_matrices=False)
    step = -(u @ vt @ root) * (s.mean(-1)[..., None, None] if size is None else size)
    return torch.where(live[..., None, None], step, 0.0)
