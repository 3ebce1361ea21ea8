"""Adam on quotients, with momentum that stays horizontal and weight decay that knows no gauge."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import geoopt
import torch
from torch import Tensor

from .base import RiemannianOptimizer, State, number, require


class RiemannianAdam(RiemannianOptimizer):
    r"""AdamW for models whose weights are points of quotient manifolds.

    On a manifold parameter, a batch of copies such as attention heads, with ``g`` the Riemannian gradient:

    - first moment ``m <- beta1 P(m) + (1 - beta1) g``: ``P`` is the horizontal projection at today's point, which is
      vector transport from yesterday's;
    - second moment ``v <- beta2 v + (1 - beta2) |g|^2 / d``, one number per copy, ``d`` the dimension of its
      quotient. An elementwise second moment would depend on the gauge and leave the horizontal space. Divided by
      ``d``, the step has a root mean square of ``lr`` in orthonormal coordinates, as Adam's has. It lies along
      the gradient itself, though, where Adam's is spread over many directions, so a smaller ``lr`` for manifold
      parameters may be needed: put them in a group of their own.
      (`geoopt.optim.RiemannianAdam` does not divide; its ``lr`` is ours times ``sqrt(d)``.)
    - step by the manifold's retraction along ``-lr m^ / (sqrt(v^) + eps)``, then decoupled weight decay: both factors
      times ``1 - lr weight_decay``. The group acts linearly, so this commutes with it: every singular value of ``G
      H^T`` shrinks by the same factor, as under the decay of the balanced representative.

    Two starts on one orbit therefore give the same losses. All other parameters take the steps of
    `torch.optim.AdamW`. A copy of rank zero, such as an adapter with ``B = 0``, takes the spectral start of
    `quotientsharp.optim.launch` first.

    Args:
        params: The parameters, or groups of them.
        lr: The learning rate.
        betas: Decay of the two moments.
        eps: Added to the root of the second moment.
        weight_decay: Decoupled weight decay, invariant on manifolds.
        amsgrad: Whether to divide by the largest second moment so far.
        maximize: Whether to ascend.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        amsgrad: bool = False,
        maximize: bool = False,
    ) -> None:
        require(number(lr, 0.0), f"lr must be a number that is not negative, not {lr!r}.")
        require(
            len(betas) == 2 and all(number(beta, 0.0, 1.0) for beta in betas),
            f"betas must be two numbers in [0, 1), not {betas!r}.",
        )
        require(number(eps, 0.0), f"eps must be a number that is not negative, not {eps!r}.")
        require(number(weight_decay, 0.0), f"weight_decay must be a number that is not negative, not {weight_decay!r}.")
        defaults = {
            "lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay,
            "amsgrad": amsgrad, "maximize": maximize,
        }  # fmt: skip
        super().__init__(params, defaults)

    def _move(self, group: dict[str, Any], p: geoopt.ManifoldParameter, name: str) -> tuple[Tensor, State]:
        here = self._here(group, p, name)
        old, (beta1, beta2), lr = self.state[p], group["betas"], group["lr"]
        square = here.square()
        first = here.rgrad * (1 - beta1)
        if old:
            first = here.point.proju(old["exp_avg"]).mul_(beta1).add_(first)
        second = square * (1 - beta2) + (old["exp_avg_sq"] * beta2 if old else 0.0)
        step = torch.ones_like(square) if here.resting is None else 1.0 - here.resting.reshape(square.shape).to(square)
        step = step + (old["step"] if old else 0.0)
        state = {"step": step, "exp_avg": first, "exp_avg_sq": second, "rest": here.resting is not None}
        top = second
        if group["amsgrad"]:
            top = torch.maximum(second, old["max_exp_avg_sq"]) if old else second.clone()
            state["max_exp_avg_sq"] = top
        count = step.clamp_min(1.0)  # copies at rest have zero moments
        size = lr / (1 - beta1**count) / ((top / (1 - beta2**count)).sqrt() + group["eps"])
        new = here.moved(-first * size, 1 - lr * group["weight_decay"], lr, lr)
        return new, state

    def _step_free(self, group: dict[str, Any], params: list[Tensor]) -> None:
        (beta1, beta2), lr = group["betas"], group["lr"]
        for p in params:
            state = self.state[p]
            if not state:
                state["step"] = torch.zeros(())
                state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
                if group["amsgrad"]:
                    state["max_exp_avg_sq"] = torch.zeros_like(p)
            state["step"] += 1
        states = [self.state[p] for p in params]
        grads = [p.grad for p in params if p.grad is not None]
        grads = list(torch._foreach_neg(grads)) if group["maximize"] else grads
        if group["weight_decay"]:
            torch._foreach_mul_(params, 1 - lr * group["weight_decay"])
        first, second = [s["exp_avg"] for s in states], [s["exp_avg_sq"] for s in states]
        torch._foreach_lerp_(first, grads, 1 - beta1)
        torch._foreach_mul_(second, beta2)
        torch._foreach_addcmul_(second, grads, grads, 1 - beta2)
        if group["amsgrad"]:
            top = [s["max_exp_avg_sq"] for s in states]
            torch._foreach_maximum_(top, second)
        else:
            top = second
        counts = [float(s["step"]) for s in states]
        roots = torch._foreach_sqrt(top)
        torch._foreach_div_(roots, [(1 - beta2**count) ** 0.5 for count in counts])
        torch._foreach_add_(roots, group["eps"])
        torch._foreach_addcdiv_(params, first, roots, [-lr / (1 - beta1**count) for count in counts])
