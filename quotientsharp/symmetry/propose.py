"""Proposes units, the smallest pairs ``(G, H)`` with a symmetry, from the exported graph."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, fx

from .contractions import Elements, Projection, parse, trace
from .graph import Graph, first_line
from .groups import Group, commutant, diagonal, general_linear, orthogonal, rescaling, scalar
from .maps import Head, Unclear, heads, offset_channels, offset_elements, wires
from .walk import Route, Walker, base_name, since_split

PROBING = (RuntimeError, IndexError, TypeError, ValueError, NotImplementedError)
"""What an operator may raise on a probe that it was not made for: a reason to refuse, not to fail."""

Id = tuple[str, int]
"""A channel: parameter name and flat index of its first element. Shared weights have one identity."""


@dataclass(frozen=True, eq=False)
class Part:
    """Rows of one factor: flat indices ``channel[copy, i] + row[r]`` into one parameter."""

    name: str
    channel: Tensor
    row: Tensor


@dataclass
class Unit:
    """One pair ``(G, H)``.

    Attributes:
        kind: ``"qk"``, ``"vo"``, ``"rescaling"``, ``"lora"`` or ``"linear"``.
        left: Parts of G.
        right: Parts of H.
        groups: Candidates, the largest first.
        note: What the graph shows that may break the symmetry, for the reason of a refusal.
        sure: Whether a softmax follows, so that it is attention; other products of projections come last.
    """

    kind: str
    left: list[Part]
    right: list[Part]
    groups: list[Group]
    note: str = ""
    sure: bool = True

    @property
    def key(self) -> tuple[object, ...]:
        """Units with equal keys are copies in one block."""
        parts = tuple((side, p.name, p.row.numel()) for side, ps in ((0, self.left), (1, self.right)) for p in ps)
        return (self.kind, self.left[0].channel.shape[1], tuple(self.groups), parts)


Refusal = tuple[str, str]


@dataclass
class _Edge:
    """Two sets of channels that meet in one head, and what stands between them at several pairs of positions."""

    where: tuple[object, ...]
    left: list[Id]
    right: list[Id]
    M: Tensor
    columns: Tensor
    label: str
    note: str
    sure: bool

    def between(self, rows: list[int], columns: list[int]) -> Tensor:
        """What stands between some channels of both sides, ``(pairs of positions, rows, columns)``, scaled to one."""
        M = self.M[:, :, rows][..., self.columns[columns]].flatten(0, 1)
        M = M[M.abs().amax((-2, -1)) > 0]
        return M / M.abs().amax((-2, -1), keepdim=True)


@dataclass
class _Parts:
    """Remembers which elements belong to a channel."""

    elements: dict[Id, list[tuple[str, int, Tensor]]] = field(default_factory=dict)

    def add(self, projection: Projection) -> list[Id]:
        """Register the channels that a projection makes."""
        first = projection.source[0]
        ids = [(first.name, int(c)) for c in first.channel]
        for index, key in enumerate(ids):
            self.elements.setdefault(key, [(e.name, int(e.channel[index]), e.row) for e in projection.source])
        return ids

    def join(self, key: Id, name: str, rows: Tensor) -> None:
        """Join elements of a parameter that is added on the way."""
        known = self.elements[key]
        if any(n == name and c == int(rows[0]) for n, c, _ in known):
            return
        known.append((name, int(rows[0]), rows - rows[0]))

    def parts(self, ids: list[Id]) -> list[Part] | None:
        """Parts of a factor made of some channels, or None if their rows differ."""
        result = []
        for rows in zip(*(self.elements[key] for key in ids), strict=False):
            names = {name for name, _, _ in rows}
            if len(names) > 1 or any(not torch.equal(row, rows[0][2]) for _, _, row in rows[1:8]):
                return None
            result.append(Part(rows[0][0], torch.tensor([[c for _, c, _ in rows]]), rows[0][2]))
        return result if len({len(self.elements[key]) for key in ids}) == 1 else None


class Proposer:
    """Walks over the graph and collects units and refusals.

    Args:
        graph: The exported graph.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.walker = Walker(graph)
        self.units: list[Unit] = []
        self.refused: list[Refusal] = []
        self._parts = _Parts()
        self._cache: dict[object, list[Head]] = {}
        self._met: dict[tuple[int, int], Meeting] = {}
        self._followed: set[fx.Node] = set()

    def propose(self) -> tuple[list[Unit], list[Refusal]]:
        """Collect everything.

        Returns:
            Units and refusals, in the order of the graph.
        """
        edges: list[_Edge] = []
        for node in self.graph.nodes:
            if node.op != "call_function":
                continue
            edges += self._score(node)
            self._mix(node)
            reader = self.walker.projection(node)
            if reader is not None:
                self._read(reader)
            self._product(node)
            if "grouped_mm" in base_name(node):
                weights = [a for a in node.args if isinstance(a, fx.Node) and self.graph.is_weight(a)]
                names = [
                    self.graph.parameters[n]
                    for a in weights
                    for n in self.graph.ancestors(a)
                    if n in self.graph.parameters
                ]
                self._refuse(common_prefix(names), "rescaling", "products grouped by expert are not followed")
        self.units = _score_units(edges, self._parts, self.refused) + self.units
        return self.units, self.refused

    # -- scores -----------------------------------------------------------------------------------------------------

    def _operands(self, node: fx.Node) -> list[tuple[fx.Node, Callable[[Tensor], Tensor]]] | None:
        """The two operands of a product of queries and keys, with how to bring them to (heads, positions, h)."""
        if base_name(node) == "scaled_dot_product_attention":
            q, k = node.args[:2]
            if not isinstance(q, fx.Node) or not isinstance(k, fx.Node):
                return None
            lead_q, lead_k = (tuple(n.meta["val"].shape[:-2]) for n in (q, k))
            return [(q, lambda x: x.reshape(-1, *x.shape[-2:])), (k, _repeat(lead_q, lead_k))]
        found = parse(node)
        if found is None or found.groups or self.walker.projection(node) is not None:
            return None
        inner = [c for c in found.labels[0] if c in found.labels[1] and c not in found.labels[2]]
        batch = [c for c in found.labels[0] if c in found.labels[1] and c in found.labels[2]]
        if len(inner) != 1:
            return None
        pairs = zip((found.first, found.second), found.labels[:2], strict=True)
        return [(operand, _arrange(labels, batch, inner[0])) for operand, labels in pairs]

    def _score(self, node: fx.Node) -> list[_Edge]:
        operands = self._operands(node)
        if operands is None:
            return []
        certain = base_name(node) == "scaled_dot_product_attention" or self._meets_softmax(node)
        routes = [self.walker.routes(operand) for operand, _ in operands]
        label = self._label(node, [operand for operand, _ in operands])
        for (operand, _), found in zip(operands, routes, strict=True):
            if not found:
                if certain and operand in self.graph.on_parameters:
                    blockers = self.walker.blockers(operand)
                    self._refuse(label, "qk", f"{blockers} between projection and score cannot be followed")
                return []
        problem = ""
        for left in routes[0]:
            for right in routes[1]:
                try:
                    return self._edges(node, operands, (left, right), label, sure=certain)
                except Unclear as error:
                    problem = problem or str(error)
                except PROBING as error:
                    problem = problem or f"its graph cannot be probed ({first_line(error)})"
        if certain:
            self._refuse(label, "qk", problem)
        return []

    def _edges(
        self, node: fx.Node, operands: list[tuple[fx.Node, Callable[[Tensor], Tensor]]], routes: tuple[Route, Route],
        label: str, *, sure: bool,
    ) -> list[_Edge]:  # fmt: skip
        if any(route.degree > 1 or route.positive or route.mixed for route in routes):
            raise Unclear("an activation function stands between projection and score")
        sides = []
        for (operand, arrange), route in zip(operands, routes, strict=True):
            side = []
            for source in route.sources:
                projection = self.walker.projection(source)
                assert projection is not None
                if projection.reason:
                    raise Unclear(projection.reason)
                maps = self._heads(operand, route, projection, arrange)
                side.append((self._parts.add(projection), maps))
            for offset in route.offsets:
                ids, frames = side[0]
                name, rows = offset_elements(self.graph, route, operand, offset, arrange, frames)
                for frame, element in zip(frames, rows, strict=True):
                    for i, channel in enumerate(frame.channels):
                        if len(element):
                            self._parts.join(ids[channel], name, element[:, i])
            sides.append(side)
        for route in routes:
            self._followed |= {*route.sources, *(inner for inner, _ in route.inputs)}
        bent = any(route.bent for route in routes)
        note = "it is divided by a length of its own between projection and score" if bent else ""
        if not note and any(self._read_elsewhere(route, node) for route in routes):
            note = "what it makes is read elsewhere too"
        constant = any(head.constant for side in sides for _, maps in side for head in maps)
        shifted = any(self._shifted(source) for route in routes for source in route.sources)
        if not note and (constant or shifted):
            note = "a constant is added between projection and score"
        edges = []
        for a, (left_ids, left_maps) in enumerate(sides[0]):
            for b, (right_ids, right_maps) in enumerate(sides[1]):
                for where, left, right in _distinct(left_maps, right_maps):
                    if (id(left), id(right)) not in self._met:
                        self._met[id(left), id(right)] = _between(left, right)
                    left, right, M = self._met[id(left), id(right)]
                    if not len(left.channels):
                        continue
                    edges.append(
                        _edge((node.name, a, b, where), left_ids, right_ids, left, right, M, (label, note, sure))
                    )
        return edges

    def _heads(
        self, operand: fx.Node, route: Route, projection: Projection, arrange: Callable[[Tensor], Tensor]
    ) -> list[Head]:
        """Map of every head, remembered for layers that look alike."""
        key = (self._signature(operand, route, projection), arrange.__name__)
        if key not in self._cache:
            self._cache[key] = heads(self.graph, route, operand, projection, arrange)
        return self._cache[key]

    def _signature(self, target: fx.Node, route: Route, projection: Projection) -> object:
        """The route with its own nodes numbered: equal for equal layers, which read the same constants."""
        number = {leaf: index for index, leaf in enumerate((*route.sources, *route.offsets))}
        lines: list[object] = [number[projection.node], projection.out_axes, tuple(projection.node.meta["val"].shape)]
        for node, followed in sorted(route.inputs, key=lambda item: self.graph.order[item[0]]):

            def rename(n: fx.Node, followed: tuple[fx.Node, ...] = followed) -> str:
                if n in followed:
                    return f"#{number[n]}"
                return self.graph.fingerprint(n)

            lines.append((str(node.target), repr(fx.node.map_arg((node.args, node.kwargs), rename))))
            number[node] = len(number)
        lines += [number[target], tuple(target.meta["val"].shape)]
        return tuple(lines)

    def _shifted(self, source: fx.Node) -> bool:
        """Whether a constant is part of the bias of a projection."""
        projection = self.walker.projection(source)
        return projection is not None and projection.shifted

    def _meets_softmax(self, node: fx.Node) -> bool:
        """Whether a softmax follows within a few operators."""
        front = {node}
        for _ in range(12):
            front = {user for n in front for user in n.users if user.op == "call_function"}
            if any("softmax" in base_name(n) for n in front):
                return True
            front = {n for n in front if parse(n) is None}
        return False

    def _mix(self, node: fx.Node) -> None:
        """Refuse values that cannot be followed back to a projection."""
        if base_name(node) == "scaled_dot_product_attention":
            value = node.args[2]
        else:
            found = parse(node)
            if found is None or self.walker.projection(node) is not None:
                return
            weights = [self._from_softmax(operand) for operand in (found.first, found.second)]
            if sum(weights) != 1:
                return
            value = found.second if weights[0] else found.first
        if isinstance(value, fx.Node) and value in self.graph.on_parameters and not self.walker.routes(value):
            blockers = self.walker.blockers(value)
            self._refuse(
                self._label(node, [value]), "vo", f"{blockers} between projection and values cannot be followed"
            )

    def _from_softmax(self, node: fx.Node) -> bool:
        """Whether a softmax lies within a few operators before."""
        front = {node}
        for _ in range(8):
            if any("softmax" in base_name(n) for n in front):
                return True
            front = {m for n in front if parse(n) is None for m in n.all_input_nodes if m.op == "call_function"}
        return False

    # -- readers ----------------------------------------------------------------------------------------------------

    def _read(self, reader: Projection) -> None:
        """Everything that a projection reads linearly: values and outputs, hidden units, adapters."""
        if reader.act not in self.graph.on_parameters:
            return
        problem, label = "", ""
        done: set[fx.Node] = set()
        routes = self.walker.routes(reader.act)
        if not routes and self._is_gated(reader.act):
            reason = f"{self.walker.blockers(reader.act)} inside a gated unit cannot be followed"
            self._refuse(self._label(reader.node, [reader.act]), "rescaling", reason)
        for route in routes:
            attention = route.mixed
            if (route.bent and not attention) or done & set(route.sources):
                continue
            label = self._label(reader.node, list(route.sources))
            if not attention and self._read_elsewhere(route, reader.node):
                if route.positive or any(base_name(node) == "mul" for node, _ in route.inputs):
                    self._refuse(label, "rescaling", "what it makes is read elsewhere too")
                continue
            try:
                self._chain(route, reader)
                done |= set(route.sources)
            except Unclear as error:
                hidden = route.positive or any(base_name(node) == "mul" for node, _ in route.inputs)
                problem = problem or (str(error) if attention or hidden else "")
            except PROBING as error:
                problem = problem or f"its graph cannot be probed ({first_line(error)})"
        if problem and not done:
            self._refuse(label, "vo" if "value" in problem or "mixes" in problem else "rescaling", problem)

    def _is_gated(self, node: fx.Node) -> bool:
        """Whether a node multiplies two activations, as the hidden layer of a gated unit does."""
        moving = self.graph.on_parameters, self.graph.on_inputs
        factors = [arg for arg in node.args if isinstance(arg, fx.Node) and all(arg in nodes for nodes in moving)]
        return base_name(node) == "mul" and len(factors) == 2

    def _read_elsewhere(self, route: Route, end: fx.Node) -> bool:
        """Whether somebody else reads what is on the way, as a residual stream or a gate does."""
        inside = {node for node, _ in route.inputs} | {end}
        nodes = since_split(route)
        return any(user not in inside and "_assert" not in str(user.target) for node in nodes for user in node.users)

    def _chain(self, route: Route, reader: Projection) -> None:
        if route.degree > 1:
            raise Unclear("a squared unit scales by c and 1/c^2, which is not the rescaling of a pair")
        chosen = [self.walker.projection(source) for source in route.sources]
        for projection in [*chosen, reader]:
            assert projection is not None
            if projection.reason:
                raise Unclear(projection.reason)
        first = chosen[0]
        assert first is not None
        if len(chosen) > 1:
            self._several(route, [p for p in chosen if p is not None], reader)
            return
        wire = wires(self.graph, route, first, reader)
        if isinstance(wire, str):
            raise Unclear(wire)
        if wire.constant and not route.mixed:
            raise Unclear("a constant is added on the way")
        ids = self._parts.add(first)
        for offset in route.offsets:
            name, rows = offset_channels(self.graph, route, offset, reader)
            for channel, element in enumerate(rows[0].tolist()):
                if int(wire.origin[channel]) >= 0 and element >= 0:
                    self._parts.join(ids[int(wire.origin[channel])], name, torch.tensor([element]))
        constant = "a constant is added between projection and output" if wire.constant or first.shifted else ""
        self._chain_units(route, first, ids, wire.origin, wire.signature, reader, constant)

    def _several(self, route: Route, chosen: list[Projection], reader: Projection) -> None:
        """Several projections are added before the reader: all of them make the channels together."""
        joined: list[list[Id]] = []
        origin, signature = None, None
        for projection in chosen:
            wire = wires(self.graph, route, projection, reader)
            if isinstance(wire, str):
                raise Unclear(wire)
            if wire.constant:
                raise Unclear("a constant is added on the way")
            if origin is not None and not torch.equal(origin, wire.origin):
                raise Unclear("the values that are added do not share their channels")
            origin, signature = wire.origin, wire.signature
            joined.append(self._parts.add(projection))
        assert origin is not None
        assert signature is not None
        for own, *others in zip(*joined, strict=True):
            for other in others:
                for name, start, row in self._parts.elements[other]:
                    self._parts.join(own, name, start + row)
        self._chain_units(route, chosen[0], joined[0], origin, signature, reader)

    def _chain_units(
        self, route: Route, source: Projection, ids: list[Id], origin: Tensor, signature: Tensor, reader: Projection,
        constant: str = "",
    ) -> None:  # fmt: skip
        """Channels with one signature form a unit: a head of values, an adapter, or a single hidden unit."""
        columns = reader.reader[0]
        live = (origin >= 0).nonzero()[:, 0]
        if not len(live):
            return
        # A ReLU passes the positive probes unchanged: its channels look alike and must still not be mixed.
        groups = [[i] for i in range(len(live))] if route.positive else _equal_rows(signature[live])
        classes: dict[tuple[int, ...], list[list[int]]] = {}
        for members in groups:
            by_origin: dict[int, list[int]] = {}
            for channel in (int(live[m]) for m in members):
                by_origin.setdefault(int(origin[channel]), []).append(channel)
            start = tuple(sorted(by_origin))
            if len({len(v) for v in by_origin.values()}) != 1:
                raise Unclear("the channels that it reads do not repeat evenly")
            classes.setdefault(start, []).extend(map(list, zip(*(by_origin[c] for c in start), strict=True)))
        flat = [c for start in classes for c in start]
        if len(flat) != len(set(flat)):
            raise Unclear("heads overlap in the values that they read")
        kind = self._chain_kind(route, source)
        self._followed |= {reader.node, *route.sources, *(inner for inner, _ in route.inputs)}
        note = "it is divided by a length of its own between values and output" if route.bent else constant
        if not note and self._read_elsewhere(route, reader.node):
            note = "what it makes is read elsewhere too"
        single = {start: read for start, read in classes.items() if len(start) == 1 and kind != "lora"}
        for start, read in classes.items():
            if start not in single:
                names = [general_linear(len(start)), orthogonal(len(start)), diagonal(len(start)), scalar(len(start))]
                self._add_chain(kind, [start], [read], ids, columns, names if kind != "lora" else names[:1])
                self.units[-1].note = note
        for count in sorted({len(read) for read in single.values()}):
            starts = [start for start, read in single.items() if len(read) == count]
            reads = [single[start] for start in starts]
            self._add_chain("rescaling", starts, reads, ids, columns, [rescaling(positive=route.positive)])

    def _add_chain(
        self,
        kind: str,
        starts: Sequence[tuple[int, ...]],
        reads: list[list[list[int]]],
        ids: list[Id],
        columns: Elements,
        names: list[Group],
    ) -> None:
        """Add one unit of several copies; every copy is read equally often."""
        shape = (len(starts), len(starts[0]))
        left = self._parts.parts([ids[c] for start in starts for c in start])
        if left is None:
            raise Unclear("its channels are made of different rows")
        left = [Part(p.name, p.channel.reshape(shape), p.row) for p in left]
        right = [
            Part(columns.name, columns.channel[torch.tensor([read[k] for read in reads])].reshape(shape), columns.row)
            for k in range(len(reads[0]))
        ]
        self.units.append(Unit(kind, left, right, names))

    def _chain_kind(self, route: Route, source: Projection) -> str:
        if route.mixed:
            return "vo"
        return "lora" if "lora" in source.source[0].name.lower() else "linear"

    def strays(self, names: Iterable[str]) -> bool:
        """Whether parameters are used at places that no unit accounts for; a numeric check sees this by itself.

        Args:
            names: Names of the parameters of a block.

        Returns:
            True if the graph alone cannot vouch for the block.
        """
        wanted = set(names)
        stack = [node for node, name in self.graph.parameters.items() if name in wanted]
        while stack:
            for user in stack.pop().users:
                if user in self._followed:
                    continue
                if not self.graph.is_weight(user) or self.walker.projection(user) is not None:
                    return True
                stack.append(user)
        return False

    # -- products of two parameters ---------------------------------------------------------------------------------

    def _product(self, node: fx.Node) -> None:
        """A product of two parameters, entry by entry: a diagonal net."""
        if base_name(node) != "mul" or len(node.args) < 2 or not all(self.graph.is_weight(a) for a in node.args[:2]):
            return
        first, second = (trace(self.graph, a) for a in node.args[:2])  # type: ignore[arg-type]
        if isinstance(first, str) or isinstance(second, str):
            return
        (left, (a, shape, steps)), (right, (b, other, others)) = first, second
        if shape != other or left == right:
            return
        zero = torch.zeros(1, dtype=torch.long)
        parts = [
            Part(left, a + _flat(shape, steps)[:, None], zero),
            Part(right, b + _flat(shape, others)[:, None], zero),
        ]
        self.units.append(Unit("rescaling", parts[:1], parts[1:], [rescaling(positive=False)]))

    # -- words ------------------------------------------------------------------------------------------------------

    def _refuse(self, label: str, kind: str, reason: str) -> None:
        entry = (f"{label}.{kind}" if label else kind, reason)
        if entry not in self.refused:
            self.refused.append(entry)

    def _label(self, node: fx.Node, near: Iterable[fx.Node]) -> str:
        """A name for a place: what the nearest projections' parameters have in common."""
        names = []
        for start in near:
            stack, seen = [start], set[fx.Node]()
            while stack and len(seen) < 200:
                current = stack.pop()
                if current in seen:
                    continue
                seen.add(current)
                found = self.walker.projection(current)
                if found is not None:
                    names += [self.graph.parameters[n] for n in self.graph.ancestors(parse_weight(self.graph, current))
                              if n in self.graph.parameters]  # fmt: skip
                else:
                    stack.extend(current.all_input_nodes)
        return common_prefix(names)


def parse_weight(graph: Graph, node: fx.Node) -> fx.Node:
    """The weight operand of a projection.

    Args:
        graph: The graph.
        node: The projection's node.

    Returns:
        Its weight.
    """
    found = parse(node)
    assert found is not None
    return found.second if graph.is_weight(found.second) else found.first


def common_prefix(names: Iterable[str]) -> str:
    """Longest common module path of parameter names.

    Args:
        names: The names.

    Returns:
        For example ``"encoder.layer.0.attention"``.
    """
    split = [name.split(".")[:-1] for name in dict.fromkeys(names)]
    shared = []
    for parts in zip(*split, strict=False):
        if len(set(parts)) != 1:
            break
        shared.append(parts[0])
    return ".".join(shared)


def _flat(shape: tuple[int, ...], steps: tuple[int, ...]) -> Tensor:
    total = torch.zeros(1, dtype=torch.long)
    for size, step in zip(shape, steps, strict=True):
        total = (total[:, None] + torch.arange(size)[None] * step).flatten()
    return total


def _repeat(lead_q: tuple[int, ...], lead_k: tuple[int, ...]) -> Callable[[Tensor], Tensor]:
    """Arrange keys, repeating heads where grouped queries share them."""
    factor = lead_q[-1] // lead_k[-1] if lead_q and lead_k and lead_q[-1] % lead_k[-1] == 0 else 1

    def arrange(x: Tensor) -> Tensor:
        repeated = x.repeat_interleave(factor, dim=-3) if factor > 1 else x
        return repeated.expand(*lead_q, *repeated.shape[-2:]).reshape(-1, *x.shape[-2:])

    arrange.__name__ = f"repeat{lead_q}{lead_k}"
    return arrange


def _arrange(labels: str, batch: list[str], inner: str) -> Callable[[Tensor], Tensor]:
    """Arrange an operand of a contraction by its labels."""
    free = [c for c in labels if c not in batch and c != inner]
    order = [labels.index(c) for c in (*batch, *free, inner)]

    def arrange(x: Tensor) -> Tensor:
        moved = x.permute(order)
        lead = 1
        for size in moved.shape[: len(batch)]:
            lead *= size
        return moved.reshape(lead, -1, moved.shape[-1])

    arrange.__name__ = f"arrange{order}{len(batch)}"
    return arrange


def _distinct(left: list[Head], right: list[Head]) -> Iterable[tuple[int, Head, Head]]:
    """Heads that differ in their channels; batch entries and windows repeat them, one more of each is kept."""
    seen: dict[tuple[object, ...], int] = {}
    for index, (a, b) in enumerate(zip(left, right, strict=True)):
        key = (a.channels, b.channels)
        seen[key] = seen.get(key, 0) + 1
        if seen[key] <= 2 and a.channels and b.channels:
            yield index, a, b


Meeting = tuple[Head, Head, Tensor]


def _between(left: Head, right: Head) -> Meeting:
    """What stands between two sides of a head, ``(positions, positions, channels, channels)``, where they meet."""
    # A side may have channels that only meet another projection, as keys whose rotated part all heads share.
    M = torch.einsum("sih,tjh->stij", left.R, right.R)
    met = M.abs().amax((0, 1)) > 1e-11 * M.abs().max()
    rows, columns = met.any(1).nonzero()[:, 0], met.any(0).nonzero()[:, 0]
    if len(rows) != len(columns):
        raise Unclear("queries and keys of a head have different numbers of channels")
    if len(rows) < M.shape[2] or len(columns) < M.shape[3]:
        left = Head(tuple(left.channels[i] for i in rows.tolist()), left.R[:, rows], left.constant)
        right = Head(tuple(right.channels[i] for i in columns.tolist()), right.R[:, columns], right.constant)
        M = M[:, :, rows][..., columns]
    return left, right, M


def _edge(
    where: tuple[object, ...], left_ids: list[Id], right_ids: list[Id], left: Head, right: Head, M: Tensor,
    words: tuple[str, str, bool],
) -> _Edge:  # fmt: skip
    """Pair the channels of two sides of a head: at equal positions what stands between them is diagonal."""
    size = min(M.shape[0], M.shape[1])
    match = M[range(size), range(size)].mean(0)
    order = match.abs().argmax(1)
    clear = match.abs() > 1e-11 * match.abs().max()
    if len(set(order.tolist())) != len(order) or bool((clear.sum(1) != 1).any()):
        order = torch.arange(len(order))
    if not bool(M.abs().max() > 0):
        raise Unclear("queries and keys of a head do not meet")
    ordered = [right_ids[right.channels[i]] for i in order.tolist()]
    return _Edge(where, [left_ids[c] for c in left.channels], ordered, M, order, *words)


def _score_units(edges: list[_Edge], parts: _Parts, refused: list[Refusal]) -> list[Unit]:
    """Join edges that share channels into units; refuse what does not fit together."""
    pieces = _split(edges)
    owner: dict[Id, frozenset[Id]] = {}
    bad: dict[frozenset[Id], str] = {}
    neighbors: dict[tuple[int, frozenset[Id]], list[_Edge]] = {}
    for piece in pieces:
        for side, ids in ((0, piece.left), (1, piece.right)):
            key = frozenset(ids)
            for channel in ids:
                if owner.setdefault(channel, key) != key:
                    bad[key] = bad[owner[channel]] = "heads overlap in part of their channels"
            neighbors.setdefault((side, key), []).append(piece)
    for side, key in neighbors:
        if side == 0 and (1, key) in neighbors:
            bad[key] = "one weight makes both queries and keys"
    units, seen = [], set()
    known: dict[object, Group | None] = {}
    for start in neighbors:
        if start in seen:
            continue
        component = _component(start, neighbors)
        seen |= set(component)
        label = neighbors[start][0].label
        problem = next((bad[key] for _, key in component if key in bad), "")
        unit = None if problem else _score_unit(component, neighbors, parts, known)
        if unit is None:
            entry = (f"{label}.qk", problem or "its channels are made of different rows")
            if entry not in refused:
                refused.append(entry)
        else:
            units.append(unit)
    return units


def _split(edges: list[_Edge]) -> list[_Edge]:
    """Split heads whose channels belong to different sets of heads, as a rotated key that all heads share."""
    occurs: dict[Id, set[object]] = {}
    for edge in edges:
        for ids in (edge.left, edge.right):
            for channel in ids:
                occurs.setdefault(channel, set()).add(edge.where)
    frozen = {channel: frozenset(where) for channel, where in occurs.items()}
    result = []
    for edge in edges:
        classes: dict[object, list[int]] = {}
        for i, (a, b) in enumerate(zip(edge.left, edge.right, strict=True)):
            classes.setdefault((frozen[a], frozen[b]), []).append(i)
        for members in classes.values():
            rest = [i for i in range(len(edge.left)) if i not in members]
            if rest and bool(edge.M[:, :, members][..., edge.columns[rest]].abs().max() > 1e-8 * edge.M.abs().max()):
                result.append(edge)
                break
            left, right = [edge.left[i] for i in members], [edge.right[i] for i in members]
            M = edge.M if not rest else edge.M[:, :, members]
            result.append(_Edge(edge.where, left, right, M, edge.columns[members], edge.label, edge.note, edge.sure))
    return result


Side = tuple[int, frozenset[Id]]


def _component(start: Side, neighbors: dict[Side, list[_Edge]]) -> list[Side]:
    found, stack = [start], [start]
    while stack:
        side, key = stack.pop()
        for edge in neighbors[side, key]:
            other = (1 - side, frozenset(edge.right if side == 0 else edge.left))
            if other not in found:
                found.append(other)
                stack.append(other)
    return found


def _score_unit(
    component: list[Side], neighbors: dict[Side, list[_Edge]], parts: _Parts, known: dict[object, Group | None]
) -> Unit | None:
    """Bring all channels of a unit into one order and find the group that commutes with what stands between."""
    root = component[0]
    orders: dict[Side, list[Id]] = {root: sorted(root[1])}
    for node in component:  # breadth first: the order of a node is known when it is reached
        for edge in neighbors[node]:
            own, other = (edge.left, edge.right) if node[0] == 0 else (edge.right, edge.left)
            partner = dict(zip(own, other, strict=True))
            orders.setdefault((1 - node[0], frozenset(other)), [partner[c] for c in orders[node]])
    meetings: dict[object, tuple[_Edge, list[int], list[int]]] = {}
    for node in component:
        if node[0] == 0:
            for edge in neighbors[node]:
                rows = [edge.left.index(c) for c in orders[node]]
                columns = [edge.right.index(c) for c in orders[1, frozenset(edge.right)]]
                entry = (id(edge.M), tuple(rows), tuple(edge.columns[columns].tolist()))
                meetings.setdefault(entry, (edge, rows, columns))
    factors: list[list[Part]] = [[], []]
    for node in sorted(component, key=lambda item: sorted(item[1])):
        found = parts.parts(orders[node])
        if found is None:
            return None
        factors[node[0]] += found
    h = len(root[1])
    note = next((edge.note for edge in neighbors[root] if edge.note), "")
    key = tuple(meetings)
    if key not in known:  # equal layers share what stands between
        thinned = [_thin(edge.between(rows, columns), len(meetings)) for edge, rows, columns in meetings.values()]
        known[key] = commutant(torch.cat(thinned))
    largest = known[key]
    candidates = [largest] if largest is not None else []
    candidates += [g for g in (orthogonal(h), diagonal(h), scalar(h)) if g.dim and g not in candidates]
    return Unit("qk", factors[0], factors[1], candidates, note, all(edge.sure for edge in neighbors[root]))


def _thin(M: Tensor, heads: int) -> Tensor:
    """Fewer pairs of positions where many heads meet; four of one head tell its frequencies."""
    count = max(4, 24 // heads)
    if len(M) <= count:
        return M
    return M[torch.randperm(len(M), generator=torch.Generator().manual_seed(heads))[:count]]


def _equal_rows(signature: Tensor) -> list[list[int]]:
    """Group rows that are equal up to rounding."""
    scale = float(signature.abs().max())
    weights = torch.rand(signature.shape[1], dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    keys = (signature @ weights) / scale
    order = keys.argsort()
    groups: list[list[int]] = []
    for index in order.tolist():
        last = groups[-1][-1] if groups else -1
        if groups and abs(float(keys[index] - keys[last])) < 1e-9:
            groups[-1].append(index)
        else:
            groups.append([index])
    return sorted(sorted(g) for g in groups)
