"""Curvature of the loss on the quotient: eigenvalues and trace of the Riemannian Hessian, and a model of sharpness.

Along a second-order retraction the Hessian of ``z -> L(R(z))`` at the center is the Riemannian Hessian, so its products
with vectors are differences of gradients, ``(grad(e v) - grad(-e v)) / 2e``. That needs no double backward, which fused
attention kernels do not have.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from .ascent import dots, length
from .measurement import Measurement, open_measurement, read_count, read_number
from .objective import Loss
from .space import Geometry
from .symmetry import Symmetries


@dataclass
class HessianResult:
    """Spectrum of the Riemannian Hessian of the mean loss.

    Attributes:
        eigenvalues: Largest eigenvalues, descending.
        residuals: Bound of the error of each, ``|H v - lambda v|``.
        trace: Hutchinson's estimate of the trace; NaN if no samples were asked for.
        trace_error: Its standard error.
        gradient_norm: Length of the Riemannian gradient.
        dimension: Number of coordinates, the vertical ones included; the Hessian vanishes on these.
        geometry: The geometry.
        metric: The metric of the blocks.
        notes: What a reader should know beside the numbers.
    """

    eigenvalues: list[float]
    residuals: list[float]
    trace: float
    trace_error: float
    gradient_norm: float
    dimension: int
    geometry: str
    metric: str | float
    notes: list[str] = field(default_factory=list)
    model: tuple[list[float], list[float]] = field(default_factory=lambda: ([], []), repr=False)

    def sharpness(self, rho: float) -> float:
        """Second-order estimate of sharpness: the largest value of the quadratic model in a ball.

        The model is the one that Lanczos' method sees from the gradient, so it holds the curvature along the gradient
        as well as the largest eigenvalues.

        Args:
            rho: Radius of the ball.

        Returns:
            ``max { <g, z> + <z, H z> / 2 : |z| <= rho }``.
        """
        return trust_region(np.array(self.model[0]), np.array(self.model[1]), read_number("rho", rho))

    def to_dict(self) -> dict[str, Any]:
        """The result as JSON can hold it.

        Returns:
            A dictionary of numbers, strings and lists.
        """
        return asdict(self)

    def __str__(self) -> str:
        """Two lines for a terminal."""
        kind = f"geodesic ({self.metric})" if self.geometry == "geodesic" else self.geometry
        pairs = zip(self.eigenvalues, self.residuals, strict=True)
        values = ", ".join(f"{value:.5g} ± {error:.1g}" for value, error in pairs)
        lines = [f"{kind} Hessian: largest eigenvalues {values}", f"gradient norm {self.gradient_norm:.4g}"]
        if not math.isnan(self.trace):
            lines[1] += f", trace {self.trace:.5g} ± {self.trace_error:.2g}"
        return "\n".join(lines + [f"note: {note}" for note in self.notes])


def trust_region(slopes: np.ndarray[Any, Any], values: np.ndarray[Any, Any], rho: float) -> float:
    """Largest value of ``<g, z> + sum_i values_i z_i^2 / 2`` in a ball.

    The maximizer is ``z_i = g_i / (mu - values_i)`` for the multiplier ``mu >= max(0, max values)`` that makes
    ``|z| = rho``, or the unconstrained one inside the ball. Where ``g`` has no part along the largest eigenvector, the
    rest of the length goes there (the hard case).

    Args:
        slopes: ``g`` in the eigenbasis.
        values: Eigenvalues.
        rho: Radius.

    Returns:
        The value.
    """
    top = max(float(values.max()), 0.0)

    def step(mu: float) -> np.ndarray[Any, Any]:
        gap = mu - values
        return np.asarray(np.divide(slopes, gap, out=np.zeros_like(slopes), where=gap > 0))

    low, high = top, top + float(np.linalg.norm(slopes)) / rho
    for _ in range(200):
        middle = (low + high) / 2
        if np.linalg.norm(step(middle)) > rho:
            low = middle
        else:
            high = middle
    z = step(high)
    value = float(slopes @ z + (values * z**2).sum() / 2)
    return value + max(rho**2 - float(z @ z), 0.0) * top / 2


def hessian(
    model: nn.Module,
    batches: Any,
    *,
    eigenvalues: int = 3,
    samples: int = 0,
    iterations: int = 20,
    loss: Loss | str | None = None,
    geometry: str = "geodesic",
    metric: str | float = "mix",
    relaxation: float = 0.0,
    blocks: str = "all",
    symmetries: Symmetries | None = None,
    epsilon: float | None = None,
    seed: int = 0,
) -> HessianResult:
    """Largest eigenvalues and trace of the Riemannian Hessian of the mean loss.

    Blocks move along the Christoffel retraction and other parameters along their geodesics ``w exp(z)``, both of second
    order, so the geodesic and the adaptive geometry give the Hessians of their own metrics; the Euclidean one gives the
    plain Hessian. Each product with a vector takes two gradients of every batch.

    Args:
        model: Any PyTorch model.
        batches: As for `quotientsharp.sharpness`; all of them are kept.
        eigenvalues: How many.
        samples: Random vectors for the trace; 0 leaves it out.
        iterations: Steps of Lanczos' method, with full reorthogonalization: so many vectors are kept.
        loss: The loss, as for `quotientsharp.sharpness`.
        geometry: ``"geodesic"``, ``"adaptive"`` or ``"euclidean"``.
        metric: Metric of the blocks.
        relaxation: Invariant relaxation of the metric.
        blocks: ``"all"``, ``"attention"`` or ``"none"``.
        symmetries: The model's symmetries, if known.
        epsilon: Length of the difference steps; by default the cube root of the dtype's resolution.
        seed: Seed of the random vectors.

    Returns:
        A `HessianResult`.
    """
    read_count("eigenvalues", eigenvalues)
    read_count("iterations", iterations)
    read_count("samples", samples, zero=True)
    chosen = Geometry.parse(geometry, metric, "christoffel", relaxation=relaxation, blocks=blocks, free="geodesic")
    with open_measurement(model, batches, chosen, loss=loss, symmetries=symmetries, seed=seed) as measurement:
        space = measurement.space
        kept = list(measurement.batches())
        width = epsilon or torch.finfo(space.dtype).eps ** (1 / 3)
        generator = torch.Generator(device=space.device).manual_seed(seed)

        def product(v: Tensor) -> Tensor:
            step = width / length(v)
            ahead = _gradient(measurement, kept, v * step)
            return ahead.sub_(_gradient(measurement, kept, v * -step)).div_(2 * step)

        slope = _gradient(measurement, kept, space.zeros())
        norm = length(slope)
        # From the gradient, so that the model of the loss that Lanczos' method builds has the right slope.
        start = slope / norm if norm > 0 else space.random(generator)
        values, errors, basis = lanczos(product, start, max(iterations, eigenvalues + 2))
        slopes = [float(number) for number in dots([(slope, vector) for vector in basis]).tolist()]
        draws = []
        for _ in range(samples):
            v = space.gaussian(generator)
            draws.append(float(dots([(v, product(v))])))
        notes = [*space.notes, *measurement.notes]
        size = space.size
        floor = torch.finfo(space.dtype).eps ** (2 / 3) * abs(values[0])  # what the differences resolve
        errors = [max(error, floor) for error in errors]
    count = min(eigenvalues, len(values))
    return HessianResult(
        eigenvalues=values[:count],
        residuals=errors[:count],
        trace=float(np.mean(draws)) if draws else math.nan,
        trace_error=float(np.std(draws, ddof=1) / math.sqrt(samples)) if samples > 1 else math.nan,
        gradient_norm=norm,
        dimension=size,
        geometry=chosen.name,
        metric=chosen.metric.name,
        notes=notes,
        model=(slopes, values),
    )


def _gradient(measurement: Measurement, batches: Sequence[Any], z: Tensor) -> Tensor:
    """Gradient of the mean loss over batches at ``R(z)``."""
    space = measurement.space
    total, part = space.zeros(), torch.empty_like(z)
    for batch in batches:
        space.move_(z)  # a component's tape serves one derivative
        _, gradients = measurement.objective.gradient(batch)
        total.add_(space.pull(gradients, z, part), alpha=1 / len(batches))
    return total


def lanczos(
    product: Callable[[Tensor], Tensor], start: Tensor, iterations: int
) -> tuple[list[float], list[float], list[Tensor]]:
    """Lanczos' method with full reorthogonalization.

    Args:
        product: The symmetric map.
        start: A unit vector.
        iterations: Most products.

    Returns:
        Ritz values, descending, bounds of their errors, and the Ritz vectors.
    """
    vectors, diagonal, beside = [start], [], []
    last = 0.0
    for _ in range(min(iterations, start.numel())):
        w = product(vectors[-1])
        coefficients = dots([(w, v) for v in vectors])
        diagonal.append(float(coefficients[-1]))
        for _ in range(2):  # once removes the projections, twice what rounding left of them
            for v, c in zip(vectors, dots([(w, v) for v in vectors]).tolist(), strict=True):
                w.sub_(v, alpha=c)
        last = length(w)
        scale = max(map(abs, diagonal))
        if last <= 1e-7 * scale or len(diagonal) == min(iterations, start.numel()):
            break
        beside.append(last)
        vectors.append(w.div_(last))
    matrix = np.diag(diagonal) + np.diag(beside[: len(diagonal) - 1], 1) + np.diag(beside[: len(diagonal) - 1], -1)
    values, rotations = np.linalg.eigh(matrix)
    order = np.argsort(values)[::-1]
    ritz = []
    for column in order:
        total = torch.zeros_like(start)
        for v, weight in zip(vectors, rotations[:, column].tolist(), strict=True):
            total.add_(v, alpha=weight)
        ritz.append(total)
    return values[order].tolist(), np.abs(last * rotations[-1, order]).tolist(), ritz


def relative_flatness(
    model: nn.Module,
    batches: Any,
    *,
    layer: str | None = None,
    samples: int = 20,
    loss: Loss | str | None = None,
    epsilon: float | None = None,
    seed: int = 0,
) -> tuple[float, float]:
    """Relative flatness of a layer (Petzka et al. 2021, arXiv 2001.00939), a reparametrization-aware baseline.

    ``kappa = sum_{s, t} <w_s, w_t> Tr(H_{s t})`` over pairs of rows of the layer's weight matrix ``W``, where
    ``H_{s t}`` is the block of the Hessian that belongs to rows ``s`` and ``t``. With independent standard normal
    ``u`` and ``v`` this is the mean of ``<V, H V>`` for ``V = (W v) u^T``, which is how it is estimated.

    Args:
        model: Any PyTorch model.
        batches: As for `quotientsharp.sharpness`.
        layer: Name of a linear layer; by default the last one.
        samples: Random vectors.
        loss: The loss.
        epsilon: Length of the difference steps relative to ``|W|``.
        seed: Seed of the random vectors.

    Returns:
        The estimate and its standard error.

    Raises:
        ValueError: If there is no such layer.
    """
    read_count("samples", samples)
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    layer = layer or (linear[-1] if linear else "")
    if layer not in linear:
        raise ValueError(f"layer must name a linear layer of the model, not {layer!r}; the last one is {linear[-1:]}.")
    chosen = Geometry.parse("euclidean")
    with open_measurement(model, batches, chosen, loss=loss, seed=seed) as measurement:
        space, name = measurement.space, f"{layer}.weight"
        if name not in space.parameters:
            raise ValueError(f"layer {layer!r} is frozen; {name}.requires_grad_() would do.")
        kept = list(measurement.batches())
        weight = space.parameters[name]
        base = weight.detach().clone()
        width = (epsilon or torch.finfo(space.dtype).eps ** (1 / 3)) * length(base.to(space.dtype).reshape(-1))
        generator = torch.Generator(device=space.device).manual_seed(seed)

        def gradient(step: Tensor) -> Tensor:
            with torch.no_grad():
                weight.copy_(base + step)
            parts = [measurement.objective.gradient(batch)[1][name].to(space.dtype) for batch in kept]
            return torch.stack(parts).mean(0)

        draws = []
        for _ in range(samples):
            u, v = (torch.randn(base.shape[1], generator=generator, device=base.device) for _ in range(2))
            direction = torch.outer(base @ v.to(base), u.to(base))
            size = length(direction.to(space.dtype).reshape(-1))
            if size == 0:
                draws.append(0.0)
                continue
            step = direction * (width / size)
            bend = (gradient(step) - gradient(-step)) / (2 * width / size)
            draws.append(float((bend * direction).double().sum()))
    error = float(np.std(draws, ddof=1) / math.sqrt(samples)) if samples > 1 else math.nan
    return float(np.mean(draws)), error
