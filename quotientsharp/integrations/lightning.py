"""GeodesicSAM inside Lightning."""

from __future__ import annotations

from typing import Any

import torch

from ..optim import GeodesicSAM


def geodesic_sam_optimizer(
    module: Any, base_optimizer: torch.optim.Optimizer, rho: float = 0.05, **options: Any
) -> GeodesicSAM:
    """What ``configure_optimizers`` of a LightningModule returns to train with GeodesicSAM.

    Under automatic optimization Lightning hands its optimizer a closure that evaluates ``training_step`` and calls
    backward, which is all that GeodesicSAM needs; it calls it twice. With ``accumulate_grad_batches`` the closure
    knows the last micro-batch alone, and with ``precision="16-mixed"`` Lightning calls the closure itself: for both
    use manual optimization with ``first_step`` and ``second_step``. ``"bf16-mixed"`` works.

    Args:
        module: The LightningModule, or the part of it that holds the model.
        base_optimizer: An optimizer of its parameters.
        rho: Length of the ascent step.
        **options: More arguments of `GeodesicSAM`, for example ``symmetries``.

    Returns:
        The optimizer.

    Raises:
        ValueError: If the module uses manual optimization, where steps are taken by hand.
    """
    if getattr(module, "automatic_optimization", True) is False:
        raise ValueError(
            "module uses manual optimization; build GeodesicSAM there and call first_step and second_step."
        )
    return GeodesicSAM(module, base_optimizer, rho, **options)
