"""Contractions: operators that multiply two tensors and sum, and the parameter elements behind their channels."""

from __future__ import annotations

import string
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from .graph import Graph, apply

aten = torch.ops.aten


@dataclass(frozen=True)
class Contraction:
    """``out[labels] = sum over contracted labels of first * second``, plus ``bias`` (a node, if any).

    A convolution is kept apart (``groups`` > 0): its channel axis is 1 and its kernel axes belong to the rows.
    """

    node: fx.Node
    first: fx.Node
    second: fx.Node
    labels: tuple[str, str, str]
    bias: fx.Node | None = None
    groups: int = 0


def _rank(node: Any) -> int:
    return len(node.meta["val"].shape)


def _matmul_labels(first: fx.Node, second: fx.Node) -> tuple[str, str, str] | None:
    """Labels of a broadcast matrix product; an axis of size one that is stretched gets a label of its own."""
    a, b = tuple(first.meta["val"].shape), tuple(second.meta["val"].shape)
    if len(a) < 2 or len(b) < 2:
        return None
    names = iter(string.ascii_lowercase)
    rows, inner, columns = next(names), next(names), next(names)
    batch_a, batch_b, out = "", "", ""
    for offset in range(max(len(a), len(b)) - 2, 0, -1):
        size_a = a[-2 - offset] if len(a) - 2 >= offset else None
        size_b = b[-2 - offset] if len(b) - 2 >= offset else None
        label = next(names)
        other = label if size_a == size_b else next(names)
        if size_a is not None:
            batch_a += label
        if size_b is not None:
            batch_b += other
        out += label if size_b is None or (size_a is not None and size_a != 1) else other
    return batch_a + rows + inner, batch_b + inner + columns, out + rows + columns


def _einsum_labels(equation: str, ranks: list[int]) -> tuple[str, str, str] | None:
    left, _, out = equation.replace(" ", "").partition("->")
    parts = left.split(",")
    if len(parts) != 2:
        return None
    if not _:
        counts = sorted(set(left.replace(",", "").replace(".", "")))
        out = ("..." if "..." in left else "") + "".join(c for c in counts if left.count(c) == 1)
    free = [c for c in string.ascii_uppercase + string.ascii_lowercase if c not in equation]
    width = max(rank - len(p.replace("...", "")) for p, rank in zip(parts, ranks, strict=True))
    full = [
        p.replace("...", "".join(free[width - (r - len(p) + 3) : width])) for p, r in zip(parts, ranks, strict=True)
    ]
    if any(len(set(p)) != len(p) for p in full):
        return None
    return full[0], full[1], out.replace("...", "".join(free[:width]))


def parse(node: fx.Node) -> Contraction | None:
    """Read a node as a contraction.

    Args:
        node: A node of the graph.

    Returns:
        The contraction, or None if it is none (or one of more than two tensors).
    """
    if node.op != "call_function":
        return None
    target: Any = node.target
    args: Any = node.args
    if target == aten.linear.default:
        names = string.ascii_lowercase[2 : 1 + _rank(args[0])]
        bias = args[2] if len(args) > 2 else None
        return Contraction(node, args[0], args[1], (names + "a", "ba", names + "b"), bias)
    if target in (aten.matmul.default, aten.mm.default, aten.bmm.default):
        labels = _matmul_labels(args[0], args[1])
        return Contraction(node, args[0], args[1], labels) if labels else None
    if target in (aten.addmm.default, aten.baddbmm.default):
        labels = _matmul_labels(args[1], args[2])
        return Contraction(node, args[1], args[2], labels, args[0]) if labels else None
    if target == aten.einsum.default and len(args[1]) == 2:
        first, second = args[1]
        labels = _einsum_labels(str(args[0]), [_rank(first), _rank(second)])
        return Contraction(node, first, second, labels) if labels else None
    if target in (aten.conv1d.default, aten.conv2d.default):
        bias = args[2] if len(args) > 2 else None
        groups = args[6] if len(args) > 6 else 1
        return Contraction(node, args[0], args[1], ("", "", ""), bias, int(groups))
    return None


@dataclass(frozen=True)
class Elements:
    """Elements of one parameter per channel: flat index ``channel[c] + row[r]``."""

    name: str
    channel: Tensor
    row: Tensor


@dataclass
class Projection:
    """A contraction with a weight: the channels it makes (``source``) and those it reads (``reader``).

    Attributes:
        node: The contraction.
        act: The activation it reads.
        out_axes: Axes of its output that are channels.
        in_axes: Axes of the activation that are channels.
        source: Elements per output channel, the bias as one more entry.
        reader: Elements per input channel.
        reason: Why the elements could not be told, if so.
        shifted: Whether a constant is added to its weight or bias.
    """

    node: fx.Node
    act: fx.Node
    out_axes: tuple[int, ...]
    in_axes: tuple[int, ...]
    source: list[Elements]
    reader: list[Elements]
    reason: str = ""
    shifted: bool = False


def projection(graph: Graph, node: fx.Node) -> Projection | None:
    """Read a node as a contraction of an activation with a weight.

    Args:
        graph: The graph.
        node: A node.

    Returns:
        The projection, or None.
    """
    found = parse(node)
    if found is None:
        return None
    fixed = node.target in (aten.linear.default, aten.conv1d.default, aten.conv2d.default)
    if not fixed and any(_projected(graph, n) for n in (found.first, found.second) if graph.is_weight(n)):
        return None
    if graph.is_weight(found.second) and (
        fixed or not graph.is_weight(found.first) or node.target == aten.addmm.default
    ):
        return _projection(graph, found, swap=False)
    if not fixed and graph.is_weight(found.first) and not graph.is_weight(found.second):
        return _projection(graph, found, swap=True)
    return None


def _projected(graph: Graph, node: fx.Node) -> bool:
    """Whether a tensor made of parameters is itself the output of a projection, as of a table of positions."""
    linear = (aten.linear.default, aten.addmm.default, aten.conv1d.default)
    return any(n.target in linear for n in graph.ancestors(node) if n in graph.on_parameters)


def _projection(graph: Graph, found: Contraction, *, swap: bool) -> Projection:
    act, weight = (found.second, found.first) if swap else (found.first, found.second)
    if found.groups:
        return _convolution(graph, found)
    act_labels, weight_labels = (found.labels[1], found.labels[0]) if swap else found.labels[:2]
    out_labels = found.labels[2]
    out_axes = tuple(i for i, c in enumerate(out_labels) if c in weight_labels)
    in_axes = tuple(i for i, c in enumerate(act_labels) if c in weight_labels)
    result = Projection(found.node, act, out_axes, in_axes, [], [])
    view = trace(graph, weight, shifted=True)
    if isinstance(view, str):
        result.reason = view
        return result
    result.shifted = bool(_constants(graph, weight))
    name, index = view
    made, read = [out_labels[i] for i in out_axes], [act_labels[i] for i in in_axes]
    result.source.append(_elements(name, index, weight_labels, made))
    result.reader.append(_elements(name, index, weight_labels, read))
    if found.bias is not None:
        _add_bias(graph, found, result, out_labels)
    return result


def _add_bias(graph: Graph, found: Contraction, result: Projection, out_labels: str) -> None:
    """A bias runs along the last axes of the output."""
    bias = found.bias
    assert bias is not None
    if bias not in graph.on_parameters and bias not in graph.on_inputs:
        result.shifted = True
        return
    result.shifted |= bool(_constants(graph, bias))
    view = trace(graph, bias, shifted=True) if graph.is_weight(bias) else "its bias is not a parameter"
    rank = _rank(bias)
    if isinstance(view, str) or tuple(range(len(out_labels) - rank, len(out_labels))) != result.out_axes:
        result.reason = view if isinstance(view, str) else "its bias does not run along the channels"
        return
    labels = out_labels[len(out_labels) - rank :]
    result.source.append(_elements(view[0], view[1], labels, list(labels)))


def _convolution(graph: Graph, found: Contraction) -> Projection:
    result = Projection(found.node, found.first, (1,), (1,), [], [])
    view = trace(graph, found.second)
    if isinstance(view, str):
        result.reason = view
        return result
    name, (offset, shape, stride) = view
    out, per_group = shape[0], shape[1]
    kernel = _grid(shape[2:], stride[2:])
    made = offset + torch.arange(out) * stride[0]
    rows = (torch.arange(per_group)[:, None] * stride[1] + kernel[None]).flatten()
    result.source.append(Elements(name, made, rows))
    block = out // found.groups
    channel = torch.arange(found.groups)[:, None] * (block * stride[0]) + torch.arange(per_group)[None] * stride[1]
    read = (torch.arange(block)[:, None] * stride[0] + kernel[None]).flatten()
    result.reader.append(Elements(name, offset + channel.flatten(), read))
    if found.bias is not None:
        bias = trace(graph, found.bias)
        if isinstance(bias, str):
            result.reason = bias
        else:
            result.source.append(_elements(bias[0], bias[1], "a", ["a"]))
    return result


Strided = tuple[int, tuple[int, ...], tuple[int, ...]]


def _grid(shape: tuple[int, ...], stride: tuple[int, ...]) -> Tensor:
    """Flat offsets of a strided box, in row-major order."""
    total = torch.zeros(1, dtype=torch.long)
    for size, step in zip(shape, stride, strict=True):
        total = (total[:, None] + torch.arange(size)[None] * step).flatten()
    return total


def _elements(name: str, index: Strided, labels: str, channels: list[str]) -> Elements:
    offset, shape, stride = index
    at = [labels.index(c) for c in channels]
    rest = [i for i in range(len(labels)) if i not in at]
    return Elements(
        name,
        offset + _grid(tuple(shape[i] for i in at), tuple(stride[i] for i in at)),
        _grid(tuple(shape[i] for i in rest), tuple(stride[i] for i in rest)),
    )


def _constants(graph: Graph, node: fx.Node) -> dict[fx.Node, fx.Node]:
    """Sums of a parameter and a constant on the way to a weight, each with the term that is made of the parameter."""
    found = {}
    for current in graph.ancestors(node):
        if current.target != aten.add.Tensor or current not in graph.on_parameters or current.kwargs:
            continue
        terms = [arg for arg in current.args if isinstance(arg, fx.Node)]
        trained = [term for term in terms if graph.is_weight(term)]
        fixed = [term for term in terms if term not in graph.on_parameters and term not in graph.on_inputs]
        if len(trained) == len(fixed) == 1 and trained[0].meta["val"].shape == current.meta["val"].shape:
            found[current] = trained[0]
    return found


def trace(graph: Graph, node: fx.Node, *, shifted: bool = False) -> tuple[str, Strided] | str:
    """Follow a weight back to the one parameter it is a view of.

    The views are applied to a tensor without data, whose strides then say which element went where.

    Args:
        graph: The graph.
        node: A node made of parameters alone.
        shifted: Whether a constant may be added on the way; the caller must then note it.

    Returns:
        The parameter's name with offset, shape and strides, or the reason why it is not a view of one parameter.
    """
    chain = [n for n in graph.ancestors(node) if n in graph.on_parameters]
    leaves = [n for n in chain if n in graph.parameters]
    if len(leaves) != 1:
        return "its weight is computed from several parameters"
    name = graph.parameters[leaves[0]]
    base = torch.empty(graph.shapes[name], dtype=torch.float64, device="meta")
    values: dict[fx.Node, Any] = {leaves[0]: base}
    sums = _constants(graph, node) if shifted else {}
    try:
        for current in sorted(chain, key=graph.order.__getitem__):
            if current in sums:
                values[current] = values[sums[current]]
            elif current not in values:
                args = fx.node.map_arg(current.args, lambda n: values[n] if n in values else graph.value(n))
                kwargs = fx.node.map_arg(current.kwargs, lambda n: values[n] if n in values else graph.value(n))
                values[current] = _as_view(current, args, dict(kwargs))
    except (RuntimeError, KeyError, TypeError, ValueError):
        return "its weight is computed from a parameter, not a view of it"
    view = values[node]
    if not isinstance(view, Tensor) or view.untyped_storage()._cdata != base.untyped_storage()._cdata:
        return "its weight is computed from a parameter, not a view of it"
    return name, (int(view.storage_offset()), tuple(view.shape), tuple(view.stride()))


def _as_view(node: fx.Node, args: Any, kwargs: dict[str, Any]) -> Any:
    """Apply a view; copies that keep the values count as the view they copy."""
    copies = (
        aten.contiguous.default,
        aten.clone.default,
        aten.detach.default,
        aten.alias.default,
        aten._to_copy.default,
    )
    if node.target in copies or str(node.target).startswith("aten.to."):
        return args[0]
    if node.target == aten.repeat.default and all(1 in pair for pair in zip(args[0].shape, args[1], strict=True)):
        return args[0].expand([size * times for size, times in zip(args[0].shape, args[1], strict=True)])
    return apply(node.target, args, kwargs)
