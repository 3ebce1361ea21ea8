"""Train a small vision transformer in plain coordinates and on the quotient.

AdamW against Riemannian Adam with each of the three retractions, and against SAM in the quotient, on scikit-learn's
digits (1,797 images of 8 x 8). Every optimizer takes its learning rate from the same grid by its accuracy on held-out
images, on a seed of its own; five other seeds count. Each training also starts from a second point of the same orbit:
the network is the same function there, so whatever changes is an artifact of coordinates.

Run: python examples/train_on_quotient.py --out DIR [--seeds 5] [--steps 400] [--quick]. It goes on where it stopped.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from functools import cache
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional

with warnings.catch_warnings():  # geoopt compiles with torch.jit, which torch calls deprecated
    warnings.simplefilter("ignore")
    import quotientsharp as qs
from quotientsharp.optim import Ascent, GeodesicSAM, RiemannianAdam

sys.path.insert(0, str(Path(__file__).parent))
from rows import Row, Rows, cell

GRID = (1e-3, 3e-3, 1e-2)
DECAY, RHO, BATCH = 0.01, 0.05, 128
METHODS = (
    "AdamW",
    "Riemannian Adam, first order",
    "Riemannian Adam, Christoffel",
    "Riemannian Adam, geodesic",
    "geodesic SAM on Riemannian Adam",
)
RETRACTIONS = {"first order": "first_order", "Christoffel": "christoffel", "geodesic": "geodesic"}


class Attention(nn.Module):
    """Attention with four heads."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.heads = heads

    def forward(self, x: Tensor) -> Tensor:
        """Mix tokens.

        Args:
            x: ``(batch, tokens, width)``.

        Returns:
            The same shape.
        """
        q, k, v = (part(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (self.q, self.k, self.v))
        mixed = (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1) @ v
        out: Tensor = self.o(mixed.transpose(1, 2).flatten(-2))
        return out


class Layer(nn.Module):
    """A pre-norm transformer layer."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Mix tokens, then channels.

        Args:
            x: ``(batch, tokens, width)``.

        Returns:
            The same shape.
        """
        x = x + self.attention(self.first(x))
        out: Tensor = x + self.down(functional.gelu(self.up(self.second(x))))
        return out


class ViT(nn.Module):
    """Sixteen patches of 2 x 2, two layers."""

    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.patch = nn.Linear(4, width)
        self.position = nn.Parameter(0.02 * torch.randn(16, width))
        self.layers = nn.Sequential(Layer(width, heads), Layer(width, heads))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Classify.

        Args:
            images: ``(batch, 8, 8)``.

        Returns:
            Logits ``(batch, 10)``.
        """
        patches = images.unfold(1, 2, 2).unfold(2, 2, 2).flatten(3).flatten(1, 2)
        logits: Tensor = self.head(self.norm(self.layers(self.patch(patches) + self.position)).mean(1))
        return logits


def data() -> dict[str, tuple[Tensor, Tensor]]:
    """Training, validation and test images, split once and for all."""
    digits = load_digits()
    images, labels = torch.tensor(digits.images, dtype=torch.float32) / 8 - 1, torch.tensor(digits.target)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    parts = order.split([1000, 300, len(order) - 1300])
    return {
        name: (images[part], labels[part]) for name, part in zip(("train", "validation", "test"), parts, strict=True)
    }


@cache
def found() -> qs.Symmetries:
    """The symmetries, which do not depend on the weights."""
    return qs.find_symmetries(ViT(), data()["train"][0][:2])


def build(method: str, model: nn.Module, symmetries: qs.Symmetries, lr: float) -> torch.optim.Optimizer:
    """Attach the model if the method needs it, and make the optimizer."""
    if method == "AdamW":
        return torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=DECAY)
    name = method.rsplit(", ", 1)[-1]
    qs.attach(model, symmetries, retraction=RETRACTIONS.get(name, "christoffel"))
    base = RiemannianAdam(model.parameters(), lr=lr, weight_decay=DECAY)
    return GeodesicSAM(model, base, rho=RHO) if "SAM" in method else base


def train(method: str, seed: int, lr: float, steps: int, moved: bool) -> Row:
    """One training run."""
    sets = data()
    symmetries = found()
    torch.manual_seed(seed)
    model = ViT()
    if moved:
        symmetries.move_(model, seed=seed, scale=3.0)
    optimizer = build(method, model, symmetries, lr)
    images, labels = sets["train"]
    generator = torch.Generator().manual_seed(seed)
    curve, start = [], time.perf_counter()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1.0, (step + 1) / 20) * (1 - step / steps)
        at = torch.randint(len(images), (BATCH,), generator=generator)

        def closure(at: Tensor = at) -> Tensor:
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(images[at]), labels[at])
            loss.backward()
            return loss

        curve.append(float(optimizer.step(closure).detach()))
    seconds = time.perf_counter() - start
    if qs.attached(model) is not None:
        qs.detach(model)
    return {**_scores(model, symmetries, sets), "seconds": seconds, "curve": curve}


def _scores(model: nn.Module, symmetries: qs.Symmetries, sets: dict[str, tuple[Tensor, Tensor]]) -> Row:
    """Loss, accuracies, and the rise of the training loss after one geodesic ascent step of length rho."""
    result: Row = {}
    for name in ("validation", "test"):
        with torch.no_grad():
            result[name] = float((model(sets[name][0]).argmax(1) == sets[name][1]).float().mean())
    ascent = Ascent(model, RHO, symmetries=symmetries)
    model.zero_grad()
    loss = functional.cross_entropy(model(sets["train"][0]), sets["train"][1])
    loss.backward()
    ascent.up_()
    with torch.no_grad():
        above = functional.cross_entropy(model(sets["train"][0]), sets["train"][1])
    ascent.back_()
    return {**result, "loss": float(loss.detach()), "sharpness": float(above - loss.detach())}


def choose(tried: list[Row]) -> float:
    """The learning rate with the best validation accuracy; ties go to the lower loss."""
    return float(max(tried, key=lambda row: (row["validation"], -row["loss"]))["lr"])


def plot(path: Path, runs: dict[tuple[str, bool], list[Row]]) -> None:
    """Learning curves from both starts, mean over seeds."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4))
    for color, method in enumerate(METHODS):
        for moved in (False, True):
            curves = torch.tensor([run["curve"] for run in runs[method, moved]]).mean(0)
            smooth = curves.unfold(0, min(10, len(curves)), 1).mean(-1)
            label = None if moved else method
            axes.semilogy(smooth, color=f"C{color}", linestyle="--" if moved else "-", label=label, linewidth=1)
    axes.set_xlabel("step")
    axes.set_ylabel("training loss (dashed: from another point of the orbit)")
    axes.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main() -> None:
    """Run what is missing, then print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--quick", action="store_true", help="one seed, one learning rate, 12 steps")
    options = parser.parse_args()
    rows = Rows(options.out / "train_on_quotient.jsonl")
    steps, seeds, grid = options.steps, range(options.seeds), GRID
    if options.quick:
        steps, seeds, grid = 12, range(1), GRID[-1:]

    def run(method: str, seed: int, lr: float, moved: bool) -> Row:
        key = {"method": method, "seed": seed, "lr": lr, "steps": steps, "moved": moved}
        return rows.get(key, lambda: train(method, seed, lr, steps, moved))

    rates = {method: choose([run(method, 1000, lr, False) for lr in grid]) for method in METHODS}
    runs = {
        (method, moved): [run(method, seed, rates[method], moved) for seed in seeds]
        for method in METHODS
        for moved in (False, True)
    }
    print(
        f"{'method':34}{'lr':>7}{'train loss':>20}{'test accuracy %':>18}{'sharpness':>20}{'s':>7}"
        f"{'other start: %':>18}"
    )
    for method in METHODS:
        own, other = runs[method, False], runs[method, True]
        print(
            f"{method:34}{rates[method]:7.0e}{cell([r['loss'] for r in own], 4):>20}"
            f"{cell([100 * r['test'] for r in own], 2):>18}{cell([r['sharpness'] for r in own], 4):>20}"
            f"{sum(r['seconds'] for r in own) / len(own):7.1f}{cell([100 * r['test'] for r in other], 2):>18}"
        )
    plot(options.out / "train_on_quotient.png", runs)
    # The first steps are the same from both starts; later, rounding in single precision tells them apart.
    for method in METHODS:
        pairs = zip(runs[method, False], runs[method, True], strict=True)
        gap = max(abs(a - b) for one, two in pairs for a, b in zip(one["curve"][:10], two["curve"][:10], strict=True))
        print(f"largest difference of the first ten losses between the two starts, {method}: {gap:.1e}")
        assert (gap > 1e-2) == (method == "AdamW")


if __name__ == "__main__":
    main()
