"""Loss along the straight line between two models."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn


@dataclass
class Barrier:
    """Losses on the line from ``a`` to ``b``.

    Attributes:
        positions: From 0 (``a``) to 1 (``b``).
        losses: The loss at each.
    """

    positions: list[float]
    losses: list[float]

    @property
    def height(self) -> float:
        """Largest excess over the straight line between the losses at the ends; zero if there is none."""
        first, last = self.losses[0], self.losses[-1]
        line = [(1 - t) * first + t * last for t in self.positions]
        return max(loss - level for loss, level in zip(self.losses, line, strict=True))


def barrier(a: nn.Module, b: nn.Module, loss: Callable[[nn.Module], float], points: int = 11) -> Barrier:
    """Loss along the linear interpolation of two models.

    Args:
        a: A model.
        b: A model of the same architecture.
        loss: Loss of a model, a number; it must not train it.
        points: How many models on the line, the ends included.

    Returns:
        The losses and the height of the barrier. Parameters and floating-point buffers are interpolated, all else is
        taken from ``a``.

    Raises:
        ValueError: If there are fewer than three points, or the models differ in shape.
    """
    if points < 3:
        raise ValueError(f"points must be at least 3, the two ends and a model between them, not {points}.")
    first, second = a.state_dict(), b.state_dict()
    if {k: v.shape for k, v in first.items()} != {k: v.shape for k, v in second.items()}:
        raise ValueError("a and b must be models of one architecture: names or shapes of their tensors differ.")
    between = copy.deepcopy(a)
    positions = [index / (points - 1) for index in range(points)]
    losses = []
    for t in positions:
        mixed = {k: torch.lerp(v, second[k].to(v), t) if v.is_floating_point() else v for k, v in first.items()}
        between.load_state_dict(mixed)
        losses.append(float(loss(between)))
    return Barrier(positions, losses)
