"""`find_symmetries` and what it returns."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .blocks import Block, Piece, Stack, parameters_of, refuse_attached, stacked
from .canonical import canonical_point, has_canonical_point
from .check import SLOPE, TOLERANCE, Probe, Slopes, position_tables, slopes
from .graph import ExportError, Graph
from .groups import Group, stabilizer
from .inputs import read_inputs
from .names import propose_by_name
from .propose import Part, Proposer, Refusal, Unit, common_prefix

ORDER = ("lora", "qk", "vo", "rescaling", "linear")


class Symmetries(Sequence[Block]):
    """The parameter symmetries of a model: a sequence of disjoint blocks.

    Attributes:
        refused: What looked like a symmetry and cannot be treated, as pairs (place, reason).
        note: What a reader must know about all blocks, for example that the numeric check was skipped.
        total: Number of parameters of the model, shared ones once.
    """

    def __init__(self, blocks: Sequence[Block], refused: Sequence[Refusal], total: int, note: str = "") -> None:
        self._blocks = list(blocks)
        self.refused = list(refused)
        self.total = total
        self.note = note

    def __len__(self) -> int:
        """Number of blocks."""
        return len(self._blocks)

    def __getitem__(self, index: Any) -> Any:
        """One block, or several."""
        return self._blocks[index]

    def __iter__(self) -> Iterator[Block]:
        """All blocks."""
        return iter(self._blocks)

    def __repr__(self) -> str:
        """One line."""
        return f"Symmetries({len(self)} blocks, dim={self.dim}, refused={len(self.refused)})"

    @property
    def dim(self) -> int:
        """Dimension of all groups together: how many parameters are redundant."""
        return sum(block.dim for block in self)

    def stacks(self) -> list[Stack]:
        """Blocks of equal shape and group as batched tensors.

        Returns:
            The stacks.
        """
        return stacked(self._blocks)

    def rows(self) -> list[tuple[str, ...]]:
        """The table as texts: place, kind, group, copies, dimension, parameters, checked.

        Returns:
            One row per block.
        """
        result: list[tuple[str, ...]] = []
        for block in self:
            style = f" {block.group.style}" if block.group.style else " c > 0" if block.group.positive else ""
            checked = f"{block.error:.0e}" if block.verified else "no"
            names = ", ".join(_short(block.name, name) for name in block.parameters)
            result.append((
                block.name,
                block.kind,
                block.group + style,
                str(block.copies),
                str(block.dim),
                names,
                checked,
            ))
        return result

    def table(self) -> str:
        """The blocks, what was refused and why, and the share of the parameters that is redundant.

        Returns:
            A text of several lines.
        """
        head = ("block", "kind", "group", "copies", "dim", "parameters", "error")
        rows = [head, *self.rows()]
        widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        lines.insert(1, "-" * max(map(len, lines)))
        return "\n".join([*lines, *self.summary()])

    def summary(self) -> list[str]:
        """Lines below the table.

        Returns:
            The refusals, the share of redundant parameters, and the note.
        """
        lines = [f"refused  {place}: {reason}" for place, reason in self.refused]
        share = 100.0 * self.dim / max(self.total, 1)
        lines.append(f"{self.dim:,} of {self.total:,} parameters are redundant ({share:.2f} %).")
        return [*lines, self.note] if self.note else lines

    def verify(self, model: nn.Module, example_inputs: Any = None, *, seed: int = 0) -> dict[str, float]:
        """Check every block by itself: perturb all parameters, move the block, compare the outputs in float64.

        Args:
            model: The model; it is not changed.
            example_inputs: What it takes; made from its configuration if None.
            seed: Seed of the perturbation and of the moves.

        Returns:
            Relative change of the output by block name.

        Raises:
            ValueError: If a block is no symmetry of the model.
        """
        fixed = position_tables(model)
        probe = Probe(model, *read_inputs(model, example_inputs), seed=seed + 7, fixed=fixed)
        generator = torch.Generator().manual_seed(seed)
        errors = {}
        for block in self:
            block.error = probe.move([block], generator)
            block.verified = block.error <= TOLERANCE
            errors[block.name] = block.error
        broken = [f"{name} ({error:.1e})" for name, error in errors.items() if not error <= TOLERANCE]
        if broken:
            raise ValueError(f"Not a symmetry of {type(model).__name__}: {', '.join(broken)}.")
        return errors

    def move_(self, model: nn.Module, seed: int = 0, scale: float = 1.0) -> None:
        """Move the weights along their orbits by random Gaussian matrices, in place; the function stays.

        Args:
            model: The model.
            seed: Seed of the matrices.
            scale: How far; 1 draws ``1 + N / sqrt(h)``.
        """
        generator = torch.Generator().manual_seed(seed)
        tensors = parameters_of(model)
        for block in self:
            A = block.group.random(block.copies, scale, generator)
            point = block.read(tensors).detach()
            wide = point.double() if point.is_floating_point() else point
            block.write_(model, block.act(wide, A.to(wide.device)).to(point.dtype))

    def move_gaussian_(self, model: nn.Module, size: float = 1.0, seed: int = 0) -> None:
        """Move the weights along their orbits by ``A = size N``, N Gaussian, in place; the function stays.

        These are the moves of figure 7 of arXiv 2505.05409: far from the identity, also in scale. A matrix of
        condition above ``200 sqrt(h)`` is drawn again, as in `move_`. Groups smaller than GL(h), which hold no such
        matrices, take a random element of their own.

        Args:
            model: The model.
            size: Factor before the Gaussian matrix, of either sign but not zero.
            seed: Seed of the matrices.

        Raises:
            ValueError: If the size is zero or not finite.
        """
        if not (math.isfinite(size) and size != 0):
            raise ValueError(f"size must be a finite number other than zero, not {size}.")
        generator = torch.Generator().manual_seed(seed)
        tensors = parameters_of(model)
        for block in self:
            A = _gaussian(block, size, generator)
            point = block.read(tensors).detach()
            block.write_(model, block.act(point.double(), A.to(point.device)).to(point.dtype))

    def canonicalize_(self, model: nn.Module) -> list[Refusal]:
        """Bring every block to the canonical point of its orbit, in place; the function stays.

        GL(h): the balanced gauge ``G^T G = H^T H = diag(s)``, with ``s`` the singular values of ``G H^T``, descending,
        and the first entry of a column of ``G`` that is within 0.1 % of its largest positive. Singular values closer
        than the root of the machine precision (at most 1e-3), relative to the largest, count as equal: inside such a
        cluster singular vectors are noise, and the basis is fixed by the space that they span, see
        ``symmetry/canonical.py``; ``G^T G = H^T H`` still holds exactly and is diagonal up to the width of the cluster.
        Rescalings, diagonal and rotary groups: equal lengths, the same entry of ``G`` positive (real and positive for
        a rotated pair of channels). O(h): the singular vectors of ``G`` above ``H``.

        The form is deterministic, and bit for bit idempotent. Two models on one orbit end close to each other: up to
        rounding of their weights times ``s[0]`` over the smallest gap between clusters. As every canonical form it
        jumps somewhere: where a gap passes the width of a cluster, or another entry becomes the pivot.

        Args:
            model: The model.

        Returns:
            What stays as it is, as pairs (block, reason): copies whose product has lower rank than h, as an adapter
            with ``B = 0``, since their orbit has no balanced point and the limit would be zero on both sides; and
            groups without a known canonical point.
        """
        tensors = parameters_of(model)
        kept: list[Refusal] = []
        for block in self:
            point = block.read(tensors).detach()
            canonical, live = canonical_point(block, point)
            block.write_(model, canonical)
            dead = int((~live).sum())
            if dead:
                why = "lower rank" if has_canonical_point(block) else "a group without a canonical point"
                kept.append((block.name, f"{dead} of {block.copies} copies: {why}"))
        return kept


def _gaussian(block: Block, size: float, generator: torch.Generator) -> Tensor:
    """Group elements ``size N`` of every copy of a block."""
    if block.group.dim < block.h**2:
        return block.group.random(block.copies, 1.0, generator)

    def draw(copies: int) -> Tensor:
        A = size * torch.randn(copies, block.h, block.h, dtype=torch.float64, generator=generator)
        return A.abs() if block.group.positive else A

    A = draw(block.copies)
    for _ in range(20):
        bad = torch.linalg.cond(A) > 200.0 * block.h**0.5
        if not bool(bad.any()):
            break
        A[bad] = draw(int(bad.sum()))
    return A


def _short(prefix: str, name: str) -> str:
    """Parameter name below the block's own place."""
    place = prefix.rsplit(".", 1)[0] + "."
    return name.removeprefix(place)


def find_symmetries(model: nn.Module, example_inputs: Any = None) -> Symmetries:
    """Find the parameter symmetries of a model and check them numerically.

    The model is exported and its attention, gated and ReLU units and adapters are read off the graph, no matter how
    they are named or packed. A block is accepted only if moving a perturbed float64 copy of the model along the orbit
    leaves its output as it is; what is not accepted is listed in ``refused`` with the reason. The model itself is not
    changed.

    Args:
        model: A PyTorch model. On the meta device the check is skipped, and the blocks say so.
        example_inputs: What the model takes: a tensor, a tuple, or a dict of keyword arguments. Made from the
            configuration if None. Take at least 96 tokens: with fewer, wrong groups look right.

    Returns:
        The symmetries.

    Raises:
        ValueError: If inputs are needed or do not fit, or the model is attached or not deterministic in eval mode.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"model must be a torch.nn.Module, not {type(model).__name__}.")
    refuse_attached(model)
    total = sum(p.numel() for p in model.parameters())
    args, kwargs = read_inputs(model, example_inputs)
    fixed = position_tables(model)
    training = {module: module.training for module in model.modules()}
    frozen = [p for p in model.parameters() if not p.requires_grad and p.is_floating_point()]
    try:
        model.eval()
        for p in frozen:
            p.requires_grad_(True)
        return _find(model, args, kwargs, total, fixed)
    finally:
        for p in frozen:
            p.requires_grad_(False)
        for module, mode in training.items():
            module.training = mode


def _find(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], total: int, fixed: frozenset[str]
) -> Symmetries:
    device = next((p.device for p in model.parameters()), torch.device("cpu"))

    def move(value: Any) -> Any:
        return value.to(device) if isinstance(value, Tensor) else value

    placed_args, placed_kwargs = (torch.utils._pytree.tree_map(move, v) for v in (args, kwargs))
    probe = None if device.type == "meta" else Probe(model, args, kwargs, fixed=fixed)
    note, proposer = "", None
    try:
        graph = Graph(model, placed_args, placed_kwargs, (args, kwargs), fixed)
        proposer = Proposer(graph)
        units, refused = proposer.propose()
    except ExportError as error:
        units, refused = propose_by_name(model)
        note = f"{error} Blocks were proposed from module names instead."
    blocks, notes, overlaps = _blocks(units, dict(model.named_parameters()))
    refused = [*refused, *overlaps]
    if probe is None:
        return _unchecked(blocks, notes, refused, total, proposer)
    kept, more = _accept(probe, blocks, notes)
    refused += more
    if note and kept:  # no graph was seen: larger weights show a clip that rests at the usual ones
        kept, more = _one_by_one(Probe(model, args, kwargs, 3, fixed, 30.0), kept, torch.Generator().manual_seed(12))
        refused += more
    return Symmetries(kept, refused, total, note)


def _unchecked(
    blocks: list[Block], notes: dict[str, str], refused: list[Refusal], total: int, proposer: Proposer | None
) -> Symmetries:
    """Without weights only what the graph alone vouches for is proposed."""
    kept: list[Block] = []
    for block in blocks:
        note = notes[block.name]
        if proposer is None or (not note and proposer.strays(block.parameters)):
            note = "its weights are used elsewhere too" if proposer else "it was found by its name alone"
        if note:
            refused.append((block.name, f"{note}, which cannot be checked on the meta device"))
        else:
            kept.append(block)
    return Symmetries(kept, refused, total, "Numeric check skipped: the model is on the meta device.")


def _blocks(units: list[Unit], parameters: dict[str, Tensor]) -> tuple[list[Block], dict[str, str], list[Refusal]]:
    """Join units of one place into blocks, one block per set of parameters; refuse what overlaps."""
    table: dict[tuple[object, ...], list[Unit]] = {}
    seen: set[object] = set()
    for unit in sorted(units, key=lambda u: (not u.sure, ORDER.index(u.kind))):
        parts = [*unit.left, *unit.right]
        same = tuple((p.name, tuple(p.channel.flatten().tolist())) for p in parts)
        if same not in seen:
            seen.add(same)
            table.setdefault(unit.key, []).append(unit)
    blocks: list[Block] = []
    notes: dict[str, str] = {}
    refused: list[Refusal] = []
    claims = Claims({name: p.numel() for name, p in parameters.items()})
    for members in table.values():
        block = _block(members)
        while block.name in notes:
            block.name += "+"
        clash = claims.clash(block)
        if clash:
            refused.append((block.name, f"it shares {clash} with another block"))
            continue
        notes[block.name] = members[0].note
        blocks.append(block)
    return blocks, notes, refused


def _block(members: list[Unit]) -> Block:
    first = members[0]

    def piece(parts: list[Part]) -> Piece:
        return Piece(parts[0].name, torch.cat([p.channel for p in parts]), parts[0].row)

    left = [piece(list(parts)) for parts in zip(*(u.left for u in members), strict=True)]
    right = [piece(list(parts)) for parts in zip(*(u.right for u in members), strict=True)]
    place = common_prefix(p.name for p in [*left, *right])
    name = f"{place}.{first.kind}" if place else first.kind
    block = Block(name, first.kind, first.groups[0], (*left, *right), sum(p.row.numel() for p in left))
    block.candidates = tuple(first.groups)
    return block


class Claims:
    """Which elements of the parameters belong to a block already.

    Pieces are lines of equal length and step, as a rule, and then comparing their starts is enough: a large model is
    looked through without a mask of its size. Other pieces are marked one by one.

    Args:
        sizes: Number of elements by parameter name.
    """

    def __init__(self, sizes: dict[str, int]) -> None:
        self.sizes = sizes
        self.lines: dict[str, list[Piece]] = {}

    def clash(self, block: Block) -> str:
        """Claim the elements of a block.

        Args:
            block: The block.

        Returns:
            Name of a parameter of which an element is taken already, or an empty string.
        """
        for name in block.parameters:
            pieces = [*self.lines.get(name, []), *(p for p in block.pieces if p.name == name)]
            if not (_apart(pieces) or self._marked(name, pieces)):
                return name
        for piece in block.pieces:
            self.lines.setdefault(piece.name, []).append(piece)
        return ""

    def _marked(self, name: str, pieces: list[Piece]) -> bool:
        mask = torch.zeros(self.sizes[name], dtype=torch.bool)
        for piece in pieces:
            for channel in torch.split(piece.channel.flatten(), max(1, 4_000_000 // piece.row.numel())):
                index = (channel[:, None] + piece.row[None]).flatten()
                if bool(mask[index].any()):
                    return False
                mask[index] = True
                if len(torch.unique(index)) != len(index):
                    return False
        return True


def _apart(pieces: list[Piece]) -> bool:
    """Whether lines of one step and length do not meet; False if they do or are not such lines."""
    length = pieces[0].row.numel()
    step = int(pieces[0].row[1] - pieces[0].row[0]) if length > 1 else 1
    line = torch.arange(length) * step
    if step < 1 or any(not torch.equal(p.row, line) for p in pieces):
        return False
    channel = torch.cat([p.channel.flatten() for p in pieces]).sort().values
    channel = channel[(channel % step).argsort(stable=True)]
    same = channel[1:] % step == channel[:-1] % step
    return not bool((same & (channel[1:] - channel[:-1] < length * step)).any())


def _accept(probe: Probe, blocks: list[Block], notes: dict[str, str]) -> tuple[list[Block], list[Refusal]]:
    """Keep what the numeric check confirms, with the largest group that holds."""
    wanted = [name for block in blocks for name in block.parameters]
    gradients = probe.gradients(wanted, 2 if sum(p.numel() for p in probe.parameters.values()) < 20_000_000 else 1)
    parameters = {name: p.detach() for name, p in probe.parameters.items()}
    kept: list[Block] = []
    refused: list[Refusal] = []
    for block in blocks:
        found = slopes(block, parameters, gradients)
        reason = _choose(block, found, notes[block.name])
        if reason:
            refused.append((block.name, reason))
        else:
            kept.append(block)
    del gradients
    generator = torch.Generator().manual_seed(11)
    error = probe.move(kept, generator) if kept else 0.0
    if not error <= TOLERANCE:
        kept, more = _one_by_one(probe, kept, generator)
        return kept, [*refused, *more]
    for block in kept:
        block.verified, block.error = True, error
    return kept, refused


def _choose(block: Block, found: Slopes, note: str) -> str:
    """Set the largest candidate group that the derivatives allow; the reason if there is none."""
    share = float(found.alive.double().mean())
    if share < (0.5 if block.kind == "rescaling" else 1.0):
        return "the output does not depend on it for these inputs, so it cannot be checked"
    for group in (*block.candidates[:1], *_kept(block, found), *block.candidates[1:]):
        if found.error(group) <= SLOPE:
            block.group = group
            return ""
    text = f"moving it changes the output (relative slope {found.error(block.group):.0e})"
    return f"{note}, and {text}" if note else text


def _kept(block: Block, found: Slopes) -> list[Group]:
    """The group that keeps the vectors which stand out in the derivatives, as a constant beside the rows of G does.

    Moved along ``L``, a pair with a constant row ``b`` in G changes the function by ``b^T L u``: all derivatives are of
    the form ``b u^T``.

    Args:
        block: The block.
        found: Its derivatives.

    Returns:
        The group, or nothing where the derivatives have no vector in common.
    """
    h = block.h
    if block.kind == "rescaling" or block.group.dim != h**2 or not bool(found.alive.any()):
        return []
    parts = [(D / scale[:, None, None])[found.alive] for D, scale in zip(found.D, found.scale, strict=True)]
    columns = torch.cat(parts).permute(1, 0, 2).reshape(h, -1)
    vectors, values, _ = torch.linalg.svd(columns, full_matrices=False)
    rank = int((values > 1e-7 * values[0]).sum())
    return [stabilizer(vectors[:, :rank])] if rank < h else []


def _one_by_one(probe: Probe, blocks: list[Block], generator: torch.Generator) -> tuple[list[Block], list[Refusal]]:
    """Find the blocks that a finite move breaks."""
    kept: list[Block] = []
    refused: list[Refusal] = []
    for block in blocks:
        block.error = probe.move([block], generator)
        block.verified = block.error <= TOLERANCE
        if block.verified:
            kept.append(block)
        else:
            refused.append((block.name, f"a finite move changes the output by {block.error:.0e}"))
    if kept and not probe.move(kept, generator) <= TOLERANCE:
        return [], [*refused, *((b.name, "blocks that hold alone do not hold together") for b in kept)]
    return kept, refused
