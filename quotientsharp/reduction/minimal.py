"""Weights without redundant numbers: the gauge is fixed by entries that do not train."""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ..symmetry import Block, Symmetries
from ..symmetry.canonical import _pivoted, turns

CONDITION = 1e6
"""Largest condition of the rows that are fixed; a pair whose first factor has no better ones keeps its gauge."""

Fixed = tuple[list[tuple[int, int, float]], Tensor]
"""Entries (row of G, column, value) of one copy that are fixed, and the copy's new point."""


def pivot_rows(G: Tensor) -> Tensor:
    """Rows of a tall matrix that make a well-conditioned square: those of the pivoted Cholesky factor of its projector.

    Args:
        G: ``(n, h)`` of full rank.

    Returns:
        The ``h`` rows, in the order in which they were chosen.
    """
    basis = torch.linalg.qr(G)[0]
    canonical = basis @ _pivoted(basis)  # column j is zero in the pivot rows before the j-th
    rest = torch.ones(len(G), dtype=torch.bool, device=G.device)
    rows = []
    remainder = canonical.square().sum(1)
    for j in range(G.shape[1]):
        row = int(torch.where(rest & (remainder >= (1 - 1e-3) * remainder[rest].max()), 1, 0).argmax())
        rows.append(row)
        rest[row] = False
        remainder = remainder - canonical[:, j].square()
    return torch.tensor(rows, device=G.device)


class MinimalRank(nn.Module):
    """Torch parametrization of a matrix of rank h by ``n h + m h - h^2`` numbers.

    ``W = G H^T`` where ``h`` rows of ``G`` are a multiple of the identity and all other entries of ``G`` and ``H`` are
    free: every matrix of rank h whose pivot rows are independent is written so exactly once, and no direction of the
    free numbers leaves ``W`` as it is. Use it by
    ``torch.nn.utils.parametrize.register_parametrization(layer, "weight", MinimalRank(h))``: the pivot rows are chosen
    for the weight that is there, which is cut to rank h. Assigning a weight later chooses them anew.

    Args:
        rank: ``h``.

    Raises:
        ValueError: If ``rank`` is not positive.
    """

    pivots: Tensor
    scale: Tensor

    def __init__(self, rank: int) -> None:
        super().__init__()
        if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
            raise ValueError(f"rank must be a positive integer, not {rank!r}.")
        self.rank = rank
        self.rows = 0
        self.register_buffer("pivots", torch.arange(rank))
        self.register_buffer("scale", torch.ones(()))

    def right_inverse(self, weight: Tensor) -> Tensor:
        """The free numbers of the nearest matrix of rank h.

        Args:
            weight: ``(n, m)``.

        Returns:
            A vector of ``n h + m h - h^2`` numbers.

        Raises:
            ValueError: If the weight is no matrix with at least h rows and columns.
        """
        if weight.ndim != 2 or min(weight.shape) < self.rank:
            raise ValueError(f"MinimalRank({self.rank}) needs a matrix with at least {self.rank} rows and columns.")
        u, s, vt = torch.linalg.svd(weight.detach().double(), full_matrices=False)
        u, s, v = u[:, : self.rank], s[: self.rank], vt[: self.rank].mT
        pivots = pivot_rows(u)
        top = u[pivots]
        G, H = torch.linalg.solve(top, u, left=False), (v * s) @ top.mT
        length = H.norm()
        scale = (length / G.norm()).sqrt() if bool(length > 0) else torch.ones_like(length)
        self.rows, self.pivots, self.scale = weight.shape[0], pivots, scale.to(weight)
        free = torch.ones(weight.shape[0], dtype=torch.bool, device=weight.device)
        free[pivots] = False
        return torch.cat([(G * scale)[free].flatten(), (H / scale).flatten()]).to(weight)

    def forward(self, free: Tensor) -> Tensor:
        """The matrix.

        Args:
            free: The free numbers.

        Returns:
            ``W``.
        """
        h = self.rank
        mask = torch.ones(self.rows, dtype=torch.bool, device=free.device)
        mask[self.pivots] = False
        others = mask.nonzero()[:, 0]
        count = (self.rows - h) * h
        G = free.new_zeros(self.rows, h)
        G = G.index_copy(0, self.pivots, self.scale * torch.eye(h, dtype=free.dtype, device=free.device))
        G = G.index_copy(0, others, free[:count].reshape(-1, h))
        return G @ free[count:].reshape(-1, h).mT


class FixedEntries(nn.Module):
    """Torch parametrization of a tensor some of whose entries do not train.

    Args:
        shape: Shape of the tensor.
        index: Flat indices of the fixed entries.
        values: Their values.
    """

    index: Tensor
    values: Tensor
    free: Tensor

    def __init__(self, shape: torch.Size, index: Tensor, values: Tensor) -> None:
        super().__init__()
        self.shape = shape
        mask = torch.ones(shape.numel(), dtype=torch.bool, device=index.device)
        mask[index] = False
        self.register_buffer("index", index)
        self.register_buffer("values", values)
        self.register_buffer("free", mask.nonzero()[:, 0], persistent=False)

    def forward(self, free: Tensor) -> Tensor:
        """The tensor.

        Args:
            free: Its free entries.

        Returns:
            All entries.
        """
        flat = free.new_zeros(self.shape.numel()).index_copy(0, self.free, free)
        return flat.index_copy(0, self.index, self.values.to(free.dtype)).reshape(self.shape)

    def right_inverse(self, tensor: Tensor) -> Tensor:
        """The free entries.

        Args:
            tensor: The tensor.

        Returns:
            A vector.
        """
        return tensor.reshape(-1)[self.free]


def to_minimal_(model: nn.Module, symmetries: Symmetries) -> list[tuple[str, str]]:
    """Replace every pair by its minimal form, in place; the function stays.

    A pair ``(G, H)`` of the group GL(h) is moved along its orbit to where ``h`` rows of ``G`` are a multiple of the
    identity, and these ``h^2`` entries become constants: ``n h + m h - h^2`` numbers are left to train. Rotated pairs
    of channels fix one complex entry each, rescalings one number. The parameters that are left
    (``parametrizations.*.original`` in the state dict) have no flat directions from these blocks; make the optimizer
    afterwards. Gradient descent in them is not the one in the weights: the metric is another.

    Args:
        model: The model, changed in place.
        symmetries: Its symmetries.

    Returns:
        What stays as it is, as pairs (block, reason): first factors without ``h`` well-conditioned rows, groups other
        than GL(h), rescalings, diagonal and rotary ones, and weights that several modules share.
    """
    owners = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    shared = {name for name, p in model.named_parameters(remove_duplicate=False) if owners[id(p)] > 1}
    entries: dict[str, list[tuple[Tensor, Tensor]]] = {}
    kept = []
    for block in symmetries:
        if shared & set(block.parameters):
            kept.append((block.name, "several modules share its weights"))
            continue
        point = block.read(model).detach()
        x = point.double()
        x = x.unsqueeze(-1) if block.kind == "rescaling" else x
        found = [_fix(block, copy) for copy in x]
        bad = sum(f is None for f in found)
        if bad:
            kept.append((block.name, f"{bad} of {block.copies} copies: no well-conditioned rows, or another group"))
        new = torch.stack([copy if f is None else f[1] for copy, f in zip(x, found, strict=True)])
        block.write_(model, (new.squeeze(-1) if block.kind == "rescaling" else new).to(point))
        rows = [(piece, r) for piece in block.pieces for r in range(piece.row.numel())]
        for copy, f in enumerate(found):
            for row, column, value in f[0] if f is not None else []:
                piece, r = rows[row]
                index = piece.channel[copy, column] + piece.row[r]
                entries.setdefault(piece.name, []).append((index, torch.tensor(value, dtype=torch.float64)))
    for name, pairs in entries.items():
        path, _, leaf = name.rpartition(".")
        parameter = model.get_parameter(name)
        index = torch.stack([i for i, _ in pairs]).to(parameter.device)
        values = torch.stack([v for _, v in pairs]).to(parameter)
        parametrize.register_parametrization(
            model.get_submodule(path), leaf, FixedEntries(parameter.shape, index, values)
        )
    return kept


def from_minimal_(model: nn.Module) -> None:
    """Plain parameters again, with the values that they have.

    Args:
        model: A model that `to_minimal_` changed; make the optimizer anew.

    Raises:
        ValueError: If no weight of it is in minimal form.
    """
    found = False
    for module in list(model.modules()):
        for leaf, steps in list(getattr(module, "parametrizations", {}).items()):
            if any(isinstance(step, FixedEntries) for step in steps):
                parametrize.remove_parametrizations(module, leaf, leave_parametrized=True)
                found = True
    if not found:
        raise ValueError(f"{type(model).__name__} has no weight in minimal form.")


def _fix(block: Block, x: Tensor) -> Fixed | None:
    """Fixed entries and new point of one copy ``(n + m, h)``."""
    columns = list(range(block.h))
    if block.group.dim == block.h**2 and block.kind != "rescaling":
        return _fix_square(block, x, columns)
    if block.kind == "rescaling" or str(block.group) == f"Diagonal({block.h})":
        return _join(block, x, [_fix_scale(block, x, (j,)) for j in columns])
    channels = turns(block)
    if channels is None:
        return None
    pairs, rest = channels
    parts = [_fix_scale(block, x, pair) for pair in pairs]
    return _join(block, x, parts + ([_fix_square(block, x, rest)] if rest else []))


def _join(block: Block, x: Tensor, parts: list[Fixed | None]) -> Fixed | None:
    """Parts that each change their own columns."""
    result, entries = x.clone(), []
    for part in parts:
        if part is None:
            return None
        entries += part[0]
        changed = sorted({column for _, column, _ in part[0]})
        result[:, changed] = part[1][:, changed]
    return entries, result


def _fix_square(block: Block, x: Tensor, columns: list[int]) -> Fixed | None:
    G, H = x[: block.n, columns], x[block.n :, columns]
    h = len(columns)
    if block.n < h or not bool(G.isfinite().all() and H.isfinite().all()) or int(torch.linalg.matrix_rank(G)) < h:
        return None
    pivots = pivot_rows(G)
    top = G[pivots]
    if float(torch.linalg.cond(top)) > CONDITION:
        return None
    left, right = torch.linalg.solve(top, G, left=False), H @ top.mT
    scale = float((right.norm() / left.norm()).sqrt()) if bool(right.norm() > 0) else 1.0
    new = x.clone()
    new[: block.n, columns], new[block.n :, columns] = left * scale, right / scale
    entries = []
    for i, row in enumerate(pivots.tolist()):
        for j, column in enumerate(columns):
            entries.append((row, column, scale if i == j else 0.0))
            new[row, column] = entries[-1][2]
    return entries, new


def _fix_scale(block: Block, x: Tensor, columns: tuple[int, ...]) -> Fixed | None:
    """One column, or two as one complex column."""
    z = x[:, columns[0]] if len(columns) == 1 else torch.complex(x[:, columns[0]], x[:, columns[1]])
    g, k = z[: block.n], z[block.n :]
    a, b = g.abs().norm(), k.abs().norm()
    if not bool(a > 0) or not bool((a * b).isfinite()):
        return None
    row = int(g.abs().argmax())
    # Balanced lengths, so that the fixed entry is of the size of the others.
    size = (b / a).sqrt() if bool(b > 0) else torch.ones_like(a)
    unit = g[row].abs() / g[row] if not block.group.positive else torch.ones_like(g[row])
    new = torch.cat([g * unit * size, k / (unit.conj() * size)])
    result = x.clone()
    parts = (new,) if len(columns) == 1 else (new.real, new.imag)
    entries = []
    for column, part in zip(columns, parts, strict=True):
        result[:, column] = part
        value = float(part[row]) if column == columns[0] else 0.0
        entries.append((row, column, value))
        result[row, column] = value
    return entries, result
