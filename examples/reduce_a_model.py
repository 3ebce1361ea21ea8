"""Three ways to work without flat directions, on a small transformer in float64.

1. Canonical weights: two models on one orbit become the same weights.
2. Minimal form: the redundant numbers become constants, the function stays, training goes on.
3. Horizontal steps: Adam drifts along the orbits, Adam with projected steps hardly does.
And attention that sees inner products only: it commutes with every rotation of the residual stream.

Run: python examples/reduce_a_model.py
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional

import quotientsharp as qs
from quotientsharp.reduction import RelationalAttention, conserved, distance, from_minimal_, horizontal_, to_minimal_


def make() -> tuple[nn.Module, Tensor, Tensor]:
    """A transformer layer with a classifier, and data."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, activation="gelu", batch_first=True)
    model = nn.Sequential(layer, nn.Flatten(), nn.Linear(6 * 16, 4)).double()
    return model, torch.randn(64, 6, 16).double(), torch.randint(4, (64,))


def train(model: nn.Module, x: Tensor, y: Tensor, optimizer: torch.optim.Optimizer, steps: int = 30) -> float:
    """A few steps; the last loss."""
    for _ in range(steps):
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
    return float(loss.detach())


def drift(before: dict[str, Tensor], after: dict[str, Tensor]) -> float:
    """Largest relative change of G^T G - H^T H."""
    return max(float((after[name] - before[name]).norm() / before[name].norm()) for name in before)


def main() -> None:
    """Show each of them and assert what it shows."""
    model, x, y = make()
    symmetries = qs.find_symmetries(model, x)
    output = model(x).detach()

    other = copy.deepcopy(model)
    symmetries.move_(other, seed=1)
    apart = distance(model, other, symmetries).relative
    symmetries.canonicalize_(model)
    symmetries.canonicalize_(other)
    gap = max(float((a - b).detach().abs().max()) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    print(f"one orbit: distance {apart:.0e}, canonical weights differ by {gap:.0e}")
    assert apart < 1e-12
    assert gap < 1e-8
    assert torch.allclose(model(x), output, rtol=0, atol=1e-10)

    count = sum(tensor.numel() for tensor in model.parameters())
    to_minimal_(model, symmetries)
    left = sum(tensor.numel() for tensor in model.parameters())
    assert torch.allclose(model(x), output, rtol=0, atol=1e-10)
    start = float(functional.cross_entropy(model(x), y).detach())
    end = train(model, x, y, torch.optim.Adam(model.parameters(), 1e-2))
    from_minimal_(model)
    print(f"minimal form: {count} parameters, {count - left} fewer; loss {start:.3f} to {end:.3f} in 30 steps of Adam")
    assert count - left == symmetries.dim
    assert end < start

    drifts = {}
    for name in ("Adam", "Adam, horizontal steps"):
        copied = make()[0]
        before = conserved(copied, symmetries)
        optimizer = torch.optim.Adam(copied.parameters(), 1e-3)
        if "horizontal" in name:
            horizontal_(optimizer, copied, symmetries)
        train(copied, x, y, optimizer)
        drifts[name] = drift(before, conserved(copied, symmetries))
        print(f"{name}: G^T G - H^T H changes by {100 * drifts[name]:.2g} %")
    assert drifts["Adam, horizontal steps"] < 0.1 * drifts["Adam"]

    attention = RelationalAttention(16, 2).double()
    turn = torch.linalg.qr(torch.randn(16, 16).double()).Q
    straight, turned = attention(x, x, x)[0] @ turn, attention(x @ turn, x @ turn, x @ turn)[0]
    error = float((straight - turned).detach().abs().max())
    print(f"relational attention: turning before or after differs by {error:.0e}")
    assert error < 1e-10


if __name__ == "__main__":
    main()
