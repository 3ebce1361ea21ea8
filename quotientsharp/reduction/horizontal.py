"""Steps of any torch optimizer without their part along the orbits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ..symmetry import Block, Symmetries

WHAT = ("update", "gradient")


def conserved(model: nn.Module, symmetries: Symmetries) -> dict[str, Tensor]:
    """What gradient flow conserves: ``G^T G - H^T H``, its part in the Lie algebra of the group.

    Along the flow of an invariant loss ``G^T dL/dG = (dL/dH)^T H`` on the algebra, so the difference of the Gram
    matrices stands still. For GL(h) these are all ``h (h + 1) / 2`` entries, for smaller groups fewer.

    Args:
        model: The model.
        symmetries: Its symmetries.

    Returns:
        By block name ``(copies, h, h)``, in float64.
    """
    return {block.name: _moment(block, _wide(block, block.read(model).detach())) for block in symmetries}


def _wide(block: Block, x: Tensor) -> Tensor:
    x = x.double()
    return x.unsqueeze(-1) if block.kind == "rescaling" else x


def _moment(block: Block, x: Tensor) -> Tensor:
    G, H = x[:, : block.n], x[:, block.n :]
    return block.group.project(G.mT @ G - H.mT @ H)


def horizontal_part(block: Block, x: Tensor, u: Tensor) -> Tensor:
    """Part of a vector orthogonal to the orbit, in the Euclidean metric of the weights.

    The vertical vectors are ``(-G L, H L^T)`` with ``L`` in the algebra. For GL(h) the part along them has
    ``SG L + L SH = b^T H - G^T a``, solved in the eigenbases of both Gram matrices; where both lose rank in common
    the pseudo-inverse is taken. For smaller groups it is one Gram system of the size of the algebra.

    Args:
        block: The block.
        x: The point, as ``block.read`` gives it.
        u: The vector, of the same shape.

    Returns:
        ``(a + G L, b - H L^T)`` in the dtype of ``u``.
    """
    wide, vector = _wide(block, x), _wide(block, u)
    G, H = wide[:, : block.n], wide[:, block.n :]
    a, b = vector[:, : block.n], vector[:, block.n :]
    right = b.mT @ H - G.mT @ a
    if block.group.dim == block.h**2:
        p, P = torch.linalg.eigh(G.mT @ G)
        q, Q = torch.linalg.eigh(H.mT @ H)
        scale = p.clamp_min(0)[:, :, None] + q.clamp_min(0)[:, None, :]
        L = P @ _divide(P.mT @ right @ Q, scale) @ Q.mT
    else:
        algebra = block.group.algebra().to(wide)
        E = algebra.flatten(1)
        images = (G.mT @ G).unsqueeze(1) @ algebra + algebra @ (H.mT @ H).unsqueeze(1)
        gram = torch.einsum("ri,csi->crs", E, images.flatten(2))
        weights = torch.linalg.pinv(gram, hermitian=True) @ (right.flatten(1) @ E.mT).unsqueeze(-1)
        L = (weights.mT @ E).reshape(right.shape)
    result = torch.cat([a + G @ L, b - H @ L.mT], 1)
    return (result.squeeze(-1) if block.kind == "rescaling" else result).to(u.dtype)


def _divide(value: Tensor, scale: Tensor) -> Tensor:
    """Zero where the scale vanishes: both factors are zero there and nothing is vertical."""
    live = scale > 1e-14 * scale.amax((-2, -1), keepdim=True)
    return torch.where(live, value / torch.where(live, scale, 1.0), 0.0)


class HorizontalHook:
    """What `horizontal_` attached to an optimizer.

    Args:
        model: The model.
        symmetries: Its symmetries.
        what: ``"update"`` or ``"gradient"``.
    """

    def __init__(self, model: nn.Module, symmetries: Symmetries, what: str) -> None:
        self.symmetries, self.what = symmetries, what
        self.parameters = dict(model.named_parameters())
        self.names = list(dict.fromkeys(name for block in symmetries for name in block.parameters))
        self.before: dict[str, Tensor] = {}
        self.handles: list[RemovableHandle] = []

    def remove(self) -> None:
        """Take the hook off the optimizer."""
        for handle in self.handles:
            handle.remove()

    def pre(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Before a step: project the gradients, or remember the weights.

        Args:
            optimizer: The optimizer.
            args: Arguments of its step.
            kwargs: Keyword arguments of its step.
        """
        if self.what == "update":
            self.before = {name: self.parameters[name].detach().clone() for name in self.names}
            return
        now = {name: self.parameters[name].detach() for name in self.names}
        grads: dict[str, Tensor] = {}
        for name, p in now.items():
            grad = self.parameters[name].grad
            grads[name] = torch.zeros_like(p) if grad is None else grad
        for block in self.symmetries:
            grads.update(block.write(grads, horizontal_part(block, block.read(now), block.read(grads))))
        for name in self.names:
            if self.parameters[name].grad is not None:
                self.parameters[name].grad = grads[name]

    def post(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """After a step: replace it by its horizontal part at the point where it started.

        Args:
            optimizer: The optimizer.
            args: Arguments of its step.
            kwargs: Keyword arguments of its step.
        """
        now = {name: self.parameters[name].detach().clone() for name in self.names}
        for block in self.symmetries:
            start, end = block.read(self.before), block.read(now)
            step = _wide(block, end) - _wide(block, start)
            step = step.squeeze(-1) if block.kind == "rescaling" else step
            block.write_(now, start + horizontal_part(block, start, step).to(start.dtype))
        with torch.no_grad():
            for name, value in now.items():
                if self.parameters[name].requires_grad:
                    self.parameters[name].copy_(value)
        self.before = {}


def horizontal_(
    optimizer: torch.optim.Optimizer, model: nn.Module, symmetries: Symmetries, *, what: str = "update"
) -> HorizontalHook:
    """Take the part along the orbits out of every step of an optimizer.

    The gradient of an invariant loss is horizontal by itself, so plain gradient descent conserves ``G^T G - H^T H`` up
    to the square of the step. Adaptive optimizers, momentum kept from other points, weight decay and noise do not:
    they push the weights along the orbits, where the function does not change. With ``what="update"`` the whole step is
    projected, whatever made it, and the conserved quantities change by ``a^T a - b^T b`` per step alone. With
    ``what="gradient"`` the gradients are projected before the optimizer sees them, which removes what a loss with a
    broken invariance (a penalty on weights) adds, not what an adaptive optimizer adds.

    Args:
        optimizer: Any torch optimizer. With ``what="gradient"`` do not give its ``step`` a closure: gradients that it
            computes come after the hook.
        model: The model whose parameters it trains.
        symmetries: The symmetries of the model.
        what: ``"update"`` or ``"gradient"``.

    Returns:
        The hook; call ``remove()`` to take it off.

    Raises:
        ValueError: If ``what`` is neither.
    """
    if what not in WHAT:
        raise ValueError(f"what must be 'update' or 'gradient', not {what!r}.")
    hook = HorizontalHook(model, symmetries, what)
    hook.handles.append(optimizer.register_step_pre_hook(hook.pre))
    if what == "update":
        hook.handles.append(optimizer.register_step_post_hook(hook.post))
    return hook
