"""The loss around a model along its worst directions: a curve and a plane to look at."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from .ascent import Across, Ascent, length, orthogonal_
from .measurement import open_measurement, read_count, read_number
from .objective import Loss
from .sharpness import ModelSurface
from .space import Geometry, ParameterSpace
from .symmetry import Symmetries

Array = np.ndarray[Any, np.dtype[np.float64]]


@dataclass
class Landscape:
    """The loss on one batch along and around the worst direction.

    Attributes:
        t: Positions in units of ``rho``, from -1 to 1; the worst point in the ball is at 1.
        geodesic: Loss along the retraction of the worst direction.
        straight: Loss along the straight line in weight space with the same initial direction.
        plane: Loss over the plane of the two worst directions, ``plane[i, j]`` at ``t[i]`` of the second and ``t[j]``
            of the first; empty if it was not asked for.
        rho: Radius of the ball.
        loss: Loss of the model itself.
        worst: Rise of the loss at the worst point, and at the worst among the directions orthogonal to it.
    """

    t: Array
    geodesic: Array
    straight: Array
    plane: Array
    rho: float
    loss: float
    worst: tuple[float, float]


def landscape(
    model: nn.Module,
    batch: Any,
    rho: float = 0.05,
    *,
    points: int = 41,
    plane: bool = True,
    loss: Loss | str | None = None,
    geometry: str = "geodesic",
    metric: str | float = "mix",
    retraction: str = "geodesic",
    relaxation: float = 0.0,
    blocks: str = "all",
    steps: int = 20,
    symmetries: Symmetries | None = None,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> Landscape:
    """The loss along the worst direction, along the straight line beside it, and over the plane of the two worst.

    Args:
        model: Any PyTorch model; it comes back as it was.
        batch: One batch, as `quotientsharp.sharpness` takes them; of several, the first.
        rho: Radius of the ball.
        points: Points along an axis.
        plane: Whether to evaluate the plane, ``points`` times ``points`` forward passes.
        loss: The loss.
        geometry: ``"geodesic"``, ``"adaptive"`` or ``"euclidean"``.
        metric: Metric of the blocks.
        retraction: Their retraction; other parameters move along ``w exp(z)`` with ``"geodesic"`` and along
            ``w (1 + z)`` else.
        relaxation: Invariant relaxation of the metric.
        blocks: ``"all"``, ``"attention"`` or ``"none"``.
        steps: Most gradients per ascent.
        symmetries: The model's symmetries, if known.
        seed: Seed.
        progress: Called with the number of forward passes done and to do.

    Returns:
        A `Landscape`. Where a geodesic leaves the manifold the loss is NaN.

    Raises:
        ValueError: If an argument is out of range or the model can move in one direction only.
    """
    radius = read_number("rho", rho)
    read_count("points", points)
    free = "geodesic" if retraction == "geodesic" else "first_order"
    chosen = Geometry.parse(geometry, metric, retraction, relaxation=relaxation, blocks=blocks, free=free)
    with open_measurement(model, batch, chosen, loss=loss, symmetries=symmetries, seed=seed) as measurement:
        space = measurement.space
        data = next(measurement.batches())
        surface = ModelSurface(measurement.objective, space, data)
        center, gradient = surface.open()
        generator = torch.Generator(device=space.device).manual_seed(seed)
        slope = length(gradient)
        if slope > 0:
            space.prepare(gradient * (radius / slope), radius)
            first = Ascent(surface, center, radius, steps=steps).run(space.zeros(), gradient=gradient)
        else:
            first = Ascent(surface, center, radius, steps=steps).run(space.random(generator).mul_(radius))
        one = space.zeros() if first.z is None else first.z
        size = length(one)
        one = one.mul_(radius / size) if size > 0 else space.random(generator).mul_(radius)
        across = one / radius
        start = space.random(generator)
        if length(orthogonal_(start, across)) < 1e-6:
            raise ValueError(
                "model has a single direction to move in, so there is no plane; plane=False does not help."
            )
        second = Ascent(Across(surface, across), center, radius, steps=steps).run(start.mul_(radius / length(start)))
        two = start if second.z is None else second.z
        two.mul_(radius / length(two))
        gains = first.gain, max(second.gain, 0.0)
        if gains[1] > gains[0]:
            one, two, gains = two, one, (gains[1], gains[0])
        t = np.linspace(-1.0, 1.0, points)
        total, done = 2 * points + (points**2 if plane else 0), 0

        def along(values: list[Tensor], place: ParameterSpace) -> Array:
            nonlocal done
            found = []
            for z in values:
                inside = place.reach_(z)
                found.append(float(measurement.objective.value(data)) if inside else math.nan)
                done += 1
                if progress is not None:
                    progress(done, total)
            return np.array(found)

        space.prepare(one + two, math.sqrt(2) * radius)
        geodesic = along([one * float(x) for x in t], space)
        grid = [along([one * float(x) + two * float(y) for x in t], space) for y in t] if plane else []
        space.restore_()
        flat = ParameterSpace(model, replace(chosen, retraction="first_order", free="first_order"), measurement.blocks)
        flat.focus(surface.objective.gradient(data)[1])
        straight = along([one * float(x) for x in t], flat)
        flat.restore_()
    return Landscape(t, geodesic, straight, np.array(grid), radius, center, gains)
