"""Pushes probes through a route: which channel of a projection reaches which head, and what stands in between."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from .contractions import Projection, trace
from .graph import Graph
from .walk import Route, _shape, run

TOLERANCE = 1e-9
POSITIONS = 6


class Unclear(Exception):
    """The probes do not show a structure that can be used; the text says why."""


@dataclass
class Head:
    """How one head depends on the channels of a projection: ``R[s]`` maps channels to the head at position s.

    Attributes:
        channels: The channels.
        R: The maps, ``(positions, channels, h)``.
        constant: Whether a constant is added on the way; the maps leave it out.
    """

    channels: tuple[int, ...]
    R: Tensor
    constant: bool = False


def spread(size: int, count: int = POSITIONS) -> list[int]:
    """Positions from the first to the last, unevenly spaced so that no period hides.

    Args:
        size: Number of positions.
        count: How many to take at most.

    Returns:
        The positions.
    """
    if size <= count:
        return list(range(size))
    return sorted({0, 1, size - 1, *(int((size - 1) * (k / (count - 2)) ** 1.5) for k in range(1, count - 2))})


def leaf(projection: Projection, channels: Tensor, weights: Tensor | None = None) -> Tensor:
    """Output of a projection with given numbers on its channels.

    Args:
        projection: The projection.
        channels: One number per channel.
        weights: One number per position (the other axes); ones if None.

    Returns:
        A tensor shaped like the output.
    """
    shape = _shape(projection.node)
    along = [size if axis in projection.out_axes else 1 for axis, size in enumerate(shape)]
    beside = [1 if axis in projection.out_axes else size for axis, size in enumerate(shape)]
    other = torch.ones(beside, dtype=torch.float64) if weights is None else weights.reshape(beside)
    return channels.reshape(along) * other


def count_channels(projection: Projection) -> int:
    """Number of channels that a projection makes.

    Args:
        projection: The projection.

    Returns:
        The number.
    """
    shape = _shape(projection.node)
    total = 1
    for axis in projection.out_axes:
        total *= shape[axis]
    return total


def heads(
    graph: Graph, route: Route, target: fx.Node, projection: Projection, arrange: Callable[[Tensor], Tensor]
) -> list[Head]:
    """Map of every head of an operand of the scores.

    Args:
        graph: The graph.
        route: How the operand depends on the projection.
        target: The operand.
        projection: The projection.
        arrange: Brings the operand to ``(heads, positions, h)``.

    Returns:
        One entry per head, in the order of ``arrange``.
    """
    start = arrange(run(graph, route, target, {}))
    touched = _dependence(graph, route, target, projection, arrange)
    colors = _color(touched)
    at = spread(start.shape[1])
    responses = []
    for color in range(int(colors.max()) + 1):
        probe = leaf(projection, (colors == color).double())
        responses.append((arrange(run(graph, route, target, {projection.node: probe})) - start)[:, at])
    answer = torch.stack(responses)  # (color, head, position, h)
    result = []
    for index in range(touched.shape[0]):
        channels = touched[index].nonzero()[:, 0]
        constant = bool(start[index].abs().max() > 0)
        result.append(Head(tuple(channels.tolist()), answer[colors[channels], index].permute(1, 0, 2), constant))
    return result


def _dependence(
    graph: Graph, route: Route, target: fx.Node, projection: Projection, arrange: Callable[[Tensor], Tensor]
) -> Tensor:
    """Which head depends on which channel, ``(heads, channels)``, by one derivative per head."""
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(_shape(projection.node), dtype=torch.float64, generator=generator).requires_grad_()
    with torch.enable_grad():
        y = arrange(run(graph, route, target, {projection.node: z}))
        weights = torch.randn(y.shape, dtype=torch.float64, generator=generator)
        rows = []
        others = [axis for axis in range(z.ndim) if axis not in projection.out_axes]
        for index in range(y.shape[0]):
            (grad,) = torch.autograd.grad((y[index] * weights[index]).sum(), z, retain_graph=True, allow_unused=True)
            size = torch.zeros(z.shape, dtype=torch.float64) if grad is None else grad.abs()
            rows.append((size.sum(others) if others else size).flatten() > 0)
    return torch.stack(rows)


def _color(touched: Tensor) -> Tensor:
    """Number the channels so that no two of one head share a number: they can then be probed at once."""
    members = [row.nonzero()[:, 0].tolist() for row in touched.T]
    used: list[set[int]] = [set() for _ in range(touched.shape[0])]
    colors = []
    for belongs in members:
        color = 0 if belongs else -1
        taken = set().union(*(used[i] for i in belongs)) if belongs else set()
        while color in taken:
            color += 1
        colors.append(color)
        for i in belongs:
            used[i].add(color)
    return torch.tensor(colors)


def offset_elements(
    graph: Graph,
    route: Route,
    target: fx.Node,
    offset: fx.Node,
    arrange: Callable[[Tensor], Tensor],
    frames: list[Head],
) -> tuple[str, list[Tensor]]:
    """Elements of a parameter that is added on the way, per head as rows ``(rows, channels)`` in the order of the head.

    Args:
        graph: The graph.
        route: The route.
        target: The operand.
        offset: The node that is added.
        arrange: Brings the operand to ``(heads, positions, h)``.
        frames: The map of every head from a projection whose channels give the order.

    Returns:
        Name of the parameter, and per head the flat indices of its elements.

    Raises:
        Unclear: If what is added are not elements of one parameter, each on one channel.
    """
    name, flat, codes = _coded(graph, offset, 1)
    ordered, order = codes.sort()
    moved = arrange(run(graph, route, target, {offset: codes[flat]}) - run(graph, route, target, {}))
    at = spread(moved.shape[1], moved.shape[1])
    rows = []
    for index, frame in enumerate(frames):
        if frame.R.shape[1] != frame.R.shape[2]:
            raise Unclear("what is added to it does not fit its channels")
        rows.append(_match(moved[index, at], frame, spread(moved.shape[1]), ordered, order))
    return name, rows


def _match(moved: Tensor, frame: Head, at: list[int], ordered: Tensor, order: Tensor) -> Tensor:
    """Recognize the elements by their codes, after undoing what stands between channel and head."""
    known = {position: frame.R[i] for i, position in enumerate(at) if bool(frame.R[i].abs().max() > 0)}
    if not known:
        raise Unclear("no position shows its channels")
    first = next(iter(known.values()))
    constant = all(bool((R - first).abs().max() <= TOLERANCE * first.abs().max()) for R in known.values())
    rows = []
    for position in range(moved.shape[0]):
        if bool(moved[position].abs().max() == 0) or (position not in known and not constant):
            continue
        values = torch.linalg.solve(known.get(position, first).T, moved[position])
        place = torch.searchsorted(ordered, values - 1e-9).clamp_max(len(ordered) - 1)
        if bool((ordered[place] - values).abs().max() > 1e-8):
            raise Unclear("what is added to it are not elements of one parameter")
        rows.append(order[place])
    return torch.unique(torch.stack(rows), dim=0) if rows else torch.zeros(0, len(frame.channels), dtype=torch.long)


@dataclass
class Wire:
    """How the channels read by a projection depend on those made by another: one to one, or not at all.

    Attributes:
        origin: Per channel that is read, the channel that it comes from, or -1.
        signature: Per channel that is read, its factor at several positions.
        constant: Whether a constant is added on the way.
    """

    origin: Tensor
    signature: Tensor
    constant: bool = False


def wires(graph: Graph, route: Route, source: Projection, reader: Projection) -> Wire | str:
    """Map from the channels that one projection makes to the channels that another reads.

    Args:
        graph: The graph.
        route: How the reader's activation depends on the source.
        source: The projection at the start.
        reader: The projection at the end.

    Returns:
        The wires, or the reason why a channel does not depend on one channel alone.
    """
    generator = torch.Generator().manual_seed(2)
    size = count_channels(source)
    shape = _shape(source.node)
    beside = [1 if axis in source.out_axes else n for axis, n in enumerate(shape)]
    weights = torch.rand(beside, dtype=torch.float64, generator=generator) + 0.5
    codes = [torch.ones(size, dtype=torch.float64)]
    codes += [torch.rand(size, dtype=torch.float64, generator=generator) + 0.5 for _ in range(2)]
    start = _by_channel(run(graph, route, reader.act, {}), reader)
    answers = [
        _by_channel(run(graph, route, reader.act, {source.node: leaf(source, code, weights)}), reader) - start
        for code in codes
    ]
    base = answers[0]  # (positions, channels)
    live = base.abs() > TOLERANCE * base.abs().max()
    place = base.abs().argmax(0, keepdim=True)
    ratio = [torch.where(live.any(0), (a / base).gather(0, place)[0], torch.nan) for a in answers[1:]]
    ordered, order = codes[1].sort()
    near = torch.searchsorted(ordered, ratio[0].nan_to_num(0.0) - 1e-10).clamp_max(size - 1)
    origin = torch.where(live.any(0), order[near], -1)
    for answer, code in zip(answers[1:], codes[1:], strict=True):
        expected = base * code[origin.clamp_min(0)]
        if bool(((answer - expected).abs() > 1e-8 * base.abs().max()).any()):
            return "a channel that it reads mixes several channels"
    picks = torch.randperm(base.shape[0], generator=generator)[:48]
    return Wire(origin, base[picks].T, bool(start.abs().max() > 0))


def _by_channel(value: Tensor, reader: Projection) -> Tensor:
    """Bring an activation to ``(positions, channels)``."""
    others = [axis for axis in range(value.ndim) if axis not in reader.in_axes]
    moved = value.permute(*others, *reader.in_axes)
    width = 1
    for axis in reader.in_axes:
        width *= value.shape[axis]
    return moved.reshape(-1, width)


def _coded(graph: Graph, offset: fx.Node, seed: int) -> tuple[str, Tensor, Tensor]:
    """Name of the parameter that is added, the flat index of each of its elements, and a random code for each."""
    view = trace(graph, offset)
    if isinstance(view, str):
        raise Unclear("what is added to it is computed from parameters")
    name, (start, shape, stride) = view
    flat = torch.zeros((), dtype=torch.long) + start
    for axis, (size, step) in enumerate(zip(shape, stride, strict=True)):
        flat = flat + (torch.arange(size) * step).reshape([-1 if i == axis else 1 for i in range(len(shape))])
    total = math.prod(graph.shapes[name])
    codes = torch.rand(total, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) + 0.5
    return name, flat.expand(shape), codes


def offset_channels(graph: Graph, route: Route, offset: fx.Node, reader: Projection) -> tuple[str, Tensor]:
    """Element of a parameter, added on the way, that reaches each channel read; ``(rows, channels)``, -1 for none.

    Args:
        graph: The graph.
        route: The route.
        offset: The node that is added.
        reader: The projection that reads.

    Returns:
        Name of the parameter and the flat indices.

    Raises:
        Unclear: If a channel sees more than one element.
    """
    name, flat, codes = _coded(graph, offset, 3)
    ordered, order = codes.sort()
    zero = _by_channel(run(graph, route, reader.act, {}), reader)
    ones = (
        _by_channel(run(graph, route, reader.act, {offset: torch.ones(flat.shape, dtype=torch.float64)}), reader) - zero
    )
    coded = _by_channel(run(graph, route, reader.act, {offset: codes[flat]}), reader) - zero
    live = ones.abs() > TOLERANCE * ones.abs().max()
    ratio = torch.where(live, coded / ones, torch.nan)
    low, high = ratio.nan_to_num(9.0).amin(0), ratio.nan_to_num(-9.0).amax(0)
    near = torch.searchsorted(ordered, low - 1e-9).clamp_max(len(codes) - 1)
    if bool((live.any(0) & ((high - low).abs() > 1e-8)).any()) or bool(
        (live.any(0) & ((ordered[near] - low).abs() > 1e-8)).any()
    ):
        raise Unclear("what is added to it are not elements of one parameter, one per channel")
    return name, torch.where(live.any(0), order[near], -1)[None]
