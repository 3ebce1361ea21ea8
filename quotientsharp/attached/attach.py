"""`attach` and `detach`: weights as points of a quotient manifold, and back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import geoopt
import torch
from torch import Tensor, nn

from ..symmetry import Block, Stack, find_symmetries, stacked
from . import retired
from .layout import Part, layout_of
from .modules import install, reader_of, remove
from .stacks import Stacks

NAME = "quotient"


def attached(model: nn.Module) -> Stacks | None:
    """The stacked points of a model.

    Args:
        model: A model, possibly wrapped (DistributedDataParallel, torch.compile).

    Returns:
        The module that holds them, or None if the model is not attached.
    """
    return next((module for module in model.modules() if isinstance(module, Stacks)), None)


def attach(
    model: nn.Module,
    symmetries: Sequence[Block] | None = None,
    *,
    metric: str | float = "mix",
    retraction: str = "christoffel",
    relaxation: float = 0.0,
    example_inputs: Any = None,
) -> Stacks:
    """Turn the weights of all symmetry blocks into Geoopt manifold parameters, in place.

    Blocks of equal shape and group become one batched `geoopt.ManifoldParameter`, which ``model.parameters()`` lists
    in place of the plain parameters and which the forward pass reads through. The function, ``state_dict``,
    ``load_state_dict`` and ``save_pretrained`` stay those of the plain model. The plain parameters wait, emptied;
    `detach` fills and returns the same objects. An optimizer built before `attach` would train nothing and raises an
    error instead.

    A block stays plain, and is listed under ``skipped``, if some of its parameters are frozen, differ in dtype or
    device, or have fewer rows than columns. A pair of rank zero (an adapter with ``B = 0``) is attached as it is; the
    optimizers of `quotientsharp.optim` know how to start there.

    Args:
        model: The model.
        symmetries: What `find_symmetries` gave, or some of its blocks; searched for if None.
        metric: The metric, see `GLQuotient`.
        retraction: The retraction.
        relaxation: The invariant relaxation.
        example_inputs: What the model takes, for the search.

    Returns:
        The module that holds the stacked points, registered as ``model.quotient``.

    Raises:
        ValueError: If the model is attached already, is wrapped, or has no block that can be attached.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"model must be a torch.nn.Module, not {type(model).__name__}.")
    if isinstance(model, nn.parallel.DistributedDataParallel) or hasattr(model, "_orig_mod"):
        raise ValueError("model must be attached before it is wrapped by DistributedDataParallel or torch.compile.")
    if attached(model) is not None:
        raise ValueError("model is attached already; call detach(model) first.")
    if hasattr(model, NAME):
        raise ValueError(f"model has an attribute {NAME!r}, which attach needs for the manifold parameters.")
    found = find_symmetries(model, example_inputs) if symmetries is None else symmetries
    parameters = dict(model.named_parameters(remove_duplicate=False))
    blocks, skipped = _usable(list(found), parameters)
    if not blocks:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in skipped) or "no symmetry was found"
        raise ValueError(f"model has no block that can be attached ({reasons}).")
    groups = _groups(blocks, parameters)
    points = [_point(stack, parameters, metric, retraction, relaxation) for stack in groups]
    layouts = {name: layout_of(parameters[name].shape, parts) for name, parts in _parts(groups).items()}
    rests = {
        name: nn.Parameter(parameters[name].detach().reshape(-1)[layout.rest.to(parameters[name].device)])
        for name, layout in layouts.items()
        if layout.rest is not None
    }
    old = {name: parameters[name] for name in layouts}
    stacks = Stacks(groups, points, layouts, rests, skipped, old)
    for module, names in _places(model, old):
        install(module, names, stacks)
    model.add_module(NAME, stacks)
    retired.retire(old.values(), "attach")
    for p in old.values():
        p.grad = None
        p.data = p.data.new_empty(0)
    return stacks


def detach(model: nn.Module) -> nn.Module:
    """Turn an attached model into a plain one again, in place.

    Args:
        model: The model that `attach` was given.

    Returns:
        The model. Its parameters are the objects it had before `attach`, with today's values; they have no gradients.

    Raises:
        ValueError: If the model is not attached, or is wrapped.
    """
    stacks = attached(model)
    if stacks is None:
        raise ValueError("model is not attached; nothing can be detached.")
    if model._modules.get(NAME) is not stacks or hasattr(model, "_orig_mod"):
        raise ValueError("detach needs the very model that attach was given, not a wrapper or a part of it.")
    with torch.no_grad():
        for name, p in stacks.retired.items():
            p.data = stacks.value(name).detach().clone(memory_format=torch.contiguous_format)
    for module in model.modules():
        reader = reader_of(module)
        if reader is not None and reader.stacks is stacks:
            remove(module, stacks.retired)
    delattr(model, NAME)
    retired.restore(stacks.retired.values())
    retired.retire([*stacks.points, *stacks.rests.values()], "detach")
    return model


def _usable(
    blocks: list[Block], parameters: dict[str, nn.Parameter]
) -> tuple[list[Block], list[tuple[str, str]]]:  # fmt: skip
    kept: list[Block] = []
    skipped: list[tuple[str, str]] = []
    for block in blocks:
        reason = _reason(block, parameters)
        if reason:
            skipped.append((block.name, reason))
        else:
            kept.append(block)
    return kept, skipped


def _reason(block: Block, parameters: dict[str, nn.Parameter]) -> str:
    """Why a block has to stay plain."""
    unknown = [name for name in block.parameters if name not in parameters]
    if unknown:
        return f"the model has no parameter {unknown[0]}"
    tensors = [parameters[name] for name in block.parameters]
    frozen = sum(not p.requires_grad for p in tensors)
    if frozen:
        return "its parameters are frozen" if frozen == len(tensors) else "some of its parameters are frozen"
    if len({(p.dtype, p.device) for p in tensors}) > 1:
        return "its parameters differ in dtype or device"
    if not tensors[0].is_floating_point():
        return f"its parameters are {tensors[0].dtype}"
    if min(block.n, block.m) < block.h:
        return f"its factors have {block.n} and {block.m} rows, fewer than h = {block.h} columns"
    return ""


def _groups(blocks: list[Block], parameters: dict[str, nn.Parameter]) -> list[Stack]:
    """Stacks, each on one device and of one dtype."""
    result = []
    for stack in stacked(blocks):
        table: dict[tuple[torch.dtype, torch.device], list[Block]] = {}
        for block in stack.blocks:
            p = parameters[block.parameters[0]]
            table.setdefault((p.dtype, p.device), []).append(block)
        result += [Stack(tuple(members)) for members in table.values()]
    return result


def _point(
    stack: Stack, parameters: dict[str, nn.Parameter], metric: str | float, retraction: str, relaxation: float
) -> geoopt.ManifoldParameter:
    point = stack.read({name: parameters[name].detach() for name in stack.parameters})
    if stack.kind != "rescaling":
        point = point.transpose(1, 2).contiguous().transpose(1, 2)
    return geoopt.ManifoldParameter(point, manifold=stack.manifold(metric, retraction, relaxation))


def _parts(stacks: Iterable[Stack]) -> dict[str, list[Part]]:
    """Parts of every parameter."""
    table: dict[str, list[Part]] = {}
    for number, stack in enumerate(stacks):
        copy = count = 0
        for block in stack.blocks:
            row = 0
            for piece in block.pieces:
                rows = piece.row.numel()
                part = Part(piece, number, count, (copy, block.copies), (row, rows))
                table.setdefault(piece.name, []).append(part)
                row, count = row + rows, count + 1
            copy += block.copies
    return table


def _places(model: nn.Module, parameters: dict[str, nn.Parameter]) -> list[tuple[nn.Module, dict[str, str]]]:
    """Every module that holds one of the parameters, tied ones included, with the names."""
    by_id: dict[int, str] = {id(p): name for name, p in parameters.items()}
    places = []
    for module in model.modules():
        names = {local: by_id[id(p)] for local, p in module._parameters.items() if p is not None and id(p) in by_id}
        if names:
            places.append((module, names))
    return places


def plain_values(model: nn.Module) -> dict[str, Tensor]:
    """Values of the parameters in the names of the plain model, attached or not.

    Args:
        model: The model.

    Returns:
        Detached tensors by name, new ones where the model is attached.
    """
    names = {name for name, _ in model.named_buffers(remove_duplicate=False)}
    return {name: value.detach() for name, value in model.state_dict().items() if name not in names}
