"""The engine under fake CUDA tensors: mixed devices and hidden host transfers would raise."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import quotientsharp as qs
from quotientsharp.ascent import Ascent
from quotientsharp.objective import Objective, default_loss
from quotientsharp.sharpness import ModelSurface
from quotientsharp.space import Geometry, ParameterSpace

from .models import Classifier, Grouped

NUMBERS = [0.5, 0.0, 1.0, 0.2, 0.3, 0.1, 0.2]


class Passes(Objective):
    """Runs the model forward and makes derivatives up: see `without_autograd`."""

    def gradient(self, batch: object) -> tuple[Tensor, dict[str, Tensor]]:
        return self.value(batch), {name: torch.empty_like(tensor) for name, tensor in self.parameters.items()}


def without_autograd(monkeypatch: pytest.MonkeyPatch) -> None:
    """A build of torch without CUDA aborts at any autograd node of a fake CUDA tensor: make derivatives up."""

    def grad(outputs: object, inputs: tuple[Tensor, ...], *arguments: object) -> tuple[Tensor, ...]:
        return tuple(torch.empty_like(tensor) for tensor in inputs)

    monkeypatch.setattr(torch, "enable_grad", torch.no_grad)
    monkeypatch.setattr(torch.autograd, "grad", grad)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Answers each transfer to the host with made-up numbers, and counts them."""
    transfers: list[int] = []

    def tolist(self: torch.Tensor) -> list[float]:
        transfers.append(self.numel())
        return NUMBERS[: self.numel()]

    monkeypatch.setattr(FakeTensor, "tolist", tolist)
    return transfers


@pytest.mark.parametrize("retraction", ["first_order", "christoffel", "geodesic"])
@pytest.mark.parametrize(("geometry", "metric"), [("geodesic", "inv"), ("geodesic", "mix"), ("adaptive", "mix")])
@pytest.mark.parametrize("kind", ["encoder", "grouped"])
def test_the_engine_runs_on_fake_cuda_tensors(
    kind: str, geometry: str, metric: str, retraction: str, counted: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    real = Classifier(activation="relu") if kind == "encoder" else Grouped()
    width = 4 if kind == "encoder" else 16
    symmetries = qs.find_symmetries(real, torch.randn(2, 96, width))
    model = real.eval()
    without_autograd(monkeypatch)
    with FakeTensorMode():
        for module in model.modules():
            for name, tensor in module._parameters.items():
                if tensor is not None:
                    module._parameters[name] = nn.Parameter(torch.empty(tensor.shape, device="cuda"))
        batch = torch.empty(2, 6, width, device="cuda"), torch.zeros(2, dtype=torch.long, device="cuda")
        space = ParameterSpace(model, Geometry.parse(geometry, metric, retraction), symmetries)
        surface = ModelSurface(Passes(model, default_loss, space.parameters), space, batch)
        space.prepare(space.zeros(), 0.05)
        gradient = torch.empty_like(space.zeros())
        surface.gradient(space.zeros(), gradient)
        del counted[:]
        steps = 3
        ascent = Ascent(surface, 0.0, 0.05, steps=steps, tolerance=0)
        ascent._finish = lambda *arguments: None  # reads one number more, after the loop
        peak = ascent.run(space.zeros(), gradient=gradient)
        assert gradient.device.type == "cuda"
        space.squares(gradient)
        space.restore_()
    assert peak.gradients == steps
    assert len(counted) == steps, "one transfer a step"
