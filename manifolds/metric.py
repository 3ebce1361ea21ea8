"""The family of GL(h)-invariant metrics, as one number and one function of the singular values.

In the balanced gauge of a point, where ``G^T G = H^T H = diag(s)``, every metric of the family weighs column ``j`` of
both tangent factors by ``s_j ** (2 p - 1)``. The exponent ``p = 0`` is the invariant metric *inv*, ``p = 1`` the mixed
metric *mix* of "Hide & Seek" (arXiv 2505.05409), and ``p = 1/2`` is the Euclidean metric of the balanced gauge. In any
other gauge the weight of the first factor is the weighted geometric mean ``(G^T G)^-1 #_p (H^T H)``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

_NAMES = {"inv": 0.0, "mix": 1.0}

# Nodes and weights of the four-point Gauss-Legendre rule on [0, 1].
_INNER, _OUTER = math.sqrt(3 / 7 - 2 / 7 * math.sqrt(6 / 5)), math.sqrt(3 / 7 + 2 / 7 * math.sqrt(6 / 5))
_GAUSS = [
    ((1 + sign * node) / 2, (18 + kind * math.sqrt(30)) / 72)
    for node, kind in ((_INNER, 1), (_OUTER, -1))
    for sign in (1, -1)
]


@dataclass(frozen=True)
class Metric:
    """One member of the family, with its invariant relaxation.

    Args:
        exponent: Position in the family: 0 is inv, 1 is mix.
        relaxation: ``epsilon >= 0``; the weights use ``s + epsilon * max(s)`` in place of ``s``. That keeps them
            bounded at nearly singular points and, unlike adding a multiple of the identity to ``G^T G``, it depends on
            ``G H^T`` alone, so the metric stays GL(h)-invariant.
    """

    exponent: float
    relaxation: float = 0.0

    @classmethod
    def parse(cls, metric: str | float, relaxation: float = 0.0) -> Metric:
        """Read the constructor arguments of a manifold.

        Args:
            metric: ``"inv"``, ``"mix"`` or a number in [0, 1].
            relaxation: A non-negative finite number.

        Returns:
            The metric.

        Raises:
            ValueError: If an argument is none of these.
        """
        number = _NAMES.get(metric) if isinstance(metric, str) else metric
        if isinstance(number, bool) or not isinstance(number, (int, float)) or not 0 <= number <= 1:
            raise ValueError(f"metric must be 'inv', 'mix' or a number between 0 and 1, not {metric!r}.")
        if isinstance(relaxation, bool) or not isinstance(relaxation, (int, float)) or not 0 <= relaxation < math.inf:
            raise ValueError(f"relaxation must be a finite number that is not negative, not {relaxation!r}.")
        return cls(float(number), float(relaxation))

    @property
    def name(self) -> str | float:
        """The constructor argument that gives this metric."""
        return {0.0: "inv", 1.0: "mix"}.get(self.exponent, self.exponent)

    @property
    def is_inv(self) -> bool:
        """Whether this is the invariant metric itself, without relaxation."""
        return self.exponent == 0 and self.relaxation == 0

    @property
    def is_mix(self) -> bool:
        """Whether this is the mixed metric itself, without relaxation."""
        return self.exponent == 1 and self.relaxation == 0

    @property
    def is_rational(self) -> bool:
        """Whether the weights are rational in ``G^T G`` and ``H^T H``, so that no eigenvectors are needed."""
        return self.is_inv or self.is_mix

    def _shift(self, s: Tensor) -> Tensor:
        return self.relaxation * s.amax(-1, keepdim=True)

    def weights(self, s: Tensor) -> Tensor:
        """Weights of the columns in the balanced gauge.

        Args:
            s: Singular values of ``G H^T``, shape ``(..., h)``.

        Returns:
            ``(s + epsilon max(s)) ** (2 p - 1)``, shape ``(..., h)``.
        """
        return (s + self._shift(s)) ** (2 * self.exponent - 1)

    def weight_slope(self, s: Tensor) -> Tensor:
        """Derivative of the weights in the shift ``epsilon max(s)``, times ``epsilon``.

        Args:
            s: Singular values of ``G H^T``, shape ``(..., h)``.

        Returns:
            ``epsilon (2 p - 1) (s + epsilon max(s)) ** (2 p - 2)``, shape ``(..., h)``.
        """
        power = 2 * self.exponent - 1
        return self.relaxation * power * (s + self._shift(s)) ** (power - 1)

    def kernels(self, s: Tensor) -> tuple[Tensor, Tensor]:
        r"""Coefficients of the derivative of the weight matrices at a balanced point.

        With ``f(lambda) = s w(s)``, ``lambda = s^2``, and ``F`` its matrix of divided differences, the Daleckii-Krein
        formula gives ``dK = q * dSH - p * dSG`` (entrywise products) with ``q = F`` and
        ``p_ij = [(f_i + f_j)/2 - F_ij (lambda_i + lambda_j)/2] / (s_i s_j)``. For mix ``q = 1, p = 0``; for inv
        ``q = 0, p = 1/(s_i s_j)``.

        Args:
            s: Singular values of ``G H^T``, shape ``(..., h)``.

        Returns:
            ``(p, q)``, each of shape ``(..., h, h)``. Equal singular values are no special case.
        """
        power = 2 * self.exponent - 1
        shift = self._shift(s)
        rows, columns, edge = s.unsqueeze(-1), s.unsqueeze(-2), shift.unsqueeze(-1)

        def value(x: Tensor, c: Tensor) -> Tensor:
            return x * (x + c) ** power

        def slope(x: Tensor, c: Tensor) -> Tensor:  # of value, in lambda = x^2
            return ((x + c) ** power + power * x * (x + c) ** (power - 1)) / (2 * x)

        start, gap = columns**2, rows**2 - columns**2
        mean = (rows**2 + columns**2) / 2
        near = gap.abs() <= 0.1 * mean
        quadrature = sum(weight * slope((start + node * gap).sqrt(), edge) for node, weight in _GAUSS)
        f = value(s, shift)
        ratio = (f.unsqueeze(-1) - f.unsqueeze(-2)) / torch.where(near, torch.ones_like(gap), gap)
        q = torch.where(near, torch.as_tensor(quadrature), ratio)
        p = ((f.unsqueeze(-1) + f.unsqueeze(-2)) / 2 - q * mean) / (rows * columns)
        return p, q
