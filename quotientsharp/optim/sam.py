"""Sharpness-aware minimization whose ascent step follows the geometry of the quotient.

The ascent moves all parameters by one step of length rho in one norm. Blocks of a symmetry carry their quotient
metric and move by the manifold's retraction; all other parameters carry the elementwise metric ``(xi / |w|)^2`` and
move by ``xi = w^2 dL/dw``, so a weight that is zero stays zero. The ascended point of another point on the orbit is
the ascended point moved along by the same group element, and so are the partial derivatives there: what the base
optimizer is given does not depend on the gauge. Whether its own step does is up to it, see `GeodesicSAM`.

`quotientsharp.space.ParameterSpace` has the same geometry, but it moves pairs to their balanced gauge first. That is
right for a number such as sharpness; here the partial derivatives at the ascended point must be those of the gauge in
which the base optimizer takes its step, and factoring a point once per step must not need its singular vectors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..attached import attached
from ..manifolds.points import work_dtype
from ..symmetry import Block, Stack, find_symmetries, stacked
from .base import Here, Manifold, number, require


def unwrap(model: nn.Module) -> nn.Module:
    """The model inside DistributedDataParallel, DataParallel and torch.compile.

    Args:
        model: The model as it is called.

    Returns:
        The model as it was built.
    """
    while True:
        if isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
            model = model.module
        elif isinstance(getattr(model, "_orig_mod", None), nn.Module):
            model = model._orig_mod  # type: ignore[assignment]
        else:
            return model


class Ascent:
    """One step uphill in the quotient, and back, bit for bit.

    Args:
        model: The model, attached or not, possibly wrapped.
        rho: Length of the step.
        symmetries: The blocks of a model that is not attached; searched for if None.
        metric: Metric of the blocks; that of the manifold parameters if None, or ``"mix"``.
        retraction: Retraction of the blocks; that of the manifold parameters if None, or ``"christoffel"``.
        relaxation: The invariant relaxation; that of the manifold parameters if None, or 0.
        example_inputs: What the model takes, for the search.

    Raises:
        ValueError: If an argument does not fit.
    """

    def __init__(
        self,
        model: nn.Module,
        rho: float = 0.05,
        *,
        symmetries: Sequence[Block] | None = None,
        metric: str | float | None = None,
        retraction: str | None = None,
        relaxation: float | None = None,
        example_inputs: Any = None,
    ) -> None:
        require(isinstance(model, nn.Module), f"model must be a torch.nn.Module, not {type(model).__name__}.")
        require(number(rho, 0.0), f"rho must be a finite number that is not negative, not {rho!r}.")
        self.rho = rho
        plain = unwrap(model)
        self.parameters: dict[str, Tensor] = dict(plain.named_parameters())
        stacks = attached(plain)
        self._places: list[tuple[Stack | None, str, Manifold]] = []
        if stacks is not None:
            if symmetries is not None:
                raise ValueError(
                    "symmetries cannot be given for an attached model: its manifold parameters are the blocks."
                )
            names = {id(p): name for name, p in self.parameters.items()}
            for stack, p in zip(stacks.blocks, stacks.points, strict=True):
                m = p.manifold
                options = m.metric if metric is None else metric, retraction or m.retraction
                manifold = stack.manifold(*options, m.relaxation if relaxation is None else relaxation)
                self._places.append((None, names[id(p)], manifold))
        else:
            found = find_symmetries(plain, example_inputs) if symmetries is None else symmetries
            for stack in stacked([block for block in found if self._moves(block)]):
                manifold = stack.manifold(
                    "mix" if metric is None else metric, retraction or "christoffel", relaxation or 0.0
                )
                self._places.append((stack, stack.blocks[0].name, manifold))
        self._masks = self._outside()
        self._saved: list[tuple[Tensor, Tensor]] = []

    def _moves(self, block: Block) -> bool:
        """Whether all parameters of a block are trained; others are free parameters, or fixed."""
        trained = all(name in self.parameters and self.parameters[name].requires_grad for name in block.parameters)
        return trained and min(block.n, block.m) >= block.h

    def _outside(self) -> dict[str, Tensor | None]:
        """Parameters with elements outside all blocks: None if that is all of them, else a mask."""
        inside: dict[str, Tensor] = {}
        for stack, name, _ in self._places:
            if stack is None:
                inside[name] = torch.ones(self.parameters[name].numel(), dtype=torch.bool)
                continue
            for block in stack.blocks:
                for piece in block.pieces:
                    size = self.parameters[piece.name].numel()
                    inside.setdefault(piece.name, torch.zeros(size, dtype=torch.bool))[piece.index().reshape(-1)] = True
        masks: dict[str, Tensor | None] = {}
        for name, p in self.parameters.items():
            taken = inside.get(name)
            if taken is None:
                masks[name] = None
            elif not bool(taken.all()):
                masks[name] = (~taken).reshape(p.shape)
        return masks

    @property
    def ascended(self) -> bool:
        """Whether the weights are those of the ascended point."""
        return bool(self._saved)

    def _heres(self, parameters: Mapping[str, Tensor]) -> list[tuple[Stack | None, str, Here]]:
        """The stacked points whose gradients are known."""
        heres = []
        for stack, name, manifold in self._places:
            if stack is None:
                point, gradient = parameters[name].detach(), parameters[name].grad
                if gradient is None:
                    continue
            else:
                # A parameter without a gradient does not matter to the loss of this batch.
                shape = (stack.copies, *stack.blocks[0].shape[1:])
                like = parameters[stack.parameters[0]]
                slopes = {n: torch.zeros_like(q) if (q.grad is None) else q.grad for n, q in self._of(stack)}
                point = torch.empty(shape, dtype=like.dtype, device=like.device)
                gradient = torch.empty_like(point)
                stack.gather(parameters, point)
                stack.gather(slopes, gradient)
            gradient = gradient.to(work_dtype(point.dtype))
            heres.append((stack, name, Here(manifold, point, gradient, rest=True, name=name)))
        return heres

    def _of(self, stack: Stack) -> list[tuple[str, Tensor]]:
        return [(name, self.parameters[name]) for name in stack.parameters]

    @torch.no_grad()
    def up_(self) -> Tensor:
        """Move the weights uphill along the gradients they hold.

        Gradients that are not finite, as a GradScaler meets them, and gradients that vanish leave the weights where
        they are. Any positive multiple of the gradient gives the same step, so scaled losses need not be unscaled.

        Returns:
            The length of the gradient in the metric of the space.

        Raises:
            RuntimeError: If the weights are ascended already.
            ValueError: If no parameter has a gradient or a pair has lost rank.
        """
        if self.ascended:
            raise RuntimeError("the weights are ascended already; call second_step() or restore() first.")
        moving = [p for p in self.parameters.values() if p.grad is not None]
        if not moving:
            raise ValueError("no parameter has a gradient; call backward() before first_step().")
        free = [(p, mask) for p, mask in self._free() if p.grad is not None]
        sizes = torch._foreach_norm([p.grad for p in moving if p.grad is not None])
        if bool(torch.stack([size.isfinite().to(sizes[0].device) for size in sizes]).all()):  # one look from the host
            return self._climb(free, moving)
        return moving[0].new_full((), math.nan, dtype=torch.float32)

    def _free(self) -> list[tuple[Tensor, Tensor | None]]:
        return [(self.parameters[name], mask) for name, mask in self._masks.items()]

    def _climb(self, free: list[tuple[Tensor, Tensor | None]], moving: list[Tensor]) -> Tensor:
        heres = self._heres(self.parameters)
        weighted = [_weighted(p, mask) for p, mask in free]
        norms = torch._foreach_norm(weighted) if weighted else ()
        squares = [here.length().double() for _, _, here in heres] + [norm.double().square() for norm in norms]
        length = torch.stack([square.to(squares[0].device) for square in squares]).sum().sqrt()
        scale = torch.where(length > 0, self.rho / length, 0.0)
        news = [here.ascended(scale.to(here.rgrad)) for _, _, here in heres]
        self._saved = [(p, copy) for p, copy in zip(moving, _clones(moving), strict=True)]
        for (p, _), slope in zip(free, weighted, strict=True):
            p.addcmul_(p, slope.to(p.dtype) * scale.to(p))
        for (stack, name, _), new in zip(heres, news, strict=True):
            if stack is None:
                self.parameters[name].copy_(new)
            else:
                stack.scatter_(self.parameters, new)
        torch.clear_autocast_cache()
        return length

    @torch.no_grad()
    def back_(self) -> None:
        """Write the weights back, bit for bit."""
        if self._saved:
            torch._foreach_copy_([p for p, _ in self._saved], [copy for _, copy in self._saved])
        self._saved = []
        torch.clear_autocast_cache()


def _clones(parameters: list[Tensor]) -> list[Tensor]:
    copies = [torch.empty_like(p) for p in parameters]
    torch._foreach_copy_(copies, [p.detach() for p in parameters])
    return copies


def _weighted(p: Tensor, mask: Tensor | None) -> Tensor:
    """Coordinates ``w dL/dw`` of the gradient in the elementwise metric, zero inside blocks."""
    assert p.grad is not None
    slope = p.detach().to(work_dtype(p.dtype)) * p.grad
    return slope if mask is None else slope * mask.to(slope.device)


class GeodesicSAM(torch.optim.Optimizer):
    r"""Sharpness-aware minimization in the quotient: one ascent step of length rho, then the step of a base optimizer.

    Three ways to use it::

        loss = sam.step(closure)          # closure: zero_grad, forward, backward, return the loss; it is called twice

        loss.backward(); sam.first_step(zero_grad=True)
        loss_fn(model).backward(); sam.second_step(zero_grad=True)

        scaler.scale(loss).backward(); sam.first_step(zero_grad=True)       # mixed precision
        scaler.scale(loss_fn(model)).backward(); sam.second_step(zero_grad=True, scaler=scaler); scaler.update()

    Several backward passes may come before each step (gradient accumulation); under DistributedDataParallel every
    process ascends along the same averaged gradient. Between the two steps the model holds ascended weights; they are
    restored bit for bit before the base optimizer steps.

    The gradient handed to the base optimizer does not depend on the point of the orbit. Training as a whole does not
    if the base optimizer's step does not: take `RiemannianAdam` or `RiemannianSGD` on an attached model. AdamW or SGD
    on plain weights work too, but their own steps depend on the gauge.

    Args:
        model: The model, attached or not, possibly wrapped.
        base_optimizer: An optimizer of the model's parameters.
        rho: Length of the ascent step, all parameters in one norm.
        symmetries: The blocks of a model that is not attached; searched for if None.
        metric: Metric of the ascent; that of the manifold parameters if None, or ``"mix"``.
        retraction: Retraction of the ascent; that of the manifold parameters if None, or ``"christoffel"``.
        relaxation: The invariant relaxation; that of the manifold parameters if None, or 0.
        example_inputs: What the model takes, for the search.

    Raises:
        ValueError: If an argument does not fit, or the base optimizer holds parameters the model does not have.
    """

    def __init__(
        self,
        model: nn.Module,
        base_optimizer: torch.optim.Optimizer,
        rho: float = 0.05,
        *,
        symmetries: Sequence[Block] | None = None,
        metric: str | float | None = None,
        retraction: str | None = None,
        relaxation: float | None = None,
        example_inputs: Any = None,
    ) -> None:
        require(
            isinstance(base_optimizer, torch.optim.Optimizer),
            "base_optimizer must be an optimizer that was built already, for example "
            "RiemannianAdam(model.parameters()).",
        )
        self.ascent = Ascent(
            model,
            rho,
            symmetries=symmetries,
            metric=metric,
            retraction=retraction,
            relaxation=relaxation,
            example_inputs=example_inputs,
        )
        known = {id(p) for p in self.ascent.parameters.values()}
        if any(id(p) not in known for group in base_optimizer.param_groups for p in group["params"]):
            raise ValueError(
                "base_optimizer holds parameters that model does not have; build it from model.parameters(), "
                "after attach."
            )
        super().__init__(base_optimizer.param_groups, dict(base_optimizer.defaults))
        self.base_optimizer = base_optimizer
        self._share()

    def _share(self) -> None:
        """Learning-rate schedulers, checkpoints and users see the groups and the state of the base optimizer."""
        self.param_groups, self.state = self.base_optimizer.param_groups, self.base_optimizer.state

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the base optimizer.

        Args:
            param_group: The group.
        """
        base = getattr(self, "base_optimizer", None)
        if base is None:
            super().add_param_group(param_group)
        else:
            base.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """State of the base optimizer; the ascent itself has none.

        Returns:
            The state.
        """
        return self.base_optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of the base optimizer.

        Args:
            state_dict: What `state_dict` gave.
        """
        self.base_optimizer.load_state_dict(state_dict)
        self._share()

    def first_step(self, zero_grad: bool = False) -> Tensor:
        """Ascend along the gradients at hand.

        Args:
            zero_grad: Whether to clear them afterwards.

        Returns:
            The length of the gradient; NaN if it is not finite, and then the weights did not move.
        """
        length = self.ascent.up_()
        if zero_grad:
            self.zero_grad()
        return length

    def restore(self) -> None:
        """Write the weights back, bit for bit; for those who clip or unscale before the base optimizer's step."""
        self.ascent.back_()

    def second_step(self, zero_grad: bool = False, scaler: torch.amp.GradScaler | None = None) -> None:
        """Restore the weights and take the base optimizer's step with the gradients of the ascended point.

        Args:
            zero_grad: Whether to clear the gradients afterwards.
            scaler: The GradScaler the losses were scaled with; it unscales, and skips the step where gradients
            overflowed.
        """
        self.restore()
        if scaler is None:
            self.base_optimizer.step()
        else:
            scaler.step(self.base_optimizer)
        if zero_grad:
            self.zero_grad()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Both steps.

        Args:
            closure: Clears the gradients, evaluates the model, calls backward and returns the loss.

        Returns:
            The loss before the step.

        Raises:
            ValueError: If there is no closure.
        """
        if closure is None:
            raise ValueError(
                "step needs a closure that can be called twice; without one use first_step and second_step."
            )
        with torch.enable_grad():
            loss = closure()
        if isinstance(loss, Tensor):
            loss = loss.detach().clone()
        self.first_step(zero_grad=True)
        try:
            with torch.enable_grad():
                closure()
        except BaseException:
            self.restore()
            raise
        self.second_step()
        return loss
