"""Small models that break a symmetry, or read its weights a second time, without saying so in any name."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

D, HEADS, H = 16, 2, 8


def rotate(x: Tensor, base: float = 100.0) -> Tensor:
    """Rotary embedding in halves, positions along the second last axis."""
    h, length = x.shape[-1], x.shape[-2]
    place, plane = (torch.arange(size, dtype=x.dtype, device=x.device) for size in (length, h // 2))
    angle = torch.outer(place, base ** (-plane * 2 / h))
    cos, sin = torch.cat([angle.cos()] * 2, -1), torch.cat([angle.sin()] * 2, -1)
    return x * cos + torch.cat([-x.narrow(-1, h // 2, h // 2), x.narrow(-1, 0, h // 2)], -1) * sin


class Attention(nn.Module):
    """Plain attention; the variants override one step each."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(D, D) for _ in range(4))

    def split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (HEADS, H)).transpose(-3, -2)

    def query(self, x: Tensor) -> Tensor:
        return x

    def key(self, x: Tensor) -> Tensor:
        return x

    def value(self, x: Tensor) -> Tensor:
        return x

    def bias(self, q: Tensor, k: Tensor) -> Tensor | float:
        return 0.0

    def mixed(self, y: Tensor, x: Tensor) -> Tensor:
        return y

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self.split(layer(x)) for layer in (self.q, self.k, self.v))
        q, k, v = self.query(q), self.key(k), self.value(v)
        weights = torch.softmax(q @ k.mT / H**0.5 + self.bias(q, k), -1)
        y = self.mixed(weights @ v, x)
        return x + self.o(y.transpose(-3, -2).flatten(-2))


class Clipped(Attention):
    def query(self, x: Tensor) -> Tensor:
        return x.clamp(-0.5, 0.5)

    key = value = query


class Cosine(Attention):
    def query(self, x: Tensor) -> Tensor:
        return 5 * F.normalize(x, dim=-1)

    key = query


class NormAfterRotation(Attention):
    def query(self, x: Tensor) -> Tensor:
        x = rotate(x)
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)

    key = query


class RotatedValues(Attention):
    def value(self, x: Tensor) -> Tensor:
        return rotate(x)


class NormBeforeOutput(Attention):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(H)

    def mixed(self, y: Tensor, x: Tensor) -> Tensor:
        return self.norm(y)


class RelativePositions(Attention):
    """Transformer-XL: queries also meet projected positions, with a bias of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.r = nn.Linear(D, D, bias=False)
        self.u = nn.Parameter(torch.randn(HEADS, 1, H))

    def bias(self, q: Tensor, k: Tensor) -> Tensor:
        length = q.shape[-2]
        table = torch.sin(torch.arange(length, dtype=q.dtype)[:, None] * torch.arange(1, D + 1, dtype=q.dtype) / D)
        r = self.split(self.r(table))
        return (q + self.u) @ r.mT


class LearnedPositionBias(Attention):
    """Queries meet a learned table of positions."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(24, H))

    def bias(self, q: Tensor, k: Tensor) -> Tensor:
        return q @ self.table.T


class GatedOutput(Attention):
    """A gate packed with the queries multiplies the mixed values, channel by channel."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(D, 2 * D)

    def forward(self, x: Tensor) -> Tensor:
        q, gate = self.q(x).unflatten(-1, (HEADS, 2 * H)).chunk(2, -1)
        k, v = self.split(self.k(x)), self.split(self.v(x))
        y = F.scaled_dot_product_attention(q.transpose(-3, -2), k, v).transpose(-3, -2) * torch.sigmoid(gate)
        return self.o(y.flatten(-2))


class GateReadsQuery(Attention):
    """The queries themselves gate the output: an extra reader."""

    def mixed(self, y: Tensor, x: Tensor) -> Tensor:
        return y * torch.sigmoid(self.split(self.q(x)))


class Scaled(Attention):
    """Learned scale per channel between projection and score: the diagonal group is left."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(1 + torch.rand(H))

    def query(self, x: Tensor) -> Tensor:
        return x * self.scale


class Tanh(Attention):
    def query(self, x: Tensor) -> Tensor:
        return torch.tanh(x)


class SharedQueryKey(Attention):
    def __init__(self) -> None:
        super().__init__()
        self.k = self.q


class TwoLayers(nn.Module):
    """The second layer has queries of its own but takes keys and values from the first."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Attention()
        self.q2, self.o2 = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        split = self.first.split
        k, v = split(self.first.k(x)), split(self.first.v(x))
        y = F.scaled_dot_product_attention(split(self.first.q(x)), k, v)
        x = x + self.first.o(y.transpose(-3, -2).flatten(-2))
        y = F.scaled_dot_product_attention(split(self.q2(x)), k, v)
        return x + self.o2(y.transpose(-3, -2).flatten(-2))


class Parallel(nn.Module):
    """Attention and a ReLU layer read one norm and are added."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(D), Attention()
        self.up, self.down = nn.Linear(D, 24), nn.Linear(24, D)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.attention(y) + self.down(torch.relu(self.up(y)))


class Gated(nn.Module):
    """A gated layer; the variants bend it."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(D, 24), nn.Linear(D, 24), nn.Linear(24, D)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class ShiftedGate(Gated):
    """(up + 1) * glu(gate): the shift ends the symmetry."""

    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate(x)
        return self.down((self.up(x) + 1) * gate * torch.sigmoid(1.7 * gate))


class ClippedGate(Gated):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x).clamp(-0.3, 0.3))


class SquaredRelu(Gated):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)).square())


class ReadTwice(Gated):
    """The hidden units are an output too."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.relu(self.up(x))
        return self.down(hidden), hidden.sum(-1)


class Einsum(nn.Module):
    """Hand-written attention with einsum, weights of four axes, biases added by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wk, self.wv = (nn.Parameter(torch.randn(D, HEADS, H) / 4) for _ in range(3))
        self.bq = nn.Parameter(torch.randn(HEADS, H))
        self.bv = nn.Parameter(torch.randn(HEADS, H))
        self.wo = nn.Parameter(torch.randn(HEADS, H, D) / 4)

    def forward(self, x: Tensor) -> Tensor:
        q = torch.einsum("bsd,dhk->bshk", x, self.wq) + self.bq
        k = torch.einsum("bsd,dhk->bshk", x, self.wk)
        v = torch.einsum("bsd,dhk->bshk", x, self.wv) + self.bv
        weights = torch.softmax(torch.einsum("bqhk,bshk->bhqs", q, k), -1)
        return torch.einsum("bqhk,hkd->bqd", torch.einsum("bhqs,bshk->bqhk", weights, v), self.wo)


class Diagonal(nn.Module):
    """Diagonal linear net."""

    def __init__(self) -> None:
        super().__init__()
        self.u, self.v = nn.Parameter(torch.randn(D)), nn.Parameter(torch.randn(D))

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.u * self.v)


class RestingClip(Attention):
    """Clips that do nothing at usual sizes, written in three ways: no numeric check sees them."""

    def query(self, x: Tensor) -> Tensor:
        return torch.where(x > 1e4, 1e4, x)

    def key(self, x: Tensor) -> Tensor:
        return x * (x.abs() < 1e4)

    def value(self, x: Tensor) -> Tensor:
        return x.masked_fill(x > 1e4, 0.0)


class RestingMask(Attention):
    """The same for the keys alone: a product with a comparison."""

    def key(self, x: Tensor) -> Tensor:
        return x * (x.abs() < 1e4)


class RestingGate(Gated):
    """A gated unit that is clipped at a value it never reaches."""

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * torch.where(self.up(x) < 1e4, self.up(x), 1e4))


class ComplexRotary(Attention):
    """Rotary embedding by complex numbers, on neighboring channels."""

    def __init__(self) -> None:
        super().__init__()
        angle = torch.arange(24)[:, None] * 100.0 ** (-torch.arange(H // 2) * 2 / H)
        self.register_buffer("turn", torch.polar(torch.ones_like(angle), angle))

    def query(self, x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2).contiguous())
        return torch.view_as_real(pairs * self.turn).flatten(-2).type_as(x)

    key = query


class LinearAttention(Attention):
    """No softmax, keys and values are multiplied first."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self.split(layer(x)) for layer in (self.q, self.k, self.v))
        q, k = F.elu(q) + 1, F.elu(k) + 1
        y = q @ (k.mT @ v) / (q @ k.sum(-2, keepdim=True).mT)
        return self.o(y.transpose(-3, -2).flatten(-2))


class ConstantKey(Attention):
    """A constant is added to the keys: the same number for all scores of a query, which softmax does not see."""

    def key(self, x: Tensor) -> Tensor:
        return x + torch.linspace(-1, 1, H, dtype=x.dtype)


class ConstantQuery(Attention):
    """A constant is added to the queries."""

    def query(self, x: Tensor) -> Tensor:
        return x + torch.linspace(-1, 1, H, dtype=x.dtype)


class ConstantRotaryQuery(Attention):
    """A constant is added to the queries before they are rotated."""

    def query(self, x: Tensor) -> Tensor:
        return rotate(x + torch.linspace(0.5, 1, H, dtype=x.dtype))

    def key(self, x: Tensor) -> Tensor:
        return rotate(x)


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + torch.randn(())


class UnexportableClip(Attention):
    """A clip that rests at usual sizes, in a model of which no graph can be had."""

    num_heads = HEADS

    def query(self, x: Tensor) -> Tensor:
        return x.clamp(-20, 20)

    def forward(self, x: Tensor) -> Tensor:
        return x if float(x.sum()) > 1e9 else super().forward(x)


class Unexportable(Attention):
    """A branch on the data keeps it from being exported."""

    num_heads = HEADS

    def forward(self, x: Tensor) -> Tensor:
        if float(x.sum()) > 1e9:
            return x
        return super().forward(x)
