"""How a plain parameter is put together from pieces of stacked points, and taken apart again.

A stacked point has the shape ``(copies, n + m, h)`` but lies in memory as ``(copies, h, n + m)``: channel after
channel, each with its row of every factor. A query weight ``(heads * h, d)`` is then a strided view of the point, an
output weight its transpose, a bias a column; none of them is copied. What cannot be a view (queries, keys and values
packed into one parameter; the query heads of a group) is written once into a new tensor, piece by piece with strided
copies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..symmetry import Piece
from ..symmetry.blocks import Run


@dataclass(frozen=True, eq=False)
class Part:
    """One piece of a stacked point.

    Attributes:
        piece: The piece, which knows where its elements lie in the parameter.
        stack: Number of the stack.
        number: Number of the piece inside the stack, counted over all blocks.
        copies: First copy and number of copies.
        rows: First row and number of rows.
    """

    piece: Piece
    stack: int
    number: int
    copies: tuple[int, int]
    rows: tuple[int, int]

    @property
    def count(self) -> int:
        """Number of elements."""
        return self.piece.channel.numel() * self.piece.row.numel()

    def index(self, device: torch.device) -> Tensor:
        """Flat indices into the parameter, ``(copies, h, rows)``.

        Args:
            device: Where to put them.

        Returns:
            The indices.
        """
        return self.piece.index(device).transpose(1, 2)


@dataclass(frozen=True, eq=False)
class Layout:
    """A parameter as parts of stacked points, and the rest.

    Attributes:
        shape: Shape of the parameter.
        parts: Its parts.
        rest: Flat indices of the elements that are in no block, or None.
        order: Axes of the only part in the order of memory, where the parameter is a view of it.
    """

    shape: torch.Size
    parts: tuple[Part, ...]
    rest: Tensor | None
    order: tuple[int, int, int] | None


def layout_of(shape: torch.Size, parts: Sequence[Part]) -> Layout:
    """Plan how a parameter is put together.

    Args:
        shape: Shape of the parameter.
        parts: Its parts, disjoint.

    Returns:
        The layout.
    """
    total = shape.numel()
    if sum(part.count for part in parts) == total:
        return Layout(shape, tuple(parts), None, _order(parts[0].piece) if len(parts) == 1 else None)
    free = torch.ones(total, dtype=torch.bool)
    for part in parts:
        free[part.index(free.device)] = False
    return Layout(shape, tuple(parts), free.nonzero().squeeze(1), None)


def _order(piece: Piece) -> tuple[int, int, int] | None:
    """Axes (copy, channel, row) by falling stride: a parameter that is all one run is that run with axes permuted."""
    if piece.runs is None or len(piece.runs) > 1:
        return None
    by_copy, by_row, by_channel = piece.runs[0].strides
    strides = (by_copy, by_channel, by_row)
    first, second, third = sorted(range(3), key=lambda axis: -strides[axis])
    return first, second, third


def _view(flat: Tensor, part: Part, run: Run) -> Tensor:
    """The elements of a run in a flattened parameter, as a view ``(copies, h, rows)``."""
    copies, h = part.piece.channel.shape
    _, count, offset, (by_copy, by_row, by_channel) = run
    start = 0 if torch.compiler.is_compiling() else flat.storage_offset()  # see `_flat`
    return flat.as_strided((copies, h, count), (by_copy, by_channel, by_row), start + offset)


def _flat(tensor: Tensor) -> Tensor:
    """A tensor as one contiguous axis; at the start of its storage when compiling, where offsets are not known."""
    flat = tensor.contiguous().reshape(-1)
    return flat.clone() if torch.compiler.is_compiling() else flat


class _Assemble(torch.autograd.Function):
    """Writes parts and rest into one new tensor; the derivative reads them out of its gradient."""

    @staticmethod
    def forward(ctx: Any, layout: Layout, *values: Tensor) -> Tensor:
        ctx.layout = layout
        out = values[0].new_empty(layout.shape.numel())
        for part, value in zip(layout.parts, values, strict=False):
            if part.piece.runs is None:
                out[part.index(out.device)] = value
                continue
            for run in part.piece.runs:
                first, count, *_ = run
                _view(out, part, run).copy_(value.narrow(2, first, count))
        if layout.rest is not None:
            out[layout.rest.to(out.device)] = values[-1]
        return out.reshape(layout.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return (None, *take_apart(ctx.layout, gradients[0]))


def _take(flat: Tensor, part: Part) -> Tensor:
    if part.piece.runs is None:
        return flat[part.index(flat.device)]
    views = [_view(flat, part, run) for run in part.piece.runs]
    return views[0] if len(views) == 1 else torch.cat(views, 2)


def take_apart(layout: Layout, tensor: Tensor) -> list[Tensor]:
    """The parts of a parameter, each ``(copies, h, rows)``, and the rest where there is one.

    Args:
        layout: The layout.
        tensor: A tensor shaped like the parameter.

    Returns:
        The parts, then the rest; differentiable.
    """
    flat = _flat(tensor)
    parts = [_take(flat, part) for part in layout.parts]
    return parts if layout.rest is None else [*parts, flat[layout.rest.to(flat.device)]]


def assemble(layout: Layout, values: Sequence[Tensor]) -> Tensor:
    """Put a parameter together.

    Args:
        layout: The layout.
        values: Its parts, each ``(copies, h, rows)``, then the rest where there is one.

    Returns:
        The parameter: a view of the only part where the layout allows that, else a new tensor; differentiable.
    """
    if layout.order is not None:
        return values[0].permute(layout.order).reshape(layout.shape)
    assembled: Tensor = _Assemble.apply(layout, *values)  # type: ignore[no-untyped-call]
    return assembled
