"""What every measurement does around its numbers: read arguments, open the space, leave the model as it was."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from .objective import Loss, Objective, inputs_of, read_loss, to_device, untouched
from .space import Geometry, ParameterSpace
from .symmetry import Block, Symmetries, find_symmetries
from .symmetry.inputs import make_inputs


def read_number(name: str, value: float, *, zero: bool = False) -> float:
    """Read a positive finite number.

    Args:
        name: Name of the argument.
        value: The argument.
        zero: Whether zero will do.

    Returns:
        The number.

    Raises:
        ValueError: If it is none.
    """
    good = not isinstance(value, bool) and isinstance(value, int | float) and math.isfinite(value)
    if not good or value < 0 or (value == 0 and not zero):
        raise ValueError(f"{name} must be a {'non-negative' if zero else 'positive'} finite number, not {value!r}.")
    return float(value)


def read_count(name: str, value: int, *, zero: bool = False) -> int:
    """Read a positive integer.

    Args:
        name: Name of the argument.
        value: The argument.
        zero: Whether zero will do.

    Returns:
        The integer.

    Raises:
        ValueError: If it is none.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < (0 if zero else 1):
        raise ValueError(f"{name} must be a {'non-negative' if zero else 'positive'} integer, not {value!r}.")
    return value


def _one_batch(batches: Any) -> bool:
    """Whether the argument is a batch rather than an iterable of batches."""
    if isinstance(batches, Mapping):
        return True
    return (
        isinstance(batches, tuple | list)
        and len(batches) == 2
        and isinstance(batches[1], Tensor)
        and isinstance(batches[0], Tensor | Mapping)
    )


@dataclass
class Measurement:
    """A model under measurement.

    Attributes:
        space: Its parameter space.
        objective: Its loss.
        blocks: The symmetries the space was made from.
        count: Number of batches, if known.
        notes: What a reader should know.
    """

    space: ParameterSpace
    objective: Objective
    blocks: Sequence[Block]
    count: int | None
    first: Any
    rest: Iterator[Any]
    notes: list[str] = field(default_factory=list)

    def batches(self) -> Iterator[Any]:
        """The batches, on the device of the model.

        Yields:
            One after the other; once.
        """
        for batch in chain([self.first], self.rest):
            yield to_device(batch, self.space.device)


@contextmanager
def open_measurement(
    model: nn.Module,
    batches: Any,
    geometry: Geometry,
    *,
    loss: Loss | str | None = None,
    symmetries: Symmetries | None = None,
    seed: int = 0,
) -> Iterator[Measurement]:
    """Take a model to be measured and bring it back bit for bit.

    Args:
        model: The model.
        batches: One batch or an iterable of them.
        geometry: The geometry.
        loss: The loss, as `read_loss` reads it.
        symmetries: The symmetries, if they are known.
        seed: Seed of whatever the model draws.

    Yields:
        The measurement; the model is in evaluation mode.

    Raises:
        ValueError: If there is no batch.
        TypeError: If an argument is of the wrong type.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, not {type(model).__name__}.")
    chosen = read_loss(loss)
    if not _one_batch(batches) and not isinstance(batches, Iterable):
        raise TypeError(f"batches must be an iterable of batches, not {type(batches).__name__}.")
    listed = [batches] if _one_batch(batches) else batches
    count = len(listed) if hasattr(listed, "__len__") else None
    with untouched(model):
        rest = iter(listed)
        try:
            first = next(rest)
        except StopIteration:
            raise ValueError("batches is empty; sharpness needs at least one batch.") from None
        blocks = _blocks(model, geometry, symmetries, first)
        space = ParameterSpace(model, geometry, blocks)
        moving = {id(tensor) for tensor in space.parameters.values()}
        for tensor in model.parameters():
            tensor.requires_grad_(id(tensor) in moving)
        try:
            objective = Objective(model, chosen, space.parameters, seed)
            yield Measurement(space, objective, blocks, count, first, rest, _notes(space))
        finally:
            space.restore_()


def _blocks(model: nn.Module, geometry: Geometry, symmetries: Symmetries | None, batch: Any) -> Sequence[Block]:
    if geometry.name != "geodesic" or geometry.blocks == "none":
        return ()
    if symmetries is not None:
        return symmetries
    # A model that says what it takes gets inputs made to tell the groups apart; others see the batch.
    device = next(model.parameters()).device
    return find_symmetries(model, None if make_inputs(model) is not None else to_device(inputs_of(batch), device))


def _notes(space: ParameterSpace) -> list[str]:
    coarse = sorted({str(t.dtype).removeprefix("torch.") for t in space.parameters.values() if t.dtype.itemsize < 4})
    if not coarse:
        return []
    step = max(torch.finfo(t.dtype).eps for t in space.parameters.values())
    return [
        f"weights in {' and '.join(coarse)} resolve relative steps of {step:.1g} only; model.float() would do better"
    ]
