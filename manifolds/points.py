"""A point factored once, ready for many vectors: the layer between the pure functions and the manifold classes.

This is where input is judged. A gauge in which Gram matrices would lose digits is left first (the operation runs in the
balanced gauge and its result moves back, which equivariance allows), a point of lower rank is refused, and a
geodesic that leaves the manifold is reported. Each of these needs one flag on the host. Where the host must not
look (vmap, tracing, fake tensors) the flag is unknown and the plain path is taken.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from . import geodesics, gl, rescaling
from .frame import Frame, balance, balanced_frame, correlation, factor, small_dtype, split_rows
from .gl import Pair
from .metric import Metric

RETRACTIONS = ("first_order", "christoffel", "geodesic")

# Above this correlation of columns, Gram matrices lose more than three digits.
_CORRELATION_LIMIT = 1e3
_MOST_STEPS = 64


def known(flag: Tensor) -> bool | None:
    """The value of a flag, if the host may look at it.

    Args:
        flag: A tensor with one boolean.

    Returns:
        The boolean, or None under vmap, tracing and fake or meta tensors.
    """
    if torch.compiler.is_compiling():
        return None
    try:
        return bool(flag)
    except RuntimeError:  # raised by functorch, FakeTensorMode and the meta device alike
        return None


def label(flags: Tensor, name: str = "x") -> str:
    """Name of the first batch entry at which a flag is set.

    Args:
        flags: Booleans, one per batch entry.
        name: Name of the argument.

    Returns:
        For example ``x[3]``, or ``x`` where there is no batch.
    """
    if flags.ndim == 0:
        return name
    index = flags.nonzero()[0].tolist()
    return f"{name}[{', '.join(str(i) for i in index)}]"


def work_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype in which the tall factors are handled.

    Args:
        dtype: Dtype of the point.

    Returns:
        The dtype itself, float32 for half precision.
    """
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def require_vector(u: Tensor, point: torch.Size, axes: int) -> None:
    """Refuse a tangent vector that does not fit its point.

    Args:
        u: The vector.
        point: Shape of the point.
        axes: Number of axes of a single point.

    Raises:
        ValueError: If the last axes differ or the vector is not of floating point.
    """
    if u.shape[-axes:] != point[-axes:]:
        wanted = ", ".join(str(size) for size in point[-axes:])
        raise ValueError(f"u must have the shape (..., {wanted}) of its point x, but it is {tuple(u.shape)}.")
    if not u.is_floating_point():
        raise ValueError(f"u must be of floating point, not {u.dtype}.")


class FactoredPoint(ABC):
    """A point of a quotient manifold with everything computed that its tangent vectors share.

    Vectors and points keep the packed layout of the manifold. Results have the dtype of the vector that went in.
    """

    def __init__(self, metric: Metric, retraction: str, n: int) -> None:
        self.metric, self.retraction, self.n = metric, retraction, n

    @abstractmethod
    def _into(self, u: Tensor) -> Pair:
        """Unpack a vector in the working gauge and dtype."""

    @abstractmethod
    def _out(self, pair: Pair, like: Tensor) -> Tensor:
        """Pack a result in the caller's gauge and dtype."""

    @abstractmethod
    def _inner(self, u: Pair, v: Pair) -> Tensor: ...

    @abstractmethod
    def _project(self, u: Pair) -> Pair: ...

    @abstractmethod
    def _gradient(self, euclidean: Pair) -> Pair: ...

    @abstractmethod
    def _christoffel(self, u: Pair, v: Pair | None) -> Pair: ...

    @abstractmethod
    def _hessian(self, euclidean: Pair, second: Pair, u: Pair) -> Pair: ...

    @abstractmethod
    def _geodesic(self, u: Pair) -> Pair: ...

    @property
    @abstractmethod
    def pair(self) -> Pair:
        """The two factors in the working gauge."""

    def inner(self, u: Tensor, v: Tensor | None = None) -> Tensor:
        """Inner product of two tangent vectors.

        Args:
            u: A tangent vector.
            v: A tangent vector; ``u`` if left out.

        Returns:
            One number per batch entry.
        """
        first = self._into(u)
        return self._inner(first, first if v is None else self._into(v)).to(u.dtype)

    def proju(self, u: Tensor) -> Tensor:
        """Orthogonal projection onto the horizontal space.

        Args:
            u: Any vector of the total space.

        Returns:
            Its horizontal part.
        """
        return self._out(self._project(self._into(u)), u)

    def egrad2rgrad(self, euclidean: Tensor) -> Tensor:
        """Riemannian gradient from partial derivatives.

        Args:
            euclidean: The partial derivatives, as autograd gives them.

        Returns:
            The horizontal gradient.
        """
        return self._out(self._project(self._gradient(self._into_dual(euclidean))), euclidean)

    def ehess2rhess(self, euclidean: Tensor, second: Tensor, u: Tensor) -> Tensor:
        """Riemannian Hessian along a vector from Euclidean derivatives.

        Args:
            euclidean: The partial derivatives.
            second: Their derivative along ``u``.
            u: A horizontal vector.

        Returns:
            The horizontal vector ``Hess f [u]``.
        """
        return self._out(self._hessian(self._into_dual(euclidean), self._into_dual(second), self._into(u)), u)

    def christoffel(self, u: Tensor, v: Tensor | None = None) -> Tensor:
        """Christoffel term ``Gamma(u, v)`` of the total space.

        Args:
            u: A tangent vector.
            v: A tangent vector; ``u`` if left out.

        Returns:
            A tensor like ``u``.
        """
        return self._out(self._christoffel(self._into(u), None if v is None else self._into(v)), u)

    def expmap(self, u: Tensor) -> Tensor:
        """Exact geodesic at time 1.

        Args:
            u: The initial velocity, horizontal.

        Returns:
            The point.
        """
        return self._out(self._geodesic(self._into(u)), u)

    @abstractmethod
    def _into_dual(self, euclidean: Tensor) -> Pair:
        """Unpack partial derivatives, which change gauge the other way round."""

    def retr(self, u: Tensor) -> Tensor:
        """The manifold's retraction.

        Args:
            u: The step.

        Returns:
            ``x + u``, ``x + u - Gamma(u, u)/2`` or the geodesic.
        """
        if self.retraction == "geodesic":
            return self.expmap(u)
        step = self._into(u)
        moved = gl.add(self.pair, step)
        if self.retraction == "christoffel":
            moved = gl.add(moved, self._christoffel(step, None), -0.5)
        return self._out(moved, u)


class GLPoint(FactoredPoint):
    """A factored point of the GL(h) quotient.

    Args:
        metric: The metric.
        retraction: Name of the retraction.
        n: Rows of the first factor.
        x: The point, ``(..., n + m, h)``.
        spectral: Whether vectors will be projected.

    Raises:
        ValueError: If ``x`` is not finite or has lower rank.
    """

    def __init__(self, metric: Metric, retraction: str, n: int, x: Tensor, *, spectral: bool = True) -> None:
        super().__init__(metric, retraction, n)
        wide = x.to(work_dtype(x.dtype))
        self.dtype, self._shape = x.dtype, x.shape
        self._point: Pair = split_rows(wide, n)
        self.change: Pair | None = None
        self.frame: Frame = factor(metric, *self._point, spectral=spectral)
        if known(self._sound().all()) is False:
            self._move_to_good_gauge(x)
        # With derivatives the small algebra stays wide, so that gradients do too.
        narrow = not (torch.is_grad_enabled() and x.requires_grad)
        self._fast = self.frame.cast(self._point[0].dtype) if narrow else self.frame

    @property
    def pair(self) -> Pair:
        """The two factors in the working gauge."""
        return self._point

    def _sound(self) -> Tensor:
        number = correlation(self.frame)
        sound = (number > 0.5) & (number <= _CORRELATION_LIMIT)
        if self.frame.spectrum is not None:
            # eigh sees the squares of the singular values, with an absolute error of the largest.
            s = self.frame.spectrum.s
            goal = max(1e-10, torch.finfo(self._point[0].dtype).eps)
            sound = sound & (s.amin(-1) >= (torch.finfo(s.dtype).eps / goal) ** 0.5 * s.amax(-1))
        return sound

    def _move_to_good_gauge(self, x: Tensor) -> None:
        finite = x.isfinite().all(-1).all(-1)
        if known(finite.all()) is False:
            raise ValueError(f"{label(~finite)} holds NaN or infinite entries; every weight must be finite.")
        with torch.no_grad():
            balanced = balance(*self._point)
        refuse_rank_loss(balanced.s, x.dtype, x.shape[-2])
        self.change = (balanced.change, balanced.change_inverse)
        self._point = gl.act(self._point, *self.change)
        if torch.is_grad_enabled() and x.requires_grad:
            self.frame = factor(self.metric, *self._point, spectral=True)
        else:
            self.frame = balanced_frame(self.metric, balanced.s)

    def _plain(self, u: Tensor) -> bool:
        """Whether vectors need neither another gauge nor another dtype, so that results can be packed as they form."""
        return self.change is None and u.dtype == self._point[0].dtype and u.shape == self._shape

    def proju(self, u: Tensor) -> Tensor:
        """Orthogonal projection onto the horizontal space.

        Args:
            u: Any vector of the total space.

        Returns:
            Its horizontal part.
        """
        if not self._plain(u):
            return super().proju(u)
        pair = self._split(u)
        L = self._field(pair)
        return gl.assemble([(self._point[0], L)], [(self._point[1], -L.mT)], pair)

    def retr(self, u: Tensor) -> Tensor:
        """The manifold's retraction.

        Args:
            u: The step.

        Returns:
            ``x + u``, ``x + u - Gamma(u, u)/2`` or the geodesic.
        """
        if self.retraction != "christoffel" or not self._plain(u):
            return super().retr(u)
        pair = self._split(u)
        products = gl.grams(self._fast, self._point, pair)
        step, _ = geodesics.retraction_fields("christoffel", self.metric, self._fast, products)
        first = [(pair[0], step.on_a), (self._point[0], step.on_g)]
        second = [(pair[1], step.on_b), (self._point[1], step.on_h)]
        return gl.assemble(first, second)

    def _split(self, u: Tensor) -> Pair:
        require_vector(u, self._shape, 2)
        wide = u.to(work_dtype(self.dtype))
        return split_rows(wide, self.n)

    def _into(self, u: Tensor) -> Pair:
        pair = self._split(u)
        return pair if self.change is None else gl.act(pair, *self.change)

    def _into_dual(self, euclidean: Tensor) -> Pair:
        pair = self._split(euclidean)
        if self.change is None:
            return pair
        change, inverse = self.change
        return gl.combine(pair[0], inverse.mT), gl.combine(pair[1], change)

    def _out(self, pair: Pair, like: Tensor) -> Tensor:
        if self.change is not None:
            pair = gl.act(pair, self.change[1], self.change[0])
        return torch.cat(pair, -2).to(like.dtype)

    def _inner(self, u: Pair, v: Pair) -> Tensor:
        return gl.inner(self.frame, u, v)

    def _field(self, u: Pair) -> Tensor:
        """The ``L`` for which ``(a + G L, b - H L^T)`` is horizontal."""
        return gl.project_field(self.metric, self._fast, self._point, u)

    def _project(self, u: Pair) -> Pair:
        L = self._field(u)
        return u[0] + gl.combine(self._point[0], L), u[1] - gl.combine(self._point[1], L.mT)

    def _gradient(self, euclidean: Pair) -> Pair:
        return gl.gradient(self.frame, euclidean)

    def _christoffel(self, u: Pair, v: Pair | None) -> Pair:
        return gl.christoffel(self.metric, self._fast, self._point, u, v)

    def _hessian(self, euclidean: Pair, second: Pair, u: Pair) -> Pair:
        return self._project(gl.covariant_gradient(self.metric, self.frame, self._point, euclidean, second, u))

    def _geodesic(self, u: Pair) -> Pair:
        return self.land(u, strict=True)

    def land(self, u: Pair, *, strict: bool = False) -> Pair:
        """Where a geodesic is at time 1, in the working gauge.

        Args:
            u: The initial velocity in the working gauge.
            strict: Whether to refuse a geodesic that leaves the manifold, rather than return what the integrator gives.

        Returns:
            The two factors.
        """
        steps = 1
        while True:
            point, drift = geodesics.geodesic(self.metric, self.frame, self._point, u, steps=steps)
            if drift is None:
                return point
            bound = _drift_bound(self._point[0])
            if known((drift <= bound).all()) is not False:
                return point
            if steps >= _MOST_STEPS:
                if strict:
                    refuse_end_of_geodesic(self.metric, drift, bound)
                return point
            steps *= 2


class SubgroupPoint(GLPoint):
    """A factored point of the quotient by a subgroup of GL(h).

    The total space, its metrics and its geodesics are those of the GL(h) quotient; only the vertical space is smaller.

    Args:
        metric: The metric.
        retraction: Name of the retraction.
        n: Rows of the first factor.
        x: The point, ``(..., n + m, h)``.
        algebra: Basis of the subgroup's Lie algebra, ``(r, h, h)``.
    """

    def __init__(self, metric: Metric, retraction: str, n: int, x: Tensor, algebra: Tensor) -> None:
        super().__init__(metric, retraction, n, x, spectral=False)
        algebra = algebra.to(device=x.device, dtype=self.frame.gram_g.dtype)
        if self.change is not None:
            change, inverse = (part.unsqueeze(-3) for part in self.change)
            algebra = inverse @ algebra @ change
        self.algebra = algebra

    def _field(self, u: Pair) -> Tensor:
        return gl.subgroup_field(self.frame, self.algebra, self._point, u)


def _drift_bound(x: Tensor) -> float:
    """How far the squared speed may drift along an integrated geodesic."""
    if small_dtype(x) == torch.float32:
        return 1e-5
    return 1e-12 if x.dtype == torch.float64 else 1e-8


def refuse_rank_loss(s: Tensor, dtype: torch.dtype, rows: int) -> None:
    """Refuse a point of lower rank.

    Args:
        s: Singular values of ``G H^T``, descending.
        dtype: Dtype of the point.
        rows: Rows of the point.

    Raises:
        ValueError: If a singular value vanishes to the precision of the dtype, naming the entry and the value.
    """
    present = s > rows * torch.finfo(dtype).eps * s.narrow(-1, 0, 1)
    full = present.all(-1)
    if known(full.all()) is not False:
        return
    where = label(~full)
    index = tuple((~full).nonzero()[0].tolist())
    count = int(present[index].sum())
    raise ValueError(
        f"{where} has rank {count}, not {s.shape[-1]}: singular value {count + 1} of G H^T is {s[index][count]:.1e} "
        f"beside a largest of {s[index][0]:.1e}; projx(x) gives a point of full rank nearby."
    )


def refuse_end_of_geodesic(metric: Metric, drift: Tensor, bound: float) -> None:
    """Report a geodesic that leaves the manifold.

    Args:
        metric: The metric.
        drift: Relative error after each step, ``(steps, ...)``.
        bound: What was allowed.

    Raises:
        ValueError: Always.
    """
    lost = ~(drift <= bound)
    failed = lost.any(0)
    index = tuple(failed.nonzero()[0].tolist())
    first = int(lost[(slice(None), *index)].to(torch.uint8).argmax())
    raise ValueError(
        f"the geodesic of {label(failed)} under metric {metric.name!r} leaves the manifold (G H^T loses rank) "
        f"near t = {(first + 1) / drift.shape[0]:.2f}, before t = 1; take a shorter u, or metric='inv', "
        "whose geodesics never end."
    )


class RescalingPoint(FactoredPoint):
    """A factored point of the rescaling quotient.

    Args:
        metric: The metric.
        retraction: Name of the retraction.
        n: Length of the first vector.
        x: The point, ``(..., n + m)``, or ``(..., n + m, 1)`` for the GL(1) quotient.
        column: Whether points and vectors carry a last axis of size one.

    Raises:
        ValueError: If ``x`` is not finite or one of its vectors is zero.
    """

    def __init__(self, metric: Metric, retraction: str, n: int, x: Tensor, *, column: bool = False) -> None:
        super().__init__(metric, retraction, n)
        self.column, self.dtype, self._shape = column, x.dtype, x.shape
        self._point = self._into(x)
        self.frame = rescaling.factor(metric, *self._point)
        size = self.frame.square_g * self.frame.square_k
        good = ((size > 0) & size.isfinite()).squeeze(-1)
        if known(good.all()) is False:
            self._refuse(good)

    def _refuse(self, good: Tensor) -> None:
        finite = torch.cat(self._point, -1).isfinite().all(-1)
        if known(finite.all()) is False:
            raise ValueError(f"{label(~finite)} holds NaN or infinite entries; every weight must be finite.")
        raise ValueError(
            f"{label(~good)} has rank 0, not 1: one of its two vectors is zero (or its square leaves the range of the "
            "dtype), so the only singular value of g k^T is 0; projx(x) gives a point of full rank nearby."
        )

    @property
    def pair(self) -> Pair:
        """The two vectors."""
        return self._point

    def _into(self, u: Tensor) -> Pair:
        require_vector(u, self._shape, 2 if self.column else 1)
        wide = u.to(work_dtype(self.dtype))
        wide = wide.squeeze(-1) if self.column else wide
        return split_rows(wide, self.n, -1)

    def _into_dual(self, euclidean: Tensor) -> Pair:
        return self._into(euclidean)

    def _out(self, pair: Pair, like: Tensor) -> Tensor:
        packed = torch.cat(pair, -1).to(like.dtype)
        return packed.unsqueeze(-1) if self.column else packed

    def _inner(self, u: Pair, v: Pair) -> Tensor:
        return rescaling.inner(self.frame, u, v)

    def _project(self, u: Pair) -> Pair:
        return rescaling.project(self.frame, self._point, u)

    def _gradient(self, euclidean: Pair) -> Pair:
        return rescaling.gradient(self.frame, euclidean)

    def _christoffel(self, u: Pair, v: Pair | None) -> Pair:
        return rescaling.christoffel(self.metric, self.frame, self._point, u, v)

    def _hessian(self, euclidean: Pair, second: Pair, u: Pair) -> Pair:
        return rescaling.hessian(self.metric, self.frame, self._point, euclidean, second, u)

    def _geodesic(self, u: Pair) -> Pair:
        point, reach = rescaling.geodesic(self.metric, self.frame, self._point, u)
        kept = (reach > 0).squeeze(-1)
        if known(kept.all()) is False:
            lost = ~kept
            growth = (1 - reach.squeeze(-1))[lost][0]
            raise ValueError(
                f"the geodesic of {label(lost)} under metric {self.metric.name!r} leaves the manifold (g k^T vanishes) "
                f"at t = {float(1 / growth):.2f}, not after t = 1; take a shorter u, or metric='inv', "
                "whose geodesics never end."
            )
        return point
