"""Energy conserving descent: a Hamiltonian flow whose measure concentrates at low loss."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

COUPLINGS = ("global", "tensor")


class ECD(torch.optim.Optimizer):
    r"""Energy conserving descent with the separable Hamiltonian ``log|P| + U``.

    ``U = eta d / (2 (d - 1)) log(F - F0)``, where ``F`` is the loss and ``d`` the number of parameters. In the arc
    length of the path the flow moves at unit speed along ``p = P / |P|`` and turns by
    ``p' = -(grad U - p (p . grad U))``, while ``(log|P|)' = -p . grad U``. One step is

        ``p <- p - lr (grad U - p (p . grad U))``, ``p <- p / |p|``, ``theta <- theta + lr p``.

    The speed never falls, not even at a minimum: lower ``lr`` by a schedule to settle. The energy is conserved up to
    the discretization; `energy` reads it, and its drift over a given length of path is of first order in ``lr``.

    Source: De Luca, Gatti, Silverstein, "Improving Energy Conserving Descent for Machine Learning: Theory and
    Practice", arXiv 2306.00352. The public code takes the product ``p . grad`` per tensor although ``|p| = 1`` over
    all of them; the path is then not that of the Hamiltonian, at any ``lr``. It is offered as ``coupling="tensor"``
    for comparison.

    Where the loss is not above ``F0`` the potential does not exist: the momentum is kept and the step is straight.

    Args:
        params: Parameters or groups of them; a group may have its own ``lr``, the unit of its coordinates. The
            momentum is one unit vector over all groups. Parameters without a gradient do not move.
        lr: Length of a step (of the whole vector of parameters).
        eta: Concentration: the measure is ``(F - F0)^(-eta d / 2)``.
        F0: A bound below the loss.
        nu: Noise: a Gaussian vector of about this length is added to ``p`` before it is normalized. Breaks the
            conservation of `energy` on purpose.
        weight_decay: Adds ``weight_decay / 2 |theta|^2`` to ``F``.
        coupling: ``"global"``: the product ``p . grad`` runs over all parameters; ``"tensor"``: over each by itself.

    Raises:
        ValueError: If a number is out of range.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        *,
        eta: float = 1.0,
        F0: float = 0.0,
        nu: float = 0.0,
        weight_decay: float = 0.0,
        coupling: str = "global",
    ) -> None:
        for name, value in (("lr", lr), ("eta", eta)):
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name} must be a finite number above 0, not {value!r}.")
        for name, value in (("nu", nu), ("weight_decay", weight_decay)):
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} must be a finite number of at least 0, not {value!r}.")
        if not math.isfinite(F0):
            raise ValueError(f"F0 must be a finite number below the loss, not {F0!r}.")
        if coupling not in COUPLINGS:
            raise ValueError(f"coupling must be 'global' or 'tensor', not {coupling!r}.")
        super().__init__(params, {"lr": lr})
        self.eta, self.F0, self.nu, self.weight_decay, self.coupling = eta, F0, nu, weight_decay, coupling
        self._log_momentum, self._energy = 0.0, float("nan")
        if self._size() < 2:
            raise ValueError("params must hold at least two numbers: a unit vector in one dimension cannot turn.")

    def _size(self) -> int:
        return sum(p.numel() for group in self.param_groups for p in group["params"])

    @property
    def energy(self) -> float:
        """``log|P| + U`` at the point of the last gradient; ``|P|`` starts at 1. NaN before the first step."""
        return self._energy

    def state_dict(self) -> dict[str, Any]:
        """State, with the length of the momentum.

        Returns:
            What `torch.optim.Optimizer.state_dict` returns and ``log_momentum``.
        """
        return {**super().state_dict(), "log_momentum": self._log_momentum}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state.

        Args:
            state_dict: What `state_dict` returned.
        """
        rest = dict(state_dict)
        self._log_momentum = float(rest.pop("log_momentum", 0.0))
        super().load_state_dict(rest)

    def step(self, closure: Callable[[], Any] | None = None, *, loss: Any = None) -> Any:
        """One step.

        Args:
            closure: Clears the gradients, computes the loss, calls ``backward`` and returns the loss.
            loss: The loss, where the gradients are already there; in place of ``closure``.

        Returns:
            The loss.

        Raises:
            ValueError: If neither or both are given, or the loss or its gradient is not finite.
        """
        if (closure is None) == (loss is None):
            raise ValueError("step needs the value of the loss: give a closure that returns it, or loss=.")
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            self._step(float(loss.detach() if isinstance(loss, Tensor) else loss))
        return loss

    def _step(self, loss: float) -> None:
        moving = [(group["lr"], p) for group in self.param_groups for p in group["params"] if p.grad is not None]
        parameters = [p for _, p in moving]
        if not moving:
            return
        gradients = [_wide(p.grad) for p in parameters if p.grad is not None]
        if self.weight_decay:
            loss += self.weight_decay / 2 * _dot(parameters, parameters)
            gradients = [g + self.weight_decay * p for g, p in zip(gradients, parameters, strict=True)]
        # A group's lr is the unit of its coordinates: in theta / lr the step has length one and the flow is the same.
        gradients = [rate * g for (rate, _), g in zip(moving, gradients, strict=True)]
        length = math.sqrt(_dot(gradients, gradients))
        if not math.isfinite(loss) or not math.isfinite(length):
            raise ValueError(f"The loss ({loss}) and its gradient (length {length}) must be finite.")
        momenta = self._momenta(parameters, gradients, length)
        if not momenta:
            return
        d = self._size()
        above = loss - self.F0
        weight = self.eta * d / (2 * (d - 1))
        self._energy = self._log_momentum + weight * math.log(above) if above > 0 else float("nan")
        turn = weight / above if above > 0 else 0.0
        along = _dot(momenta, gradients)
        for momentum, gradient in zip(momenta, gradients, strict=True):
            product = along if self.coupling == "global" else _dot([momentum], [gradient])
            momentum.sub_(gradient - product * momentum, alpha=turn)
            if self.nu:
                momentum.add_(torch.randn_like(momentum), alpha=self.nu / math.sqrt(d))
        norm = math.sqrt(_dot(momenta, momenta))
        for (rate, parameter), momentum in zip(moving, momenta, strict=True):
            momentum.div_(norm)
            parameter.add_(momentum.to(parameter.dtype), alpha=rate)
        self._log_momentum -= turn * along

    def _momenta(self, parameters: list[Tensor], gradients: list[Tensor], length: float) -> list[Tensor]:
        """The momenta; the first is the direction of steepest descent. Empty while there has been no gradient."""
        fresh = [p for p in parameters if "momentum" not in self.state[p]]
        if len(fresh) == len(parameters) and length == 0:
            return []
        for parameter, gradient in zip(parameters, gradients, strict=True):
            if "momentum" not in self.state[parameter]:
                first = gradient / -length if len(fresh) == len(parameters) else torch.zeros_like(gradient)
                self.state[parameter]["momentum"] = first
        return [self.state[p]["momentum"] for p in parameters]


def _wide(gradient: Tensor) -> Tensor:
    """Half precision has no room for a unit vector of many entries."""
    return gradient.float() if gradient.dtype in (torch.float16, torch.bfloat16) else gradient


def _dot(first: list[Tensor], second: list[Tensor]) -> float:
    """Inner product over all tensors, added up in float64 where the device has it; read back once."""
    parts = [
        (a * b).sum(dtype=torch.float32 if a.device.type == "mps" else torch.float64)
        for a, b in zip(first, second, strict=True)
    ]
    return float(torch.stack([part.to(parts[0].device) for part in parts]).sum())
