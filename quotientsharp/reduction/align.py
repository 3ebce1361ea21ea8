"""Brings a model as close to another as heads, hidden units and gauges allow; its function stays."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..symmetry import Block, Symmetries, find_symmetries
from ..symmetry.blocks import parameters_of
from ..symmetry.canonical import balanced_pair, scaled_pairs, tie, turns
from ..symmetry.check import TOLERANCE, Probe, position_tables
from ..symmetry.check import distance as change_of_output
from ..symmetry.inputs import read_inputs

Places = list[tuple[Block, ...]]


def permutable(model: nn.Module, symmetries: Symmetries, example_inputs: Any = None) -> Places:
    """Blocks whose copies can be permuted together: scores and values of an attention, hidden units of a layer.

    Each place is checked: the copies are shuffled in a perturbed float64 copy of the model, and the output must stay.
    Heads that a position bias tells apart, or units with a gate of their own, are therefore left out.

    Args:
        model: The model; it is not changed.
        symmetries: Its symmetries.
        example_inputs: What it takes; made from its configuration if None.

    Returns:
        The places.
    """
    places: Places = []
    values = [block for block in symmetries if block.kind == "vo"]
    for block in symmetries:
        if block.kind == "rescaling" and block.copies > 1:
            places.append((block,))
        if block.kind == "qk" and block.copies > 1:
            partner = next((v for v in values if v.copies == block.copies and _together(block.name, v.name)), None)
            if partner is not None:
                places.append((block, partner))
    if not places:
        return []
    probe = Probe(model, *read_inputs(model, example_inputs), fixed=position_tables(model))
    generator = torch.Generator().manual_seed(0)
    kept = []
    for place in places:
        before = {name: probe.parameters[name].detach().clone() for block in place for name in block.parameters}
        order = torch.randperm(place[0].copies, generator=generator)
        order = order.roll(1) if bool((order == torch.arange(len(order))).all()) else order
        for block in place:
            block.write_(probe.model, block.read(probe.parameters).detach()[order])
        if change_of_output(probe.output, probe.run()) <= TOLERANCE:
            kept.append(place)
        with torch.no_grad():
            for name, value in before.items():
                probe.parameters[name].copy_(value)
    return kept


def _together(first: str, second: str) -> bool:
    """Whether two blocks belong to one attention: the place of one holds that of the other."""
    a, b = first.rpartition(".")[0], second.rpartition(".")[0]
    return a == b or a.startswith(f"{b}.") or b.startswith(f"{a}.")


def align_(
    model: nn.Module,
    reference: nn.Module,
    symmetries: Symmetries | None = None,
    example_inputs: Any = None,
    *,
    permute: bool = True,
) -> dict[str, list[int]]:
    """Move a model along its orbits next to a reference, in place; its function stays.

    First heads (scores and values together) and hidden units are permuted: SciPy's assignment maximizes the summed
    inner products ``<G H^T, G' H'^T>`` of the invariants (of the balanced vectors for positive rescalings). Then each
    copy takes the gauge nearest to that of the reference: both are brought to the balanced gauge, where the best
    rotation is the polar factor of ``G^T G' + H^T H'`` (Procrustes), and from there to the gauge of the reference. For
    rotated pairs of channels the rotation is a phase, for rescalings a sign. Copies of lower rank, and other groups,
    keep their gauge.

    To interpolate, canonicalize the reference first: in a poor gauge the straight line leads through worse models.

    Args:
        model: The model that is moved.
        reference: The model that it is compared with; it is not changed.
        symmetries: Their symmetries; those of ``model`` are found if None.
        example_inputs: What the models take, for finding and for checking permutations.
        permute: Whether to permute heads and hidden units.

    Returns:
        By block name the copies of ``model`` in their new order.
    """
    from scipy.optimize import linear_sum_assignment

    found = find_symmetries(model, example_inputs) if symmetries is None else symmetries
    orders: dict[str, list[int]] = {}
    target = parameters_of(reference)
    for place in permutable(model, found, example_inputs) if permute else []:
        similar = sum(_similarity(block, _read(block, target), _read(block, model)) for block in place)
        assert isinstance(similar, Tensor)
        _, columns = linear_sum_assignment(similar.numpy(), maximize=True)
        order = torch.as_tensor(columns)
        for block in place:
            block.write_(model, block.read(model).detach()[order.to(next(model.parameters()).device)])
            orders[block.name] = order.tolist()
    for block in found:
        old = block.read(model).detach()
        block.write_(model, _nearest(block, _read(block, model), _read(block, target), tie(old.dtype)).to(old))
    return orders


def _read(block: Block, state: Any) -> Tensor:
    x = block.read(state).detach().double().cpu()
    return x.unsqueeze(-1) if block.kind == "rescaling" else x


def _similarity(block: Block, x: Tensor, y: Tensor) -> Tensor:
    """Inner products of the invariants of every two copies, ``(copies of x, copies of y)``, over their mean size."""
    if block.group.positive:
        balanced = []
        for point in (x, y):
            g, k, _ = scaled_pairs(point[:, : block.n].mT, point[:, block.n :].mT, positive=True)
            balanced.append(torch.cat([g, k], -1).flatten(1))
        similar = balanced[0] @ balanced[1].mT
    else:
        G = torch.einsum("anh,bnk->abhk", x[:, : block.n], y[:, : block.n])
        similar = (G * torch.einsum("anh,bnk->abhk", x[:, block.n :], y[:, block.n :])).sum((-2, -1))
    return similar / similar.abs().mean().clamp_min(1e-300)


def _nearest(block: Block, x: Tensor, reference: Tensor, width: float) -> Tensor:
    """The points of the orbits of ``x`` nearest to the reference, copy by copy."""
    n, name = block.n, str(block.group)
    if block.kind == "rescaling" or name == f"Diagonal({block.h})":
        result = _scaled(x.mT, reference.mT, n, positive=block.group.positive).mT
    elif name == f"O({block.h})":
        result = torch.stack([a @ _polar(a.mT @ b) for a, b in zip(x, reference, strict=True)])
    elif block.group.dim == block.h**2:
        result = torch.stack([_gauged(a, b, n, width) for a, b in zip(x, reference, strict=True)])
    elif (channels := turns(block)) is not None:
        pairs, rest = channels
        i, j = torch.tensor(pairs).T
        complex_x, complex_r = (torch.complex(p[..., i], p[..., j]).mT for p in (x, reference))
        new = _scaled(complex_x, complex_r, n, positive=False).mT
        result = x.clone()
        result[..., i], result[..., j] = new.real, new.imag
        for index in range(len(x) if rest else 0):
            result[index][:, rest] = _gauged(x[index][:, rest], reference[index][:, rest], n, width)
    else:
        result = x
    return result.squeeze(-1) if block.kind == "rescaling" else result


def _scaled(x: Tensor, reference: Tensor, n: int, *, positive: bool) -> Tensor:
    """Vectors ``(..., n + m)`` scaled to the ratio of lengths of the reference, with the nearest sign or phase."""
    g, k, live = scaled_pairs(x[..., :n], x[..., n:], positive=positive)
    a, b, known = scaled_pairs(reference[..., :n], reference[..., n:], positive=positive)
    moved, target = torch.cat([g, k], -1), torch.cat([a, b], -1)
    if not positive:
        overlap = (moved.conj() * target).sum(-1, keepdim=True)
        size = overlap.abs()
        moved = moved * torch.where(size > 0, overlap / size.clamp_min(1e-300), torch.ones_like(overlap))
    lengths = reference[..., :n].abs().norm(dim=-1, keepdim=True), reference[..., n:].abs().norm(dim=-1, keepdim=True)
    ratio = (lengths[0] / lengths[1].clamp_min(1e-300)).sqrt()
    ratio = torch.where(known.unsqueeze(-1), ratio, torch.ones_like(ratio))
    if not positive:  # the reference's own sign or phase
        phase = (target.conj() * reference).sum(-1, keepdim=True)
        moved = moved * phase / phase.abs().clamp_min(1e-300)
    result = torch.cat([moved[..., :n] * ratio, moved[..., n:] / ratio], -1)
    return torch.where((live & known).unsqueeze(-1), result, x)


def _polar(M: Tensor) -> Tensor:
    u, _, vt = torch.linalg.svd(M)
    turn: Tensor = u @ vt
    return turn


def _gauged(x: Tensor, reference: Tensor, n: int, width: float) -> Tensor:
    """One GL(h) copy in the gauge of the reference, after the best rotation in the balanced gauge."""
    own, other = (balanced_pair(p[:n], p[n:], width) for p in (x, reference))
    if own is None or other is None:
        return x
    Q = _polar(own.G.mT @ other.G + own.H.mT @ other.H)
    change = torch.linalg.lstsq(other.G, reference[:n]).solution  # reference = balanced @ change
    inverse = torch.linalg.lstsq(other.H, reference[n:]).solution  # which is change^-T on the other side
    return torch.cat([own.G @ Q @ change, own.H @ Q @ inverse])
