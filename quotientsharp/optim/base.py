"""What the Riemannian optimizers share: one factored point per stack, a step that is computed before it is written."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import geoopt
import torch
from torch import Tensor

from ..manifolds import FactoredPoint, GLQuotient, RescalingQuotient, SubgroupQuotient
from ..manifolds.points import known, label, work_dtype
from .launch import resting, spectral_start

Manifold = GLQuotient | RescalingQuotient
State = dict[str, Any]


def dimension(manifold: Manifold, shape: torch.Size) -> int:
    """Dimension of the quotient of one copy.

    Args:
        manifold: The manifold.
        shape: Shape of the point.

    Returns:
        The number of entries of one copy less the dimension of the group.
    """
    size = math.prod(shape[-manifold.ndim :])
    if isinstance(manifold, SubgroupQuotient):
        return size - int(manifold.algebra.shape[0])
    return size - (shape[-1] ** 2 if manifold.ndim == 2 else 1)


def on_quotient(p: Tensor) -> bool:
    """Whether a parameter is a point of one of our quotients.

    Args:
        p: The parameter.

    Returns:
        Whether it is.

    Raises:
        ValueError: If it is a point of a manifold that is none of ours.
    """
    if not isinstance(p, geoopt.ManifoldTensor) or isinstance(p.manifold, geoopt.Euclidean):
        return False
    if not isinstance(p.manifold, (GLQuotient, RescalingQuotient)):
        raise ValueError(
            f"params holds a point of {p.manifold}, which is none of quotientsharp's manifolds; "
            "train it with geoopt.optim."
        )
    return True


class Here:
    """A stacked point with its gradient, ready for a step.

    Copies of rank zero are replaced by a fixed point with zero gradient, and take the spectral start instead of the
    step.

    Args:
        manifold: The manifold.
        p: The point.
        gradient: The partial derivatives.
        rest: Whether copies of rank zero must be looked for.
        name: What to call the point in errors.

    Raises:
        ValueError: If the gradient is not finite or a copy has lost rank.
    """

    def __init__(self, manifold: Manifold, p: Tensor, gradient: Tensor, *, rest: bool, name: str) -> None:
        self.p, self.gradient, self.manifold = p.detach(), gradient, manifold
        self.axes = (1,) * self.manifold.ndim
        self.resting = resting(self.manifold, self.p) if rest else None
        if self.resting is not None and known(self.resting.any()) is False:
            self.resting = None
        finite = gradient.isfinite().flatten(-self.manifold.ndim).all(-1)
        if known(finite.all()) is False:
            raise ValueError(
                f"the gradient of {label(~finite, name)} holds NaN or infinite entries; no weight was changed."
            )
        x, e = self.p, gradient
        if self.resting is not None:
            at = self.resting.reshape(*self.resting.shape, *self.axes)
            x = torch.where(at, self.manifold.origin(x.shape, dtype=x.dtype, device=x.device), x)
            e = torch.where(at, 0.0, e)
        try:
            self.point: FactoredPoint = self.manifold.at(x)
        except ValueError as error:
            raise ValueError(f"{name}: {error} No weight was changed.") from error
        self.rgrad = self.point.egrad2rgrad(e)

    def length(self) -> Tensor:
        """Squared length of the gradient, all copies together.

        Returns:
            One number.
        """
        return self.point.inner(self.rgrad).sum()

    def ascended(self, scale: Tensor) -> Tensor:
        """The point after a step along the gradient; copies of rank zero stay.

        Args:
            scale: What the gradient is multiplied by.

        Returns:
            The new point.
        """
        new = self.point.retr(self.rgrad * scale)
        if self.resting is None:
            return new
        return torch.where(self.resting.reshape(*self.resting.shape, *self.axes), self.p.to(new.dtype), new)

    def square(self) -> Tensor:
        """Mean square of the gradient's coordinates in an orthonormal frame.

        Returns:
            One number per copy, with the axes of a point.
        """
        value = self.point.inner(self.rgrad) / dimension(self.manifold, self.p.shape)
        return value.reshape(*value.shape, *self.axes)

    def moved(self, step: Tensor, decay: float, start: float | None, lr: float) -> Tensor:
        """The point after a step.

        Args:
            step: The horizontal step.
            decay: What the point is multiplied by afterwards. Both factors shrink together, so that every singular
                value of ``G H^T`` shrinks by the same factor: the decay of the balanced representative, in any gauge.
            start: Length of the spectral start per root of dimension; the gradient's own size if None.
            lr: The learning rate.

        Returns:
            The new point.
        """
        new = self.point.retr(step)
        if decay != 1.0:
            new = new * decay
        if self.resting is None:
            return new
        h = self.p.shape[-1] if self.manifold.ndim == 2 else 1
        size = None if start is None else start * math.sqrt(dimension(self.manifold, self.p.shape) / h)
        started = spectral_start(self.manifold, self.p, self.gradient * (lr if start is None else 1.0), size)
        return torch.where(self.resting.reshape(*self.resting.shape, *self.axes), started.to(new.dtype), new)


class RiemannianOptimizer(torch.optim.Optimizer):
    """Steps on quotients for manifold parameters, ordinary steps for all others.

    All steps on manifolds are computed before the first weight is written: an error leaves the model as it was.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step.

        Args:
            closure: Evaluates the model anew and returns the loss.

        Returns:
            What the closure returned, or None.

        Raises:
            ValueError: If a gradient on a manifold is not finite, a copy lost rank, or a gradient is sparse.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        moves: list[tuple[Tensor, Tensor, State]] = []
        free: list[tuple[dict[str, Any], list[Tensor]]] = []
        number = 0
        for group in self.param_groups:
            plain = []
            for p in group["params"]:
                on = on_quotient(p)
                if p.grad is not None:
                    if p.grad.is_sparse:
                        raise ValueError("params holds one with a sparse gradient; dense gradients are needed.")
                    if on:
                        moves.append((p, *self._move(group, p, f"manifold parameter {number}")))
                    else:
                        plain.append(p)
                number += on
            free.append((group, plain))
        for p, new, state in moves:
            p.copy_(new)
            self.state[p].update(state)
        for group, plain in free:
            if plain:
                self._step_free(group, plain)
        return loss

    def _here(self, group: dict[str, Any], p: geoopt.ManifoldParameter, name: str) -> Here:
        gradient = p.grad.to(work_dtype(p.dtype))
        state = self.state[p]
        gradient = -gradient if group["maximize"] else gradient
        return Here(p.manifold, p, gradient, rest=state.get("rest", True), name=name)

    @abstractmethod
    def _move(self, group: dict[str, Any], p: geoopt.ManifoldParameter, name: str) -> tuple[Tensor, State]:
        """New point and new state of a manifold parameter."""

    @abstractmethod
    def _step_free(self, group: dict[str, Any], params: list[Tensor]) -> None:
        """Ordinary step of the other parameters."""


def require(condition: bool, sentence: str) -> None:
    """Refuse a bad argument.

    Args:
        condition: What must hold.
        sentence: What to say if it does not.

    Raises:
        ValueError: If the condition does not hold.
    """
    if not condition:
        raise ValueError(sentence)


def number(value: object, low: float, high: float = math.inf) -> bool:
    """Whether an argument is a plain number in a half-open interval.

    Args:
        value: The argument.
        low: Smallest value allowed.
        high: Values from here on are not allowed.

    Returns:
        Whether it is.
    """
    return isinstance(value, (int, float)) and not isinstance(value, bool) and low <= value < high
