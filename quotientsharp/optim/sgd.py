"""Stochastic gradient descent on quotients, with momentum that starts and stays horizontal."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import geoopt
import torch
from torch import Tensor

from .base import RiemannianOptimizer, State, number, require


class RiemannianSGD(RiemannianOptimizer):
    r"""SGD for models whose weights are points of quotient manifolds.

    On a manifold parameter ``x = (G, H)`` with Riemannian gradient ``g``: ``u = g + weight_decay x``, ``b <- momentum
    P(b) + (1 - dampening) u`` (``b <- u`` in the first step), and the retraction along ``-lr b``, or ``-lr (u +
    momentum b)`` with ``nesterov``. ``P`` is the horizontal projection at today's point. The point itself, read as a
    vector, is horizontal and moves with the gauge, so weight decay is invariant: it shrinks every singular value of
    ``G H^T`` at the same rate. All other parameters take the steps of `torch.optim.SGD`. A copy of rank zero takes
    the spectral start of `quotientsharp.optim.launch` first.

    Args:
        params: The parameters, or groups of them.
        lr: The learning rate.
        momentum: Factor of the momentum.
        dampening: Dampening of the momentum.
        weight_decay: Weight decay, invariant on manifolds.
        nesterov: Whether to look ahead.
        maximize: Whether to ascend.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
    ) -> None:
        require(number(lr, 0.0), f"lr must be a number that is not negative, not {lr!r}.")
        require(number(momentum, 0.0), f"momentum must be a number that is not negative, not {momentum!r}.")
        require(number(weight_decay, 0.0), f"weight_decay must be a number that is not negative, not {weight_decay!r}.")
        require(isinstance(dampening, (int, float)), f"dampening must be a number, not {dampening!r}.")
        require(
            not nesterov or (momentum > 0 and dampening == 0), "nesterov needs a positive momentum and zero dampening."
        )
        require(momentum > 0 or dampening == 0, "dampening needs a positive momentum.")
        defaults = {
            "lr": lr, "momentum": momentum, "dampening": dampening, "weight_decay": weight_decay,
            "nesterov": nesterov, "maximize": maximize,
        }  # fmt: skip
        super().__init__(params, defaults)

    def _move(self, group: dict[str, Any], p: geoopt.ManifoldParameter, name: str) -> tuple[Tensor, State]:
        here = self._here(group, p, name)
        old, momentum, lr = self.state[p], group["momentum"], group["lr"]
        u = here.rgrad
        if group["weight_decay"]:
            decay = here.p.to(u.dtype) * group["weight_decay"]
            u = u + (
                decay
                if here.resting is None
                else torch.where(here.resting.reshape(*here.resting.shape, *here.axes), 0.0, decay)
            )
        state: State = {"rest": here.resting is not None}
        step = u
        if momentum:
            buffer = u
            if "momentum_buffer" in old:
                buffer = here.point.proju(old["momentum_buffer"]).mul_(momentum).add_(u, alpha=1 - group["dampening"])
            state["momentum_buffer"] = buffer
            step = u + momentum * buffer if group["nesterov"] else buffer
        return here.moved(-lr * step, 1.0, None, lr), state

    def _step_free(self, group: dict[str, Any], params: list[Tensor]) -> None:
        momentum, lr = group["momentum"], group["lr"]
        steps = [p.grad for p in params if p.grad is not None]
        steps = list(torch._foreach_neg(steps)) if group["maximize"] else steps
        if group["weight_decay"]:
            steps = list(torch._foreach_add(steps, params, alpha=group["weight_decay"]))
        if momentum:
            buffers = []
            for p, step in zip(params, steps, strict=True):
                buffer = self.state[p].get("momentum_buffer")
                if buffer is None:
                    buffer = self.state[p]["momentum_buffer"] = step.clone()
                else:
                    buffer.mul_(momentum).add_(step, alpha=1 - group["dampening"])
                buffers.append(buffer)
            steps = list(torch._foreach_add(steps, buffers, alpha=momentum)) if group["nesterov"] else buffers
        torch._foreach_add_(params, steps, alpha=-lr)
