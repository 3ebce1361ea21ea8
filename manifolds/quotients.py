"""The two quotients as Geoopt manifolds."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import geoopt
import numpy as np
import torch
from torch import Tensor

from . import gl, rescaling
from .frame import balance, small_dtype, split_rows
from .logarithm import flatten, reduce_rows, shoot, spread, unflatten
from .metric import Metric
from .points import (
    RETRACTIONS,
    FactoredPoint,
    GLPoint,
    RescalingPoint,
    SubgroupPoint,
    known,
    label,
    require_vector,
    work_dtype,
)


def _size(size: Sequence[int | Sequence[int]]) -> tuple[int, ...]:
    """Read ``random(2, 3)`` and ``random((2, 3))`` alike."""
    first = size[0] if len(size) == 1 else size
    return tuple(first) if isinstance(first, Sequence) else (first,)  # type: ignore[arg-type]


class Quotient(geoopt.Manifold):
    """What the two quotients share. See `GLQuotient` for the arguments."""

    reversible = False
    ndim: int

    def __init__(self, n: int, *, metric: str | float, retraction: str, relaxation: float) -> None:
        if isinstance(n, bool) or not isinstance(n, int) or n < 1:
            raise ValueError(f"n must be a positive integer, the number of rows of G, not {n!r}.")
        if retraction not in RETRACTIONS:
            raise ValueError(f"retraction must be one of {', '.join(map(repr, RETRACTIONS))}, not {retraction!r}.")
        super().__init__()
        self.n, self.retraction = n, retraction
        self._metric = Metric.parse(metric, relaxation)

    @property
    def metric(self) -> str | float:
        """``"inv"``, ``"mix"`` or the exponent of the family."""
        return self._metric.name

    @property
    def relaxation(self) -> float:
        """The invariant relaxation."""
        return self._metric.relaxation

    def extra_repr(self) -> str:
        """Arguments as they were given.

        Returns:
            For example ``n=769, metric='mix', retraction='christoffel'``.
        """
        text = f"n={self.n}, metric={self.metric!r}, retraction={self.retraction!r}"
        return text + (f", relaxation={self.relaxation}" if self.relaxation else "")

    @abstractmethod
    def at(self, x: Tensor) -> FactoredPoint:
        """Factor a point once for many vectors.

        Args:
            x: The point.

        Returns:
            An object with the methods ``inner``, ``proju``, ``egrad2rgrad``, ``ehess2rhess``, ``christoffel``, ``retr``
            and ``expmap`` of this manifold, without the argument ``x``.
        """

    def _at(self, x: Tensor, *, spectral: bool) -> FactoredPoint:
        return self.at(x)

    # -- geometry ---------------------------------------------------------------------------------------------------

    def inner(self, x: Tensor, u: Tensor, v: Tensor | None = None, *, keepdim: bool = False) -> Tensor:
        """Inner product of tangent vectors.

        Args:
            x: The point.
            u: A tangent vector.
            v: A tangent vector; ``u`` if left out.
            keepdim: Whether to keep the axes of the point with size one.

        Returns:
            One number per batch entry.
        """
        value = self._at(x, spectral=False).inner(u, v)
        return self._with_axes(value) if keepdim else value

    def norm(self, x: Tensor, u: Tensor, *, keepdim: bool = False) -> Tensor:
        """Length of a tangent vector.

        Args:
            x: The point.
            u: A tangent vector.
            keepdim: Whether to keep the axes of the point with size one.

        Returns:
            One number per batch entry.
        """
        return self.inner(x, u, keepdim=keepdim).clamp_min(0).sqrt()

    def proju(self, x: Tensor, u: Tensor) -> Tensor:
        """Orthogonal projection onto the horizontal space.

        Args:
            x: The point.
            u: Any vector of the total space.

        Returns:
            Its horizontal part.
        """
        return self.at(x).proju(u)

    def egrad2rgrad(self, x: Tensor, u: Tensor) -> Tensor:
        """Riemannian gradient from partial derivatives.

        Args:
            x: The point.
            u: The partial derivatives.

        Returns:
            The horizontal gradient; it is projected, since weight decay or a term outside the pair makes the gradient
            of the total space leave the horizontal space.
        """
        return self.at(x).egrad2rgrad(u)

    def ehess2rhess(self, x: Tensor, egrad: Tensor, ehess: Tensor, u: Tensor) -> Tensor:
        """Riemannian Hessian along a vector from Euclidean derivatives.

        Args:
            x: The point.
            egrad: The partial derivatives of the function.
            ehess: Their derivative along ``u``.
            u: A horizontal vector.

        Returns:
            The horizontal vector ``Hess f [u]``.
        """
        return self.at(x).ehess2rhess(egrad, ehess, u)

    def christoffel(self, x: Tensor, u: Tensor, v: Tensor | None = None) -> Tensor:
        """Christoffel term of the total space.

        Args:
            x: The point.
            u: A tangent vector.
            v: A tangent vector; ``u`` if left out.

        Returns:
            ``Gamma(u, v)``, like ``u``.
        """
        return self._at(x, spectral=False).christoffel(u, v)

    def retr(self, x: Tensor, u: Tensor) -> Tensor:
        """The retraction chosen at construction.

        Args:
            x: The point.
            u: The step.

        Returns:
            ``x + u``, ``x + u - Gamma(u, u)/2`` or the geodesic.
        """
        if self.retraction == "first_order":
            self._assert_check_shape(x.shape, "x")
            require_vector(u, x.shape, self.ndim)
            return x + u
        return self._at(x, spectral=False).retr(u)

    def expmap(self, x: Tensor, u: Tensor) -> Tensor:
        """Exact geodesic at time 1, whatever the retraction.

        Args:
            x: The point.
            u: The initial velocity, horizontal.

        Returns:
            The point.
        """
        return self._at(x, spectral=False).expmap(u)

    def transp(self, x: Tensor, y: Tensor, v: Tensor) -> Tensor:
        """Vector transport by projection onto the horizontal space of ``y``.

        Args:
            x: The point of ``v``.
            y: Where to bring it; a retraction of ``x``, so that both are in one gauge.
            v: A horizontal vector at ``x``.

        Returns:
            A horizontal vector at ``y``.
        """
        return self.at(y).proju(v)

    def dist(self, x: Tensor, y: Tensor, *, keepdim: bool = False) -> Tensor:
        """Length of the geodesic that `logmap` finds.

        Args:
            x: A point.
            y: A point in any gauge.
            keepdim: Whether to keep the axes of the point with size one.

        Returns:
            One number per batch entry; zero on an orbit, and the same for all points of two orbits.
        """
        value = self._log(x, y)[1]
        return self._with_axes(value) if keepdim else value

    def logmap(self, x: Tensor, y: Tensor) -> Tensor:
        """Horizontal vector whose geodesic leads from ``x`` to the orbit of ``y``.

        Args:
            x: A point.
            y: A point in any gauge.

        Returns:
            A horizontal vector at ``x``.
        """
        return self._log(x, y)[0]

    @abstractmethod
    def _log(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Vector and distance."""

    # -- representation ---------------------------------------------------------------------------------------------

    def _with_axes(self, value: Tensor) -> Tensor:
        for _ in range(self.ndim):
            value = value.unsqueeze(-1)
        return value

    def _axis(self) -> int:
        return -self.ndim

    def unpack_tensor(self, tensor: Tensor) -> tuple[Tensor, Tensor]:
        """The two factors of a point, as views.

        Args:
            tensor: A point or tangent vector.

        Returns:
            ``(G, H)``.
        """
        self._assert_check_shape(tensor.shape, "x")
        return split_rows(tensor, self.n, self._axis())

    def pack_point(self, *tensors: Tensor) -> Tensor:
        """One tensor from two factors.

        Args:
            *tensors: ``G`` and ``H``.

        Returns:
            The point.

        Raises:
            ValueError: If there are not two factors, or they do not fit each other or this manifold.
        """
        if len(tensors) != 2:
            raise ValueError(f"pack_point takes the two factors G and H, not {len(tensors)} tensors.")
        first, second = tensors
        if first.ndim < self.ndim or first.shape[self._axis()] != self.n:
            raise ValueError(f"G must have {self.n} rows for {self}, but its shape is {tuple(first.shape)}.")
        if first.ndim != second.ndim or (self.ndim == 2 and first.shape[-1] != second.shape[-1]):
            raise ValueError(f"G and H must share h and batch axes, not {tuple(first.shape)}, {tuple(second.shape)}.")
        packed = torch.cat(tensors, self._axis())
        self._assert_check_shape(packed.shape, "x")
        return packed

    def _check_shape(self, shape: Sequence[int], name: str) -> tuple[bool, str | None]:
        axes = "(..., n + m, h)" if self.ndim == 2 else "(..., n + m)"
        if len(shape) < self.ndim:
            return False, f"{name} must have the shape {axes} with n = {self.n}, but it is {tuple(shape)}."
        rows = shape[self._axis()]
        h = shape[-1] if self.ndim == 2 else 1
        if rows <= self.n:
            return False, f"{name} must have more than n = {self.n} rows (G above H), but it has {rows}."
        m = rows - self.n
        if not 1 <= h <= min(self.n, m):
            return False, f"{name} has h = {h} columns, but h must be at most min(n, m) = min({self.n}, {m})."
        return True, None

    def _assert_check_point(self, x: Tensor) -> None:
        self._assert_check_shape(x.shape, "x")
        if not x.is_floating_point():
            raise ValueError(f"x must be of floating point, not {x.dtype}.")

    def _assert(self, checked: tuple[bool, str | None]) -> None:
        if not checked[0]:
            raise ValueError(checked[1])

    def assert_check_point(self, x: Tensor) -> None:
        """Refuse a tensor of the wrong shape.

        Args:
            x: The tensor.
        """
        self._assert(self._check_shape(x.shape, "x"))

    def assert_check_vector(self, u: Tensor) -> None:
        """Refuse a vector of the wrong shape.

        Args:
            u: The tensor.
        """
        self._assert(self._check_shape(u.shape, "u"))

    def assert_check_point_on_manifold(self, x: Tensor, *, atol: float = 1e-5, rtol: float = 1e-5) -> None:
        """Refuse a tensor that is no point: wrong shape, not finite, or of lower rank.

        Args:
            x: The tensor.
            atol: Not needed: rank is judged by the precision of the dtype.
            rtol: Not needed.
        """
        self.assert_check_point(x)
        self._assert(self._check_point_on_manifold(x, atol=atol, rtol=rtol))

    def assert_check_vector_on_tangent(
        self, x: Tensor, u: Tensor, *, ok_point: bool = False, atol: float = 1e-5, rtol: float = 1e-5
    ) -> None:
        """Refuse a vector that is not horizontal.

        Args:
            x: The point.
            u: The vector.
            ok_point: Whether the point is known to be one.
            atol: Absolute tolerance on the length of the vertical part.
            rtol: Tolerance relative to the length of ``u``.
        """
        if not ok_point:
            self.assert_check_point_on_manifold(x)
        self.assert_check_vector(u)
        self._assert(self._check_vector_on_tangent(x, u, atol=atol, rtol=rtol))

    def _check_point_on_manifold(self, x: Tensor, *, atol: float = 1e-5, rtol: float = 1e-5) -> tuple[bool, str | None]:
        try:
            self.at(x)
        except ValueError as error:
            return False, str(error)
        return True, None

    def _check_vector_on_tangent(
        self, x: Tensor, u: Tensor, *, atol: float = 1e-5, rtol: float = 1e-5
    ) -> tuple[bool, str | None]:
        finite = u.isfinite().flatten(u.ndim - self.ndim).all(-1)
        if known(finite.all()) is False:
            return False, f"{label(~finite, 'u')} holds NaN or infinite entries."
        point = self.at(x)
        rest = u - point.proju(u)
        off, size = point.inner(rest).clamp_min(0).sqrt(), point.inner(u).clamp_min(0).sqrt()
        good = off <= atol + rtol * size
        if known(good.all()) is False:
            return False, f"{label(~good, 'u')} is not horizontal; proju(x, u) is."
        return True, None

    def random(
        self,
        *size: int | Sequence[int],
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Gaussian point, of full rank with probability one.

        Args:
            *size: Shape of the point.
            dtype: Its dtype.
            device: Its device.
            generator: Source of randomness.

        Returns:
            A point whose product ``G H^T`` has singular values of order one.
        """
        shape = _size(size)
        self._assert_check_shape(shape, "size")
        x = torch.randn(shape, dtype=dtype, device=device, generator=generator)
        first, second = self.unpack_tensor(x)
        return torch.cat([part * part.shape[self._axis()] ** -0.5 for part in (first, second)], self._axis())

    def random_tangent(self, x: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
        """Horizontal vector drawn from a Gaussian in the balanced gauge of ``x``.

        Args:
            x: The point.
            generator: Source of randomness.

        Returns:
            A horizontal vector at ``x``. Its distribution does not depend on the point of the orbit.
        """
        noise = torch.randn(x.shape, dtype=work_dtype(x.dtype), device=x.device, generator=generator)
        return self.proju(x, self._from_balanced(x, noise).to(x.dtype))

    @abstractmethod
    def _from_balanced(self, x: Tensor, u: Tensor) -> Tensor:
        """Move a vector from the balanced gauge of ``x`` to the gauge of ``x``."""


class GLQuotient(Quotient):
    r"""Pairs ``(G, H)`` up to ``(G A^-1, H A^T)`` with ``A`` in GL(h), as a Geoopt manifold.

    Attention depends on its weights through ``W_Q W_K^T`` and ``W_V W_O`` per head; a low-rank adapter through ``B
    A``; each
    is a point of this manifold, which is the manifold of n x m matrices of rank h with a GL(h)-invariant metric.
    A point is a tensor ``(..., n + m, h)``: rows ``[:n]`` are ``G``, the rest ``H``; leading axes are a batch. Tangent
    vectors are horizontal tensors of that shape.

    The metric mix is flat for n = m = h but not complete: ``G H^T`` can lose rank in finite time, and `expmap` then
    raises an error that names the entry and the time. inv is complete.

    Reference: "Hide & Seek: Transformer Symmetries Obscure Sharpness & Riemannian Geometry Finds It", arXiv 2505.05409.

    Args:
        n: Rows of ``G``.
        metric: ``"inv"``, ``"mix"``, or a number in [0, 1] for the family between them (0 is inv, 1 is mix).
        retraction: ``"first_order"`` (``x + u``), ``"christoffel"`` (second order) or ``"geodesic"`` (exact).
        relaxation: Fraction of the largest singular value that is added to all of them in the weights of the metric.
    """

    ndim = 2
    name = "GLQuotient"

    def __init__(
        self, n: int, *, metric: str | float = "mix", retraction: str = "christoffel", relaxation: float = 0.0
    ) -> None:
        super().__init__(n, metric=metric, retraction=retraction, relaxation=relaxation)

    def at(self, x: Tensor) -> FactoredPoint:
        """Factor a point once for many vectors.

        Args:
            x: The point.

        Returns:
            An object with the methods ``inner``, ``proju``, ``egrad2rgrad``, ``ehess2rhess``, ``christoffel``, ``retr``
            and ``expmap`` of this manifold, without the argument ``x``.
        """
        return self._at(x, spectral=True)

    def _at(self, x: Tensor, *, spectral: bool) -> FactoredPoint:
        self._assert_check_point(x)
        if x.shape[-1] == 1:
            return RescalingPoint(self._metric, self.retraction, self.n, x, column=True)
        return GLPoint(self._metric, self.retraction, self.n, x, spectral=spectral)

    def product(self, x: Tensor) -> Tensor:
        """The matrix that the pair stands for.

        Args:
            x: The point.

        Returns:
            ``G H^T``, ``(..., n, m)``.
        """
        G, H = self.unpack_tensor(x)
        return G @ H.mT

    def act(self, x: Tensor, A: Tensor) -> Tensor:
        """Move a point along its orbit.

        Args:
            x: The point.
            A: Invertible matrices, ``(..., h, h)``.

        Returns:
            ``(G A^-1, H A^T)``.
        """
        G, H = self.unpack_tensor(x)
        wide = small_dtype(x)
        moved = torch.linalg.solve(A.to(wide), G.to(wide), left=False), H.to(wide) @ A.to(wide).mT
        return torch.cat(moved, -2).to(x.dtype)

    def act_tangent(self, x: Tensor, u: Tensor, A: Tensor) -> Tensor:
        """Move a tangent vector along with its point.

        Args:
            x: The point the vector belongs to (the action is linear, so its value does not matter).
            u: The vector.
            A: Invertible matrices, ``(..., h, h)``.

        Returns:
            ``(a A^-1, b A^T)``, a tangent vector at ``act(x, A)``.
        """
        self._assert_check_shape(x.shape, "x")
        return self.act(u, A)

    def vertical(self, x: Tensor, L: Tensor) -> Tensor:
        """Direction of the orbit.

        Args:
            x: The point.
            L: Elements of the Lie algebra, ``(..., h, h)``.

        Returns:
            ``(-G L, H L^T)``.
        """
        return torch.cat(gl.vertical(self.unpack_tensor(x), L), -2)

    def canonical(self, x: Tensor) -> Tensor:
        """The balanced representative of an orbit: ``G^T G = H^T H = diag(s)``, s descending.

        Signs are fixed by making the largest entry of every column of ``G`` positive. It is unique where the singular
        values ``s`` of ``G H^T`` are distinct; inside a group of equal ones every common rotation of the columns is
        balanced too, and which is returned depends on rounding.

        Args:
            x: The point.

        Returns:
            The balanced point.
        """
        G, H = self.unpack_tensor(x)
        wide = work_dtype(x.dtype)
        balanced = balance(G.to(wide), H.to(wide))
        return torch.cat([balanced.G, balanced.H], -2).to(x.dtype)

    def singular_values(self, x: Tensor) -> Tensor:
        """Singular values of the product.

        Args:
            x: The point.

        Returns:
            The h largest singular values of ``G H^T``, descending, ``(..., h)``.
        """
        G, H = self.unpack_tensor(x)
        wide = work_dtype(x.dtype)
        return balance(G.to(wide), H.to(wide)).s.to(x.dtype)

    def projx(self, x: Tensor) -> Tensor:
        """Nearest thing to a projection onto the manifold.

        Args:
            x: Any tensor of the right shape, finite.

        Returns:
            Entries of full rank exactly as they are; others in the balanced gauge with vanishing singular values raised
            to 1e-6 of the largest, or to ten times what the dtype can tell from zero.
        """
        G, H = self.unpack_tensor(x)
        wide = work_dtype(x.dtype)
        rank_eps = x.shape[-2] * torch.finfo(x.dtype).eps  # what `refuse_rank_loss` takes for zero
        floor = max(1e-6, 10 * rank_eps)
        s = balance(G.to(wide), H.to(wide)).s
        repaired = balance(G.to(wide), H.to(wide), floor=floor)
        full = s.narrow(-1, s.shape[-1] - 1, 1) > rank_eps * s.narrow(-1, 0, 1)
        return torch.where(full.unsqueeze(-1), x, torch.cat([repaired.G, repaired.H], -2).to(x.dtype))

    def origin(
        self,
        *size: int | Sequence[int],
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        seed: int | None = 42,
    ) -> Tensor:
        """A fixed balanced point.

        Args:
            *size: Shape of the point.
            dtype: Its dtype.
            device: Its device.
            seed: Not needed: nothing is random.

        Returns:
            Identity columns in both factors; all singular values are 1.
        """
        shape = _size(size)
        self._assert_check_shape(shape, "size")
        h = shape[-1]
        factors = [torch.eye(rows, h, dtype=dtype, device=device) for rows in (self.n, shape[-2] - self.n)]
        return torch.cat(factors, -2).expand(shape).clone()

    def _from_balanced(self, x: Tensor, u: Tensor) -> Tensor:
        G, H = self.unpack_tensor(x.to(u.dtype))
        balanced = balance(G, H)
        return torch.cat(gl.act(self.unpack_tensor(u), balanced.change_inverse, balanced.change), -2)

    def _log(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        self._assert_check_shape(x.shape, "x")
        self._assert_check_shape(y.shape, "y")
        if x.shape[-2:] != y.shape[-2:]:
            raise ValueError(f"x and y must have the same rows and columns, not {tuple(x.shape)} and {tuple(y.shape)}.")
        if x.shape[-1] == 1:
            flat = RescalingQuotient(self.n, metric=self.metric, relaxation=self.relaxation)
            vector, distance = flat._log(x.squeeze(-1), y.squeeze(-1))
            return vector.unsqueeze(-1), distance
        shape = np.broadcast_shapes(x.shape, y.shape)
        with torch.no_grad():
            vector, distance = self._shoot(
                x.expand(shape).reshape(-1, *shape[-2:]), y.expand(shape).reshape(-1, *shape[-2:])
            )
        return vector.reshape(shape).to(x.dtype), distance.reshape(shape[:-2]).to(x.dtype)

    def _shoot(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        wide = small_dtype(x)
        (gx, hx), (gy, hy) = self.unpack_tensor(x.to(wide)), self.unpack_tensor(y.to(wide))
        start = balance(gx, hx)
        end = balance(gy, hy)
        gx, gy, basis_g = reduce_rows(start.G, end.G)
        hx, hy, basis_h = reduce_rows(start.H, end.H)
        here = GLPoint(self._metric, "geodesic", gx.shape[-2], torch.cat([gx, hx], -2))

        def norm(v: Tensor) -> Tensor:
            u = unflatten(v, (gx, hx))
            return gl.inner(here.frame, u, u).clamp_min(0).sqrt()

        # The lift at x of W_y - W_x is a chart of the quotient around x, and its derivative there is the identity.
        def chart(y: gl.Pair) -> Tensor:
            return flatten(gl.lift(self._metric, here.frame, here.pair, y))

        goal = chart((gy, hy))

        def residual(v: Tensor) -> Tensor:
            return goal - chart(here.land(unflatten(v, (gx, hx))))

        size = torch.maximum(norm(goal), norm(flatten((gx, hx))))
        vector, error = shoot(residual, goal, norm, size, goal=1e-13, most=200)
        good = error <= 1e-9
        if not bool(good.all()):
            raise ValueError(
                f"no geodesic from x to y was found for {label(~good, 'y')} (residual {float(error.max()):.1e}); "
                "go there in shorter steps."
            )
        pair = spread(unflatten(vector, (gx, hx)), (basis_g, basis_h))
        moved = gl.act(pair, start.change_inverse, start.change)
        return torch.cat(moved, -2), norm(vector)


class SubgroupQuotient(GLQuotient):
    r"""Pairs ``(G, H)`` up to ``(G A^-1, H A^T)`` with ``A`` in a subgroup of GL(h), as a Geoopt manifold.

    Under a rotary embedding only the matrices that commute with the rotation are a symmetry of attention. The metrics
    are
    invariant under all of GL(h), hence under every subgroup, so inner product, Christoffel term, retractions and
    geodesics
    are those of `GLQuotient`, exactly. The horizontal space is larger: the projection removes the directions of the
    subgroup alone, by one Gram system of the size of its dimension. Two things do not carry over: the function is no
    longer one of ``G H^T`` alone, so there is no logarithm or distance here, and the balanced gauge may lie outside the
    orbit, so there is no canonical point.

    Args:
        n: Rows of ``G``.
        algebra: A basis of the subgroup's Lie algebra, ``(r, h, h)``.
        metric: ``"inv"``, ``"mix"``, or a number in [0, 1] for the family between them (0 is inv, 1 is mix).
        retraction: ``"first_order"`` (``x + u``), ``"christoffel"`` (second order) or ``"geodesic"`` (exact).
        relaxation: Fraction of the largest singular value that is added to all of them in the weights of the metric.

    Raises:
        ValueError: If ``algebra`` is not a basis of square matrices.
    """

    name = "SubgroupQuotient"

    def __init__(
        self,
        n: int,
        algebra: Tensor,
        *,
        metric: str | float = "mix",
        retraction: str = "christoffel",
        relaxation: float = 0.0,
    ) -> None:
        super().__init__(n, metric=metric, retraction=retraction, relaxation=relaxation)
        if algebra.ndim != 3 or algebra.shape[-1] != algebra.shape[-2] or algebra.shape[0] == 0:
            raise ValueError(f"algebra must be a basis of h x h matrices, shape (r, h, h), not {tuple(algebra.shape)}.")
        if int(torch.linalg.matrix_rank(algebra.double().flatten(1))) < algebra.shape[0]:
            raise ValueError("algebra must be a basis: its matrices are linearly dependent.")
        self.algebra = algebra

    def extra_repr(self) -> str:
        """Arguments as they were given.

        Returns:
            For example ``n=64, dim=16, metric='mix', retraction='christoffel'``.
        """
        return super().extra_repr().replace(", metric", f", dim={self.algebra.shape[0]}, metric", 1)

    def _at(self, x: Tensor, *, spectral: bool) -> FactoredPoint:
        self._assert_check_point(x)
        if x.shape[-1] != self.algebra.shape[-1]:
            h = self.algebra.shape[-1]
            raise ValueError(f"x must have h = {h} columns, as the matrices of algebra have, not {x.shape[-1]}.")
        return SubgroupPoint(self._metric, self.retraction, self.n, x, self.algebra)

    def canonical(self, x: Tensor) -> Tensor:
        """Refused: the balanced gauge may lie outside the orbit of a subgroup.

        Args:
            x: The point.

        Raises:
            ValueError: Always.
        """
        raise ValueError("SubgroupQuotient has no canonical point: the balanced gauge may lie outside the orbit of x.")

    def _log(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        raise ValueError(
            "SubgroupQuotient has no logmap and no dist: points with the same G H^T may be different functions here."
        )


class RescalingQuotient(Quotient):
    r"""Pairs of vectors ``(g, k)`` up to ``(g / c, c k)`` with ``c != 0``, one per hidden unit, as a Geoopt manifold.

    ReLU units (incoming against outgoing weights, c > 0), gated units (up against down projection) and diagonal
    linear nets have this symmetry. A point is a tensor ``(..., n + m)``: entries ``[:n]`` are ``g``, the rest ``k``;
    leading
    axes, for example the hidden units of a layer, are a batch. It is the GL(1) quotient, with closed geodesics,
    logarithms
    and distances for every metric of the family.

    Args:
        n: Entries of ``g``.
        metric: ``"inv"``, ``"mix"``, or a number in [0, 1] for the family between them (0 is inv, 1 is mix).
        retraction: ``"first_order"`` (``x + u``), ``"christoffel"`` (second order) or ``"geodesic"`` (exact).
        relaxation: As for `GLQuotient`; with one singular value it multiplies the metric by a constant.
    """

    ndim = 1
    name = "RescalingQuotient"

    def __init__(
        self, n: int, *, metric: str | float = "mix", retraction: str = "christoffel", relaxation: float = 0.0
    ) -> None:
        super().__init__(n, metric=metric, retraction=retraction, relaxation=relaxation)

    def at(self, x: Tensor) -> FactoredPoint:
        """Factor a point once for many vectors.

        Args:
            x: The point.

        Returns:
            An object with the methods ``inner``, ``proju``, ``egrad2rgrad``, ``ehess2rhess``, ``christoffel``, ``retr``
            and ``expmap`` of this manifold, without the argument ``x``.
        """
        self._assert_check_point(x)
        return RescalingPoint(self._metric, self.retraction, self.n, x)

    def product(self, x: Tensor) -> Tensor:
        """The matrix of rank one that a pair stands for.

        Args:
            x: The point.

        Returns:
            ``g k^T``, ``(..., n, m)``.
        """
        g, k = self.unpack_tensor(x)
        return g.unsqueeze(-1) * k.unsqueeze(-2)

    def act(self, x: Tensor, c: Tensor) -> Tensor:
        """Move a point along its orbit.

        Args:
            x: The point.
            c: Non-zero numbers, one per unit: the batch shape of ``x``.

        Returns:
            ``(g / c, c k)``.
        """
        return torch.cat(rescaling.act(self.unpack_tensor(x), c.unsqueeze(-1)), -1)

    def act_tangent(self, x: Tensor, u: Tensor, c: Tensor) -> Tensor:
        """Move a tangent vector along with its point.

        Args:
            x: The point the vector belongs to (the action is linear, so its value does not matter).
            u: The vector.
            c: Non-zero numbers, one per unit.

        Returns:
            ``(a / c, c b)``, a tangent vector at ``act(x, c)``.
        """
        self._assert_check_shape(x.shape, "x")
        return self.act(u, c)

    def vertical(self, x: Tensor, L: Tensor) -> Tensor:
        """Direction of the orbit.

        Args:
            x: The point.
            L: Numbers, one per unit.

        Returns:
            ``(-g L, k L)``.
        """
        return torch.cat(rescaling.vertical(self.unpack_tensor(x), L.unsqueeze(-1)), -1)

    def _scale(self, x: Tensor) -> Tensor:
        """The ``c`` that balances a point, with its sign fixed: ``(..., 1)``."""
        g, k = self.unpack_tensor(x)
        peak = g.gather(-1, g.abs().argmax(-1, keepdim=True))
        size = (g.norm(dim=-1, keepdim=True) / k.norm(dim=-1, keepdim=True)).sqrt()
        return torch.where(peak < 0, -size, size)

    def canonical(self, x: Tensor) -> Tensor:
        """The balanced representative of an orbit: ``|g| = |k|``, the largest entry of ``g`` positive.

        Args:
            x: The point.

        Returns:
            The balanced point.
        """
        wide = x.to(work_dtype(x.dtype))
        return torch.cat(rescaling.act(self.unpack_tensor(wide), self._scale(wide)), -1).to(x.dtype)

    def singular_values(self, x: Tensor) -> Tensor:
        """The only singular value of the product.

        Args:
            x: The point.

        Returns:
            ``|g| |k|``, ``(..., 1)``.
        """
        g, k = self.unpack_tensor(x)
        s: Tensor = g.norm(dim=-1, keepdim=True) * k.norm(dim=-1, keepdim=True)
        return s

    def projx(self, x: Tensor) -> Tensor:
        """Nearest thing to a projection onto the manifold.

        Args:
            x: Any tensor of the right shape, finite.

        Returns:
            Units of full rank exactly as they are. A vector that is zero gets 1e-6 (1e-3 in half precision) as its
            first
            entry, times the length of the other vector where that is not zero.
        """
        g, k = self.unpack_tensor(x)
        floor = 1e-6 if work_dtype(x.dtype) == x.dtype else 1e-3
        length_g, length_k = g.norm(dim=-1, keepdim=True), k.norm(dim=-1, keepdim=True)

        def repair(part: Tensor, length: Tensor, other: Tensor) -> Tensor:
            first = floor * torch.where(other > 0, other, torch.ones_like(other))
            rest = torch.zeros_like(part.narrow(-1, 1, part.shape[-1] - 1))
            return torch.where(length > 0, part, torch.cat([first, rest], -1))

        return torch.cat([repair(g, length_g, length_k), repair(k, length_k, length_g)], -1)

    def origin(
        self,
        *size: int | Sequence[int],
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        seed: int | None = 42,
    ) -> Tensor:
        """A fixed balanced point.

        Args:
            *size: Shape of the point.
            dtype: Its dtype.
            device: Its device.
            seed: Not needed: nothing is random.

        Returns:
            The first unit vector in both factors.
        """
        shape = _size(size)
        self._assert_check_shape(shape, "size")
        units = [torch.eye(1, size, dtype=dtype, device=device) for size in (self.n, shape[-1] - self.n)]
        return torch.cat(units, -1).squeeze(0).expand(shape).clone()

    def _from_balanced(self, x: Tensor, u: Tensor) -> Tensor:
        return torch.cat(rescaling.act(self.unpack_tensor(u), 1 / self._scale(x.to(u.dtype))), -1)

    def _log(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        self._assert_check_shape(x.shape, "x")
        self._assert_check_shape(y.shape, "y")
        if x.shape[-1] != y.shape[-1]:
            raise ValueError(f"x and y must have the same entries, not {tuple(x.shape)} and {tuple(y.shape)}.")
        shape = np.broadcast_shapes(x.shape, y.shape)
        wide = torch.promote_types(work_dtype(x.dtype), work_dtype(y.dtype))
        x_wide, y_wide = x.expand(shape).to(wide), y.expand(shape).to(wide)
        frame = rescaling.factor(self._metric, *self.unpack_tensor(x_wide))
        self.at(y_wide)  # refuses zero vectors
        self.at(x_wide)
        vector, distance = rescaling.logarithm(
            self._metric, frame, self.unpack_tensor(x_wide), self.unpack_tensor(y_wide)
        )
        return torch.cat(vector, -1).to(x.dtype), distance.to(x.dtype)
