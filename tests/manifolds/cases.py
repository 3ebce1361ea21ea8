"""Points, vectors and group elements that the tests share."""

from __future__ import annotations

import numpy as np
import torch
from quotientsharp.manifolds import GLQuotient
from torch import Tensor

SIZES = (1, 2, 8, 64)
METRICS = ("inv", "mix", 0.3)  # at 1/2 and h = 1 even the first-order step is of second order
PAPER_METRICS = ("inv", "mix")
RETRACTIONS = ("first_order", "christoffel", "geodesic")


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def point(h: int, *, batch: tuple[int, ...] = (2,), seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """A point with n != m and singular values between 1/2 and 2."""
    n, m = h + 5, h + 3
    gen = generator(seed)
    left = torch.linalg.qr(torch.randn(*batch, n, h, generator=gen, dtype=torch.float64)).Q
    right = torch.linalg.qr(torch.randn(*batch, m, h, generator=gen, dtype=torch.float64)).Q
    s = 0.5 + 1.5 * torch.rand(*batch, 1, h, generator=gen, dtype=torch.float64)
    mixer = group_element(h, 3.0, batch=batch, seed=seed + 1)
    x = torch.cat([left * s.sqrt(), right * s.sqrt()], -2)
    return GLQuotient(n).act(x, mixer).to(dtype)


def rows(h: int) -> int:
    return h + 5


def tangent(manifold: GLQuotient, x: Tensor, length: float = 0.3, seed: int = 7) -> Tensor:
    """A horizontal vector of given length at every entry of the batch."""
    u = manifold.random_tangent(x, generator=generator(seed))
    return u * (length / manifold.norm(x, u, keepdim=True))


def group_element(h: int, condition: float, *, batch: tuple[int, ...] = (2,), seed: int = 3) -> Tensor:
    """Matrices with a given condition number."""
    gen = generator(seed)
    first, second = (torch.linalg.qr(torch.randn(*batch, h, h, generator=gen, dtype=torch.float64)).Q for _ in range(2))
    scale = (
        torch.logspace(0, float(np.log10(condition)), h, dtype=torch.float64) if h > 1 else torch.tensor([condition])
    )
    return first @ torch.diag(scale.double() / condition**0.5) @ second


def gap(x: Tensor, y: Tensor) -> float:
    """Largest difference relative to the largest entry."""
    return float((x - y).abs().max() / y.abs().max())


def arrays(manifold: GLQuotient, *tensors: Tensor) -> list[tuple[np.ndarray, np.ndarray]]:
    """Factors of unbatched tensors as NumPy arrays."""
    out = []
    for tensor in tensors:
        first, second = manifold.unpack_tensor(tensor.double())
        out.append((first.numpy(), second.numpy()))
    return out
