"""Distance of two models on the quotient: zero exactly when blocks lie on one orbit."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..symmetry import Block, Symmetries, find_symmetries
from ..symmetry.blocks import parameters_of
from ..symmetry.canonical import turns

Gaps = tuple[Tensor, Tensor]
"""Squared distance and squared size, one number per copy."""


@dataclass
class Distance:
    """How far two models are from each other.

    Attributes:
        blocks: Distance and size of the invariants of ``a`` by block name.
        rest: Distance and size of all weights outside of blocks.
        skipped: Blocks whose group has no known invariants; they count in neither.
    """

    blocks: dict[str, tuple[float, float]]
    rest: tuple[float, float]
    skipped: list[str] = field(default_factory=list)

    @property
    def on_blocks(self) -> float:
        """Distance over all blocks together."""
        return math.sqrt(sum(gap**2 for gap, _ in self.blocks.values()))

    @property
    def relative(self) -> float:
        """The same, divided by the size of the invariants."""
        size = math.sqrt(sum(size**2 for _, size in self.blocks.values()))
        return self.on_blocks / size if size > 0 else 0.0

    @property
    def total(self) -> float:
        """Distance over blocks and all other weights."""
        return math.hypot(self.on_blocks, self.rest[0])

    def __float__(self) -> float:
        """The total."""
        return self.total

    def table(self) -> str:
        """One line per block.

        Returns:
            A text of several lines.
        """
        rows = [*self.blocks.items(), ("other weights", self.rest)]
        width = max(len(name) for name, _ in rows)
        lines = [f"{'block'.ljust(width)}  {'distance':>10}  {'relative':>10}"]
        lines += [f"{n.ljust(width)}  {gap:10.3e}  {gap / size if size else 0.0:10.3e}" for n, (gap, size) in rows]
        return "\n".join([
            *lines,
            *(f"skipped  {name}: no invariants are known for its group" for name in self.skipped),
        ])


def distance(a: nn.Module, b: nn.Module, symmetries: Symmetries | None = None, example_inputs: Any = None) -> Distance:
    """Distance of two models of one architecture that does not depend on where they are on their orbits.

    A block with the group GL(h) counts by its products, ``sum |G H^T - G' H'^T|^2`` over copies. Smaller groups have
    more invariants. A rotated pair of channels is a complex channel and counts by its complex product ``g k^*``, a
    diagonal group by the products of its columns, O(h) by the best rotation (Procrustes), a positive rescaling, for
    which ``(-g, -k)`` is another function with the same product, by ``(|k| g, |g| k)``. Copies are compared in their
    order; `align_` permutes heads first.

    Args:
        a: A model.
        b: A model with the same parameters.
        symmetries: Their symmetries; those of ``a`` are found if None.
        example_inputs: What the models take, for finding them.

    Returns:
        The distance by block, that of all other weights, and the total.

    Raises:
        ValueError: If the models do not have the same parameters.
    """
    first, second = parameters_of(a), parameters_of(b)
    shapes = [{name: tuple(p.shape) for name, p in side.items()} for side in (first, second)]
    if shapes[0] != shapes[1]:
        raise ValueError("a and b must be models of one architecture: names or shapes of their parameters differ.")
    found = find_symmetries(a, example_inputs) if symmetries is None else symmetries
    blocks, skipped = {}, []
    outside = {name: torch.ones(p.numel(), dtype=torch.bool) for name, p in a.named_parameters()}
    for block in found:
        for piece in block.pieces:
            outside[piece.name][piece.index().flatten()] = False
        gaps = block_gaps(block, *(block.read(side).detach().double().cpu() for side in (first, second)))
        if gaps is None:
            skipped.append(block.name)
        else:
            blocks[block.name] = (float(gaps[0].sum().sqrt()), float(gaps[1].sum().sqrt()))
    squares = [0.0, 0.0]
    for name, mask in outside.items():
        x, y = (side[name].detach().double().cpu().flatten()[mask] for side in (first, second))
        squares[0] += float((x - y).square().sum())
        squares[1] += float(x.square().sum())
    return Distance(blocks, (math.sqrt(squares[0]), math.sqrt(squares[1])), skipped)


def product_gaps(G: Tensor, H: Tensor, G2: Tensor, H2: Tensor) -> Gaps:
    """Squared distance of two products and squared size of the first, without forming them.

    With the QR factorizations ``[G, G2] = P R`` and ``[H, -H2] = P' R'`` it is ``|R R'^*|^2``: no cancellation, exact
    to rounding even where the products agree.

    Args:
        G: ``(..., n, h)``, real or complex.
        H: ``(..., m, h)``.
        G2: Like ``G``.
        H2: Like ``H``.

    Returns:
        ``|G H^* - G2 H2^*|^2`` and ``|G H^*|^2``.
    """
    left = torch.linalg.qr(torch.cat([G, G2], -1), mode="r")[1]
    right = torch.linalg.qr(torch.cat([H, -H2], -1), mode="r")[1]
    gap = (left @ right.mH).abs().square().sum((-2, -1))
    h = G.shape[-1]
    return gap, (left[..., :h] @ right[..., :h].mH).abs().square().sum((-2, -1))


def block_gaps(block: Block, x: Tensor, y: Tensor) -> Gaps | None:
    """Squared distances of the invariants of a block, per copy.

    Args:
        block: The block.
        x: Its point in one model, float64.
        y: Its point in the other.

    Returns:
        Distances and sizes, or None if no invariants are known for the group.
    """
    if block.kind == "rescaling":
        x, y = x.unsqueeze(-1), y.unsqueeze(-1)
    (G, H), (G2, H2) = ((point[:, : block.n], point[:, block.n :]) for point in (x, y))
    name = str(block.group)
    if block.group.fixed is not None:  # the constant row is one more row of G, and then GL(h) acts
        row = block.group.fixed.mT.expand(len(x), -1, -1)
        return product_gaps(torch.cat([G, row], 1), H, torch.cat([G2, row], 1), H2)
    if block.group.positive:
        return _positive(G, H, G2, H2)
    if block.group.dim == block.h**2 or block.kind == "rescaling":
        return product_gaps(G, H, G2, H2)
    if name == f"O({block.h})":
        return _procrustes(x, y)
    if name == f"Scalar({block.h})":
        return product_gaps(*(part.flatten(1).unsqueeze(-1) for part in (G, H, G2, H2)))
    if name == f"Diagonal({block.h})":
        gap, size = product_gaps(*(part.mT.unsqueeze(-1) for part in (G, H, G2, H2)))
        return gap.sum(1), size.sum(1)
    channels = turns(block)
    return None if channels is None else _turned(channels, G, H, G2, H2)


def _positive(G: Tensor, H: Tensor, G2: Tensor, H2: Tensor) -> Gaps:
    """``(|k| g, |g| k)`` per column, over the root of two so that the size is that of the product."""

    def invariants(g: Tensor, k: Tensor) -> Tensor:
        a, b = torch.linalg.vector_norm(g, dim=1, keepdim=True), torch.linalg.vector_norm(k, dim=1, keepdim=True)
        return torch.cat([g * b, k * a], 1) / math.sqrt(2)

    first, second = invariants(G, H), invariants(G2, H2)
    return (first - second).square().sum((1, 2)), first.square().sum((1, 2))


def _procrustes(x: Tensor, y: Tensor) -> Gaps:
    u, _, vt = torch.linalg.svd(y.mT @ x)
    return (x - y @ (u @ vt)).square().sum((1, 2)), x.square().sum((1, 2))


def _turned(channels: tuple[list[tuple[int, int]], list[int]], *parts: Tensor) -> Gaps:
    pairs, rest = channels
    i, j = torch.tensor(pairs).T
    turned = [torch.complex(part[..., i], part[..., j]).mT.unsqueeze(-1) for part in parts]
    gap, size = product_gaps(turned[0], turned[1], turned[2], turned[3])
    gap, size = gap.sum(1), size.sum(1)
    if rest:
        more = product_gaps(*(part[..., rest] for part in parts))
        gap, size = gap + more[0], size + more[1]
    return gap, size
