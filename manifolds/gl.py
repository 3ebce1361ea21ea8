"""The GL(h) quotient: pure, batched functions on pairs ``(G, H)``.

``G`` is ``(..., n, h)``, ``H`` is ``(..., m, h)``; ``A`` in GL(h) acts by ``(G A^-1, H A^T)`` and only ``G H^T``
matters.
A tangent vector is a pair ``(a, b)`` of the same shapes. Nothing here reads a value back to the host, so every
function runs on any device, under ``torch.func.vmap``, ``FakeTensorMode`` and autograd. Formulas follow "Hide & Seek"
(arXiv 2505.05409) and docs/geometry.md, which derives what that paper does not give.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .frame import Frame, factor, split_rows
from .metric import Metric

__all__ = [
    "Fields",
    "Grams",
    "act",
    "act_tangent",
    "add",
    "assemble",
    "christoffel",
    "christoffel_fields",
    "combine",
    "compensator",
    "covariant_gradient",
    "factor",
    "gradient",
    "grams",
    "inner",
    "lift",
    "project",
    "project_field",
    "spread",
    "subgroup_field",
    "subgroup_right",
    "subgroup_system",
    "vertical",
]

Pair = tuple[Tensor, Tensor]


class Grams(NamedTuple):
    """All that a retraction needs to know of a vector ``(a, b)`` at a point: four h x h matrices."""

    cross_g: Tensor  # G^T a
    cross_h: Tensor  # H^T b
    square_g: Tensor  # a^T a
    square_h: Tensor  # b^T b


class Fields(NamedTuple):
    """A pair inside the spans of ``[G, a]`` and ``[H, b]``, as four h x h matrices: ``(G M1 + a M2, H M3 + b M4)``."""

    on_g: Tensor
    on_a: Tensor
    on_h: Tensor
    on_b: Tensor


def combine(x: Tensor, left: Tensor, y: Tensor | None = None, right: Tensor | None = None) -> Tensor:
    """Tall factors times small matrices, in the dtype of the tall factors.

    Args:
        x: ``(..., n, h)``.
        left: ``(..., h, h)``.
        y: A second tall factor, or None.
        right: Its small matrix.

    Returns:
        ``x @ left`` or ``x @ left + y @ right``.
    """
    product = x @ left.to(x.dtype)
    if y is None or right is None:
        return product
    return product + y @ right.to(y.dtype)


def _gram(frame: Frame, a: Tensor, c: Tensor) -> Tensor:
    """``a^T c`` in the dtype of the frame."""
    return (a.mT @ c).to(frame.gram_g.dtype)


def grams(frame: Frame, x: Pair, u: Pair) -> Grams:
    """Gram products of a vector with its point and with itself.

    Args:
        frame: The factored point, whose dtype the products take.
        x: The point ``(G, H)``.
        u: The vector ``(a, b)``.

    Returns:
        ``G^T a, H^T b, a^T a, b^T b``.
    """
    return Grams(_gram(frame, x[0], u[0]), _gram(frame, x[1], u[1]), _gram(frame, u[0], u[0]), _gram(frame, u[1], u[1]))


def spread(fields: Fields, x: Pair, u: Pair) -> Pair:
    """The pair that four small matrices stand for.

    Args:
        fields: The small matrices.
        x: The point.
        u: The vector.

    Returns:
        ``(G M1 + a M2, H M3 + b M4)``.
    """
    return combine(x[0], fields.on_g, u[0], fields.on_a), combine(x[1], fields.on_h, u[1], fields.on_b)


def add(u: Pair, v: Pair, scale: float = 1.0) -> Pair:
    """Sum of two pairs.

    Args:
        u: A pair.
        v: A pair.
        scale: Factor of ``v``.

    Returns:
        ``u + scale * v``.
    """
    return torch.add(u[0], v[0], alpha=scale), torch.add(u[1], v[1], alpha=scale)


def act(x: Pair, change: Tensor, inverse: Tensor) -> Pair:
    """Change of gauge, of a point or, being linear, of a tangent vector.

    Args:
        x: The pair.
        change: ``B``, that is ``A^-1``.
        inverse: ``B^-1``, that is ``A``.

    Returns:
        ``(G B, H B^-T)``.
    """
    return combine(x[0], change), combine(x[1], inverse.mT)


act_tangent = act


def vertical(x: Pair, L: Tensor) -> Pair:
    """Tangent vector of the orbit.

    Args:
        x: The point.
        L: An element of the Lie algebra, ``(..., h, h)``.

    Returns:
        ``(-G L, H L^T)``.
    """
    return -combine(x[0], L), combine(x[1], L.mT)


def inner(frame: Frame, u: Pair, v: Pair) -> Tensor:
    """Inner product ``tr(K a^T c) + tr(L b^T d)``.

    Args:
        frame: The factored point.
        u: Tangent vector ``(a, b)``.
        v: Tangent vector ``(c, d)``.

    Returns:
        Shape ``(...)``, in the dtype of the vectors. inv weighs by ``K = SG^-1, L = SH^-1``, mix by ``K = SH, L = SG``.
    """
    first = (frame.weight_g * _gram(frame, u[0], v[0])).sum((-2, -1))
    second = (frame.weight_h * _gram(frame, u[1], v[1])).sum((-2, -1))
    return (first + second).to(u[0].dtype)


def gradient(frame: Frame, euclidean: Pair) -> Pair:
    """Gradient in the total space from partial derivatives.

    Args:
        frame: The factored point.
        euclidean: ``(dL/dG, dL/dH)``.

    Returns:
        ``(dG K^-1, dH L^-1)``: inv ``(dG SG, dH SH)``, mix ``(dG SH^-1, dH SG^-1)``. Horizontal when the loss is
        GL(h)-invariant.
    """
    return combine(euclidean[0], frame.dual_g), combine(euclidean[1], frame.dual_h)


def _sylvester(frame: Frame, right: Tensor) -> Tensor:
    """Solve ``A X + X A = right`` with ``A = SG SH`` through the balanced gauge."""
    assert frame.spectrum is not None
    basis, inverse, s = frame.spectrum
    scale = s.square().unsqueeze(-1) + s.square().unsqueeze(-2)
    return inverse.mT @ ((basis.mT @ right @ inverse.mT) / scale) @ basis.mT


def compensator(metric: Metric, frame: Frame, g_a: Tensor, b_h: Tensor) -> Tensor:
    """The ``L`` for which ``(a + G L, b - H L^T)`` is horizontal; see `project`.

    Args:
        metric: The metric.
        frame: The point, factored with ``spectral=True``.
        g_a: ``G^T a``.
        b_h: ``b^T H``.

    Returns:
        ``(..., h, h)``.
    """
    if metric.is_mix:
        return (b_h @ frame.gram_h_inverse - frame.gram_g_inverse @ g_a) / 2
    if metric.is_inv and any(t.requires_grad for t in (frame.gram_g, frame.gram_h)):
        # The basis is a constant here. Each pass of iterative refinement leaves the value as it is and makes one
        # more order of derivatives exact: two passes serve gradients and Hessian-vector products.
        A = frame.gram_g @ frame.gram_h
        right = frame.gram_g @ b_h.mT - g_a.mT @ frame.gram_h
        X = _sylvester(frame, right.detach())
        for _ in range(2):
            X = X + _sylvester(frame, right - A @ X - X @ A)
        return X.mT
    assert frame.spectrum is not None
    basis, inverse, _ = frame.spectrum
    share_h, share_g = frame.shares
    balanced = share_h * (inverse @ b_h @ inverse.mT) - share_g * (basis.mT @ g_a @ basis)
    return basis @ balanced @ inverse


def project_field(metric: Metric, frame: Frame, x: Pair, u: Pair) -> Tensor:
    """The ``L`` of `project`.

    Args:
        metric: The metric.
        frame: The point, factored with ``spectral=True``.
        x: The point.
        u: Any tangent vector.

    Returns:
        ``(..., h, h)``.
    """
    return compensator(metric, frame, _gram(frame, x[0], u[0]), _gram(frame, u[1], x[1]))


def subgroup_system(frame: Frame, algebra: Tensor) -> Tensor:
    """Gram matrix of the vertical vectors ``(-G E_k, H E_k^T)`` of a subgroup.

    Args:
        frame: The factored point.
        algebra: Basis ``E_k`` of the subgroup's Lie algebra, ``(..., r, h, h)``, in the gauge of the point.

    Returns:
        ``<E_k, SG E_l K + L E_l SH>``, ``(..., r, r)``, ``K`` and ``L`` the weights of the metric.
    """
    matrices = (frame.gram_g, frame.gram_h, frame.weight_g, frame.weight_h)
    gram_g, gram_h, weight_g, weight_h = (matrix.unsqueeze(-3) for matrix in matrices)
    images = (gram_g @ algebra @ weight_g + weight_h @ algebra @ gram_h).flatten(-2)
    return algebra.flatten(-2) @ images.mT


def subgroup_right(frame: Frame, algebra: Tensor, g_a: Tensor, b_h: Tensor) -> Tensor:
    """Inner products of a vector with minus the vertical vectors of a subgroup.

    Args:
        frame: The factored point.
        algebra: The basis ``E_k``.
        g_a: ``G^T a``.
        b_h: ``b^T H``.

    Returns:
        ``<E_k, L b^T H - G^T a K>``, ``(..., r, 1)``.
    """
    right = frame.weight_h @ b_h - g_a @ frame.weight_g
    return algebra.flatten(-2) @ right.flatten(-2).unsqueeze(-1)


def subgroup_field(frame: Frame, algebra: Tensor, x: Pair, u: Pair) -> Tensor:
    """The element ``L`` of a Lie subalgebra for which ``(a + G L, b - H L^T)`` is orthogonal to the subgroup's orbit.

    ``L = sum_k t_k E_k``, where ``t`` solves the Gram system of `subgroup_system` and `subgroup_right`.

    Args:
        frame: The factored point.
        algebra: The basis, ``(..., r, h, h)``, in the gauge of the point.
        x: The point.
        u: Any tangent vector.

    Returns:
        ``(..., h, h)``.
    """
    right = subgroup_right(frame, algebra, _gram(frame, x[0], u[0]), _gram(frame, u[1], x[1]))
    weights: Tensor = torch.linalg.solve(subgroup_system(frame, algebra), right)
    return (weights.unsqueeze(-1) * algebra).sum(-3)


def project(metric: Metric, frame: Frame, x: Pair, u: Pair) -> Pair:
    """Orthogonal projection onto the horizontal space.

    In the balanced gauge the compensating field is ``L_ij = (w_i (b^T H)_ij - w_j (G^T a)_ij) / (w_i s_j + w_j s_i)``
    for every metric of the family. For inv this solves ``A X + X A = SG H^T b - a^T G SH``, ``A = SG SH``, ``L = X^T``
    (the paper prints ``A^T`` in the second term; that does not give a horizontal vector). For mix it is
    ``L = (b^T H SH^-1 - SG^-1 G^T a) / 2`` in any gauge, without eigenvectors.

    Args:
        metric: The metric.
        frame: The point, factored with ``spectral=True``.
        x: The point.
        u: Any tangent vector ``(a, b)``.

    Returns:
        ``(a + G L, b - H L^T)``.
    """
    L = project_field(metric, frame, x, u)
    return u[0] + combine(x[0], L), u[1] - combine(x[1], L.mT)


def _symmetric(x: Tensor) -> Tensor:
    return x + x.mT


class _Change:
    """Derivative of the metric in the point, and its adjoint, as maps between pairs of symmetric h x h matrices.

    Both are the same map, but for the rank-one term that the largest singular value adds under a relaxation.
    """

    def __init__(self, metric: Metric, frame: Frame) -> None:
        self.metric, self.frame = metric, frame
        if not metric.is_rational:
            assert frame.spectrum is not None
            self.p, self.q = metric.kernels(frame.spectrum.s)

    def weights(self, gram_g: Tensor, gram_h: Tensor) -> Pair:
        """Derivatives of the weights ``(K, L)`` for the derivatives of ``(SG, SH)``."""
        return self._map(gram_g, gram_h, adjoint=False)

    def adjoint(self, z_a: Tensor, z_b: Tensor) -> Pair:
        """``(D_G, D_H)`` with ``<z_a, dK> + <z_b, dL> = <D_G, dSG> + <D_H, dSH>`` for symmetric ``z``."""
        return self._map(z_a, z_b, adjoint=True)

    def _map(self, first: Tensor, second: Tensor, *, adjoint: bool) -> Pair:
        frame = self.frame
        if self.metric.is_mix:
            return second, first
        if self.metric.is_inv:
            inverse_g, inverse_h = frame.gram_g_inverse, frame.gram_h_inverse
            return -inverse_g @ first @ inverse_g, -inverse_h @ second @ inverse_h
        assert frame.spectrum is not None
        basis, inverse, s = frame.spectrum
        first, second = basis.mT @ first @ basis, inverse @ second @ inverse.mT
        new_first, new_second = self.q * second - self.p * first, self.q * first - self.p * second
        if self.metric.relaxation > 0:
            slope, trace = self.metric.weight_slope(s), (first + second).diagonal(dim1=-2, dim2=-1)
            largest = torch.nn.functional.one_hot(s.argmax(-1), s.shape[-1]).to(s.dtype)
            given, taken = (slope, largest) if adjoint else (largest, slope)
            term = torch.diag_embed(taken * (given * trace).sum(-1, keepdim=True) / 2)
            new_first, new_second = new_first + term, new_second + term
        return basis @ new_first @ basis.mT, inverse.mT @ new_second @ inverse


def christoffel(metric: Metric, frame: Frame, x: Pair, u: Pair, v: Pair | None = None) -> Pair:
    """Christoffel term of the total space.

    ``Gamma(u, v)_G = 1/2 [a K'(v) + c K'(u)] K^-1 - G D_G K^-1``, where ``K'(u)`` is the derivative of the weights
    along
    ``u`` and ``G D_G`` half the derivative of ``<u, v>`` in the point. For mix and ``u = v`` this is
    ``[a (b^T H + H^T b) - G b^T b] SH^-1``, for inv ``-a SG^-1 (a^T G + G^T a) + G SG^-1 a^T a``.

    Args:
        metric: The metric.
        frame: The factored point.
        x: The point.
        u: Tangent vector ``(a, b)``.
        v: Tangent vector ``(c, d)``; ``u`` if left out.

    Returns:
        ``Gamma(u, v)``. Geodesics solve ``x'' = -Gamma(x', x')``.
    """
    if v is None:
        return spread(christoffel_fields(metric, frame, grams(frame, x, u)), x, u)
    change = _Change(metric, frame)
    along_u = change.weights(_symmetric(_gram(frame, u[0], x[0])), _symmetric(_gram(frame, u[1], x[1])))
    along_v = change.weights(_symmetric(_gram(frame, v[0], x[0])), _symmetric(_gram(frame, v[1], x[1])))
    d_g, d_h = change.adjoint(_symmetric(_gram(frame, u[0], v[0])), _symmetric(_gram(frame, u[1], v[1])))
    first = combine(u[0], along_v[0] @ frame.dual_g / 2, v[0], along_u[0] @ frame.dual_g / 2)
    second = combine(u[1], along_v[1] @ frame.dual_h / 2, v[1], along_u[1] @ frame.dual_h / 2)
    return first - combine(x[0], d_g @ frame.dual_g / 2), second - combine(x[1], d_h @ frame.dual_h / 2)


def christoffel_fields(metric: Metric, frame: Frame, products: Grams) -> Fields:
    """The small matrices of ``Gamma(u, u)``.

    Args:
        metric: The metric.
        frame: The factored point.
        products: Gram products of the vector, as `grams` gives them.

    Returns:
        ``Gamma(u, u)`` in the spans of point and vector.
    """
    change = _Change(metric, frame)
    along = change.weights(_symmetric(products.cross_g), _symmetric(products.cross_h))
    d_g, d_h = change.adjoint(products.square_g, products.square_h)
    return Fields(-d_g @ frame.dual_g, along[0] @ frame.dual_g, -d_h @ frame.dual_h, along[1] @ frame.dual_h)


Terms = Sequence[tuple[Tensor, Tensor]]


def assemble(first: Terms, second: Terms, base: Pair | None = None, out: Tensor | None = None) -> Tensor:
    """Pack two factors, each a sum of tall factors times small matrices, in as few passes over memory as possible.

    Args:
        first: Terms ``(tall, small)`` of the first factor.
        second: Terms of the second factor.
        base: A pair to add.
        out: Where to put the result of a three-dimensional batch without derivatives.

    Returns:
        ``(..., n + m, h)``.
    """
    sides = (first, second)
    if out is not None:
        return _assemble_in_place(sides, base, out)
    parts = [part for side in sides for term in side for part in term] + list(base or ())
    if not any(part.requires_grad for part in parts) and all(part.ndim == 3 for part in parts):
        try:
            return _assemble_in_place(sides, base, None)
        except RuntimeError:  # vmap knows no `out`
            pass
    sums = []
    for index, side in enumerate(sides):
        total = combine(*side[0]) if base is None else base[index] + combine(*side[0])
        for tall, small in side[1:]:
            total = total + combine(tall, small)
        sums.append(total)
    return torch.cat(sums, -2)


def _assemble_in_place(sides: tuple[Terms, Terms], base: Pair | None, out: Tensor | None) -> Tensor:
    lead = sides[0][0][0]
    heights = [side[0][0].shape[-2] for side in sides]
    packed = lead.new_empty(lead.shape[0], sum(heights), lead.shape[-1]) if out is None else out
    for index, (rows, side) in enumerate(zip(split_rows(packed, heights[0]), sides, strict=True)):
        tall, small = side[0]
        if base is None:
            torch.bmm(tall, small.to(rows.dtype), out=rows)
        else:
            torch.baddbmm(base[index], tall, small.to(rows.dtype), out=rows)
        for tall, small in side[1:]:
            rows.baddbmm_(tall, small.to(rows.dtype))
    return packed


def covariant_gradient(metric: Metric, frame: Frame, x: Pair, euclidean: Pair, second: Pair, u: Pair) -> Pair:
    """Covariant derivative of the gradient in the total space, along a horizontal vector.

    With the metric ``M`` and the gradient ``g = M^-1 e`` this is ``M^-1 (e' - M'(u) g) + Gamma(u, g)``. The horizontal
    part of
    it is the Hessian of the quotient (O'Neill).

    Args:
        metric: The metric.
        frame: The factored point.
        x: The point.
        euclidean: Partial derivatives ``e`` of the function.
        second: Their derivative ``e'`` along ``u``.
        u: A horizontal vector.

    Returns:
        A vector of the total space.
    """
    g = gradient(frame, euclidean)
    along = _Change(metric, frame).weights(_symmetric(_gram(frame, u[0], x[0])), _symmetric(_gram(frame, u[1], x[1])))
    moved = gradient(frame, (second[0] - combine(g[0], along[0]), second[1] - combine(g[1], along[1])))
    return add(moved, christoffel(metric, frame, x, u, g))


def lift(metric: Metric, frame: Frame, x: Pair, y: Pair) -> Pair:
    """Horizontal lift of the tangent part of ``W_y - W_x``.

    With the projectors ``P, Q`` onto the column spaces of ``G, H`` and ``D = W_y - W_x``, the vector
    ``((1 - P/2) D H SH^-1, (1 - Q/2) D^T G SG^-1)`` has ``a H^T + G b^T = P D + D Q - P D Q``; projecting it removes
    what
    is vertical. The gauge of ``y`` does not matter.

    Args:
        metric: The metric.
        frame: The point ``x``, factored with ``spectral=True``.
        x: The point at which to lift.
        y: The other point.

    Returns:
        A horizontal vector at ``x``.
    """
    first = combine(y[0], _gram(frame, y[1], x[1]) @ frame.gram_h_inverse) - x[0]
    second = combine(y[1], _gram(frame, y[0], x[0]) @ frame.gram_g_inverse) - x[1]
    first = first - combine(x[0], frame.gram_g_inverse @ _gram(frame, x[0], first) / 2)
    second = second - combine(x[1], frame.gram_h_inverse @ _gram(frame, x[1], second) / 2)
    return project(metric, frame, x, (first, second))
