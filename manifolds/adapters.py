"""The two quotients as Pymanopt manifolds: NumPy in, NumPy out, the same core underneath."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from pymanopt.manifolds.manifold import Manifold

from .quotients import GLQuotient, Quotient, RescalingQuotient

Array: TypeAlias = NDArray[Any]
Point: TypeAlias = tuple[Array, Array]


class TangentPair(list[Array]):
    """A tangent vector ``[a, b]`` with the arithmetic that Pymanopt's optimizers use."""

    __array_ufunc__ = None  # makes NumPy scalars defer to the operators below

    def __add__(self, other: Sequence[Array]) -> TangentPair:  # type: ignore[override]
        return TangentPair(a + b for a, b in zip(self, other, strict=True))

    def __sub__(self, other: Sequence[Array]) -> TangentPair:
        return TangentPair(a - b for a, b in zip(self, other, strict=True))

    def __mul__(self, scale: float) -> TangentPair:  # type: ignore[override]
        return TangentPair(scale * a for a in self)

    __rmul__ = __mul__  # type: ignore[assignment]

    def __truediv__(self, scale: float) -> TangentPair:
        return TangentPair(a / scale for a in self)

    def __neg__(self) -> TangentPair:
        return TangentPair(-a for a in self)


class _Adapter(Manifold):
    """Pymanopt's interface on top of a Geoopt quotient. Points are tuples, tangent vectors `TangentPair`."""

    def __init__(self, quotient: Quotient, shapes: tuple[tuple[int, ...], tuple[int, ...]], dimension: int) -> None:
        self.quotient, self._shapes = quotient, shapes
        super().__init__(f"{quotient} of pairs {shapes[0]} and {shapes[1]}", dimension, point_layout=2)

    def _pack(self, pair: Iterable[Array], name: str = "point") -> torch.Tensor:
        arrays = [np.asarray(part) for part in pair]
        if tuple(part.shape for part in arrays) != self._shapes:
            given = " and ".join(str(part.shape) for part in arrays)
            raise ValueError(
                f"{name} must be a pair of arrays of shapes {self._shapes[0]} and {self._shapes[1]}, not {given}."
            )
        return torch.cat([torch.from_numpy(np.ascontiguousarray(part)) for part in arrays], -self.quotient.ndim)

    def _unpack(self, x: torch.Tensor) -> Point:
        first, second = self.quotient.unpack_tensor(x)
        return first.numpy(), second.numpy()

    def _vector(self, x: torch.Tensor) -> TangentPair:
        return TangentPair(self._unpack(x))

    @property
    def typical_dist(self) -> float:
        """Scale of the manifold, from which trust regions take their first radius."""
        return math.sqrt(self.dim)

    def inner_product(self, point: Point, tangent_vector_a: TangentPair, tangent_vector_b: TangentPair) -> float:
        """Inner product, summed over hidden units where there are several.

        Args:
            point: The point.
            tangent_vector_a: A tangent vector.
            tangent_vector_b: A tangent vector.

        Returns:
            A number.
        """
        x, u, v = self._pack(point), self._pack(tangent_vector_a, "vector"), self._pack(tangent_vector_b, "vector")
        return float(self.quotient.inner(x, u, v).sum())

    def norm(self, point: Point, tangent_vector: TangentPair) -> float:
        """Length of a tangent vector.

        Args:
            point: The point.
            tangent_vector: The vector.

        Returns:
            A number.
        """
        return math.sqrt(max(self.inner_product(point, tangent_vector, tangent_vector), 0.0))

    def projection(self, point: Point, vector: Sequence[Array]) -> TangentPair:
        """Orthogonal projection onto the horizontal space.

        Args:
            point: The point.
            vector: Any pair of arrays.

        Returns:
            The horizontal part.
        """
        return self._vector(self.quotient.proju(self._pack(point), self._pack(vector, "vector")))

    to_tangent_space = projection

    def euclidean_to_riemannian_gradient(self, point: Point, euclidean_gradient: Sequence[Array]) -> TangentPair:
        """Riemannian gradient from partial derivatives.

        Args:
            point: The point.
            euclidean_gradient: The partial derivatives.

        Returns:
            The horizontal gradient.
        """
        return self._vector(self.quotient.egrad2rgrad(self._pack(point), self._pack(euclidean_gradient, "gradient")))

    def euclidean_to_riemannian_hessian(
        self,
        point: Point,
        euclidean_gradient: Sequence[Array],
        euclidean_hessian: Sequence[Array],
        tangent_vector: TangentPair,
    ) -> TangentPair:
        """Riemannian Hessian of the quotient along a tangent vector.

        Args:
            point: The point.
            euclidean_gradient: The partial derivatives.
            euclidean_hessian: Their derivative along ``tangent_vector``.
            tangent_vector: A horizontal vector.

        Returns:
            A horizontal vector.
        """
        x, egrad = self._pack(point), self._pack(euclidean_gradient, "gradient")
        ehess, u = self._pack(euclidean_hessian, "hessian"), self._pack(tangent_vector, "vector")
        return self._vector(self.quotient.ehess2rhess(x, egrad, ehess, u))

    def retraction(self, point: Point, tangent_vector: TangentPair) -> Point:
        """The retraction chosen at construction.

        Args:
            point: The point.
            tangent_vector: The step.

        Returns:
            The new point.
        """
        return self._unpack(self.quotient.retr(self._pack(point), self._pack(tangent_vector, "vector")))

    def exp(self, point: Point, tangent_vector: TangentPair) -> Point:
        """Exact geodesic at time 1.

        Args:
            point: The point.
            tangent_vector: The initial velocity.

        Returns:
            The new point.
        """
        return self._unpack(self.quotient.expmap(self._pack(point), self._pack(tangent_vector, "vector")))

    def log(self, point_a: Point, point_b: Point) -> TangentPair:
        """Horizontal vector at one point whose geodesic leads to the orbit of another.

        Args:
            point_a: The start.
            point_b: The end, in any gauge.

        Returns:
            The vector.
        """
        return self._vector(self.quotient.logmap(self._pack(point_a), self._pack(point_b)))

    def dist(self, point_a: Point, point_b: Point) -> float:
        """Distance of two orbits.

        Args:
            point_a: A point.
            point_b: A point.

        Returns:
            The length of the geodesic that `log` finds.
        """
        return float(self.quotient.dist(self._pack(point_a), self._pack(point_b)).square().sum().sqrt())

    def pair_mean(self, point_a: Point, point_b: Point) -> Point:
        """Midpoint of the geodesic between two points.

        Args:
            point_a: A point.
            point_b: A point.

        Returns:
            The midpoint, in the gauge of ``point_a``.
        """
        return self.exp(point_a, self.log(point_a, point_b) / 2)

    def transport(self, point_a: Point, point_b: Point, tangent_vector_a: TangentPair) -> TangentPair:
        """Vector transport by projection.

        Args:
            point_a: Where the vector is.
            point_b: Where it goes.
            tangent_vector_a: The vector.

        Returns:
            A horizontal vector at ``point_b``.
        """
        return self.projection(point_b, tangent_vector_a)

    def zero_vector(self, point: Point) -> TangentPair:
        """The zero of a tangent space.

        Args:
            point: The point.

        Returns:
            Zeros.
        """
        return TangentPair(np.zeros_like(part) for part in point)

    def random_point(self) -> Point:
        """Gaussian point, from NumPy's global state as everywhere in Pymanopt.

        Returns:
            A point of full rank.
        """
        first, second = (
            np.random.normal(size=shape) / math.sqrt(size) for shape, size in zip(self._shapes, self._rows, strict=True)
        )
        return first, second

    @property
    def _rows(self) -> tuple[int, int]:
        axis = -self.quotient.ndim
        return self._shapes[0][axis], self._shapes[1][axis]

    def random_tangent_vector(self, point: Point) -> TangentPair:
        """Horizontal vector of length one.

        Args:
            point: The point.

        Returns:
            The vector.
        """
        noise = self._pack([np.random.normal(size=shape) for shape in self._shapes], "noise")
        x = self._pack(point)
        vector = self._vector(self.quotient.proju(x, self.quotient._from_balanced(x, noise)))
        return vector / self.norm(point, vector)


def _positive(**sizes: int) -> None:
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(f"{name} must be a positive integer, not {size!r}.")


class PymanoptGLQuotient(_Adapter):
    r"""Pairs ``(G, H)`` of shapes ``(n, h)`` and ``(m, h)`` up to ``(G A^-1, H A^T)``, as a Pymanopt manifold.

    The manifold of n x m matrices of rank h with a GL(h)-invariant metric; see `GLQuotient` for the geometry and for
    what happens where the rank is lost.

    Args:
        n: Rows of ``G``.
        m: Rows of ``H``.
        h: Columns of both, at most ``min(n, m)``.
        metric: ``"inv"``, ``"mix"``, or a number in [0, 1].
        retraction: ``"first_order"``, ``"christoffel"`` or ``"geodesic"``.
        relaxation: The invariant relaxation.
    """

    def __init__(
        self,
        n: int,
        m: int,
        h: int,
        *,
        metric: str | float = "mix",
        retraction: str = "christoffel",
        relaxation: float = 0.0,
    ) -> None:
        _positive(n=n, m=m, h=h)
        if h > min(n, m):
            raise ValueError(f"h must be at most min(n, m) = min({n}, {m}), not {h}.")
        quotient = GLQuotient(n, metric=metric, retraction=retraction, relaxation=relaxation)
        super().__init__(quotient, ((n, h), (m, h)), (n + m - h) * h)


class PymanoptRescalingQuotient(_Adapter):
    r"""Pairs of arrays ``(units, n)`` and ``(units, m)`` up to one factor per unit, as a Pymanopt manifold.

    Args:
        n: Entries of each ``g``.
        m: Entries of each ``k``.
        units: Number of hidden units.
        metric: ``"inv"``, ``"mix"``, or a number in [0, 1].
        retraction: ``"first_order"``, ``"christoffel"`` or ``"geodesic"``.
        relaxation: The invariant relaxation.
    """

    def __init__(
        self,
        n: int,
        m: int,
        units: int,
        *,
        metric: str | float = "mix",
        retraction: str = "christoffel",
        relaxation: float = 0.0,
    ) -> None:
        _positive(n=n, m=m, units=units)
        quotient = RescalingQuotient(n, metric=metric, retraction=retraction, relaxation=relaxation)
        super().__init__(quotient, ((units, n), (units, m)), (n + m - 1) * units)
