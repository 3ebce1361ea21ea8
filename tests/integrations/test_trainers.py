"""Trainers of others take the ascended gradient, and nothing else about them changes."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor, nn

import quotientsharp as qs
from quotientsharp.integrations import geodesic_sam_optimizer, use_geodesic_sam
from quotientsharp.optim import Ascent, GeodesicSAM, RiemannianSGD

from ..tiny import IDS, LABELS, loss_of, make


@pytest.mark.filterwarnings("ignore")
def test_hugging_face_trainer(tmp_path: Path) -> None:
    model, symmetries = make("shallow")
    reference = copy.deepcopy(model)
    for net in (model, reference):
        qs.attach(net, symmetries)
    arguments = tf.TrainingArguments(
        output_dir=str(tmp_path), max_steps=3, per_device_train_batch_size=2, gradient_accumulation_steps=2,
        learning_rate=0.1, lr_scheduler_type="constant", max_grad_norm=0.0, report_to=[], use_cpu=True,
        save_strategy="no", logging_strategy="no", disable_tqdm=True, dataloader_drop_last=False,
    )  # fmt: skip
    rows = [{"input_ids": IDS[i], "labels": LABELS[i]} for i in range(4)] * 3
    optimizer = RiemannianSGD(model.parameters(), lr=0.1)

    class Ordered(tf.Trainer):
        def get_train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(rows, batch_size=2)

    trainer = Ordered(model=model, args=arguments, train_dataset=rows, optimizers=(optimizer, None))
    trainer.model_accepts_loss_kwargs = False  # so that it divides by the number of micro-batches itself
    use_geodesic_sam(trainer, rho=0.1)
    trainer.train()
    # The same by hand: every micro-batch ascends along its own gradient.
    ascent, base = Ascent(reference, 0.1), RiemannianSGD(reference.parameters(), lr=0.1)
    reference.train()
    for _ in range(3):
        total = [torch.zeros_like(p) for p in reference.parameters()]
        for part in ([0, 1], [2, 3]):
            for ascend in (True, False):
                reference.zero_grad()
                (reference(input_ids=IDS[part], labels=LABELS[part]).loss / 2).backward()
                if ascend:
                    ascent.up_()
            ascent.back_()
            total = [t if p.grad is None else t + p.grad for t, p in zip(total, reference.parameters(), strict=True)]
        for p, gradient in zip(reference.parameters(), total, strict=True):
            p.grad = gradient
        base.step()
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-8)


@pytest.mark.filterwarnings("ignore")
def test_lightning(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Any, index: int) -> Tensor:
            return loss_of(self.model)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return geodesic_sam_optimizer(self, RiemannianSGD(self.parameters(), lr=0.1), rho=0.1)

    model, symmetries = make("shallow")
    reference = copy.deepcopy(model)
    for net in (model, reference):
        qs.attach(net, symmetries)
    trainer = lightning.Trainer(
        max_steps=3, logger=False, enable_checkpointing=False, enable_progress_bar=False, accelerator="cpu",
        enable_model_summary=False, default_root_dir=str(tmp_path),
    )  # fmt: skip
    trainer.fit(Module(model), torch.utils.data.DataLoader([0, 1, 2]))
    sam = GeodesicSAM(reference, RiemannianSGD(reference.parameters(), lr=0.1), rho=0.1)
    for _ in range(3):
        loss_of(reference).backward()
        sam.first_step(zero_grad=True)
        loss_of(reference).backward()
        sam.second_step(zero_grad=True)
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p, q)


def test_manual_optimization_is_refused() -> None:
    module = nn.Linear(2, 2)
    module.automatic_optimization = False  # type: ignore[assignment]
    with pytest.raises(ValueError, match="manual optimization"):
        geodesic_sam_optimizer(module, torch.optim.SGD(module.parameters(), lr=0.1))
