"""The groups that act on one pair ``(G, H)`` by ``(G A^-1, H A^T)``.

A `Group` is a string, its name, so that ``block.group == "GL(32)"`` reads as one would write it; beside the name it
knows its dimension, a basis of its Lie algebra and how to draw a finite element at random.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Basis = Callable[[], Tensor]
Draw = Callable[[int, float, torch.Generator | None], Tensor]


def _gauss(copies: int, h: int, scale: float, generator: torch.Generator | None) -> Tensor:
    """Gaussian matrices around the identity: ``1 + scale * N / sqrt(h)``."""
    noise = torch.randn(copies, h, h, dtype=torch.float64, generator=generator)
    matrices: Tensor = torch.eye(h, dtype=torch.float64) + scale * noise / h**0.5
    return matrices


class Group(str):
    """A subgroup of GL(h), named by its string value.

    Attributes:
        h: Size of its matrices.
        dim: Dimension of the group, for one copy.
        style: How a rotary embedding pairs the channels (``"half"``, ``"interleaved"``, ``"paired"``), or ``""``.
        positive: Whether only the part connected to the identity is a symmetry, as for ReLU.
        fixed: Orthonormal vectors ``(h, r)`` that the group keeps, ``b^T A = b^T``, or None.
    """

    h: int
    dim: int
    style: str
    positive: bool
    fixed: Tensor | None
    _basis: Basis
    _draw: Draw | None

    @classmethod
    def make(
        cls, name: str, h: int, dim: int, basis: Basis, draw: Draw | None, *, style: str = "", positive: bool = False
    ) -> Group:
        """Build a group from its parts.

        Args:
            name: The name.
            h: Size of the matrices.
            dim: Dimension.
            basis: Returns a basis of the Lie algebra, ``(dim, h, h)``.
            draw: Draws finite elements; the matrix exponential of the algebra if None.
            style: How a rotary embedding pairs the channels.
            positive: Whether only the identity component counts.

        Returns:
            The group.
        """
        group = cls(name)
        group.h, group.dim, group.style, group.positive = h, dim, style, positive
        group._basis, group._draw, group.fixed = basis, draw, None
        return group

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle and copy by value."""
        kind = self._kind()
        # The usual groups are made again from their size: a basis of GL(64) alone would be 16 million numbers.
        data = self.fixed if self.fixed is not None else torch.zeros(0) if kind in _SIMPLE else self.algebra()
        return _remake, (str(self), self.h, self.dim, data, self.style, self.positive, kind)

    def _kind(self) -> str:
        if self.fixed is not None:
            return "stabilizer"
        return (
            self.split("(")[0] if str(self) in _simple_names(self.h) else "commutant" if self._draw else "exponential"
        )

    def algebra(self) -> Tensor:
        """Basis of the Lie algebra.

        Returns:
            float64 matrices ``(dim, h, h)``, orthonormal in the Frobenius inner product.
        """
        return self._basis()

    def project(self, L: Tensor) -> Tensor:
        """Orthogonal projection of matrices onto the Lie algebra.

        Args:
            L: Matrices ``(..., h, h)``.

        Returns:
            Their part in the algebra.
        """
        if self.dim == self.h**2:
            return L
        if self == f"O({self.h})":  # the basis would be h^4 / 2 numbers
            return (L - L.mT) / 2
        if self.fixed is not None:
            fixed = self.fixed.to(L)
            return L - fixed @ (fixed.mT @ L)
        if self == f"Diagonal({self.h})":
            return torch.diag_embed(L.diagonal(dim1=-2, dim2=-1))
        flat = self.algebra().to(L).flatten(1)
        return ((L.flatten(-2) @ flat.mT) @ flat).reshape(L.shape)

    def random(self, copies: int, scale: float = 1.0, generator: torch.Generator | None = None) -> Tensor:
        """Finite elements of the group, drawn at random.

        Args:
            copies: How many.
            scale: Distance from the identity, roughly; 1 gives Gaussian matrices around it.
            generator: Source of randomness.

        Returns:
            float64 matrices ``(copies, h, h)``, invertible and moderately conditioned.
        """
        best = self._candidate(copies, scale, generator)
        for _ in range(20):
            bad = torch.linalg.cond(best) > 200.0 * self.h**0.5
            if not bool(bad.any()):
                break
            best[bad] = self._candidate(int(bad.sum()), scale, generator)
        return best

    def _candidate(self, copies: int, scale: float, generator: torch.Generator | None) -> Tensor:
        if self._draw is not None:
            return self._draw(copies, scale, generator)
        coefficients = torch.randn(copies, self.dim, dtype=torch.float64, generator=generator)
        exponent = scale * torch.einsum("cd,dij->cij", coefficients, self.algebra()) / self.h**0.5
        drawn: Tensor = torch.linalg.matrix_exp(exponent)
        return drawn


def _remake(name: str, h: int, dim: int, algebra: Tensor, style: str, positive: bool, kind: str) -> Group:
    simple: dict[str, Callable[[int], Group]] = {"GL": general_linear, "O": orthogonal}
    if kind in simple:
        return simple[kind](h)
    if kind == "Rescaling":
        return rescaling(positive=positive)
    if kind == "stabilizer":
        return stabilizer(algebra)
    draw = _associative(algebra, h) if kind == "commutant" else None
    return Group.make(name, h, dim, lambda: algebra, draw, style=style, positive=positive)


_SIMPLE = ("GL", "O", "Rescaling")


def _simple_names(h: int) -> set[str]:
    return {f"GL({h})", f"O({h})", "Rescaling"}


def _associative(basis: Tensor, h: int) -> Draw:
    """Draw for an algebra that is closed under products: the identity plus any element, where that is invertible."""

    def draw(copies: int, scale: float, generator: torch.Generator | None) -> Tensor:
        coefficients = torch.randn(copies, basis.shape[0], dtype=torch.float64, generator=generator)
        noise = torch.einsum("cd,dij->cij", coefficients, basis)
        size = noise.norm(dim=(-2, -1), keepdim=True).clamp_min(1e-12) / h**0.5
        drawn: Tensor = torch.eye(h, dtype=torch.float64) + scale * 0.7 * noise / size
        return drawn

    return draw


def general_linear(h: int) -> Group:
    """All invertible matrices.

    Args:
        h: Their size.

    Returns:
        The group ``GL(h)``.
    """
    return Group.make(
        f"GL({h})", h, h * h, lambda: torch.eye(h * h, dtype=torch.float64).reshape(h * h, h, h),
        lambda copies, scale, generator: _gauss(copies, h, scale, generator),
    )  # fmt: skip


def orthogonal(h: int) -> Group:
    """Rotations and reflections, what cosine attention leaves.

    Args:
        h: Their size.

    Returns:
        The group ``O(h)``.
    """

    def basis() -> Tensor:
        i, j = torch.triu_indices(h, h, 1)
        out = torch.zeros(i.numel(), h, h, dtype=torch.float64)
        index = torch.arange(i.numel())
        out[index, i, j], out[index, j, i] = 0.5**0.5, -(0.5**0.5)
        return out

    def draw(copies: int, scale: float, generator: torch.Generator | None) -> Tensor:
        turned: Tensor = torch.linalg.qr(_gauss(copies, h, scale, generator))[0]
        return turned

    return Group.make(f"O({h})", h, h * (h - 1) // 2, basis, draw)


def diagonal(h: int, *, positive: bool = False) -> Group:
    """Diagonal matrices.

    Args:
        h: Their size.
        positive: Whether the entries must be positive.

    Returns:
        The group ``Diagonal(h)``.
    """

    def basis() -> Tensor:
        return torch.diag_embed(torch.eye(h, dtype=torch.float64))

    return Group.make(f"Diagonal({h})", h, h, basis, None if positive else _signed(h), positive=positive)


def _signed(h: int) -> Draw:
    """Diagonal matrices of either sign."""

    def draw(copies: int, scale: float, generator: torch.Generator | None) -> Tensor:
        numbers = torch.randn(2, copies, h, dtype=torch.float64, generator=generator)
        return torch.diag_embed(torch.exp(0.5 * scale * numbers[0]) * numbers[1].sign())

    return draw


def stabilizer(fixed: Tensor) -> Group:
    """Invertible matrices that keep given vectors, ``b^T A = b^T``: what constants added to the rows of G leave.

    Args:
        fixed: The vectors, ``(h, r)`` with ``0 < r < h``, independent.

    Returns:
        The group ``Aff(h - 1)`` for one vector (affine maps of what is left), else ``Stabilizer(h, r)``; its dimension
        is ``h (h - r)``.
    """
    h, r = fixed.shape
    basis, _ = torch.linalg.qr(fixed.double(), mode="complete")
    kept, free = basis[:, :r], basis[:, r:]

    def algebra() -> Tensor:
        return torch.einsum("ia,jk->akij", free, torch.eye(h, dtype=torch.float64)).reshape(-1, h, h)

    def draw(copies: int, scale: float, generator: torch.Generator | None) -> Tensor:
        noise = _gauss(copies, h, scale, generator) - torch.eye(h, dtype=torch.float64)
        drawn: Tensor = torch.eye(h, dtype=torch.float64) + free @ (free.mT @ noise)
        return drawn

    group = Group.make(f"Aff({h - 1})" if r == 1 else f"Stabilizer({h}, {r})", h, h * (h - r), algebra, draw)
    group.fixed = kept
    return group


def scalar(h: int) -> Group:
    """Multiples of the identity.

    Args:
        h: Their size.

    Returns:
        The group ``Scalar(h)``, of dimension one.
    """
    draw = _signed(1)
    return Group.make(
        f"Scalar({h})", h, 1, lambda: torch.eye(h, dtype=torch.float64)[None] / h**0.5,
        lambda copies, scale, generator: draw(copies, scale, generator) * torch.eye(h, dtype=torch.float64),
    )  # fmt: skip


def rescaling(*, positive: bool) -> Group:
    """One number per hidden unit.

    Args:
        positive: Whether it must be positive, as for ReLU; a gated unit allows any number but zero.

    Returns:
        The group ``Rescaling``, of dimension one, with ``h = 1``.
    """
    basis = torch.ones(1, 1, 1, dtype=torch.float64)
    draw = None if positive else _signed(1)
    return Group.make("Rescaling", 1, 1, lambda: basis, draw, positive=positive)


def rotary(h: int, pairs: Sequence[tuple[int, int]], rest: Sequence[int] = ()) -> Group:
    """What commutes with a rotary embedding: per pair a rotation and scaling, and all of GL on the channels left alone.

    Args:
        h: Size of the matrices.
        pairs: Channels that are rotated together, every pair at its own frequency.
        rest: Channels that are not rotated.

    Returns:
        The group ``R(r)`` or ``R(r) x GL(h - r)`` with ``r = 2 len(pairs)``.
    """
    r, k = 2 * len(pairs), len(rest)

    def basis() -> Tensor:
        out = torch.zeros(r + k * k, h, h, dtype=torch.float64)
        for at, (i, j) in enumerate(pairs):
            out[2 * at, i, i] = out[2 * at, j, j] = 0.5**0.5
            out[2 * at + 1, i, j], out[2 * at + 1, j, i] = 0.5**0.5, -(0.5**0.5)
        row = torch.tensor(list(rest), dtype=torch.long)
        index = torch.arange(k * k)
        out[r + index, row.repeat_interleave(k), row.repeat(k)] = 1.0
        return out

    def draw(copies: int, scale: float, generator: torch.Generator | None) -> Tensor:
        out = torch.zeros(copies, h, h, dtype=torch.float64)
        i, j = torch.tensor(list(pairs), dtype=torch.long).reshape(-1, 2).T
        numbers = torch.randn(2, copies, len(pairs), dtype=torch.float64, generator=generator)
        size, angle = torch.exp(0.5 * scale * numbers[0]), 2 * scale * numbers[1]
        out[:, i, i] = out[:, j, j] = size * torch.cos(angle)
        out[:, i, j], out[:, j, i] = size * torch.sin(angle), -size * torch.sin(angle)
        row = torch.tensor(list(rest), dtype=torch.long)
        out[:, row[:, None], row[None, :]] = _gauss(copies, k, scale, generator) if k else 0.0
        return out

    name = f"R({r})" + (f" x GL({k})" if k else "")
    return Group.make(name, h, r + k * k, basis, draw, style=_style(pairs))


def _style(pairs: Sequence[tuple[int, int]]) -> str:
    """Name the pairing: neighbors, or halves of the rotated part."""
    ordered = sorted(pairs)
    if all(j == i + 1 for i, j in ordered):
        return "interleaved"
    return "half" if len({j - i for i, j in ordered}) == 1 else "paired"


def commutant(matrices: Tensor, tolerance: float = 1e-11) -> Group | None:
    """Largest group of invertible matrices that commute with all given ones.

    Channels that no matrix connects are looked at one pair of clusters at a time, so the cost is small even at h = 256.

    Args:
        matrices: ``(T, h, h)``, what stands between the two factors at many positions.
        tolerance: Relative size below which an entry is zero.

    Returns:
        The group; None if the clusters are too large to be worth it.
    """
    h = matrices.shape[-1]
    clusters = _clusters((matrices.abs() > tolerance * matrices.abs().max()).any(0))
    if max(map(len, clusters)) > 8 or (max(map(len, clusters)) > 2 and h > 64):
        return None
    found = _intertwiners(matrices, clusters, tolerance)
    return _name(h, clusters, found)


def _clusters(linked: Tensor) -> list[list[int]]:
    """Connected components of a symmetric-ish pattern."""
    h = linked.shape[0]
    reach = (linked | linked.T | torch.eye(h, dtype=torch.bool)).double()
    for _ in range(max(1, h.bit_length())):
        reach = ((reach @ reach) > 0).double()
    return [list(map(int, row)) for row in sorted({tuple(r.nonzero()[:, 0].tolist()) for r in reach})]


Found = dict[tuple[int, int], Tensor]


def _intertwiners(matrices: Tensor, clusters: list[list[int]], tolerance: float) -> Found:
    """Solutions ``X`` of ``M_a X = X M_b`` for every two clusters, in one batch per pair of sizes."""
    found: Found = {}
    sizes = sorted({len(c) for c in clusters})
    scale = float(matrices.abs().max())
    index = [torch.tensor(c) for c in clusters]
    parts = {i: matrices[:, c[:, None], c[None]] / scale for i, c in enumerate(index)}
    for p in sizes:
        for q in sizes:
            first = [i for i, c in enumerate(clusters) if len(c) == p]
            second = [i for i, c in enumerate(clusters) if len(c) == q]
            A = torch.stack([parts[i] for i in first])[:, None]  # (a, 1, T, p, p)
            B = torch.stack([parts[i] for i in second])[None]  # (1, b, T, q, q)
            eye_p, eye_q = torch.eye(p, dtype=A.dtype), torch.eye(q, dtype=A.dtype)
            left = torch.einsum("abtij,kl->abtikjl", A, eye_q).reshape(len(first), 1, -1, p * q, p * q)
            right = torch.einsum("ij,abtkl->abtiljk", eye_p, B).reshape(1, len(second), -1, p * q, p * q)
            # Singular values of the equations themselves: their squares would hide slow frequencies.
            values, vectors = _null((left - right).flatten(2, 3))
            values = torch.nn.functional.pad(values, (0, p * q - values.shape[-1]))
            zero = values < tolerance * (matrices.shape[0] * p * q) ** 0.5
            for x, y in zero.any(-1).nonzero().tolist():
                found[first[x], second[y]] = vectors[x, y][zero[x, y]].reshape(-1, p, q)
    return found


def _null(equations: Tensor) -> tuple[Tensor, Tensor]:
    """Singular values and right vectors; a QR factorization first keeps the left ones small."""
    if equations.shape[-2] > equations.shape[-1]:
        equations = torch.linalg.qr(equations, mode="r")[1]
    _, values, vectors = torch.linalg.svd(equations, full_matrices=True)
    return values, vectors


def _name(h: int, clusters: list[list[int]], found: Found) -> Group:
    """Recognize the usual groups; any other commutant keeps its basis."""
    off = {key for key in found if key[0] != key[1]}
    single = [i for i, c in enumerate(clusters) if len(c) == 1]
    pairs = [i for i, c in enumerate(clusters) if len(c) == 2]
    rotated = all(
        found[i, i].shape[0] == 2 and (i, j) not in off for i in pairs for j in range(len(clusters)) if j != i
    )
    whole = all((i, j) in found for i in single for j in single)
    if len(single) == h and whole:
        return general_linear(h)
    if len(single) == h and not off:
        return diagonal(h)
    if len(single) + len(pairs) == len(clusters) and rotated and whole and pairs and _turns(found, pairs):
        return rotary(h, [(clusters[i][0], clusters[i][1]) for i in pairs], [clusters[i][0] for i in single])
    basis = []
    for (i, j), blocks in found.items():
        for block in blocks:
            matrix = torch.zeros(h, h, dtype=torch.float64)
            matrix[torch.tensor(clusters[i])[:, None], torch.tensor(clusters[j])[None]] = block
            basis.append(matrix)
    algebra = torch.stack(basis)
    if len(basis) == 1:
        return scalar(h)
    return Group.make(f"Commutant({len(basis)})", h, len(basis), lambda: algebra, _associative(algebra, h))


def _turns(found: Found, pairs: list[int]) -> bool:
    """Whether every pair commutes with rotations, so ``a + b J`` and not some other plane of matrices."""
    turn = torch.tensor([[0.0, 1.0], [-1.0, 0.0]], dtype=torch.float64).flatten() * 0.5**0.5
    return all(bool(((found[i, i].flatten(1) @ turn) ** 2).sum() > 1 - 1e-9) for i in pairs)
