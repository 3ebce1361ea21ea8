"""The canonical point of an orbit: the balanced gauge with every freedom that it leaves fixed by a rule.

The balanced points of an orbit of GL(h), ``G^T G = H^T H``, differ by a common rotation of the columns of ``G`` and
``H``. Singular vectors of ``G H^T`` fix it up to signs where the singular values differ. Where they do not, only the
space that a cluster of equal values spans is defined; its canonical basis is the pivoted Cholesky factor of the
projector onto that space, which does not depend on the basis one starts from. For a single value this is the sign rule:
the largest entry of the column of ``G`` is positive.
"""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from .blocks import Block

PIVOT = 1e-3
"""The first row within this fraction of the largest is the pivot: equal entries do not leave the choice to rounding."""

RANK = 1e-12
"""Fraction of the largest singular value below which a product counts as one of lower rank."""


def tie(dtype: torch.dtype) -> float:
    """Distance, relative to the largest, below which singular values count as equal.

    Args:
        dtype: Dtype of the weights. Rounding them moves singular vectors by ``eps / gap``: the root of ``eps``
            shares the loss between both.

    Returns:
        The root of the machine precision, at most 1e-3.
    """
    return min(math.sqrt(torch.finfo(dtype).eps), 1e-3)


def _pivoted(U: Tensor) -> Tensor:
    """Rotation ``Q`` for which ``U Q`` is the pivoted Cholesky factor of ``U U^T``; ``U`` has orthonormal columns."""
    k = U.shape[1]
    rest = U.clone()
    Q = torch.zeros(k, k, dtype=U.dtype, device=U.device)
    for index in range(k):
        sizes = rest.square().sum(1)
        pivot = int((sizes >= (1 - PIVOT) * sizes.max()).nonzero()[0, 0])
        direction = rest[pivot] / rest[pivot].norm()  # orthogonal to those before
        rest = rest - (rest @ direction)[:, None] * direction[None]
        Q[:, index] = direction
    return Q


def _fix(U: Tensor, s: Tensor, width: float) -> Tensor:
    """Rotation ``(h, h)``, block diagonal over clusters of singular values, that makes ``U Q`` canonical.

    Args:
        U: Orthonormal columns ``(n, h)``.
        s: The singular values, descending.
        width: Gap, relative to the largest, below which values belong together; a chain of such gaps is one cluster.

    Returns:
        The rotation.
    """
    h = s.numel()
    Q = torch.zeros(h, h, dtype=U.dtype, device=U.device)
    apart = (s[:-1] - s[1:] > width * s[0]).nonzero()[:, 0] + 1
    bounds = [0, *apart.tolist(), h]
    for start, end in itertools.pairwise(bounds):
        Q[start:end, start:end] = _pivoted(U[:, start:end])
    return Q


class Canonical(NamedTuple):
    """A canonical point ``(G, H)`` and how much rounding of the weights is enlarged in it."""

    G: Tensor
    H: Tensor
    gain: float


def _gain(s: Tensor, width: float) -> float:
    """Largest singular value over the smallest gap between clusters: singular vectors move by eps times this."""
    gaps = (s[:-1] - s[1:])[s[:-1] - s[1:] > width * s[0]]
    return float(s[0] / gaps.min()) if len(gaps) else 1.0


def balanced_pair(G: Tensor, H: Tensor, width: float) -> Canonical | None:
    """Canonical point of a GL(h) orbit.

    Args:
        G: First factor ``(n, h)``, float64.
        H: Second factor ``(m, h)``.
        width: Relative gap below which singular values count as equal.

    Returns:
        ``(G, H)`` with ``G^T G = H^T H``, diagonal but for clusters of equal singular values; None if the product has
        lower rank than h: its orbit then has no balanced point.
    """
    h = G.shape[1]
    if min(G.shape[0], H.shape[0]) < h or not bool(G.isfinite().all() and H.isfinite().all()):
        return None
    q_g, r_g = torch.linalg.qr(G)
    q_h, r_h = torch.linalg.qr(H)
    u, s, vt = torch.linalg.svd(r_g @ r_h.mT)
    if not bool(s[-1] > RANK * s[0]):
        return None
    left, right = q_g @ u, q_h @ vt.mT
    Q = _fix(left, s, width)
    root = s.sqrt()
    return Canonical((left * root) @ Q, (right * root) @ Q, _gain(s, width))


def rotated_pair(G: Tensor, H: Tensor, width: float) -> Canonical:
    """Canonical point of an O(h) orbit: the singular vectors of ``G`` above ``H``.

    Args:
        G: First factor.
        H: Second factor.
        width: Relative gap below which singular values count as equal.

    Returns:
        ``(G Q, H Q)``.
    """
    u, s, vt = torch.linalg.svd(torch.cat([G, H]), full_matrices=False)
    Q = vt.mT @ _fix(u, s, width)
    return Canonical(G @ Q, H @ Q, _gain(s, width))


def scaled_pairs(g: Tensor, k: Tensor, *, positive: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Canonical points of ``(g / c, c k)``, real or complex; for complex vectors the second is ``conj(c) k``.

    Args:
        g: First vectors, ``(..., n)``.
        k: Second vectors, ``(..., m)``.
        positive: Whether ``c`` must be positive, so that the sign stays.

    Returns:
        Vectors of equal length, the pivot entry of the first real and positive, and which of them there are: where a
        vector is zero the orbit has no such point, and both are returned as they are.
    """
    a, b = g.abs().norm(dim=-1, keepdim=True), k.abs().norm(dim=-1, keepdim=True)
    live = (a > 0) & (b > 0) & (a * b).isfinite()
    one = torch.ones_like(a)
    c = (torch.where(live, a, one) / torch.where(live, b, one)).sqrt().to(g.dtype)
    if not positive:
        sizes = g.abs()
        at = (sizes >= (1 - PIVOT) * sizes.amax(-1, keepdim=True)).to(torch.int8).argmax(-1, keepdim=True)
        pivot = g.gather(-1, at)
        c = torch.where(live, c * pivot / torch.where(live, pivot.abs(), one), one.to(g.dtype))
    return g / c, c.conj() * k, live.squeeze(-1)


def turns(block: Block) -> tuple[list[tuple[int, int]], list[int]] | None:
    """Channels that a rotary embedding pairs, and those that it leaves alone.

    Args:
        block: A block.

    Returns:
        Pairs and the rest, or None if the group is not of this kind.
    """
    if not block.group.style:
        return None
    algebra = block.group.algebra()
    count = int(str(block.group).removeprefix("R(").split(")")[0]) // 2
    pairs = []
    for index in range(count):
        i, j = (algebra[2 * index + 1] > 0).nonzero()[0].tolist()
        pairs.append((i, j))
    used = {c for pair in pairs for c in pair}
    return pairs, [c for c in range(block.h) if c not in used]


def has_canonical_point(block: Block) -> bool:
    """Whether a canonical point is known for a block's group.

    Args:
        block: The block.

    Returns:
        True for GL(h), O(h), rescalings, diagonal, scalar and rotary groups.
    """
    simple = {f"{name}({block.h})" for name in ("GL", "O", "Diagonal", "Scalar")}
    return block.kind == "rescaling" or str(block.group) in simple or bool(block.group.style)


def _scaled(block: Block, x: Tensor) -> tuple[Tensor, Tensor]:
    """Copies of a block whose group scales: columns by themselves, in complex pairs, or all together."""
    G, H = x[:, : block.n], x[:, block.n :]
    positive = block.group.positive
    if str(block.group) == f"Scalar({block.h})":
        g, k, live = scaled_pairs(G.flatten(1), H.flatten(1), positive=positive)
        return torch.cat([g.reshape(G.shape), k.reshape(H.shape)], 1), live
    g, k, live = scaled_pairs(G.mT, H.mT, positive=positive)
    live = live.all(1)
    return torch.where(live[:, None, None], torch.cat([g.mT, k.mT], 1), x), live


def _turned(block: Block, x: Tensor, width: float) -> tuple[Tensor, Tensor, Tensor]:
    """A pair of channels is one complex channel ``x_i + 1j x_j``, which the group multiplies by complex numbers."""
    channels = turns(block)
    assert channels is not None
    pairs, rest = channels
    i, j = torch.tensor(pairs).T
    z = torch.complex(x[..., i], x[..., j]).mT
    g, k, live = scaled_pairs(z[..., : block.n], z[..., block.n :], positive=False)
    new, live = torch.cat([g, k], -1).mT, live.all(1)
    result, gain = x.clone(), torch.ones(len(x), dtype=torch.float64)
    result[..., i], result[..., j] = new.real, new.imag
    for index in range(len(x) if rest else 0):
        pair = balanced_pair(x[index, : block.n, rest], x[index, block.n :, rest], width)
        live[index] &= pair is not None
        if pair is not None:
            result[index][:, rest], gain[index] = torch.cat(pair[:2]), pair.gain
    return torch.where(live[:, None, None], result, x), live, gain


def _rotated(block: Block, x: Tensor, width: float) -> tuple[Tensor, Tensor, Tensor]:
    """Copies of a block whose group is GL(h) or O(h), one by one: their clusters differ."""
    points, live, gains = [], [], []
    for copy in x:
        G, H = copy[: block.n], copy[block.n :]
        whole = block.group.dim == block.h**2
        pair = balanced_pair(G, H, width) if whole else rotated_pair(G, H, width)
        points.append(copy if pair is None else torch.cat(pair[:2]))
        live.append(pair is not None)
        gains.append(1.0 if pair is None else pair.gain)
    return torch.stack(points), torch.tensor(live), torch.tensor(gains, dtype=torch.float64)


ROUNDS = 8
"""How often at most a point is made canonical again until rounding it to its dtype changes nothing."""


def canonical_point(block: Block, point: Tensor) -> tuple[Tensor, Tensor]:
    """Canonical point of a block.

    A copy that is there already, up to what rounding of its weights leaves open, is returned bit for bit. In half
    precision rounding alone may make another entry the pivot; the form is then made again from the rounded point.

    Args:
        block: The block.
        point: The point, as ``block.read`` gives it.

    Returns:
        The point in its dtype, and per copy whether it has a canonical point. Others stay as they are: those whose
        product has lower rank than h, and groups other than GL(h), O(h), scalings and rotary groups.
    """
    x = point.detach().cpu().clone()
    x = x.unsqueeze(-1) if block.kind == "rescaling" else x
    live = torch.ones(len(x), dtype=torch.bool)
    todo = torch.arange(len(x))
    for _ in range(ROUNDS):
        found, alive, gain = _canonical(block, x[todo].double(), tie(point.dtype))
        moved, size = (found - x[todo]).flatten(1).norm(dim=1), x[todo].flatten(1).norm(dim=1).double()
        far = alive & ~(moved <= 16 * float(torch.finfo(point.dtype).eps) * gain * size)
        live[todo] = alive
        todo = todo[far]
        if not len(todo):
            break
        x[todo] = found[far].to(x.dtype)
    return (x.squeeze(-1) if block.kind == "rescaling" else x).to(point), live


def _canonical(block: Block, x: Tensor, width: float) -> tuple[Tensor, Tensor, Tensor]:
    """Canonical points of some copies, which of them there are, and what they make of rounding."""
    name = str(block.group)
    if block.kind == "rescaling" or name in (f"Diagonal({block.h})", f"Scalar({block.h})"):
        found, live = _scaled(block, x)
        return found, live, torch.ones(len(x), dtype=torch.float64)
    if block.group.dim == block.h**2 or name == f"O({block.h})":
        return _rotated(block, x, width)
    if turns(block) is not None:
        return _turned(block, x, width)
    return x, torch.zeros(len(x), dtype=torch.bool), torch.ones(len(x), dtype=torch.float64)
