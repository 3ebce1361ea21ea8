"""The small matrices of a point: factor once, use for every vector.

A point is a pair ``G (..., n, h)``, ``H (..., m, h)``. All that the geometry needs of it beside the tall factors
themselves are the Gram matrices ``SG = G^T G`` and ``SH = H^T H``, their Cholesky factors and, for most metrics, the
change of basis to the balanced gauge. Gram products run in the dtype of the point; everything h x h runs in float64
(float32 for half-precision points and on devices without float64).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, wraps
from typing import NamedTuple

import torch
from torch import Tensor

from .metric import Metric


class Spectrum(NamedTuple):
    """Change of basis to the balanced gauge: ``G B`` and ``H B^-T`` both have Gram matrix ``diag(s)``."""

    basis: Tensor  # B, (..., h, h)
    inverse: Tensor  # B^-1
    s: Tensor  # singular values of G H^T, (..., h)


def _lazy(function: Callable[[Frame], Tensor]) -> cached_property[Tensor]:
    """A matrix of a frame that is computed when it is first needed, or cast from the frame this one was cast from."""
    name = function.__name__

    @wraps(function)
    def value(self: Frame) -> Tensor:
        return function(self) if self.source is None else getattr(self.source, name).to(self.gram_g.dtype)

    return cached_property(value)


class Frame:
    """The factored point. What an operation does not need is not computed.

    Args:
        metric: The metric.
        gram_g: ``G^T G``.
        gram_h: ``H^T H``.
        spectrum: The balanced gauge, where the metric or the projection needs it.
    """

    def __init__(self, metric: Metric, gram_g: Tensor, gram_h: Tensor, spectrum: Spectrum | None = None) -> None:
        self.metric, self.gram_g, self.gram_h, self.spectrum = metric, gram_g, gram_h, spectrum
        self.source: Frame | None = None

    def cast(self, dtype: torch.dtype) -> Frame:
        """The same frame for vectors of another dtype.

        In a good gauge the small products of a vector lose no more than its Gram products, so they may run in its own
        dtype; what was factored stays factored in this frame's.

        Args:
            dtype: The dtype.

        Returns:
            A frame that casts what is asked of it, or this one.
        """
        if dtype == self.gram_g.dtype:
            return self
        spectrum = None if self.spectrum is None else Spectrum(*(part.to(dtype) for part in self.spectrum))
        frame = Frame(self.metric, self.gram_g.to(dtype), self.gram_h.to(dtype), spectrum)
        frame.source = self
        return frame

    @_lazy
    def root_g(self) -> Tensor:
        """Lower Cholesky factor of ``G^T G``."""
        return _cholesky(self.gram_g)

    @_lazy
    def root_h(self) -> Tensor:
        """Lower Cholesky factor of ``H^T H``."""
        return _cholesky(self.gram_h)

    @_lazy
    def root_g_inverse(self) -> Tensor:
        """Inverse of `root_g`."""
        return _lower_inverse(self.root_g)

    @_lazy
    def root_h_inverse(self) -> Tensor:
        """Inverse of `root_h`."""
        return _lower_inverse(self.root_h)

    @_lazy
    def gram_g_inverse(self) -> Tensor:
        """``(G^T G)^-1``, which is ``B diag(1/s) B^T``."""
        if self._spectrum_serves(self.gram_g):
            assert self.spectrum is not None
            return (self.spectrum.basis / self.spectrum.s.unsqueeze(-2)) @ self.spectrum.basis.mT
        return self.root_g_inverse.mT @ self.root_g_inverse

    @_lazy
    def gram_h_inverse(self) -> Tensor:
        """``(H^T H)^-1``, which is ``B^-T diag(1/s) B^-1``."""
        if self._spectrum_serves(self.gram_h):
            assert self.spectrum is not None
            return (self.spectrum.inverse.mT / self.spectrum.s.unsqueeze(-2)) @ self.spectrum.inverse
        return self.root_h_inverse.mT @ self.root_h_inverse

    def _spectrum_serves(self, small: Tensor) -> bool:
        """Whether the basis may stand for the Gram matrix: where that has a derivative, the basis may have none."""
        return self.spectrum is not None and not small.requires_grad

    @_lazy
    def weight_g(self) -> Tensor:
        """Matrix of the metric on the first factor: ``SG^-1 #_p SH``."""
        if self.metric.is_mix:
            return self.gram_h
        if self.metric.is_inv:
            return self.gram_g_inverse
        basis, _, w = self._basis_and_weights
        return (basis * w) @ basis.mT

    @_lazy
    def weight_h(self) -> Tensor:
        """Matrix of the metric on the second factor: ``SH^-1 #_p SG``."""
        if self.metric.is_mix:
            return self.gram_g
        if self.metric.is_inv:
            return self.gram_h_inverse
        _, inverse, w = self._basis_and_weights
        return (inverse.mT * w) @ inverse

    @_lazy
    def dual_g(self) -> Tensor:
        """Inverse of `weight_g`."""
        if self.metric.is_mix:
            return self.gram_h_inverse
        if self.metric.is_inv:
            return self.gram_g
        _, inverse, w = self._basis_and_weights
        return (inverse.mT / w) @ inverse

    @_lazy
    def dual_h(self) -> Tensor:
        """Inverse of `weight_h`."""
        if self.metric.is_mix:
            return self.gram_g_inverse
        if self.metric.is_inv:
            return self.gram_h
        basis, _, w = self._basis_and_weights
        return (basis / w) @ basis.mT

    @property
    def _basis_and_weights(self) -> tuple[Tensor, Tensor, Tensor]:
        assert self.spectrum is not None
        return self.spectrum.basis, self.spectrum.inverse, self.metric.weights(self.spectrum.s).unsqueeze(-2)

    @cached_property
    def shares(self) -> tuple[Tensor, Tensor]:
        """``w_i / (w_i s_j + w_j s_i)`` and its transpose: what `gl.project` multiplies by in the balanced gauge."""
        assert self.spectrum is not None
        s, w = self.spectrum.s, self.metric.weights(self.spectrum.s)
        scale = w.unsqueeze(-1) * s.unsqueeze(-2)
        share = w.unsqueeze(-1) / (scale + scale.mT)
        return share, share.mT


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


def _cholesky(matrices: Tensor) -> Tensor:
    """Lower factors; where a matrix is not positive definite they are wrong, and nothing is raised."""
    root: Tensor = torch.linalg.cholesky_ex(matrices).L
    return root


def _lower_inverse(root: Tensor) -> Tensor:
    identity = torch.eye(root.shape[-1], dtype=root.dtype, device=root.device).expand(root.shape)
    inverse: Tensor = torch.linalg.solve_triangular(root, identity, upper=False)
    return inverse


def spectrum_of(root_g: Tensor, gram_h: Tensor) -> Spectrum:
    """Balanced gauge from one Cholesky factor and one symmetric eigenproblem.

    With ``SG = C C^T`` and ``C^T SH C = E diag(s^2) E^T`` the basis is
    ``B = C^-T E diag(sqrt s)``, and ``B^-1 = diag(1/sqrt s) E^T C^T``.

    Args:
        root_g: Lower Cholesky factor ``C`` of ``G^T G``.
        gram_h: ``H^T H``.

    Returns:
        The change of basis, with the singular values in ascending order.
    """
    core = root_g.mT @ gram_h @ root_g
    squares, vectors = torch.linalg.eigh(core)  # reads one triangle only
    s = squares.clamp_min(torch.finfo(squares.dtype).tiny).sqrt()
    inverse_transposed = root_g @ (vectors * s.rsqrt().unsqueeze(-2))
    # B = SH B^-T diag(1/s), a product in place of a triangular solve; it loses what eigh lost already, (max s / s)^2.
    basis = (gram_h @ inverse_transposed) / s.unsqueeze(-2)
    return Spectrum(basis, inverse_transposed.mT, s)


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
    frame = Frame(metric, gram(G, G), gram(H, H))
    if not metric.is_rational:
        frame.spectrum = spectrum_of(frame.root_g, frame.gram_h)
    elif spectral and not metric.is_mix:
        # Only a linear system is solved in this basis, and `project` differentiates that system itself: eigenvectors
        # have no derivative where singular values meet, the solution has.
        frame.spectrum = spectrum_of(frame.root_g.detach(), frame.gram_h.detach())
    return frame


def balanced_frame(metric: Metric, s: Tensor) -> Frame:
    """Frame of a point that already is in the balanced gauge.

    Args:
        metric: The metric.
        s: The singular values of ``G H^T``, ``(..., h)``.

    Returns:
        The frame with ``G^T G = H^T H = diag(s)`` taken as exact.
    """
    gram_s, identity = torch.diag_embed(s), torch.diag_embed(torch.ones_like(s))
    return Frame(metric, gram_s, gram_s, Spectrum(identity, identity, s))


def correlation(frame: Frame) -> Tensor:
    """How far the gauge of a point is from one in which Gram matrices lose no digits.

    ``max_j S_jj (S^-1)_jj`` is 1 where the columns of a factor are orthogonal, does not depend on their lengths, and
    bounds the digits that Gram products and their Cholesky factors lose.

    Args:
        frame: The frame.

    Returns:
        The larger of the two factors' numbers, ``(...)``; NaN or negative where the factorization broke down.
    """
    if frame.spectrum is None:
        inverses = frame.gram_g_inverse.diagonal(dim1=-2, dim2=-1), frame.gram_h_inverse.diagonal(dim1=-2, dim2=-1)
    else:
        basis, inverse, s = (part.detach() for part in frame.spectrum)
        scale = 1 / s.unsqueeze(-1)
        inverses = (basis.square() @ scale).squeeze(-1), (inverse.mT.square() @ scale).squeeze(-1)
    first = (frame.gram_g.detach().diagonal(dim1=-2, dim2=-1) * inverses[0]).amax(-1)
    return torch.maximum(first, (frame.gram_h.detach().diagonal(dim1=-2, dim2=-1) * inverses[1]).amax(-1))


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
