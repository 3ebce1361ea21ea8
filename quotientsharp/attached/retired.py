"""Optimizers that hold parameters which no model reads any more raise an error in place of training nothing."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

_MARK = "_quotientsharp_retired_by"
_installed: list[Any] = []


def retire(parameters: Iterable[Tensor], by: str) -> None:
    """Mark parameters as no longer part of a model.

    Args:
        parameters: The parameters.
        by: ``"attach"`` or ``"detach"``.
    """
    if not _installed:
        _installed.append(register_optimizer_step_pre_hook(_check))
    for p in parameters:
        setattr(p, _MARK, by)


def restore(parameters: Iterable[Tensor]) -> None:
    """Take the mark off again.

    Args:
        parameters: The parameters.
    """
    for p in parameters:
        if hasattr(p, _MARK):
            delattr(p, _MARK)


def _check(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
    for group in optimizer.param_groups:
        for p in group["params"]:
            by = getattr(p, _MARK, None)
            if by is not None:
                raise RuntimeError(
                    f"{type(optimizer).__name__} holds parameters from before {by}(model), which the model no longer "
                    f"reads; build the optimizer after {by}(model)."
                )
