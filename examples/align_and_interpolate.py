"""Two networks trained from different seeds: what lies between them, before and after alignment?

Small vision transformers learn the 1,797 digits of scikit-learn, two seeds per pair. The loss along the straight line
between the two has a barrier. Part of it is only bookkeeping: heads and hidden units in another order, another basis
inside each head, and, since the norms here have no scales, another basis of the residual stream.
`qs.reduction.align_` undoes the former, `turn_residual` below the latter, neither changes a function, and the barrier
is measured again. Finished pairs are rows of a file in DIR, and a second call goes on where the first stopped.

Run: python examples/align_and_interpolate.py --out DIR        (needs pip install scikit-learn)
"""

from __future__ import annotations

import argparse
import copy
import csv
import math
from pathlib import Path

import matplotlib as mpl
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import quotientsharp as qs
from quotientsharp.reduction import align_, barrier, distance

mpl.use("Agg")
import matplotlib.pyplot as plt

POINTS = 11
STAGES = ("as trained", "heads, gauge, units", "residual stream", "all of them")


def norm(x: Tensor) -> Tensor:
    """Root mean square norm without a scale: it does not see a rotation of the channels."""
    return F.rms_norm(x, x.shape[-1:])


class Layer(nn.Module):
    """Attention and a ReLU network, each after a norm and beside a skip."""

    def __init__(self, d: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(d, d) for _ in range(4))
        self.up, self.down = nn.Linear(d, 2 * d), nn.Linear(2 * d, d)

    def forward(self, x: Tensor) -> Tensor:
        """One layer."""
        y = norm(x)
        q, k, v = (p(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2)
        x = x + self.o(mixed)
        return x + self.down(torch.relu(self.up(norm(x))))


class ViT(nn.Module):
    """Sixteen patches of 2 x 2 pixels."""

    def __init__(self, d: int = 32, depth: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.embed = nn.Linear(4, d)
        self.place = nn.Parameter(0.02 * torch.randn(16, d))
        self.layers = nn.Sequential(*(Layer(d, heads) for _ in range(depth)))
        self.head = nn.Linear(d, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Logits from images ``(batch, 8, 8)``."""
        return self.head(norm(self.residual(x)[-1]).mean(1))

    def residual(self, x: Tensor) -> list[Tensor]:
        """The residual stream before and after each layer."""
        patches = x.unfold(1, 2, 2).unfold(2, 2, 2).flatten(1, 2).flatten(2)
        stream = [self.embed(patches) + self.place]
        for layer in self.layers:
            stream.append(layer(stream[-1]))
        return stream


def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training and test images with their labels."""
    from sklearn.datasets import load_digits

    data = load_digits()
    x, y = torch.tensor(data.images, dtype=torch.float32) / 8 - 1, torch.tensor(data.target)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    train, test = order[:1400], order[1400:]
    return x[train], y[train], x[test], y[test]


def train(seed: int, steps: int, x: Tensor, y: Tensor) -> ViT:
    """A model of its own initialization and order of examples."""
    torch.manual_seed(seed)
    model = ViT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=max(steps, 2))
    for _ in range(steps):
        pick = torch.randint(0, len(x), (64,))
        optimizer.zero_grad()
        F.cross_entropy(model(x[pick]), y[pick]).backward()
        optimizer.step()
        schedule.step()
    return model.eval()


def turn_residual(model: ViT, Q: Tensor) -> None:
    """Turn the residual stream, ``x -> x Q``, by what writes to it and what reads it; the function stays."""
    with torch.no_grad():
        model.place.copy_(model.place @ Q)
        writers = [model.embed, *(w for layer in model.layers for w in (layer.o, layer.down))]
        readers = [model.head, *(r for layer in model.layers for r in (layer.q, layer.k, layer.v, layer.up))]
        for writer in writers:
            writer.weight.copy_(Q.T @ writer.weight)
            writer.bias.copy_(writer.bias @ Q)
        for reader in readers:
            reader.weight.copy_(reader.weight @ Q)


def nearest_turn(model: ViT, reference: ViT, x: Tensor) -> Tensor:
    """Procrustes: the rotation of the residual stream that brings it nearest to that of the reference on images."""
    with torch.no_grad():
        overlaps = [norm(a).flatten(0, 1).T @ norm(b).flatten(0, 1) for a, b in
                    zip(model.residual(x), reference.residual(x), strict=True)]  # fmt: skip
    u, _, vt = torch.linalg.svd(torch.stack(overlaps).sum(0))
    return u @ vt


def study(pair: int, steps: int, data: tuple[Tensor, Tensor, Tensor, Tensor]) -> list[list[float]]:
    """Test losses on the line for each stage; asserts that no stage changes a function."""
    x, y, x_test, y_test = data
    a, b = (train(2 * pair + k, steps, x, y) for k in (0, 1))

    def loss(model: nn.Module) -> float:
        with torch.no_grad():
            return float(F.cross_entropy(model(x_test), y_test))

    curves = [barrier(a, b, loss, POINTS).losses]
    symmetries = qs.find_symmetries(a, x[:16])
    reference = copy.deepcopy(a)
    symmetries.canonicalize_(reference)
    for turned, aligned in ((False, True), (True, False), (True, True)):
        moved = copy.deepcopy(b)
        if turned:
            turn_residual(moved, nearest_turn(moved, reference, x))
        if aligned:
            align_(moved, reference, symmetries, x[:16])
            assert distance(moved, reference, symmetries).relative <= distance(b, a, symmetries).relative
        with torch.no_grad():
            assert float((moved(x_test) - b(x_test)).abs().max()) < 1e-3 * float(b(x_test).abs().max())
        curves.append(barrier(reference if aligned else a, moved, loss, POINTS).losses)
    return curves


def height(losses: list[float]) -> float:
    """Largest excess over the line between the ends."""
    ends = losses[0], losses[-1]
    return max(v - (1 - t / (POINTS - 1)) * ends[0] - t / (POINTS - 1) * ends[1] for t, v in enumerate(losses))


def interval(values: list[float]) -> tuple[float, float]:
    """Mean and half-width of the 95 % interval of Student's t."""
    from scipy import stats

    mean = sum(values) / len(values)
    spread = math.sqrt(sum((v - mean) ** 2 for v in values) / max(len(values) - 1, 1) / len(values))
    return mean, float(stats.t.ppf(0.975, max(len(values) - 1, 1))) * spread


def picture(curves: dict[int, list[list[float]]], path: Path) -> None:
    """Mean loss along the line for each stage, single pairs faint."""
    figure, axes = plt.subplots(figsize=(6.2, 3.6), layout="constrained")
    positions = [t / (POINTS - 1) for t in range(POINTS)]
    for stage, label in enumerate(STAGES):
        color = f"C{stage}"
        rows = torch.tensor([pair[stage] for pair in curves.values()])
        for row in rows:
            axes.plot(positions, row, color=color, alpha=0.25, linewidth=0.8)
        axes.plot(positions, rows.mean(0), color=color, linewidth=2, label=label)
    axes.set_xlabel("position between the two models")
    axes.set_ylabel("test loss")
    axes.set_title(f"mean over {len(curves)} pairs, single pairs faint", fontsize=10)
    axes.legend()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main() -> None:
    """Train the pairs, print the table, write the picture, assert what it shows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(), help="folder for the rows and the picture")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=600)
    options = parser.parse_args()
    out: Path = options.out
    out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    path = out / "align_and_interpolate.csv"
    curves: dict[int, list[list[float]]] = {}
    if path.exists():
        with path.open() as file:
            for row in csv.reader(file):
                if row[0] != "pair" and int(row[2]) == options.steps:
                    curves.setdefault(int(row[0]), []).append([float(v) for v in row[3:]])
        curves = {pair: rows for pair, rows in curves.items() if len(rows) == len(STAGES)}
    else:
        path.write_text("pair,stage,steps," + ",".join(f"t{t}" for t in range(POINTS)) + "\n")
    data = digits()
    for pair in range(options.pairs):
        if pair not in curves:
            curves[pair] = study(pair, options.steps, data)
            with path.open("a") as file:
                for stage, losses in zip(STAGES, curves[pair], strict=True):
                    csv.writer(file).writerow([pair, stage, options.steps, *(f"{v:.6f}" for v in losses)])
            print(f"pair {pair}: " + ", ".join(f"{height(c):.3f}" for c in curves[pair]), flush=True)
    curves = {pair: curves[pair] for pair in range(options.pairs)}
    heights = [[height(pair[stage]) for pair in curves.values()] for stage in range(len(STAGES))]
    print(f"\nbarrier of the test loss, {options.pairs} pairs, mean and 95 % interval")
    for stage, values in zip(STAGES, heights, strict=True):
        change = [v - first for v, first in zip(values, heights[0], strict=True)]
        print(f"{stage:26}{'{:.3f} ± {:.3f}'.format(*interval(values)):>18}", end="")
        print(f"   change {'{:+.3f} ± {:.3f}'.format(*interval(change))}" if stage != STAGES[0] else "")
    if options.pairs >= 5:
        mean, half = interval([v - first for v, first in zip(heights[-1], heights[0], strict=True)])
        assert mean + half < 0, "the barrier after alignment is lower"
    picture(curves, out / "align_and_interpolate.png")
    print(f"\npicture: {out / 'align_and_interpolate.png'}")


if __name__ == "__main__":
    main()
