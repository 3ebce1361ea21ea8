"""GeodesicSAM inside a Hugging Face Trainer."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..optim import Ascent


def use_geodesic_sam(trainer: Any, rho: float = 0.05, **options: Any) -> Ascent:
    """Let every training step of a Trainer evaluate its gradient at the ascended point.

    The Trainer keeps its optimizer, scheduler, mixed precision, accumulation and distribution; only the gradient
    changes. With gradient accumulation every micro-batch ascends by itself along its own gradient. A Trainer clips
    the plain norm of the gradient, which depends on the gauge: pass ``max_grad_norm=0`` if training must not.

    Args:
        trainer: A `transformers.Trainer`, or one of a subclass, before ``train()``.
        rho: Length of the ascent step.
        **options: More arguments of `Ascent`, for example ``symmetries``.

    Returns:
        The ascent, whose ``rho`` may be changed during training.
    """
    ascent = Ascent(trainer.model, rho, **options)
    plain = trainer.training_step

    def training_step(model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Tensor:
        parameters = list(ascent.parameters.values())
        kept = [p.grad for p in parameters]  # of earlier micro-batches
        for p in parameters:
            p.grad = None
        plain(model, dict(inputs), *args, **kwargs)
        try:
            ascent.up_()
            for p, gradient in zip(parameters, kept, strict=True):
                p.grad = gradient
            loss: Tensor = plain(model, inputs, *args, **kwargs)
        finally:
            ascent.back_()
        return loss

    trainer.training_step = training_step
    return ascent
