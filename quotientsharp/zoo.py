"""A small vision transformer and its data, for the demo, the examples, the tests and the benchmarks."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Attention(nn.Module):
    """Multi-head self-attention.

    Args:
        width: Size of a token.
        heads: Number of heads.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.output = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """Attend.

        Args:
            x: ``(batch, tokens, width)``.

        Returns:
            The same shape.
        """
        inner = (self.query, self.key, self.value)
        q, k, v = (layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in inner)
        mixed = F.scaled_dot_product_attention(q, k, v)
        result: Tensor = self.output(mixed.transpose(1, 2).flatten(2))
        return result


class Layer(nn.Module):
    """Attention and a GELU network, each behind a norm and around a residual connection.

    Args:
        width: Size of a token.
        heads: Number of heads.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """One layer.

        Args:
            x: ``(batch, tokens, width)``.

        Returns:
            The same shape.
        """
        x = x + self.attention(self.before_attention(x))
        result: Tensor = x + self.mlp(self.before_mlp(x))
        return result


class DigitsViT(nn.Module):
    """A vision transformer for 8 x 8 gray images in 10 classes.

    Args:
        width: Size of a token.
        heads: Heads of a layer.
        depth: Layers.
        patch: Side of a patch.
    """

    def __init__(self, width: int = 32, heads: int = 4, depth: int = 2, patch: int = 2) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, patch, patch)
        self.positions = nn.Parameter(0.02 * torch.randn((8 // patch) ** 2, width))
        self.layers = nn.Sequential(*(Layer(width, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Class scores.

        Args:
            images: ``(batch, 1, 8, 8)``.

        Returns:
            Logits ``(batch, 10)``.
        """
        x = self.patches(images).flatten(2).transpose(1, 2) + self.positions
        result: Tensor = self.head(self.norm(self.layers(x)).mean(1))
        return result


def digits() -> tuple[Tensor, Tensor]:
    """The handwritten digits that come with scikit-learn, in an order of their own.

    Returns:
        Images ``(1797, 1, 8, 8)`` between -1 and 1, and their classes.

    Raises:
        ImportError: If scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ImportError("The digits come with scikit-learn: pip install scikit-learn.") from error
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 8 - 1
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    return images[order], torch.tensor(data.target)[order]


def trained_digits_vit(
    images: Tensor, labels: Tensor, *, steps: int = 300, seed: int = 0, width: int = 32, depth: int = 2
) -> DigitsViT:
    """Train a `DigitsViT` with AdamW on random batches of 128; the global random state is left as it was.

    Args:
        images: Training images.
        labels: Their classes.
        steps: Training steps.
        seed: Seed of the weights and of the batches.
        width: Size of a token.
        depth: Layers.

    Returns:
        The model in eval mode.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = DigitsViT(width=width, depth=depth)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.05)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps)
        for _ in range(steps):
            rows = torch.randint(len(images), (128,))
            optimizer.zero_grad()
            F.cross_entropy(model(images[rows]), labels[rows]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()
    return model.eval()
