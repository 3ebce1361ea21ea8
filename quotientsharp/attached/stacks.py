"""The module that holds the stacked points of an attached model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import geoopt
import torch
from torch import Tensor, nn

from ..symmetry import Stack
from .layout import Layout, assemble, take_apart


@dataclass
class _Pieces:
    """Pieces of a stacked point as they were last split, with what must not have changed since."""

    point: Tensor
    version: int
    address: int
    values: tuple[Tensor, ...]


@dataclass
class _Memory:
    """Split points by stack and mode. Copies start empty: what it holds belongs to a graph."""

    table: dict[tuple[int, bool, bool], _Pieces] = field(default_factory=dict)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Memory:
        return _Memory()

    def __reduce__(self) -> tuple[type[_Memory], tuple[()]]:
        return _Memory, ()


class Stacks(nn.Module):
    """Stacked points as Geoopt parameters, and how the plain parameters are read from them.

    Attributes:
        blocks: The stacks of blocks, one per manifold parameter, in the order of `points`.
        layouts: Layout of every plain parameter by its name in the model.
        skipped: Blocks that stay plain parameters, as pairs (name, reason).
        retired: The plain parameters, emptied while the model is attached.
    """

    holds_stacked_points = True  # by which `find_symmetries` and the measures know an attached model

    def __init__(
        self,
        blocks: Sequence[Stack],
        points: Sequence[geoopt.ManifoldParameter],
        layouts: Mapping[str, Layout],
        rests: Mapping[str, nn.Parameter],
        skipped: Sequence[tuple[str, str]],
        retired: Mapping[str, nn.Parameter],
    ) -> None:
        super().__init__()
        self.blocks, self.layouts, self.skipped = list(blocks), dict(layouts), list(skipped)
        self._retired = _Retired(dict(retired))
        self._memory = _Memory()
        self._rests: dict[str, str] = {}
        for number, point in enumerate(points):
            self.register_parameter(f"stack{number}", point)
        for number, (name, rest) in enumerate(rests.items()):
            self.register_parameter(f"rest{number}", rest)
            self._rests[name] = f"rest{number}"

    @property
    def retired(self) -> dict[str, nn.Parameter]:
        """The plain parameters, emptied while the model is attached."""
        return self._retired.parameters

    @property
    def points(self) -> list[geoopt.ManifoldParameter]:
        """The manifold parameters."""
        return [getattr(self, f"stack{number}") for number in range(len(self.blocks))]

    @property
    def rests(self) -> dict[str, nn.Parameter]:
        """Elements outside every block of parameters that are partly inside one, by name of the parameter."""
        return {name: getattr(self, local) for name, local in self._rests.items()}

    def where(self, stack: int, copy: int) -> str:
        """Name of a copy.

        Args:
            stack: Number of the stack.
            copy: Number of the copy inside it.

        Returns:
            For example ``layer.3.attention.qk, copy 5``.

        Raises:
            IndexError: If the stack has no such copy.
        """
        for block in self.blocks[stack].blocks:
            if copy < block.copies:
                return f"{block.name}, copy {copy}"
            copy -= block.copies
        raise IndexError(f"stack {stack} has {self.blocks[stack].copies} copies.")

    def extra_repr(self) -> str:
        """One line per stack, then what was skipped.

        Returns:
            The lines.
        """
        lines = [
            f"stack{number}: {stack.kind} {stack.group}, {stack.copies} copies in {len(stack.blocks)} blocks, "
            f"{point.manifold}, {tuple(point.shape)}"
            for number, (stack, point) in enumerate(zip(self.blocks, self.points, strict=True))
        ]
        return "\n".join([*lines, *(f"skipped {name}: {reason}" for name, reason in self.skipped)])

    # -- reading and writing ----------------------------------------------------------------------------------------

    def _wide(self, stack: int) -> Tensor:
        """A stacked point as it lies in memory: ``(copies, h, n + m)``."""
        point: Tensor = getattr(self, f"stack{stack}")
        return point.unsqueeze(1) if self.blocks[stack].kind == "rescaling" else point.transpose(1, 2)

    def _pieces(self, stack: int) -> tuple[Tensor, ...]:
        """All pieces of a stacked point. One split serves every module, so the derivative is put together once."""
        point: Tensor = getattr(self, f"stack{stack}")
        key = (stack, torch.is_grad_enabled(), torch.is_inference_mode_enabled())
        known = self._memory.table.get(key)
        if (
            known is not None
            and known.point is point
            and known.version == point._version
            and known.address == point.data_ptr()
            and known.values[0].requires_grad == (point.requires_grad and key[1])
        ):
            return known.values
        members = self.blocks[stack].blocks
        values: list[Tensor] = []
        for block, part in zip(members, torch.split(self._wide(stack), [b.copies for b in members]), strict=True):
            values += torch.split(part, [piece.row.numel() for piece in block.pieces], 2)
        self._memory.table[key] = _Pieces(point, point._version, point.data_ptr(), tuple(values))
        return tuple(values)

    def value(self, name: str) -> Tensor:
        """A plain parameter.

        Args:
            name: Its name in the model.

        Returns:
            Its value, differentiable in the manifold parameters; a view of them where the layout allows that.
        """
        layout = self.layouts[name]
        values = [self._part(part.stack, part.number, part.copies, part.rows) for part in layout.parts]
        if layout.rest is not None:
            values.append(getattr(self, self._rests[name]))
        return assemble(layout, values)

    def _part(self, stack: int, number: int, copies: tuple[int, int], rows: tuple[int, int]) -> Tensor:
        point = getattr(self, f"stack{stack}")
        if torch.compiler.is_compiling() or not isinstance(point, geoopt.ManifoldParameter):
            return self._wide(stack).narrow(0, *copies).narrow(2, *rows)
        return self._pieces(stack)[number]

    @torch.no_grad()
    def write_(self, name: str, value: Tensor) -> None:
        """Write a plain parameter into the stacked points, in place.

        Args:
            name: Its name in the model.
            value: Its new value.
        """
        layout = self.layouts[name]
        parts = take_apart(layout, value)
        for part, new in zip(layout.parts, parts, strict=False):
            self._wide(part.stack).narrow(0, *part.copies).narrow(2, *part.rows).copy_(new)
        if layout.rest is not None:
            getattr(self, self._rests[name]).copy_(parts[-1])

    # -- checkpoints hold the plain parameters, which the modules themselves save and load --------------------------

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        pass

    def _load_from_state_dict(self, *arguments: Any) -> None:
        pass

    def dimensions(self) -> list[int]:
        """Dimension of the quotient of one copy, per stack.

        Returns:
            ``(n + m) h`` less the dimension of the group.
        """
        return [
            math.prod(point.shape[1:]) - stack.group.dim for stack, point in zip(self.blocks, self.points, strict=True)
        ]


class _Retired:
    """Plain parameters that wait for `detach`; a copy of the model gets new ones."""

    def __init__(self, parameters: dict[str, nn.Parameter]) -> None:
        self.parameters = parameters

    def __deepcopy__(self, memo: dict[int, Any]) -> _Retired:
        return _Retired({name: nn.Parameter(p.detach().clone()) for name, p in self.parameters.items()})
