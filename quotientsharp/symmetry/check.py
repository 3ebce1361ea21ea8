"""The numeric check: a copy of the model with every parameter perturbed, in float64, before and after a move."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .blocks import Block
from .graph import LOW, first_line, quiet
from .groups import Group

TOLERANCE = 1e-9
"""Largest relative change of the output that a true symmetry may cause; a wrong one causes 1e-5 and mostly more."""

SLOPE = 1e-9
"""The same for the derivative along the orbit, relative to the lengths of weights and gradient."""


class Double(TorchFunctionMode):
    """Rewrites casts to lower precision inside a model to float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Rewrite the arguments of one call.

        Args:
            func: The function.
            types: Types of the arguments.
            args: Its arguments.
            kwargs: Its keyword arguments.

        Returns:
            What it returns.
        """
        if func in (Tensor.float, Tensor.half, Tensor.bfloat16):
            return args[0].double()
        args = tuple(torch.float64 if isinstance(a, torch.dtype) and a in LOW else a for a in args)
        kwargs = {k: torch.float64 if isinstance(v, torch.dtype) and v in LOW else v for k, v in (kwargs or {}).items()}
        return func(*args, **kwargs)


def tensors(value: Any) -> list[Tensor]:
    """All tensors in an output, in order.

    Args:
        value: What a model returned.

    Returns:
        Its tensors.
    """
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        return [t for v in value.values() for t in tensors(v)]
    if isinstance(value, list | tuple):
        return [t for v in value for t in tensors(v)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [t for f in dataclasses.fields(value) for t in tensors(getattr(value, f.name))]
    return []


def distance(first: Sequence[Tensor], second: Sequence[Tensor]) -> float:
    """Largest difference of two outputs, relative to the size of each tensor.

    Args:
        first: The output before.
        second: The output after.

    Returns:
        The relative difference; infinite if shapes differ or a number is not finite.
    """
    if len(first) != len(second) or any(a.shape != b.shape for a, b in zip(first, second, strict=True)):
        return float("inf")
    worst = 0.0
    for a, b in zip(first, second, strict=True):
        if not a.numel():
            continue
        if not (a.is_floating_point() or a.is_complex()):
            worst = max(worst, 0.0 if bool((a == b).all()) else 1.0)
            continue
        known = a.isfinite()
        if bool((known != b.isfinite()).any()):
            return float("inf")
        scale = float(a[known].abs().max()) if bool(known.any()) else 0.0
        gap = float((a - b)[known].abs().max()) if bool(known.any()) else 0.0
        worst = max(worst, gap / scale if scale > 0 else (0.0 if gap == 0 else float("inf")))
    return worst


def position_tables(model: nn.Module) -> frozenset[str]:
    """Frozen parameters that hold sines and cosines of positions: constants that some models store as parameters.

    Args:
        model: The model.

    Returns:
        Their names. Every row of such a table has the squared length d / 2.
    """
    found = []
    for name, p in model.named_parameters():
        if p.requires_grad or p.is_meta or p.ndim != 2 or p.shape[0] < 8 or p.shape[1] % 2 or not p.is_floating_point():
            continue
        squares = p.detach().double().square().sum(1)
        if bool((squares - p.shape[1] / 2).abs().max() < 1e-3 * p.shape[1]):
            found.append(name)
    return frozenset(found)


def perturb_(model: nn.Module, scale: float, generator: torch.Generator, fixed: frozenset[str] = frozenset()) -> None:
    """Move every parameter away from its initialization, where scales are one and biases zero.

    Args:
        model: The model, changed in place.
        scale: How far.
        generator: Source of randomness.
        fixed: Names of parameters that are constants.
    """
    with torch.no_grad():
        for name, p in model.named_parameters():
            if not p.is_floating_point() or name in fixed:
                continue
            noise = torch.randn(p.shape, dtype=p.dtype, generator=generator)
            if p.ndim >= 2:
                size = max(0.5 * float(p.square().mean().sqrt()), 0.5 * max(p.shape) ** -0.5)
                p.add_(noise.mul_(scale * size))
            else:
                p.mul_(1 + 0.3 * scale * torch.randn(p.shape, dtype=p.dtype, generator=generator))
                p.add_(noise.mul_((0.3 if p.ndim else 0.05) * scale))


class Probe:
    """A perturbed float64 copy of a model together with its inputs.

    Args:
        model: The model; it is not changed.
        args: Positional inputs.
        kwargs: Keyword inputs.
        seed: Seed of the perturbation.
        fixed: Names of parameters that are constants and stay as they are.
        scale: How far to perturb; less is tried where the output is not finite.

    Raises:
        ValueError: If the inputs do not fit the model, the model is not deterministic, or its output is not finite.
    """

    def __init__(
        self,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        seed: int = 0,
        fixed: frozenset[str] = frozenset(),
        scale: float = 1.0,
    ) -> None:
        self.name = type(model).__name__
        self.args, self.kwargs = (torch.utils._pytree.tree_map(_to_double, value) for value in (args, kwargs))
        self.model = self._copy(model)
        plain = self.run()
        again = self.run()
        gap = distance(plain, again)
        if gap > 0 and not gap <= 1e-12:
            raise ValueError(
                f"{self.name} is not deterministic in eval mode: two runs on the same inputs differ ({gap:.1e})."
            )
        if not any(t.is_floating_point() for t in plain):
            raise ValueError(f"{self.name} returns no floating-point tensor, so nothing can be checked.")
        for factor in (1.0, 0.3, 0.1):
            if factor < 1.0:
                self.model = self._copy(model)
            perturb_(self.model, factor * scale, torch.Generator().manual_seed(seed), fixed)
            self.output = self.run()
            if any(bool(t.isfinite().any()) for t in self.output if t.is_floating_point()) and self._sane():
                break
        else:
            raise ValueError(f"{self.name} gives no finite output once its parameters are perturbed.")
        self.parameters = dict(self.model.named_parameters(remove_duplicate=False))

    def _sane(self) -> bool:
        return all(not bool(t.isnan().any()) for t in self.output if t.is_floating_point())

    def _copy(self, model: nn.Module) -> nn.Module:
        copied = copy.deepcopy(model).cpu().double().eval()
        for p in copied.parameters():
            p.requires_grad_(p.is_floating_point())
        config = getattr(copied, "config", None)
        if config is not None and hasattr(config, "_experts_implementation"):
            config._experts_implementation = "eager"  # the fused kernels refuse float64
        return copied

    def run(self, *, grad: bool = False) -> list[Tensor]:
        """Output tensors of the copy.

        Args:
            grad: Whether to keep the graph for derivatives.

        Returns:
            The tensors.

        Raises:
            ValueError: If the example inputs do not fit the model.
        """
        default = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)  # tensors that the model makes itself must not be narrower
        try:
            with quiet(), torch.set_grad_enabled(grad), Double():
                return tensors(self.model(*self.args, **self.kwargs))
        except Exception as error:
            raise ValueError(f"example_inputs do not fit {self.name}: {first_line(error)}") from error
        finally:
            torch.set_default_dtype(default)

    def gradients(self, wanted: Iterable[str], count: int = 2, seed: int = 1) -> list[dict[str, Tensor]]:
        """Gradients of random combinations of the outputs.

        Args:
            wanted: Names of the parameters.
            count: How many combinations.
            seed: Seed of their coefficients.

        Returns:
            Gradients by parameter name.
        """
        generator = torch.Generator().manual_seed(seed)
        outputs = [t for t in self.run(grad=True) if t.requires_grad]
        names = [name for name in dict.fromkeys(wanted) if self.parameters[name].requires_grad]
        if not names or not outputs:
            return []
        result = []
        for index in range(count):
            weights = []
            for t in outputs:
                scale = t.detach()[t.detach().isfinite()].abs().mean().clamp_min(1e-12)
                draw = torch.randn(t.shape, dtype=t.dtype, generator=generator) / scale / t.numel() ** 0.5
                weights.append(torch.where(t.detach().isfinite(), draw, 0.0))
            grads = torch.autograd.grad(
                outputs, [self.parameters[n] for n in names], weights, allow_unused=True, retain_graph=index + 1 < count
            )
            result.append({
                n: torch.zeros_like(self.parameters[n]) if g is None else g for n, g in zip(names, grads, strict=True)
            })  # fmt: skip
        return result

    def move(self, blocks: Iterable[Block], generator: torch.Generator, scale: float = 1.0) -> float:
        """Relative change of the output when blocks move along their orbits; the copy is put back afterwards.

        Args:
            blocks: The blocks.
            generator: Source of randomness.
            scale: How far to move.

        Returns:
            The relative change.
        """
        blocks = list(blocks)
        names = dict.fromkeys(name for block in blocks for name in block.parameters)
        before = {name: self.parameters[name].detach().clone() for name in names}
        try:
            for block in blocks:
                A = block.group.random(block.copies, scale, generator)
                block.write_(self.parameters, block.act(block.read(self.parameters).detach(), A))  # type: ignore[arg-type]
            return distance(self.output, self.run())
        finally:
            with torch.no_grad():
                for name, value in before.items():
                    self.parameters[name].copy_(value)


@dataclasses.dataclass
class Slopes:
    """Derivatives of one block: ``D`` per gradient, the scale of each copy, and whether a copy matters at all."""

    D: list[Tensor]
    scale: list[Tensor]
    alive: Tensor

    def error(self, group: Group) -> float:
        """Derivative along the orbit of a group, relative.

        Args:
            group: The group.

        Returns:
            The largest over copies and gradients.
        """
        worst = 0.0
        for D, scale in zip(self.D, self.scale, strict=True):
            along = group.project(D).flatten(1).abs().amax(1)
            worst = max(worst, float((along / scale)[self.alive].max()) if bool(self.alive.any()) else 0.0)
        return worst


def slopes(block: Block, parameters: Mapping[str, Tensor], gradients: Sequence[Mapping[str, Tensor]]) -> Slopes:
    """Derivatives along ``(-G L, H L^T)`` for all ``L`` at once.

    Args:
        block: The block.
        parameters: Values of the parameters.
        gradients: Gradients of several functions of the output.

    Returns:
        ``D = dH^T H - G^T dG`` and what is needed to judge its size.
    """
    x = block.read(parameters).detach()
    x = x.unsqueeze(-1) if block.kind == "rescaling" else x
    G, H = x[:, : block.n], x[:, block.n :]
    Ds, scales = [], []
    alive = torch.zeros(block.copies, dtype=torch.bool)
    for gradient in gradients:
        g = block.read(gradient)
        g = g.unsqueeze(-1) if block.kind == "rescaling" else g
        dG, dH = g[:, : block.n], g[:, block.n :]
        Ds.append(dH.mT @ H - G.mT @ dG)
        parts = [t.flatten(1).norm(dim=1) for t in (G, dG, H, dH)]
        scales.append((parts[0] * parts[1] + parts[2] * parts[3]).clamp_min(1e-300))
        least = 1e-12 * max(float(parts[1].max()), float(parts[3].max()), 1e-300)
        alive |= (parts[1] > least) & (parts[3] > least)
    return Slopes(Ds, scales, alive)


def _to_double(value: Any) -> Any:
    if isinstance(value, Tensor):
        value = value.detach().cpu()
        return value.double() if value.dtype in LOW else value
    return value
