"""Walks back from a tensor to the projections it depends on linearly.

Every operator on the way is linear in the operand that is followed, the others being held fixed: a view, a sum, a
product with something else, a mix of values by attention. Operators that scale with their operand (ReLU) or divide it
by its own length are followed too and noted, since they leave a smaller group. Whatever else stands in the way ends the
walk.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from .contractions import Projection, parse, projection
from .graph import Graph

aten = torch.ops.aten

SHAPES = {
    "view",
    "broadcast_to",
    "tile",
    "squeeze_",
    "unsqueeze_",
    "reshape",
    "_unsafe_view",
    "transpose",
    "permute",
    "t",
    "mT",
    "unsqueeze",
    "squeeze",
    "expand",
    "expand_as",
    "slice",
    "select",
    "split",
    "split_with_sizes",
    "chunk",
    "unbind",
    "contiguous",
    "clone",
    "alias",
    "detach",
    "to",
    "_to_copy",
    "type_as",
    "flatten",
    "unflatten",
    "narrow",
    "index",
    "index_select",
    "gather",
    "roll",
    "flip",
    "movedim",
    "swapaxes",
    "swapdims",
    "repeat",
    "repeat_interleave",
    "dropout",
    "feature_dropout",
    "lift_fresh",
    "lift_fresh_copy",
    "neg",
    "sum",
    "mean",
    "cumsum",
    "view_as_complex",
    "view_as_real",
    "numpy_T",
    "matrix_H",
    "float",
    "double",
    "constant_pad_nd",
    "pad",
    "unfold",
    "im2col",
    "view_as",
    "reshape_as",
    "adjoint",
    "tensor_split",
    "masked_fill",
    "as_strided",
    "diagonal",
    "ravel",
    "unsafe_split",
    "unsafe_chunk",
    "native_dropout",
    "imag",
    "real",
    "conj",
}
"""Operators that are linear in their first argument."""

HOMOGENEOUS = {"relu", "leaky_relu", "prelu", "relu_", "leaky_relu_", "max_pool1d", "max_pool2d", "abs"}
"""Operators with f(c x) = c f(x) for c > 0."""

LENGTHS = {"rms_norm", "layer_norm", "native_layer_norm", "_fused_rms_norm"}
"""Operators that divide by a length: followed as if they did nothing, the numeric check decides what is left."""

SPLITS = {"getitem", "slice", "select", "narrow", "index", "index_select"}
"""Operators after which a tensor may hold some channels of a packed projection only."""

SWITCHES = {
    "gt",
    "lt",
    "ge",
    "le",
    "eq",
    "ne",
    "where",
    "sign",
    "clamp",
    "clamp_max",
    "clip",
    "minimum",
    "maximum",
    "round",
}
"""Operators that may do nothing to small numbers and something to large ones."""

WIDTH = 6  # how many ways to choose among factors are kept per node


@dataclass(frozen=True)
class Route:
    """One way in which a tensor depends linearly on projections.

    Attributes:
        inputs: Per node on the way, those of its inputs that are followed.
        sources: The projections at the end.
        offsets: Nodes made of parameters that are added on the way.
        positive: Whether an operator on the way only scales with positive factors.
        degree: Power with which the tensor scales (2 for a squared ReLU).
        bent: Whether something on the way divides by a length of the operand itself.
        mixed: Whether values of several positions are mixed on the way, as attention does.
    """

    inputs: tuple[tuple[fx.Node, tuple[fx.Node, ...]], ...] = ()
    sources: tuple[fx.Node, ...] = ()
    offsets: tuple[fx.Node, ...] = ()
    positive: bool = False
    degree: int = 1
    bent: bool = False
    mixed: bool = False


@dataclass
class Walker:
    """Remembers the routes of every node of a graph."""

    graph: Graph
    _routes: dict[fx.Node, list[Route]] = field(default_factory=dict)
    _projections: dict[fx.Node, Projection | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Note the operators that compare."""
        self._switches = {node for node in self.graph.nodes if base_name(node) in SWITCHES}

    def projection(self, node: fx.Node) -> Projection | None:
        """The node as a projection, remembered.

        Args:
            node: The node.

        Returns:
            The projection or None.
        """
        if node not in self._projections:
            self._projections[node] = projection(self.graph, node)
        return self._projections[node]

    def routes(self, node: fx.Node) -> list[Route]:
        """All ways in which a node depends linearly on projections.

        Args:
            node: The node.

        Returns:
            The routes; none if something that is not linear stands in between.
        """
        for current in sorted(self.graph.ancestors(node), key=self.graph.order.__getitem__):
            if current not in self._routes:
                self._routes[current] = self._step(current)
        return self._routes[node]

    def _step(self, node: fx.Node) -> list[Route]:
        if node.op != "call_function" or node not in self.graph.on_parameters:
            return []
        if self.projection(node) is not None:
            return [Route(sources=(node,))]
        name, args = base_name(node), node.args
        if name in ("add", "sub", "add_", "sub_"):
            return self._sum(node, [a for a in args[:2] if isinstance(a, fx.Node)])
        if name in ("cat", "stack", "concat"):
            return self._sum(node, [a for a in args[0] if isinstance(a, fx.Node)])  # type: ignore[union-attr]
        if name in ("baddbmm", "addmm"):
            return []
        if name in ("slice_scatter", "select_scatter"):
            return self._sum(node, [a for a in args[:2] if isinstance(a, fx.Node)])
        if name == "copy":
            return self._pass(node, args[1])
        if name == "where":
            found = self._sum(node, [a for a in args[1:] if isinstance(a, fx.Node)])
            return [route for route in found if not self._judged(route, args[:1])]
        return self._factor(node, name)

    def _factor(self, node: fx.Node, name: str) -> list[Route]:
        """Operators with one followed operand, or a choice of one."""
        args = node.args
        if node.target is operator.getitem or name in SHAPES:
            return self._pass(node, args[0])
        if name in HOMOGENEOUS:
            return self._pass(node, args[0], positive=True)
        if name in LENGTHS:
            return self._pass(node, args[0], bent=True)
        if name in ("pow", "square"):
            power = args[1] if name == "pow" else 2
            return self._pass(node, args[0], degree=2, positive=True) if power == 2 else []
        if name in ("mul", "mul_"):
            return self._choose(node, [a for a in args[:2] if isinstance(a, fx.Node)])
        if name in ("div", "div_"):
            return self._choose(node, [a for a in args[:1] if isinstance(a, fx.Node)])
        if name == "scaled_dot_product_attention":
            return self._pass(node, args[2], mixed=True)
        found = parse(node)
        if found is not None and not found.groups:
            return self._choose(node, [found.first, found.second], mixed=True)
        return []

    def _pass(self, node: fx.Node, source: Any, **notes: Any) -> list[Route]:
        if not isinstance(source, fx.Node):
            return []
        metadata = base_name(node) in ("to", "type_as", "expand_as", "view_as", "reshape_as", "broadcast_to")
        others = [other for other in node.all_input_nodes if other is not source and not metadata]
        routes = self._routes.get(source, [])
        routes = [route for route in routes if not self._judged(route, others)] if others else routes
        return [_extend(route, node, (source,), **notes) for route in routes]

    def _judged(self, route: Route, others: Iterable[Any]) -> bool:
        """Whether a condition or an index depends on the channels it is applied to: a clip, which may rest unseen."""
        followed = since_split(route)
        for other in others:
            if not isinstance(other, fx.Node):
                continue
            value = other.meta.get("val")
            choice = isinstance(value, Tensor) and not (value.is_floating_point() or value.is_complex())
            # The same layer may be called once more for the condition: then only its weights tell.
            if self.graph.ancestors(other) & (followed | self._own(route) if choice else followed):
                return True
        return False

    def _own(self, route: Route) -> set[fx.Node]:
        """Parameters of the projections at the end of a route."""
        found: set[fx.Node] = set()
        for source in route.sources:
            for operand in source.all_input_nodes:
                if self.graph.is_weight(operand):
                    found |= {n for n in self.graph.ancestors(operand) if n in self.graph.parameters}
        return found

    def _switched(self, reach: set[fx.Node], route: Route) -> bool:
        """Whether a factor depends on its partner through a comparison; no numeric check sees a threshold at rest."""
        switches = reach & self._switches
        followed = since_split(route) if switches else set()
        return any(self.graph.ancestors(node) & followed for node in switches)

    def _choose(self, node: fx.Node, operands: list[fx.Node], **notes: Any) -> list[Route]:
        """Follow one factor; note when the other one depends on it (a norm, or an activation like x * sigmoid(x))."""
        if len(operands) == 2 and operands[0] is operands[1]:
            return self._pass(node, operands[0], degree=2, positive=True)
        routes = []
        for source in operands:
            reach: set[fx.Node] = set()
            for other in node.all_input_nodes:
                reach |= self.graph.ancestors(other) if other is not source else set()
            for route in self._routes.get(source, []):
                bent = bool(reach & since_split(route))
                if not (bent and self._switched(reach, route)):
                    routes.append(_extend(route, node, (source,), bent=bent, **notes))
        return routes[:WIDTH]

    def _sum(self, node: fx.Node, terms: list[fx.Node]) -> list[Route]:
        """Follow every term; parameters become offsets, constants stay, any other activation ends the walk."""
        offsets = tuple(t for t in terms if self.graph.is_weight(t) and not self._routes.get(t))
        choices: list[list[Route]] = []
        for term in terms:
            if term in offsets or (term not in self.graph.on_inputs and term not in self.graph.on_parameters):
                continue
            found = self._routes.get(term, [])
            if found:
                choices.append(found)
            else:
                return []
        if not choices:
            return []
        followed = tuple(t for t in terms if t in offsets or self._routes.get(t))
        results = []
        for combination in itertools.islice(itertools.product(*choices), WIDTH):
            merged = combination[0]
            for route in combination[1:]:
                merged = _merge(merged, route)
            results.append(_extend(merged, node, followed, offsets=offsets))
        return results

    def blockers(self, node: fx.Node) -> str:
        """Names of the operators that end the walk from a node.

        Args:
            node: The node.

        Returns:
            Their names, for a sentence.
        """
        names: list[str] = []
        stack, seen = [node], set[fx.Node]()
        while stack:
            current = stack.pop()
            if current in seen or current not in self.graph.on_inputs or self.projection(current) is not None:
                continue
            seen.add(current)
            if current.op == "call_function" and not self._passes(current) and base_name(current) not in names:
                names.append(base_name(current))
                continue
            stack.extend(current.all_input_nodes)
        return ", ".join(names[:4]) if names else "nothing that is linear"

    def _passes(self, node: fx.Node) -> bool:
        name = base_name(node)
        known = SHAPES | HOMOGENEOUS | {"add", "sub", "mul", "div", "cat", "stack", "where"}
        return name in known or node.target is operator.getitem


def base_name(node: fx.Node) -> str:
    """Name of an operator without namespace and overload.

    Args:
        node: The node.

    Returns:
        For example ``"scaled_dot_product_attention"``.
    """
    packet = getattr(node.target, "overloadpacket", None)
    return str(packet).split(".")[-1] if packet is not None else getattr(node.target, "__name__", str(node.target))


def since_split(route: Route) -> set[fx.Node]:
    """Nodes of a route after its channels were last taken apart: what depends on these depends on the same channels.

    Args:
        route: The route.

    Returns:
        The nodes, the sources among them if nothing was taken apart.
    """
    found: set[fx.Node] = set()
    for node, _ in reversed(route.inputs):
        found.add(node)
        if base_name(node) in SPLITS:
            return found
    return found | set(route.sources)


def _extend(route: Route, node: fx.Node, inputs: tuple[fx.Node, ...], **notes: Any) -> Route:
    return Route(
        inputs=(*route.inputs, (node, inputs)),
        sources=route.sources,
        offsets=(*route.offsets, *notes.get("offsets", ())),
        positive=route.positive or notes.get("positive", False),
        degree=route.degree * notes.get("degree", 1),
        bent=route.bent or notes.get("bent", False),
        mixed=route.mixed or notes.get("mixed", False),
    )


def _merge(first: Route, second: Route) -> Route:
    inputs = dict(first.inputs)
    for node, followed in second.inputs:
        inputs[node] = tuple(dict.fromkeys([*inputs.get(node, ()), *followed]))
    return Route(
        inputs=tuple(inputs.items()),
        sources=tuple(dict.fromkeys([*first.sources, *second.sources])),
        offsets=tuple(dict.fromkeys([*first.offsets, *second.offsets])),
        positive=first.positive or second.positive,
        degree=max(first.degree, second.degree),
        bent=first.bent or second.bent,
        mixed=first.mixed or second.mixed,
    )


def run(graph: Graph, route: Route, target: fx.Node, leaves: dict[fx.Node, Tensor]) -> Tensor:
    """Value of a tensor as a function of its sources and offsets, everything beside the route held fixed.

    Args:
        graph: The graph.
        route: How the tensor depends on them.
        target: The tensor.
        leaves: Values of sources and offsets; those left out are zero.

    Returns:
        The value of ``target``.
    """
    values: dict[fx.Node, Any] = {}
    for leaf in (*route.sources, *route.offsets):
        given = leaves.get(leaf)
        values[leaf] = torch.zeros(_shape(leaf), dtype=torch.float64) if given is None else given
    for node, followed in sorted(route.inputs, key=lambda item: graph.order[item[0]]):

        def value_of(n: fx.Node, followed: tuple[fx.Node, ...] = followed) -> Any:
            return values[n] if n in followed else graph.value(n)

        name = base_name(node)
        if name in LENGTHS:
            values[node] = value_of(followed[0])
        elif name.endswith("_") and not name.startswith("_"):
            values[node] = _out_of_place(node, value_of)
        else:
            values[node] = graph.execute(node, value_of)
    return values[target]  # type: ignore[no-any-return]


def _out_of_place(node: fx.Node, value_of: Any) -> Any:
    """Run an in-place operator on a copy, so that the probes do not see each other."""
    args: list[Any] = list(fx.node.map_arg(node.args, value_of))
    args[0] = args[0].clone()
    return node.target(*args, **fx.node.map_arg(node.kwargs, value_of))  # type: ignore[operator]


def _shape(node: fx.Node) -> tuple[int, ...]:
    return tuple(int(n) for n in node.meta["val"].shape)
