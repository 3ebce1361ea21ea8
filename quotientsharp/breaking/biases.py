"""Untrained random biases of queries, values and keys, drawn anew for every training forward."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..symmetry import Block, Piece, Symmetries, find_symmetries

NAME = "symmetry_breaking"
"""Attribute of the model that holds the biases."""


@dataclass(frozen=True)
class Bias:
    """Distribution of an untrained bias: ``mean + linspace(first, last, h) * N(0, 1)``.

    Attributes:
        mean: Its mean, the preferred direction ``mean * (1, ..., 1)``.
        first: Standard deviation of the first channel of a head.
        last: Standard deviation of the last channel.
    """

    mean: float
    first: float
    last: float

    def __post_init__(self) -> None:
        """Refuse what is no distribution."""
        if (
            not all(math.isfinite(value) for value in (self.mean, self.first, self.last))
            or min(self.first, self.last) < 0
        ):
            raise ValueError(f"A Bias needs finite numbers and standard deviations of at least 0, not {self}.")


QUERY = Bias(0.5, 0.05, 0.15)
VALUE = Bias(0.5, 0.05, 0.05)
KEY = Bias(0.3, 0.12, 0.08)


class Site(NamedTuple):
    """Where a bias acts: the module, its weight, and the output channel of each component, ``(heads, h)``."""

    path: str
    parameter: str
    channels: Tensor


class Shift(nn.Module):
    """One bias of one layer: the last draw and the distribution, all in the state dict.

    Args:
        bias: The distribution.
        h: Size of a head.
        role: ``"query"``, ``"key"`` or ``"value"``.
        block: The block that it breaks.
        site: Where it acts.
        width: Number of channels of the projection.
    """

    value: Tensor
    mean: Tensor
    std: Tensor
    component: Tensor

    def __init__(self, bias: Bias, h: int, role: str, block: Block, site: Site, width: int) -> None:
        super().__init__()
        self.role, self.block, self.site = role, block, site
        self.register_buffer("mean", torch.full((h,), bias.mean))
        self.register_buffer("std", torch.linspace(bias.first, bias.last, h))
        self.register_buffer("value", self.mean.clone())
        component = torch.full((width,), h)
        component[site.channels.flatten()] = torch.arange(h).repeat(site.channels.shape[0])
        self.register_buffer("component", component, persistent=False)

    def spread(self) -> Tensor:
        """The bias of every channel of the projection.

        Returns:
            The draw, repeated for every head, and zero on the channels that are not broken.
        """
        return torch.cat([self.value, self.value.new_zeros(1)]).index_select(0, self.component)

    def add(self, module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        """Forward hook of a linear layer.

        Args:
            module: The layer.
            inputs: Its inputs.
            output: Its output.

        Returns:
            The output with the bias.
        """
        return output + self.spread().to(output.dtype)

    def extra_repr(self) -> str:
        """What is broken.

        Returns:
            For example ``query, h.0.attn.c_attn, h=16``.
        """
        return f"{self.role}, {self.site.path}, h={self.mean.numel()}"


class PackedShift(Shift):
    """A bias inside `torch.nn.MultiheadAttention`, which hands its weights to a function.

    Its bias is replaced by the sum during the forward, so that the names of its parameters stay as they are.
    """

    def enter(self, module: nn.Module, inputs: Any) -> None:
        """Forward pre-hook.

        Args:
            module: The attention.
            inputs: Its inputs.
        """
        own = module._parameters["in_proj_bias"]
        self.__dict__["own"] = own
        spread = self.spread()
        module._parameters["in_proj_bias"] = spread if own is None else own + spread.to(own.dtype)  # type: ignore[assignment]

    def leave(self, module: nn.Module, inputs: Any, output: Any) -> None:
        """Forward hook, called also after an error.

        Args:
            module: The attention.
            inputs: Its inputs.
            output: Its output.
        """
        if "own" in self.__dict__:
            module._parameters["in_proj_bias"] = self.__dict__.pop("own")


class SymmetryBreaking(nn.Module):
    """The biases of a model, one vector of head size per layer and role, shared by heads, tokens and batch.

    Every training forward of the model draws them anew, evaluation reuses the last draw. The draws are a stream of
    their own, fixed by ``seed`` and a counter that is saved with the model: they do not disturb the random numbers of
    the training, and a run that is resumed goes on with the same draws. Under data-parallel training give every rank
    its own seed for draws of its own.

    Args:
        shifts: The biases.
        seed: Seed of the draws.
    """

    count: Tensor
    seed: Tensor

    def __init__(self, shifts: list[Shift], seed: int) -> None:
        super().__init__()
        self.shifts = nn.ModuleList(shifts)
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("seed", torch.tensor(seed, dtype=torch.long))

    def draw_(self) -> None:
        """Draw all biases anew."""
        generator = torch.Generator().manual_seed(int(self.seed) * 1_000_003 + int(self.count))
        for shift in self.shifts:
            assert isinstance(shift, Shift)
            noise = torch.randn(shift.mean.shape, generator=generator, dtype=torch.float64)
            drawn = shift.mean.double() + shift.std.double() * noise.to(shift.mean.device)
            shift.value = drawn.to(shift.value.dtype)  # a new tensor: a graph that is still alive keeps the old one
        self.count = self.count + 1

    def _before(self, model: nn.Module, inputs: Any) -> None:
        if model.training:
            self.draw_()

    def forward(self, *args: Any) -> None:
        """Not meant to be called.

        Args:
            *args: Anything.

        Raises:
            TypeError: Always.
        """
        raise TypeError("SymmetryBreaking holds the biases of a model and is not called by itself.")


def break_symmetry(
    model: nn.Module,
    symmetries: Symmetries | None = None,
    example_inputs: Any = None,
    *,
    query: Bias | None = QUERY,
    value: Bias | None = VALUE,
    key: Bias | None = None,
    seed: int = 0,
) -> SymmetryBreaking:
    """Add untrained biases to the queries and values of every attention that has a symmetry.

    The scores become ``(q + b_Q) . k`` and the values ``v + b_V``. A change of basis ``A`` of a head keeps the function
    only if it keeps the drawn vectors: of GL(h) the group ``Aff(h - 1)`` of dimension ``h (h - 1)`` is left for one
    draw, and over many draws nothing. `find_symmetries` on the broken model reports what the last draw leaves. A bias
    of the keys, where no rotary embedding sees it, adds the same number to all scores of a query and drops out of the
    softmax; it is offered because the paper tries it.

    The parameters keep their names; the draws are buffers below ``symmetry_breaking`` and part of the state dict. To
    load one, break a fresh model and call ``load_state_dict``. `restore` takes the biases off again.

    Source: "Symmetry Breaking in Transformers for Efficient and Interpretable Training", arXiv 2601.22257.

    Args:
        model: The model, changed in place. Train it by calling it: the draw is made by a hook on its own forward, not
            on that of its parts.
        symmetries: Its symmetries; found if None.
        example_inputs: What it takes, for finding them.
        query: Distribution of the query biases, or None for no such bias.
        value: Distribution of the value biases. The paper's alternative is ``Bias(0.0, 0.05, 0.05)``.
        key: Distribution of the key biases; the paper's is ``KEY``.
        seed: Seed of the draws.

    Returns:
        The biases, also found as ``model.symmetry_breaking``.

    Raises:
        ValueError: If the model is broken already, has no such symmetry, or keeps its weights where no hook reaches.
    """
    if hasattr(model, NAME):
        raise ValueError(f"{type(model).__name__} is broken already: call restore(model) first.")
    found = find_symmetries(model, example_inputs) if symmetries is None else symmetries
    wanted = [("query", "qk", query), ("key", "qk", key), ("value", "vo", value)]
    shifts = []
    for block in found:
        for role, kind, bias in wanted:
            if block.kind == kind and bias is not None:
                shifts.append(_shift(model, block, role, bias))
    if not shifts:
        raise ValueError(f"{type(model).__name__} has no attention symmetry that the chosen biases would break.")
    breaking = SymmetryBreaking(shifts, seed)
    device = next(model.parameters()).device
    breaking.to(device)
    breaking.draw_()
    model.register_forward_pre_hook(breaking._before)  # first, for a model that is one attention by itself
    for shift in shifts:
        owner = model.get_submodule(shift.site.path)
        if isinstance(shift, PackedShift):
            owner.register_forward_pre_hook(shift.enter)
            owner.register_forward_hook(shift.leave, always_call=True, prepend=True)
        else:
            owner.register_forward_hook(shift.add, prepend=True)
    model.add_module(NAME, breaking)
    return breaking


def restore(model: nn.Module) -> None:
    """Take the biases off: the model is the one it was, with the weights that it has now.

    Args:
        model: A model that `break_symmetry` broke.

    Raises:
        ValueError: If it is not broken.
    """
    breaking = getattr(model, NAME, None)
    if not isinstance(breaking, SymmetryBreaking):
        raise ValueError(f"{type(model).__name__} is not broken, so there is nothing to restore.")
    members = {breaking, *breaking.shifts}
    for module in model.modules():
        for hooks in (module._forward_hooks, module._forward_pre_hooks):
            for key in [k for k, hook in hooks.items() if getattr(hook, "__self__", None) in members]:
                del hooks[key]
                module._forward_hooks_always_called.pop(key, None)
    delattr(model, NAME)


def pieces_of(block: Block, role: str) -> list[Piece]:
    """The rows of a block that make queries, keys or values: those of the weights and biases of that side.

    Args:
        block: A block of kind ``"qk"`` or ``"vo"``.
        role: ``"query"``, ``"key"`` or ``"value"``.

    Returns:
        The pieces.
    """
    left: list[Piece] = []
    rows = 0
    for piece in block.pieces:
        if rows < block.n:
            left.append(piece)
        rows += piece.row.numel()
    return list(block.pieces[len(left) :]) if role == "key" else left


def _shift(model: nn.Module, block: Block, role: str, bias: Bias) -> Shift:
    pieces = pieces_of(block, role)
    name = pieces[0].name
    path, _, parameter = name.rpartition(".")
    owner, weight = model.get_submodule(path), model.get_parameter(name)
    channels, width = _channels(weight, [p for p in pieces if p.name == name])
    if isinstance(owner, nn.MultiheadAttention):
        part = {"k_proj_weight": 1, "v_proj_weight": 2}.get(parameter, 0) * owner.embed_dim
        site = Site(path, parameter, channels + part)
        return PackedShift(bias, block.h, role, block, site, 3 * owner.embed_dim)
    if parameter != "weight" or weight.ndim != 2:
        raise ValueError(f"break_symmetry needs linear layers with a weight of their own, and {name} is none.")
    return Shift(bias, block.h, role, block, Site(path, parameter, channels), width)


def _channels(weight: Tensor, pieces: list[Piece]) -> tuple[Tensor, int]:
    """Output channels ``(heads, h)`` of a weight, whichever of its axes they run along, and their number."""
    row = pieces[0].row
    columns = weight.shape[-1]
    along_rows = row.numel() > 1 and int(row[1] - row[0]) == 1
    index = torch.cat([piece.channel for piece in pieces])
    if along_rows or columns == 1:  # (out, in), as in nn.Linear
        return torch.div(index, columns, rounding_mode="floor"), weight.shape[0]
    return index % columns, columns  # (in, out), as in Conv1D
