"""Small models whose sharpness is known, or which have every kind of block."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from .symmetry.breakers import rotate


class Diagonal(nn.Module):
    """``x -> X (u * v)`` with orthonormal columns of ``X``."""

    def __init__(self, u: Tensor, v: Tensor) -> None:
        super().__init__()
        self.u, self.v = nn.Parameter(u), nn.Parameter(v)

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.u * self.v)


def squares(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Sum of squared errors."""
    return (model(batch[0]) - batch[1]).square().sum()


def diagonal_problem(d: int = 6, seed: int = 0) -> tuple[Diagonal, tuple[Tensor, Tensor], Tensor, Tensor]:
    """A diagonal net off its minimum, its batch, ``beta0`` and ``beta*``."""
    torch.manual_seed(seed)
    x = torch.linalg.qr(torch.randn(2 * d, d, dtype=torch.float64)).Q
    u = torch.rand(d, dtype=torch.float64) + 0.5
    v = (torch.rand(d, dtype=torch.float64) + 0.5) * torch.where(torch.rand(d) < 0.5, -1.0, 1.0)
    beta = u * v
    target = beta + 0.3 * torch.randn(d, dtype=torch.float64)
    return Diagonal(u, v), (x, x @ target), beta, target


class Classifier(nn.Module):
    """A small vision-type transformer with a choice of activation: GL(h) blocks, and rescaling blocks with ReLU."""

    def __init__(self, width: int = 16, heads: int = 2, layers: int = 2, activation: str = "gelu") -> None:
        super().__init__()
        self.embed = nn.Linear(4, width)
        layer = nn.TransformerEncoderLayer(
            width, heads, 2 * width, 0.0, activation=activation, batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.encoder(self.embed(x)).mean(1))
        return logits


def classifier(seed: int = 0, **options: Any) -> tuple[Classifier, tuple[Tensor, Tensor]]:
    """A classifier after a few steps of training, in float64, and a batch. No weight or bias is zero."""
    torch.manual_seed(seed)
    model = Classifier(**options).double()
    x = torch.randn(24, 7, 4, dtype=torch.float64)
    y = (x.sum((1, 2)) > 0).long() + (x[:, 0, 0] > 0.5).long()
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    for _ in range(30):
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model.eval(), (x, y)


class Grouped(nn.Module):
    """Rotary attention with four query heads over two key heads, and a gated layer, in the precision it is given."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        h = width // 4
        self.q, self.k, self.v = nn.Linear(width, 4 * h), nn.Linear(width, 2 * h), nn.Linear(width, 2 * h)
        self.o, self.norm = nn.Linear(4 * h, width), nn.LayerNorm(width)
        self.gate, self.up, self.down = nn.Linear(width, 24), nn.Linear(width, 24), nn.Linear(24, width)
        self.head = nn.Linear(width, 3)
        self.h = h

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        q, k, v = (layer(y).unflatten(-1, (-1, self.h)).transpose(-3, -2) for layer in (self.q, self.k, self.v))
        k, v = k.repeat_interleave(2, -3), v.repeat_interleave(2, -3)
        weights = torch.softmax(rotate(q) @ rotate(k).mT / self.h**0.5, -1)
        x = x + self.o((weights @ v).transpose(-3, -2).flatten(-2))
        y = self.norm(x)
        logits: Tensor = self.head((x + self.down(functional.silu(self.gate(y)) * self.up(y))).mean(1))
        return logits


def grouped(seed: int = 0) -> tuple[Grouped, tuple[Tensor, Tensor]]:
    """The rotary model in float64, and a batch."""
    torch.manual_seed(seed)
    return Grouped().double().eval(), (torch.randn(6, 96, 16, dtype=torch.float64), torch.arange(6) % 3)


def causal_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Cross-entropy of the next token in the precision of the model; the models' own loss is in float32."""
    logits = model(input_ids=batch["input_ids"]).logits
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())


def language_model(kind: str, seed: int = 0) -> tuple[nn.Module, dict[str, Tensor]]:
    """A tiny Hugging Face model in float64 with weights off their initialization, and a batch with labels."""
    from transformers import (
        BertConfig,
        BertForSequenceClassification,
        GPT2Config,
        GPT2LMHeadModel,
        LlamaConfig,
        LlamaForCausalLM,
    )

    torch.manual_seed(seed)
    ids = torch.randint(3, 60, (3, 12))
    if kind == "bert":
        config = BertConfig(
            vocab_size=64,
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=24,
            max_position_embeddings=128,
            hidden_act="relu",
            num_labels=3,
        )
        model: Any = BertForSequenceClassification(config)
        batch = {"input_ids": ids, "labels": torch.tensor([0, 1, 2])}
    elif kind == "gpt2":
        model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=16, n_layer=2, n_head=2, n_positions=128))
        batch = {"input_ids": ids, "labels": ids}
    else:
        config = LlamaConfig(
            vocab_size=64,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=128,
        )
        model = LlamaForCausalLM(config)
        batch = {"input_ids": ids, "labels": ids}
    model = model.double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model, batch
