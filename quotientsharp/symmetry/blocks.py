"""Blocks: a symmetry of a model together with the index maps that read it from the parameters and write it back."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ..manifolds import GLQuotient, RescalingQuotient, SubgroupQuotient
from .groups import Group

State = nn.Module | Mapping[str, Tensor]
IntArray = np.ndarray[Any, np.dtype[np.int64]]

_MOST_RUNS = 64  # more strided views than this cost more than one irregular gather


def parameters_of(state: State) -> Mapping[str, Tensor]:
    """Parameters of a model by name, or the mapping itself.

    Args:
        state: A model, or a mapping from parameter names to tensors.

    Returns:
        The mapping.
    """
    return dict(state.named_parameters(remove_duplicate=False)) if isinstance(state, nn.Module) else state


def assign_(target: Tensor, source: Tensor) -> None:
    """Copy values, bit for bit where the dtypes agree.

    Args:
        target: Where to.
        source: What, of the same shape.
    """
    if target.device.type == "cuda" and not torch.cuda.is_available():
        torch.mul(source, 1, out=target)  # a build without CUDA knows no copy_ on fake CUDA tensors
    else:
        target.copy_(source)


def refuse_attached(model: nn.Module) -> None:
    """Refuse a model whose weights are read from manifold parameters: its plain parameters are not there.

    Args:
        model: The model.

    Raises:
        ValueError: If the model is attached.
    """
    if any(getattr(type(module), "holds_stacked_points", False) for module in model.modules()):
        raise ValueError("model is attached, so its plain parameters are not there; call detach(model), or use a copy.")


class Run(NamedTuple):
    """Rows of a piece that lie at equal distances, so that all their elements form one strided view."""

    start: int  # first row
    rows: int
    offset: int  # of the first element in the flattened parameter
    strides: tuple[int, int, int]  # of copy, row and channel


def _step(values: IntArray) -> int | None:
    """The common difference of a sequence of numbers, or None."""
    steps = np.diff(values)
    if steps.size == 0:
        return 0
    return int(steps[0]) if bool((steps == steps[0]).all()) else None


@dataclass(frozen=True, eq=False)
class Piece:
    """Some rows of the stacked point: element ``channel[copy, j] + row[r]`` of one parameter, flattened.

    Attributes:
        name: Name of the parameter.
        channel: Offsets ``(copies, h)``.
        row: Offsets ``(rows,)``.
    """

    name: str
    channel: Tensor
    row: Tensor
    _host: tuple[IntArray, IntArray] = field(init=False, repr=False)

    def index(self, device: torch.device | None = None) -> Tensor:
        """Flat indices into the parameter.

        Args:
            device: Where to put them.

        Returns:
            ``(copies, rows, h)``.
        """
        return (self.channel[:, None, :] + self.row[None, :, None]).to(device)

    def __post_init__(self) -> None:
        """Keep the offsets on the host, out of reach of modes that watch tensors."""
        object.__setattr__(self, "_host", (self.channel.numpy(), self.row.numpy()))

    @cached_property
    def runs(self) -> tuple[Run, ...] | None:
        """The piece as strided views, or None where its elements lie irregularly."""
        channel, row = self._host
        by_copy, by_channel = _step(channel[:, 0]), _step(channel[0])
        if by_copy is None or by_channel is None:
            return None
        copies, h = channel.shape
        grid = channel[0, 0] + np.arange(copies)[:, None] * by_copy + np.arange(h) * by_channel
        if not np.array_equal(grid, channel):
            return None
        breaks = (np.diff(row, 2) != 0).nonzero()[0] + 1
        runs, start = [], 0
        for edge in [*breaks.tolist(), row.size - 1]:
            if start > edge:
                continue
            rows = row[start : edge + 1]
            offset = int(channel[0, 0] + rows[0])
            runs.append(Run(start, rows.size, offset, (by_copy, _step(rows) or 0, by_channel)))
            start = edge + 1
        return tuple(runs) if len(runs) <= _MOST_RUNS else None

    def flat(self) -> IntArray:
        """Flat indices into the parameter on the host, whatever mode torch is in.

        Returns:
            ``(copies * rows * h,)``.
        """
        channel, row = self._host
        return np.asarray(channel[:, None, :] + row[None, :, None]).reshape(-1)

    def pairs(self, tensor: Tensor, rows: Tensor) -> list[tuple[Tensor, Tensor]] | None:
        """Views of a parameter beside views of the rows of a point that belong there.

        Args:
            tensor: The parameter, or a tensor like it.
            rows: The piece's rows of a point, ``(copies, rows, h)``.

        Returns:
            Pairs of equal shape, or None where the elements lie irregularly or the tensor is not contiguous.
        """
        if self.runs is None or not tensor.is_contiguous():
            return None
        lead, base = (self.channel.shape[0], self.channel.shape[1]), tensor.storage_offset()
        return [
            (
                tensor.as_strided((lead[0], run.rows, lead[1]), run.strides, base + run.offset),
                rows.narrow(1, run.start, run.rows),
            )
            for run in self.runs
        ]


@dataclass(eq=False)
class Block:
    """Pairs ``(G, H)`` of one place in a model, on which a group acts by ``(G A^-1, H A^T)``.

    Attributes:
        name: Where it is.
        kind: ``"qk"``, ``"vo"``, ``"rescaling"``, ``"lora"`` or ``"linear"``.
        group: The group, a string such as ``"GL(32)"`` that also knows its algebra.
        pieces: Index maps of the rows of ``G``, then of ``H``.
        n: Rows of ``G``.
        verified: Whether a numeric check of the whole model confirmed it.
        error: Relative change of the output that the check saw.
    """

    name: str
    kind: str
    group: Group
    pieces: tuple[Piece, ...]
    n: int
    verified: bool = False
    error: float = float("nan")
    candidates: tuple[Group, ...] = ()

    @property
    def copies(self) -> int:
        """How many pairs: heads, groups of heads, hidden units."""
        return int(self.pieces[0].channel.shape[0])

    @property
    def h(self) -> int:
        """Size of the group's matrices."""
        return int(self.pieces[0].channel.shape[1])

    @property
    def m(self) -> int:
        """Rows of ``H``."""
        return sum(p.row.numel() for p in self.pieces) - self.n

    @property
    def dim(self) -> int:
        """Dimension of the group, all copies."""
        return self.copies * self.group.dim

    @property
    def size(self) -> int:
        """Number of parameter elements in the block."""
        return self.copies * self.h * (self.n + self.m)

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of the parameters, each once, those of ``G`` first."""
        return tuple(dict.fromkeys(piece.name for piece in self.pieces))

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the point."""
        return (self.copies, self.n + self.m) if self.kind == "rescaling" else (self.copies, self.n + self.m, self.h)

    def __repr__(self) -> str:
        """One line."""
        return f"Block({self.name!r}, {self.group}, copies={self.copies}, dim={self.dim}, verified={self.verified})"

    def read(self, state: State) -> Tensor:
        """The point: rows ``[:n]`` are ``G``, the others ``H``.

        Args:
            state: A model, or a mapping from parameter names to tensors.

        Returns:
            A new tensor ``(copies, n + m, h)``, or ``(units, n + m)`` for a rescaling; differentiable.
        """
        tensors = parameters_of(state)
        rows = []
        for piece in self.pieces:
            tensor = tensors[piece.name]
            rows.append(tensor.reshape(-1)[piece.index(tensor.device)])
        point = torch.cat(rows, 1)
        return point.squeeze(-1) if self.kind == "rescaling" else point

    def write(self, state: State, point: Tensor) -> dict[str, Tensor]:
        """New values of the block's parameters, everything outside the block kept.

        Args:
            state: A model, or a mapping from parameter names to tensors.
            point: The point, as `read` gives it.

        Returns:
            New tensors by parameter name; differentiable in the point and in the parameters.
        """
        tensors = parameters_of(state)
        point = self._check(point)
        new: dict[str, Tensor] = {}
        start = 0
        for piece in self.pieces:
            old = new.get(piece.name, tensors[piece.name])
            rows = point[:, start : start + piece.row.numel()]
            start += piece.row.numel()
            flat = old.reshape(-1).index_put((piece.index(old.device).reshape(-1),), rows.reshape(-1).to(old.dtype))
            new[piece.name] = flat.reshape(old.shape)
        return new

    def write_(self, state: nn.Module | MutableMapping[str, Tensor], point: Tensor) -> None:
        """Write a point into the parameters, in place and bit for bit.

        Args:
            state: A model, or a mapping from parameter names to tensors.
            point: The point, as `read` gives it.
        """
        tensors = parameters_of(state)
        with torch.no_grad():
            for name, value in self.write({name: tensors[name].detach() for name in self.parameters}, point).items():
                tensors[name].copy_(value)

    def gather(self, tensors: Mapping[str, Tensor], out: Tensor) -> None:
        """`read` without derivatives into memory that is there, by strided copies where the layout allows.

        Args:
            tensors: Parameters, or tensors like them, by name.
            out: Where to put the point, of the block's shape.
        """
        for piece, rows in self._rows(out):
            tensor = tensors[piece.name].detach()
            pairs = piece.pairs(tensor, rows)
            if pairs is None:
                rows.copy_(tensor.reshape(-1)[piece.index(tensor.device)])
            else:
                for view, part in pairs:
                    assign_(part, view)

    def scatter_(self, tensors: Mapping[str, Tensor], point: Tensor) -> None:
        """`write_` into tensors by name, by strided copies where the layout allows.

        Args:
            tensors: Parameters by name; they are written in place.
            point: The point, of the block's shape.
        """
        for piece, rows in self._rows(point):
            tensor = tensors[piece.name].detach()
            pairs = piece.pairs(tensor, rows)
            if pairs is None:
                flat = tensor.reshape(-1)
                flat.index_put_((piece.index(flat.device).reshape(-1),), rows.reshape(-1).to(flat.dtype))
                if flat.data_ptr() != tensor.data_ptr():
                    tensor.copy_(flat.reshape(tensor.shape))
            else:
                for view, part in pairs:
                    assign_(view, part)

    def _rows(self, point: Tensor) -> list[tuple[Piece, Tensor]]:
        point = self._check(point)
        parts, start = [], 0
        for piece in self.pieces:
            parts.append((piece, point.narrow(1, start, piece.row.numel())))
            start += piece.row.numel()
        return parts

    def act(self, point: Tensor, A: Tensor) -> Tensor:
        """Move a point along its orbit.

        Args:
            point: The point, as `read` gives it.
            A: Group elements ``(copies, h, h)``; for a rescaling ``(units, 1, 1)`` or ``(units,)``.

        Returns:
            ``(G A^-1, H A^T)``.
        """
        if self.kind == "rescaling":
            c = A.reshape(-1, 1).to(point)
            return torch.cat([point[:, : self.n] / c, point[:, self.n :] * c], 1)
        A = A.to(point)
        left = torch.linalg.solve(A, point[:, : self.n], left=False)
        return torch.cat([left, point[:, self.n :] @ A.mT], 1)

    def manifold(
        self, metric: str | float = "mix", retraction: str = "christoffel", relaxation: float = 0.0
    ) -> GLQuotient | RescalingQuotient:
        """The quotient manifold whose points `read` gives.

        Args:
            metric: The metric, see `GLQuotient`.
            retraction: The retraction.
            relaxation: The invariant relaxation.

        Returns:
            A `GLQuotient`, a `RescalingQuotient`, or for a smaller group a `SubgroupQuotient`.
        """
        options: dict[str, Any] = {"metric": metric, "retraction": retraction, "relaxation": relaxation}
        if self.kind == "rescaling":
            return RescalingQuotient(self.n, **options)
        if self.group.dim == self.h**2:
            return GLQuotient(self.n, **options)
        return SubgroupQuotient(self.n, self.group.algebra(), **options)

    def _check(self, point: Tensor) -> Tensor:
        if tuple(point.shape) != self.shape:
            raise ValueError(f"The point of {self.name} has shape {self.shape}, not {tuple(point.shape)}.")
        return point.unsqueeze(-1) if self.kind == "rescaling" else point


@dataclass(eq=False)
class Stack:
    """Blocks of equal shape and group as one batched tensor, such as the heads of all layers.

    Attributes:
        blocks: The blocks.
    """

    blocks: tuple[Block, ...]

    @property
    def group(self) -> Group:
        """The common group."""
        return self.blocks[0].group

    @property
    def kind(self) -> str:
        """The common kind."""
        return self.blocks[0].kind

    @property
    def n(self) -> int:
        """Rows of ``G``."""
        return self.blocks[0].n

    @property
    def h(self) -> int:
        """Size of the group's matrices."""
        return self.blocks[0].h

    @property
    def copies(self) -> int:
        """Pairs in all blocks together."""
        return sum(block.copies for block in self.blocks)

    @property
    def dim(self) -> int:
        """Dimension of the group, all copies."""
        return sum(block.dim for block in self.blocks)

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of the parameters, each once."""
        return tuple(dict.fromkeys(name for block in self.blocks for name in block.parameters))

    def read(self, state: State) -> Tensor:
        """The points of all blocks, one after the other.

        Args:
            state: A model, or a mapping from parameter names to tensors.

        Returns:
            One batched point.
        """
        tensors = parameters_of(state)
        return torch.cat([block.read(tensors) for block in self.blocks])

    def write(self, state: State, point: Tensor) -> dict[str, Tensor]:
        """New values of the parameters; see `Block.write`.

        Args:
            state: A model, or a mapping from parameter names to tensors.
            point: The batched point.

        Returns:
            New tensors by parameter name.
        """
        tensors = dict(parameters_of(state))
        new: dict[str, Tensor] = {}
        for block, part in zip(self.blocks, self._parts(point), strict=True):
            changed = block.write(tensors, part)
            tensors.update(changed)
            new.update(changed)
        return new

    def write_(self, state: nn.Module | MutableMapping[str, Tensor], point: Tensor) -> None:
        """Write a batched point into the parameters, in place and bit for bit.

        Args:
            state: A model, or a mapping from parameter names to tensors.
            point: The batched point.
        """
        for block, part in zip(self.blocks, self._parts(point), strict=True):
            block.write_(state, part)

    def gather(self, tensors: Mapping[str, Tensor], out: Tensor) -> None:
        """Read all points into memory that is there; see `Block.gather`.

        Args:
            tensors: Parameters, or tensors like them, by name.
            out: Where to put the batched point.
        """
        for block, part in zip(self.blocks, self._parts(out), strict=True):
            block.gather(tensors, part)

    def scatter_(self, tensors: Mapping[str, Tensor], point: Tensor) -> None:
        """Write a batched point into tensors by name; see `Block.scatter_`.

        Args:
            tensors: Parameters by name; they are written in place.
            point: The batched point.
        """
        for block, part in zip(self.blocks, self._parts(point), strict=True):
            block.scatter_(tensors, part)

    def act(self, point: Tensor, A: Tensor) -> Tensor:
        """Move a batched point along its orbit.

        Args:
            point: The batched point.
            A: Group elements, one per copy.

        Returns:
            ``(G A^-1, H A^T)``.
        """
        return self.blocks[0].act(point, A)

    def manifold(
        self, metric: str | float = "mix", retraction: str = "christoffel", relaxation: float = 0.0
    ) -> GLQuotient | RescalingQuotient:
        """The quotient manifold of the batched point.

        Args:
            metric: The metric.
            retraction: The retraction.
            relaxation: The invariant relaxation.

        Returns:
            The manifold, see `Block.manifold`.
        """
        return self.blocks[0].manifold(metric, retraction, relaxation)

    def _parts(self, point: Tensor) -> Sequence[Tensor]:
        if point.shape[0] != self.copies:
            raise ValueError(f"The stacked point has {self.copies} copies, not {point.shape[0]}.")
        return list(torch.split(point, [block.copies for block in self.blocks]))


def stacked(blocks: Sequence[Block]) -> list[Stack]:
    """Group blocks of equal shape and group.

    Args:
        blocks: The blocks.

    Returns:
        One stack per kind, group and shape.
    """
    table: dict[tuple[object, ...], list[Block]] = {}
    for block in blocks:
        key = (block.kind, str(block.group), block.group.style, block.group.positive, block.n, block.m, block.h)
        table.setdefault(key, []).append(block)
    return [Stack(tuple(members)) for members in table.values()]
