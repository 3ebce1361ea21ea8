"""The small matrices of a point: factor once, use for every vector.

A point is a pair ``G (..., n, h)``, ``H (..., m, h)``. All that the geometry needs of it beside the tall factors
themselves are the Gram matrices ``SG = G^T G`` and ``SH = H^T H``, their Cholesky factors and, for most metrics, the
change of basis to the balanced gauge. Gram products run in the dtype of the point; everything h x h runs in float64
(float32 for half-precision points and on devices without float64).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .metric import Metric


class Spectrum(NamedTuple):
    """Change of basis to the balanced gauge: ``G B`` and ``H B^-T`` both have Gram matrix ``diag(s)``."""

    basis: Tensor  # B, (..., h, h)
    inverse: Tensor  # B^-1
    s: Tensor  # singular values of G H^T, (..., h)


class Frame(NamedTuple):
    """The factored point. ``weight_*`` are the matrices of the metric on the two factors, ``dual_*`` their inverses."""

    gram_g: Tensor
    gram_h: Tensor
    root_g: Tensor  # lower Cholesky factor of gram_g
    root_h: Tensor
    root_g_inverse: Tensor
    root_h_inverse: Tensor
    gram_g_inverse: Tensor
    gram_h_inverse: Tensor
    weight_g: Tensor
    weight_h: Tensor
    dual_g: Tensor
    dual_h: Tensor
    spectrum: Spectrum | None


def small_dtype(x: Tensor) -> torch.dtype:
    """Dtype of the h x h algebra that belongs to a tensor.

    Args:
        x: A point or tangent vector, not of half precision.

    Returns:
        float64, or float32 where the device has no float64.
    """
    return torch.float32 if x.device.type == "mps" else torch.float64


def split_rows(x: Tensor, n: int, axis: int = -2) -> tuple[Tensor, Tensor]:
    """The two factors of a packed point, as views.

    Written without index brackets, which a build of torch without CUDA refuses on fake CUDA tensors.

    Args:
        x: A point or tangent vector.
        n: Rows of the first factor.
        axis: The axis of the rows.

    Returns:
        The first ``n`` rows and the rest.
    """
    return x.narrow(axis, 0, n), x.narrow(axis, n, x.shape[axis] - n)


def gram(a: Tensor, c: Tensor) -> Tensor:
    """Gram product of two tall factors.

    Args:
        a: ``(..., n, h)``.
        c: ``(..., n, h)``.

    Returns:
        ``a^T c`` in the dtype of the small algebra.
    """
    return (a.mT @ c).to(small_dtype(a))


def _lower_inverse(root: Tensor) -> Tensor:
    identity = torch.eye(root.shape[-1], dtype=root.dtype, device=root.device).expand(root.shape)
    inverse: Tensor = torch.linalg.solve_triangular(root, identity, upper=False)
    return inverse


def spectrum_of(root_g: Tensor, root_g_inverse: Tensor, gram_h: Tensor) -> Spectrum:
    """Balanced gauge from one Cholesky factor and one symmetric eigenproblem.

    With ``SG = C C^T`` and ``C^T SH C = E diag(s^2) E^T`` the basis is ``B = C^-T E diag(sqrt s)``.

    Args:
        root_g: Lower Cholesky factor ``C`` of ``G^T G``.
        root_g_inverse: Its inverse.
        gram_h: ``H^T H``.

    Returns:
        The change of basis, with the singular values in ascending order.
    """
    core = root_g.mT @ gram_h @ root_g
    squares, vectors = torch.linalg.eigh((core + core.mT) / 2)
    s = squares.clamp_min(torch.finfo(squares.dtype).tiny).sqrt()
    half = s.sqrt().unsqueeze(-2)
    return Spectrum(root_g_inverse.mT @ (vectors * half), (root_g @ (vectors / half)).mT, s)


def _weights(
    metric: Metric, grams: tuple[Tensor, Tensor, Tensor, Tensor], spectrum: Spectrum | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    gram_g, gram_h, gram_g_inverse, gram_h_inverse = grams
    if metric.is_mix:
        return gram_h, gram_g, gram_h_inverse, gram_g_inverse
    if metric.is_inv or spectrum is None:
        return gram_g_inverse, gram_h_inverse, gram_g, gram_h
    w = metric.weights(spectrum.s).unsqueeze(-2)
    basis, inverse = spectrum.basis, spectrum.inverse
    return (
        (basis * w) @ basis.mT,
        (inverse.mT * w) @ inverse,
        (inverse.mT / w) @ inverse,
        (basis / w) @ basis.mT,
    )


def factor(metric: Metric, G: Tensor, H: Tensor, *, spectral: bool = False) -> Frame:
    """Factor a point.

    Args:
        metric: The metric.
        G: First factor, ``(..., n, h)``.
        H: Second factor, ``(..., m, h)``.
        spectral: Whether the balanced gauge is needed by the operation that follows (the projection of every metric but
            mix). Metrics other than inv and mix always need it.

    Returns:
        The frame. At a point of lower rank it holds NaN or infinite entries and nothing is raised: no value is read
        back to the host here.
    """
    gram_g, gram_h = gram(G, G), gram(H, H)
    root_g, root_h = torch.linalg.cholesky_ex(gram_g).L, torch.linalg.cholesky_ex(gram_h).L
    root_g_inverse, root_h_inverse = _lower_inverse(root_g), _lower_inverse(root_h)
    gram_g_inverse = root_g_inverse.mT @ root_g_inverse
    gram_h_inverse = root_h_inverse.mT @ root_h_inverse
    spectrum = None
    if not metric.is_rational:
        spectrum = spectrum_of(root_g, root_g_inverse, gram_h)
    elif spectral and not metric.is_mix:
        # Only a linear system is solved in this basis, and `project` differentiates that system itself: eigenvectors
        # have no derivative where singular values meet, the solution has.
        spectrum = spectrum_of(root_g.detach(), root_g_inverse.detach(), gram_h.detach())
    grams = (gram_g, gram_h, gram_g_inverse, gram_h_inverse)
    return Frame(
        gram_g, gram_h, root_g, root_h, root_g_inverse, root_h_inverse, gram_g_inverse, gram_h_inverse,
        *_weights(metric, grams, spectrum), spectrum,
    )  # fmt: skip


def balanced_frame(metric: Metric, s: Tensor) -> Frame:
    """Frame of a point that already is in the balanced gauge.

    Args:
        metric: The metric.
        s: The singular values of ``G H^T``, ``(..., h)``.

    Returns:
        The frame with ``G^T G = H^T H = diag(s)`` taken as exact.
    """
    gram_s, inverse = torch.diag_embed(s), torch.diag_embed(1 / s)
    root, root_inverse = torch.diag_embed(s.sqrt()), torch.diag_embed(s.rsqrt())
    identity = torch.diag_embed(torch.ones_like(s))
    spectrum = Spectrum(identity, identity, s)
    grams = (gram_s, gram_s, inverse, inverse)
    return Frame(
        gram_s, gram_s, root, root, root_inverse, root_inverse, inverse, inverse,
        *_weights(metric, grams, spectrum), spectrum,
    )  # fmt: skip


def correlation(frame: Frame) -> Tensor:
    """How far the gauge of a point is from one in which Gram matrices lose no digits.

    ``max_j S_jj (S^-1)_jj`` is 1 where the columns of a factor are orthogonal, does not depend on their lengths, and
    bounds the digits that Gram products and their Cholesky factors lose.

    Args:
        frame: The frame.

    Returns:
        The larger of the two factors' numbers, ``(...)``; NaN or negative where the factorization broke down.
    """
    g = (frame.gram_g.diagonal(dim1=-2, dim2=-1) * frame.gram_g_inverse.diagonal(dim1=-2, dim2=-1)).amax(-1)
    h = (frame.gram_h.diagonal(dim1=-2, dim2=-1) * frame.gram_h_inverse.diagonal(dim1=-2, dim2=-1)).amax(-1)
    return torch.maximum(g, h)


class Balance(NamedTuple):
    """The balanced gauge by orthogonal transformations: slower than `spectrum_of`, accurate on the whole orbit."""

    G: Tensor
    H: Tensor
    change: Tensor  # B with G_balanced = G B
    change_inverse: Tensor
    s: Tensor  # descending


def balance(G: Tensor, H: Tensor, *, floor: float = 0.0) -> Balance:
    """Move a point to the balanced gauge.

    QR of both factors, then the SVD ``R_G R_H^T = U diag(s) V^T`` of the small product:
    ``G -> Q_G U diag(sqrt s)``, ``H -> Q_H V diag(sqrt s)``. The signs of the columns are fixed by making the entry
    of largest modulus of each column of ``G`` positive. Inside a group of equal singular values the balanced points of
    an orbit differ by a common rotation, and which of them is returned depends on rounding.

    Args:
        G: First factor, ``(..., n, h)``.
        H: Second factor, ``(..., m, h)``.
        floor: Singular values are raised to this fraction of the largest (of 1, if all vanish).

    Returns:
        The balanced point in the dtype of ``G``, the change of gauge and the singular values.
    """
    dtype = small_dtype(G)
    q_g, r_g = torch.linalg.qr(G.to(dtype))
    q_h, r_h = torch.linalg.qr(H.to(dtype))
    u, s, vt = torch.linalg.svd(r_g @ r_h.mT)
    if floor > 0:
        top = s.narrow(-1, 0, 1)
        s = torch.maximum(s, floor * torch.where(top > 0, top, torch.ones_like(top)))
    left = q_g @ u
    peak = left.gather(-2, left.abs().argmax(-2, keepdim=True))
    sign = torch.where(peak < 0, -1.0, 1.0).to(dtype)
    half = s.sqrt().unsqueeze(-2)
    left_half, right_half = u * (sign * half), vt.mT * (sign * half)
    # B = R_G^-1 U sqrt(s); by the SVD its inverse transpose is R_H^-1 V sqrt(s), which avoids inverting B itself.
    change = torch.linalg.solve_triangular(r_g, left_half, upper=True)
    change_inverse = torch.linalg.solve_triangular(r_h, right_half, upper=True).mT
    return Balance((q_g @ left_half).to(G.dtype), (q_h @ right_half).to(H.dtype), change, change_inverse, s)
