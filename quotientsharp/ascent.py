"""The worst loss in a ball: projected ascent in coordinates where the ball is round.

At a maximum on the boundary the gradient ``d`` points along ``z``, so the maximum is a fixed point of the power step
``T(z) = rho d / |d|``. Power steps alone reach it in two or three gradients where the loss is nearly linear or
quadratic, and swing about it where the gradient turns fast; extrapolating over the last two of them (Anderson's
method with one secant) keeps the speed and stops the swinging. A step that does not raise the loss is taken back:
from the best iterate, projected gradient steps of adaptive length follow (Auto-PGD, Croce & Hein, arXiv 2003.01690,
with its rule of halving), which also find a maximum inside the ball.

The gap ``rho |d| - <d, z>`` is what the ball still promises to first order. Divided by ``rho |d|`` it is
``1 - cos(d, z)``. Summed as a geometric series with the ratio of successive gaps it estimates all that is left to
gain; the ascent stops when that, and the last gain carried on likewise, are less than the tolerance asks for.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

_CHUNK = 65536  # terms that single precision adds up well enough
DEFAULT_TOLERANCE = 1e-3


class Surface:
    """A function of coordinates, to be maximized; `quotientsharp.sharpness` has the one of a model's loss."""

    error_bound = math.inf

    def value(self, z: Tensor) -> tuple[Tensor, Tensor | None]:
        """Value of the function.

        Args:
            z: Coordinates.

        Returns:
            A scalar tensor, and the error of the retraction or None.
        """
        raise NotImplementedError

    def gradient(self, z: Tensor, out: Tensor) -> tuple[Tensor, Tensor | None]:
        """Value and gradient.

        Args:
            z: Coordinates.
            out: Where to put the gradient.

        Returns:
            A scalar tensor, and the error of the retraction or None.
        """
        raise NotImplementedError

    def refine(self) -> bool:
        """Integrate the retraction more finely.

        Returns:
            Whether that was possible.
        """
        return False


@dataclass
class Peak:
    """What an ascent found.

    Attributes:
        gain: Largest rise of the function over its value at the center.
        residual: ``1 - cos(gradient, z)`` where it was attained, or less where the maximum lies inside the ball: the
            gap ``rho |d| - <d, z>`` relative to the larger of ``rho |d|`` and the gain.
        left: Estimate of what is left to gain, relative to the gain.
        converged: Whether that is within the tolerance.
        gradients: Gradients taken.
        gains: Rise at each evaluation, in order.
        left_manifold: Whether steps were taken back because their geodesic left the manifold.
        z: Where the largest rise was attained.
    """

    gain: float = 0.0
    residual: float = math.inf
    left: float = math.inf
    converged: bool = False
    gradients: int = 0
    gains: list[float] = field(default_factory=list)
    left_manifold: bool = False
    z: Tensor | None = None


def dots(pairs: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Inner products of flat vectors, added up in float64 over short pieces and left on the device.

    Args:
        pairs: The vectors.

    Returns:
        One number per pair.
    """
    wide = torch.float32 if pairs[0][0].device.type == "mps" else torch.float64
    if pairs[0][0].device.type != "cpu":
        return torch.stack([torch.dot(a, b) for a, b in pairs]).to(wide)
    # The dot product of a CPU adds ten million terms in single precision, which loses four digits.
    return torch.stack([
        torch
        .stack([torch.dot(x, y) for x, y in zip(torch.split(a, _CHUNK), torch.split(b, _CHUNK), strict=True)])
        .to(wide)
        .sum()
        for a, b in pairs
    ])


def length(z: Tensor) -> float:
    """Euclidean norm, added up as in `dots`.

    Args:
        z: A flat vector.

    Returns:
        The norm, on the host.
    """
    return math.sqrt(float(dots([(z, z)])))


Report = Callable[[int, float], None]


@dataclass
class _Best:
    """The best iterate: all that the next step needs of it beside the vectors."""

    gain: float = -math.inf
    inside: float = 0.0  # |z|^2
    along: float = 0.0  # <d, z> / |d|
    gap: float = math.inf  # rho |d| - <d, z>
    ratio: float = 0.0  # of the last two gaps
    miss: float = 0.0  # |T - z|^2
    residual: float = math.inf
    left: float = math.inf


class Ascent:
    """Ascents in the ball of radius ``rho`` around the center of a surface.

    Four vectors are kept: the trial ``z``, its gradient ``d``, and of the best iterate ``T = rho d / |d|`` and
    ``F = T - z``. All norms and inner products that a step needs come to the host in one small transfer.

    Args:
        surface: The function.
        center: Its value at the center.
        rho: Radius of the ball.
        steps: Largest number of gradients.
        tolerance: What may be left to gain, relative to the gain; 0 takes all steps.
    """

    def __init__(
        self, surface: Surface, center: float, rho: float, *, steps: int = 20, tolerance: float = 1e-3
    ) -> None:
        self.surface, self.center, self.rho, self.steps, self.tolerance = surface, center, rho, steps, tolerance

    def run(self, start: Tensor, *, gradient: Tensor | None = None, report: Report | None = None) -> Peak:
        """Climb.

        Args:
            start: Where to start; overwritten.
            gradient: The gradient at the center, if that is where ``start`` is; overwritten. It counts as taken.
            report: Called after every gradient with the number of gradients taken and the largest gain so far.

        Returns:
            The best iterate.
        """
        peak, best = Peak(), _Best()
        z, d = start, torch.empty_like(start) if gradient is None else gradient
        T, F = torch.zeros_like(start), torch.zeros_like(start)
        inside = length(z) ** 2 if gradient is None else 0.0
        reach = math.inf  # length of a projected gradient step; infinite means power steps
        while peak.gradients < self.steps:
            given = gradient is not None and peak.gradients == 0
            numbers = self._read(z, d, T, F, given=given, secant=reach == math.inf and best.inside > 0)
            peak.gradients += 1
            gain, error, dd, dz = numbers[:4]
            if not error <= self.surface.error_bound:
                if self.surface.refine():
                    continue
                peak.left_manifold, gain = True, -math.inf
            peak.gains.append(gain)
            if math.isfinite(gain) and math.isfinite(dd) and dd > 0 and gain >= best.gain:
                last, best = best, self._judge(gain, math.sqrt(dd), dz, inside, best)
                step = self.rho / math.sqrt(dd)
                d.mul_(step)
                mixing = self._mixing(numbers, step, last, best) if len(numbers) > 4 else 0.0
                torch.sub(d, z, out=F)
                if reach == math.inf:
                    torch.lerp(d, T, mixing, out=z)
                    z.mul_(self._rescale(mixing, step * numbers[4] if mixing else 0.0))
                    inside = self.rho**2
                T, d = d, T
                if reach < math.inf:
                    reach *= 2
                    inside = self._project(z, T, F, best, reach)
            elif best.gain == -math.inf:
                break  # there is no slope here: the caller starts elsewhere
            else:
                reach = self.rho if reach == math.inf else reach / 2
                inside = self._project(z, T, F, best, reach)
            if report is not None:
                report(peak.gradients, best.gain)
            if self.tolerance > 0 and (best.left <= self.tolerance or reach < 1e-6 * self.rho):
                break
        if best.gain > -math.inf:
            self._finish(peak, best, z, T, F)
        return peak

    def _read(self, z: Tensor, d: Tensor, T: Tensor, F: Tensor, *, given: bool, secant: bool) -> list[float]:
        """Evaluate, and bring ``gain, error, <d,d>, <d,z>`` and for a secant ``<d,T>, <d,F>, <z,F>`` to the host."""
        pairs = [(d, d), (d, z)]
        if secant:
            pairs += [(d, T), (d, F), (z, F)]
        if given:
            return [0.0, 0.0, *dots(pairs).tolist()]
        loss, error = self.surface.gradient(z, d)
        products = dots(pairs)
        head = torch.stack([loss.to(products), torch.zeros_like(products[0]) if error is None else error.to(products)])
        numbers: list[float] = torch.cat([head, products]).tolist()
        return [numbers[0] - self.center, *numbers[1:]]

    def _judge(self, gain: float, slope: float, dz: float, inside: float, last: _Best) -> _Best:
        """Gap, residual and what is left at a new best iterate."""
        gap = max(self.rho * slope - dz, 0.0)
        ratio = gap / last.gap if last.gap > 0 else 0.0
        # A secant can make one gap small by luck, so the slower of the last two decides.
        decay = min(max(ratio, last.ratio), 0.97)
        miss = max(self.rho**2 - 2 * self.rho * dz / slope + inside, 0.0)
        rise = max(gap, decay * (gain - last.gain)) if last.gain > -math.inf else gap
        left = rise / (1 - decay) / gain if gain > 0 else math.inf
        residual = gap / max(self.rho * slope, gain)
        return _Best(gain, inside, dz / slope, gap, ratio, miss, residual, left)

    def _mixing(self, numbers: list[float], step: float, last: _Best, best: _Best) -> float:
        """Anderson's coefficient: how much of the last power step to mix into this one (negative: to go beyond)."""
        turned, missed, crossed = numbers[4], numbers[5], numbers[6]
        product = step * missed - crossed  # <F_new, F_old>
        spread = best.miss - 2 * product + last.miss
        if spread <= 0:
            return 0.0
        mixing = (best.miss - product) / spread
        # A mixture on the far side of the sphere is no extrapolation.
        return mixing if (1 - mixing) * self.rho**2 + mixing * step * turned > 0 else 0.0

    def _rescale(self, mixing: float, turned: float) -> float:
        """Factor that puts ``(1 - mixing) T_new + mixing T_old`` back onto the sphere."""
        if mixing == 0:
            return 1.0
        squared = self.rho**2 * ((1 - mixing) ** 2 + mixing**2) + 2 * mixing * (1 - mixing) * turned
        return self.rho / math.sqrt(squared)

    def _project(self, z: Tensor, T: Tensor, F: Tensor, best: _Best, reach: float) -> float:
        """A projected gradient step from the best iterate; the squared length of the trial."""
        torch.mul(T, 1 + reach / self.rho, out=z).sub_(F)
        squared = best.inside + 2 * reach * best.along + reach**2
        if squared > self.rho**2:
            z.mul_(self.rho / math.sqrt(squared))
        return min(squared, self.rho**2)

    def _finish(self, peak: Peak, best: _Best, z: Tensor, T: Tensor, F: Tensor) -> None:
        """One forward pass more: the step that the last gradient proposes is often the best."""
        loss, error = self.surface.value(z)
        gain = float(loss) - self.center
        peak.gains.append(gain)
        peak.residual, peak.left, peak.gain = best.residual, best.left, best.gain
        peak.converged = best.left <= (self.tolerance or DEFAULT_TOLERANCE)
        sound = error is None or float(error) <= self.surface.error_bound
        if sound and gain > best.gain:
            peak.gain, peak.z = gain, z
        else:
            peak.z = torch.sub(T, F, out=F)


def orthogonal_(z: Tensor, direction: Tensor) -> Tensor:
    """Remove the part of a vector along a direction, in place.

    Args:
        z: The vector.
        direction: A unit vector.

    Returns:
        The same tensor.
    """
    return z.sub_(direction * dots([(z, direction)]).to(z.dtype))


class Across(Surface):
    """A surface seen from the directions orthogonal to a given one, where another maximum may hide.

    Args:
        surface: The surface.
        direction: A unit vector.
    """

    def __init__(self, surface: Surface, direction: Tensor) -> None:
        self.surface, self.direction, self.error_bound = surface, direction, surface.error_bound

    def value(self, z: Tensor) -> tuple[Tensor, Tensor | None]:
        """The value; see `Surface.value`."""
        return self.surface.value(z)

    def gradient(self, z: Tensor, out: Tensor) -> tuple[Tensor, Tensor | None]:
        """The value and the gradient across the direction; see `Surface.gradient`."""
        found = self.surface.gradient(z, out)
        orthogonal_(out, self.direction)
        return found

    def refine(self) -> bool:
        """Integrate the retraction more finely; see `Surface.refine`."""
        return self.surface.refine()
