"""A whole model as a Pymanopt problem: its blocks on their quotients, everything else in Euclidean space."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import pymanopt
import torch
from numpy.typing import NDArray
from pymanopt.manifolds import Euclidean, Product
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from .attached import Stacks, attach, attached
from .manifolds.adapters import _Adapter
from .objective import Loss, read_loss, to_device
from .symmetry import Block

Array = NDArray[Any]


class ModelProblem(pymanopt.Problem):
    """The mean loss of a model over some batches, as a function on a product manifold.

    Attributes:
        initial_point: The weights the model has, as a point.
    """

    def __init__(
        self, manifold: Product, cost: Any, initial_point: list[Any], names: list[str], model: nn.Module
    ) -> None:
        super().__init__(manifold, cost)
        self.initial_point = initial_point
        self._names, self._model = names, model

    def write_(self, model: nn.Module, point: Sequence[Any]) -> None:
        """Write a point into a plain model of the same architecture.

        Args:
            model: The model, not attached.
            point: A point of the manifold, for example ``result.point``.
        """
        with torch.no_grad():
            for name, tensor in _tensors(self._model, self._names, _flatten(point)).items():
                self._model.get_parameter(name).copy_(tensor)
            model.load_state_dict(self._model.state_dict())


def pymanopt_problem(
    model: nn.Module,
    batches: Sequence[Any],
    symmetries: Sequence[Block] | None = None,
    *,
    loss: Loss | str | None = None,
    metric: str | float = "mix",
    retraction: str = "christoffel",
    relaxation: float = 0.0,
    example_inputs: Any = None,
) -> ModelProblem:
    """A model and its data as a problem that Pymanopt's optimizers solve.

    Stacks of blocks are points of their quotients, all other trainable parameters points of Euclidean spaces.
    Everything runs on a float64 copy of the model in eval mode, with attention kernels that have second derivatives,
    so that `TrustRegions` works. Meant for small models: Pymanopt is NumPy on one process, and evaluates all batches
    at once.

    Args:
        model: The model; it is not changed.
        batches: Mappings as Hugging Face models take them, or pairs (inputs, targets).
        symmetries: What `find_symmetries` gave; searched for if None.
        loss: None, ``"logit_normalized"`` or a callable ``loss(model, batch)``.
        metric: The metric, see `GLQuotient`.
        retraction: The retraction.
        relaxation: The invariant relaxation.
        example_inputs: What the model takes, for the search.

    Returns:
        The problem. ``optimizer.run(problem, initial_point=problem.initial_point)`` starts at the model's weights, and
        ``problem.write_(model, result.point)`` writes the result back.

    Raises:
        ValueError: If there are no batches, or the model is attached.
    """
    batches = list(batches)
    if not batches:
        raise ValueError("batches must hold at least one batch.")
    if attached(model) is not None:
        raise ValueError("model is attached; pymanopt_problem needs the plain model, call detach(model) first.")
    own = copy.deepcopy(model).double().cpu().eval()
    stacks = attach(
        own, symmetries, metric=metric, retraction=retraction, relaxation=relaxation, example_inputs=example_inputs
    )
    factors, point, names = _product(own, stacks)
    manifold = Product(factors)
    evaluate = read_loss(loss)
    wide = [_widen(to_device(batch, torch.device("cpu"))) for batch in batches]

    @pymanopt.function.pytorch(manifold)  # type: ignore[untyped-decorator]
    def cost(*arrays: Tensor) -> Tensor:
        tensors = _tensors(own, names, list(arrays))
        with sdpa_kernel(SDPBackend.MATH):
            values = [_call(own, tensors, evaluate, batch) for batch in wide]
        return torch.stack(values).mean()

    return ModelProblem(manifold, cost, point, names, own)


def _widen(batch: Any) -> Any:
    """Floating-point inputs as float64."""
    if isinstance(batch, Tensor):
        return batch.double() if batch.is_floating_point() else batch
    if isinstance(batch, dict):
        return {key: _widen(value) for key, value in batch.items()}
    return type(batch)(_widen(value) for value in batch) if isinstance(batch, (list, tuple)) else batch


class _Evaluated(nn.Module):
    """A loss as a module, so that `functional_call` may replace the parameters below it."""

    def __init__(self, model: nn.Module, evaluate: Loss) -> None:
        super().__init__()
        self.model, self.evaluate = model, evaluate

    def forward(self, batch: Any) -> Tensor:
        return self.evaluate(self.model, batch)


def _call(model: nn.Module, tensors: dict[str, Tensor], evaluate: Loss, batch: Any) -> Tensor:
    named = {f"model.{name}": tensor for name, tensor in tensors.items()}
    value: Tensor = torch.func.functional_call(_Evaluated(model, evaluate), named, (batch,))
    return value


def _product(model: nn.Module, stacks: Stacks) -> tuple[list[Any], list[Any], list[str]]:
    """Manifolds, today's point and parameter names, in one order."""
    numbers = {id(p): number for number, p in enumerate(stacks.points)}
    dimensions = stacks.dimensions()
    factors: list[Any] = []
    point: list[Any] = []
    names: list[str] = []
    for name, p in model.named_parameters():
        if not p.requires_grad:
            continue
        names.append(name)
        number = numbers.get(id(p))
        if number is None:
            factors.append(Euclidean(*p.shape) if p.ndim else Euclidean(1))
            point.append(p.detach().reshape(p.shape or (1,)).numpy().copy())
            continue
        manifold = stacks.points[number].manifold
        first, second = (part.detach().numpy().copy() for part in manifold.unpack_tensor(p))
        factors.append(_Adapter(manifold, (first.shape, second.shape), len(p) * dimensions[number]))
        point.append((first, second))
    return factors, point, names


def _flatten(point: Sequence[Any]) -> list[Tensor]:
    arrays = [part for entry in point for part in (entry if isinstance(entry, (tuple, list)) else [entry])]
    return [torch.from_numpy(np.ascontiguousarray(part)) for part in arrays]


def _tensors(model: nn.Module, names: list[str], arrays: list[Tensor]) -> dict[str, Tensor]:
    """Parameters by name from the arrays of a point, which holds two for every quotient."""
    rest = list(arrays)
    result: dict[str, Tensor] = {}
    for name in names:
        p = model.get_parameter(name)
        manifold = getattr(p, "manifold", None)
        if manifold is None:
            result[name] = rest.pop(0).reshape(p.shape)
        else:
            result[name] = manifold.pack_point(rest.pop(0), rest.pop(0))
    return result
