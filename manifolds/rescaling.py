"""The rescaling quotient: pure, batched functions on pairs of vectors ``(g, k)``, one pair per hidden unit.

``c != 0`` acts by ``(g / c, c k)`` and only ``g k^T`` matters. This is the GL(h) quotient with h = 1, where every
formula
is a handful of dot products and every metric of the family has closed geodesics: with ``s = |g||k|``, ``u = g/|g|``,
``v = k/|k|`` and ``r = s^p / (p sqrt 2)`` the metric of exponent ``p`` is ``dr^2 + 2 p^2 r^2 (du^2 + dv^2)``, a cone
over a
product of spheres; ``p = 0`` is the cylinder ``(d log s)^2 / 2 + du^2 + dv^2``. The functions mirror those of ``gl``.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from .gl import Fields, Grams, Pair, add
from .metric import Metric


class Frame(NamedTuple):
    """The factored point: squared lengths and the weights of the metric, all of shape ``(..., 1)``."""

    square_g: Tensor
    square_k: Tensor
    weight_g: Tensor
    weight_k: Tensor


def _dot(a: Tensor, c: Tensor) -> Tensor:
    return (a * c).sum(-1, keepdim=True)


def factor(metric: Metric, g: Tensor, k: Tensor) -> Frame:
    """Factor a point.

    Args:
        metric: The metric.
        g: ``(..., n)``.
        k: ``(..., m)``.

    Returns:
        The frame; ``K = |g|^(2p-2) |k|^(2p)`` weighs the first factor. The relaxation is the constant factor
        ``(1 + epsilon)^(2p-1)`` here, since the only singular value is the largest.
    """
    p = metric.exponent
    square_g, square_k = _dot(g, g), _dot(k, k)
    relaxed = (1 + metric.relaxation) ** (2 * p - 1)
    return Frame(
        square_g,
        square_k,
        relaxed * square_g ** (p - 1) * square_k**p,
        relaxed * square_k ** (p - 1) * square_g**p,
    )


def act(x: Pair, c: Tensor) -> Pair:
    """Rescaling, of a point or, being linear, of a tangent vector.

    Args:
        x: The pair.
        c: Non-zero numbers, ``(..., 1)``.

    Returns:
        ``(g / c, c k)``.
    """
    return x[0] / c, x[1] * c


def vertical(x: Pair, L: Tensor) -> Pair:
    """Tangent vector of the orbit.

    Args:
        x: The point.
        L: One number per unit, ``(..., 1)``.

    Returns:
        ``(-g L, k L)``.
    """
    return -x[0] * L, x[1] * L


def inner(frame: Frame, u: Pair, v: Pair) -> Tensor:
    """Inner product ``K a.c + L b.d``.

    Args:
        frame: The factored point.
        u: Tangent vector ``(a, b)``.
        v: Tangent vector ``(c, d)``.

    Returns:
        Shape ``(...)``.
    """
    return (frame.weight_g * _dot(u[0], v[0]) + frame.weight_k * _dot(u[1], v[1])).squeeze(-1)


def gradient(frame: Frame, euclidean: Pair) -> Pair:
    """Gradient in the total space from partial derivatives.

    Args:
        frame: The factored point.
        euclidean: The partial derivatives.

    Returns:
        ``(dg / K, dk / L)``.
    """
    return euclidean[0] / frame.weight_g, euclidean[1] / frame.weight_k


def project(frame: Frame, x: Pair, u: Pair) -> Pair:
    """Orthogonal projection onto the horizontal space, the same for every metric of the family.

    Args:
        frame: The factored point.
        x: The point.
        u: Any tangent vector ``(a, b)``.

    Returns:
        ``(a + g L, b - k L)`` with ``L = (b.k / |k|^2 - a.g / |g|^2) / 2``.
    """
    L = (_dot(u[1], x[1]) / frame.square_k - _dot(u[0], x[0]) / frame.square_g) / 2
    return u[0] + x[0] * L, u[1] - x[1] * L


def _log_rates(metric: Metric, frame: Frame, x: Pair, u: Pair) -> Pair:
    """Logarithmic derivatives of the two weights along ``u``."""
    p = metric.exponent
    on_g, on_k = 2 * _dot(u[0], x[0]) / frame.square_g, 2 * _dot(u[1], x[1]) / frame.square_k
    return (p - 1) * on_g + p * on_k, (p - 1) * on_k + p * on_g


def christoffel(metric: Metric, frame: Frame, x: Pair, u: Pair, v: Pair | None = None) -> Pair:
    """Christoffel term of the total space.

    Args:
        metric: The metric.
        frame: The factored point.
        x: The point.
        u: Tangent vector ``(a, b)``.
        v: Tangent vector ``(c, d)``; ``u`` if left out.

    Returns:
        ``Gamma(u, v)``; on ``g``: ``1/2 [a (log K)'(v) + c (log K)'(u)] - g [(p-1) K a.c + p L b.d] / (|g|^2 K)``.
    """
    v = u if v is None else v
    p = metric.exponent
    along_u, along_v = _log_rates(metric, frame, x, u), _log_rates(metric, frame, x, v)
    part_g, part_k = frame.weight_g * _dot(u[0], v[0]), frame.weight_k * _dot(u[1], v[1])
    pull_g = ((p - 1) * part_g + p * part_k) / (frame.square_g * frame.weight_g)
    pull_k = ((p - 1) * part_k + p * part_g) / (frame.square_k * frame.weight_k)
    return (
        (u[0] * along_v[0] + v[0] * along_u[0]) / 2 - x[0] * pull_g,
        (u[1] * along_v[1] + v[1] * along_u[1]) / 2 - x[1] * pull_k,
    )


def hessian(metric: Metric, frame: Frame, x: Pair, euclidean: Pair, second: Pair, u: Pair) -> Pair:
    """Riemannian Hessian of an invariant function on the quotient, along a horizontal vector.

    Args:
        metric: The metric.
        frame: The factored point.
        x: The point.
        euclidean: Partial derivatives of the function.
        second: Their derivative along ``u``.
        u: A horizontal vector.

    Returns:
        The horizontal lift of ``Hess f [u]``.
    """
    g = gradient(frame, euclidean)
    rate_g, rate_k = _log_rates(metric, frame, x, u)
    moved = gradient(frame, second)
    moved = moved[0] - g[0] * rate_g, moved[1] - g[1] * rate_k
    return project(frame, x, add(moved, christoffel(metric, frame, x, u, g)))


def _safe_root(square: Tensor) -> Tensor:
    """Square root with derivative zero, not infinity, at zero."""
    zero = square <= 0
    return torch.where(zero, torch.zeros_like(square), torch.where(zero, torch.ones_like(square), square).sqrt())


def _safe_norm(x: Tensor) -> Tensor:
    """Euclidean norm with derivative zero, not NaN, at zero."""
    return _safe_root(_dot(x, x))


def geodesic(metric: Metric, frame: Frame, x: Pair, u: Pair) -> tuple[Pair, Tensor]:
    """Geodesic at time 1 along a horizontal vector.

    On the cone the geodesic is the straight line ``z = 1 + p s'/s + i c`` with ``c = sqrt(2) p |(u', v')|``; the
    singular value becomes ``s |z|^(1/p)`` and both directions advance by ``arg(z) / c`` along their great circles. inv
    is the limit ``s exp(s'/s)`` with advance 1. The lift keeps ``|g| / |k|``.

    Args:
        metric: The metric.
        frame: The factored point.
        x: The point.
        u: The initial velocity. Its vertical part is dropped: the geodesic of the quotient has none.

    Returns:
        The point at time 1, and ``1 + p s'/s`` where the line runs into the apex of the cone, which is at time 1 or
        before if that number is not positive; 1 elsewhere, ``(..., 1)``.
    """
    rate_g, rate_k = _dot(u[0], x[0]) / frame.square_g, _dot(u[1], x[1]) / frame.square_k
    turns = u[0] - rate_g * x[0], u[1] - rate_k * x[1]
    squares = _dot(turns[0], turns[0]) / frame.square_g, _dot(turns[1], turns[1]) / frame.square_k
    (along_g, turn_g, along_k, turn_k), reach = _cone(metric, rate_g + rate_k, *squares)
    return (along_g * x[0] + turn_g * turns[0], along_k * x[1] + turn_k * turns[1]), reach


def geodesic_fields(metric: Metric, frame: Frame, products: Grams) -> tuple[Fields, Tensor]:
    """Geodesic at time 1 from the dot products of its velocity: `geodesic` as four numbers per unit.

    Args:
        metric: The metric.
        frame: The factored point.
        products: ``g.a, k.b, a.a, b.b``, each ``(..., 1)``.

    Returns:
        The end point in the spans of point and velocity, and the reach as `geodesic` gives it.
    """
    rate_g, rate_k = products.cross_g / frame.square_g, products.cross_h / frame.square_k
    squares = (
        (products.square_g / frame.square_g - rate_g**2).clamp_min(0.0),
        (products.square_h / frame.square_k - rate_k**2).clamp_min(0.0),
    )
    (along_g, turn_g, along_k, turn_k), reach = _cone(metric, rate_g + rate_k, *squares)
    return Fields(along_g - turn_g * rate_g, turn_g, along_k - turn_k * rate_k, turn_k), reach


def _cone(metric: Metric, growth: Tensor, square_g: Tensor, square_k: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
    """Coefficients of ``g`` and of the part of ``a`` across it, likewise for ``k``; the reach."""
    # `growth` is s'/s, the squares are |u'|^2 and |v'|^2.
    p = metric.exponent
    reach = torch.ones_like(growth)
    if p == 0:
        scale, angle = torch.exp(growth / 2), torch.ones_like(growth)
    else:
        c = math.sqrt(2) * p * _safe_root(square_g + square_k)
        real = 1 + p * growth
        reach = torch.where(c > 0, reach, real)
        scale = torch.exp(torch.log1p(p * growth * (2 + p * growth) + c**2) / (4 * p))  # |z|^(1 / (2p))
        small = c < 1e-6 * real
        safe = torch.where(small, torch.ones_like(c), c)
        bent = torch.atan2(safe, real) / safe
        angle = torch.where(small, 1 / torch.where(small, real, torch.ones_like(real)), bent)
    arc_g, arc_k = angle * _safe_root(square_g), angle * _safe_root(square_k)
    along_g, turn_g = scale * torch.cos(arc_g), scale * angle * _sinc(arc_g)
    along_k, turn_k = scale * torch.cos(arc_k), scale * angle * _sinc(arc_k)
    return (along_g, turn_g, along_k, turn_k), reach


def logarithm(metric: Metric, frame: Frame, x: Pair, y: Pair) -> tuple[Pair, Tensor]:
    """Initial velocity at ``x`` of the shortest geodesic to ``y``, and the distance.

    Args:
        metric: The metric.
        frame: The factored point ``x``.
        x: The start.
        y: The end, in any gauge.

    Returns:
        The horizontal vector and the distance, ``(...)``. Since ``(u, v)`` and ``(-u, -v)`` are one point, two points
        are
        seen from the apex of the cone under an angle of at most pi, so a shortest geodesic exists (at pi, which only
        mix with both factors orthogonal attains, it runs into the apex). The distance is infinite where no path
        leads from one sign of ``g k`` to the other, which needs n = 1 or m = 1.
    """
    p = metric.exponent
    length_g, length_k = frame.square_g.sqrt(), frame.square_k.sqrt()
    other_g, other_k = _dot(y[0], y[0]).sqrt(), _dot(y[1], y[1]).sqrt()
    u, v = x[0] / length_g, x[1] / length_k
    arcs = []
    for sign in (1.0, -1.0):
        pair = [_arc(u, sign * y[0] / other_g), _arc(v, sign * y[1] / other_k)]
        arcs.append((pair[0], pair[1], _dot(pair[0], pair[0]) + _dot(pair[1], pair[1])))
    swap = arcs[1][2] < arcs[0][2]
    turn_g = torch.where(swap, arcs[1][0], arcs[0][0])
    turn_k = torch.where(swap, arcs[1][1], arcs[0][1])
    angle = torch.minimum(arcs[0][2], arcs[1][2]).sqrt()
    log_ratio = torch.log(other_g / length_g) + torch.log(other_k / length_k)
    relaxed = (1 + metric.relaxation) ** (2 * p - 1)
    if p == 0:
        growth, speed = log_ratio, torch.ones_like(angle)
        distance = (log_ratio**2 / 2 + angle**2).sqrt()
    else:
        c = math.sqrt(2) * p * angle
        stretch, excess = torch.exp(p * log_ratio), torch.expm1(p * log_ratio)
        chord = torch.sin(c / 2)
        growth = (excess * torch.cos(c) - 2 * chord**2) / p
        speed = stretch * _sinc(c)
        distance = ((excess / p) ** 2 / 2 + 2 * stretch * (chord / p) ** 2).sqrt()
        distance = distance * (length_g * length_k) ** p
    distance = torch.where(angle.isinf(), angle, distance * relaxed**0.5)
    vector = length_g * (growth / 2 * u + speed * turn_g), length_k * (growth / 2 * v + speed * turn_k)
    return vector, distance.squeeze(-1)


def _sinc(x: Tensor) -> Tensor:
    """``sin(x) / x`` with its series near zero, so that it has the right derivative there too."""
    small = x.abs() < 1e-4
    safe = torch.where(small, torch.ones_like(x), x)
    return torch.where(small, 1 - x**2 / 6, torch.sin(safe) / safe)


def _arc(start: Tensor, end: Tensor) -> Tensor:
    """Velocity of the shorter great circle between two unit vectors; its length is their angle."""
    # Between antipodes it is one of the many; in one dimension, where no path leads there, it is infinite.
    cosine = _dot(start, end)
    away = end - cosine * start
    away = away - _dot(away, start) * start
    sine = _safe_norm(away)
    opposite = (sine < 1e-12) & (cosine < 0)
    if start.shape[-1] == 1:
        return torch.where(opposite, math.inf, torch.zeros_like(away))
    axis = torch.nn.functional.one_hot(start.abs().argmin(-1), start.shape[-1]).to(start.dtype)
    normal = axis - _dot(axis, start) * start
    away = torch.where(opposite, normal / _safe_norm(normal), away)
    sine = torch.where(opposite, torch.zeros_like(sine), sine)
    length = torch.where(opposite, torch.ones_like(sine), sine)
    return away * (torch.atan2(sine, cosine) / torch.where(length > 0, length, torch.ones_like(length)))
