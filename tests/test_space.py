"""The parameter space: its norm, its derivative and its steps against the manifolds and against autograd."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor, nn

import quotientsharp as qs
from quotientsharp.objective import Loss, Objective, default_loss
from quotientsharp.space import Geometry, ParameterSpace

from .models import causal_loss, classifier, grouped, language_model

METRICS = ["inv", "mix", 0.3]
RETRACTIONS = ["first_order", "christoffel", "geodesic"]


def cases() -> dict[str, tuple[nn.Module, object]]:
    return {
        "gelu": classifier(),
        "relu": classifier(activation="relu"),
        "gpt2": language_model("gpt2"),
        "grouped": grouped(),
    }


@pytest.fixture(scope="module")
def models() -> dict[str, tuple[nn.Module, object, qs.Symmetries]]:
    found = {}
    for name, (model, batch) in cases().items():
        inputs = None if isinstance(batch, dict) else batch[0]
        found[name] = model, batch, qs.find_symmetries(model, inputs)
    return found


def loss_of(batch: object) -> Loss:
    return causal_loss if isinstance(batch, dict) and batch["labels"].ndim == 2 else default_loss


def geometries() -> list[Geometry]:
    plain = [Geometry.parse("euclidean"), Geometry.parse("adaptive"), Geometry.parse("adaptive", free="geodesic")]
    return plain + [Geometry.parse("geodesic", m, r, free="geodesic") for m in METRICS for r in RETRACTIONS]


@pytest.mark.parametrize("geometry", geometries(), ids=lambda g: f"{g.name}-{g.metric.name}-{g.retraction}-{g.free}")
@pytest.mark.parametrize("name", ["gelu", "relu", "gpt2", "grouped"])
def test_pull_is_the_derivative_of_the_loss_along_the_retraction(
    models: dict[str, tuple[nn.Module, object, qs.Symmetries]], name: str, geometry: Geometry
) -> None:
    model, batch, symmetries = models[name]
    space = ParameterSpace(model, geometry, symmetries)
    objective = Objective(model, loss_of(batch), space.parameters)
    generator = torch.Generator().manual_seed(0)
    z, v = space.random(generator) * 0.2, space.random(generator)

    def loss(position: Tensor) -> float:
        assert float(space.move_(position)) < 1e-6
        return float(objective.value(batch))

    try:
        space.move_(z)
        _, gradients = objective.gradient(batch)
        slope = space.pull(gradients, z, torch.empty_like(z))
        width = 1e-5
        difference = (
            8 * (loss(z + width * v) - loss(z - width * v)) - (loss(z + 2 * width * v) - loss(z - 2 * width * v))
        ) / (12 * width)
        assert float(slope @ v) == pytest.approx(difference, rel=1e-6, abs=1e-8)
        assert torch.allclose(space.project_(slope.clone()), slope, rtol=0, atol=1e-12 * float(slope.norm()))
    finally:
        space.restore_()


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("name", ["gelu", "relu", "gpt2", "grouped"])
def test_length_of_the_gradient_is_that_of_the_manifolds(
    models: dict[str, tuple[nn.Module, object, qs.Symmetries]], name: str, metric: str | float
) -> None:
    """The manifolds work at the weights as they are, the space in the balanced gauge."""
    model, batch, symmetries = models[name]
    space = ParameterSpace(model, Geometry.parse("geodesic", metric), symmetries)
    objective = Objective(model, loss_of(batch), space.parameters)
    _, gradients = objective.gradient(batch)
    expected = 0.0
    seen: set[str] = set()
    for block in symmetries:
        manifold = block.manifold(metric)
        x, e = block.read(model).detach(), block.read(gradients)
        rgrad = manifold.egrad2rgrad(x, e)
        expected += float(manifold.inner(x, rgrad).sum())
        seen |= set(block.parameters)
    for parameter, tensor in model.named_parameters():
        if parameter not in seen:
            expected += float((tensor.detach() * gradients[parameter]).square().sum())
    zeros = space.zeros()
    space.move_(zeros)
    _, there = objective.gradient(batch)
    slope = space.pull(there, zeros, torch.empty_like(zeros))
    space.restore_()
    assert float(slope @ slope) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("retraction", RETRACTIONS)
@pytest.mark.parametrize("name", ["gelu", "relu", "grouped"])
def test_steps_are_those_of_the_manifolds(
    models: dict[str, tuple[nn.Module, object, qs.Symmetries]], name: str, metric: str | float, retraction: str
) -> None:
    """A step along the Riemannian gradient, taken by the manifold at the weights as they are: the same function."""
    model, batch, symmetries = models[name]
    geometry = Geometry.parse("geodesic", metric, retraction)
    space = ParameterSpace(model, geometry, symmetries)
    objective = Objective(model, loss_of(batch), space.parameters)
    zeros = space.zeros()
    space.move_(zeros)
    _, gradients = objective.gradient(batch)
    slope = space.pull(gradients, zeros, torch.empty_like(zeros))
    size = 0.1 / float(slope.norm())
    assert float(space.move_(slope * size)) < 1e-6
    moved = float(objective.value(batch))
    space.restore_()
    other = copy.deepcopy(model)
    _, gradients = Objective(other, loss_of(batch), dict(other.named_parameters())).gradient(batch)
    with torch.no_grad():
        held: set[str] = set()
        for block in symmetries:
            manifold = block.manifold(metric, retraction)
            x = block.read(other).detach()
            step = size * manifold.egrad2rgrad(x, block.read(gradients))
            block.write_(other, manifold.retr(x, step))
            held |= set(block.parameters)
        for parameter, tensor in other.named_parameters():
            if parameter not in held:
                tensor.add_(size * tensor.square() * gradients[parameter])
    assert moved == pytest.approx(float(loss_of(batch)(other, batch).detach()), rel=1e-7)


def test_weights_come_back_bit_for_bit(models: dict[str, tuple[nn.Module, object, qs.Symmetries]]) -> None:
    for model, _, symmetries in models.values():
        for dtype in (torch.float64, torch.float32, torch.bfloat16):
            other = copy.deepcopy(model).to(dtype)
            before = {name: tensor.clone() for name, tensor in other.state_dict().items()}
            space = ParameterSpace(other, Geometry.parse("geodesic"), symmetries)
            space.move_(space.random(torch.Generator().manual_seed(0)))
            assert any(not torch.equal(before[name], tensor) for name, tensor in other.state_dict().items())
            space.restore_()
            assert all(torch.equal(before[name], tensor) for name, tensor in other.state_dict().items())


def test_a_zero_weight_stays_zero_in_the_adaptive_metric() -> None:
    model, batch = classifier()
    with torch.no_grad():
        model.head.bias.zero_()
    for free in ("first_order", "geodesic"):
        space = ParameterSpace(model, Geometry.parse("adaptive", free=free))
        objective = Objective(model, loss_of(batch), space.parameters)
        _, gradients = objective.gradient(batch)
        slope = space.pull(gradients, space.zeros(), space.zeros())
        assert bool(slope.isfinite().all())
        space.move_(space.random(torch.Generator().manual_seed(0)))
        assert not model.head.bias.any()
        space.restore_()


def test_rows_of_embeddings_that_a_batch_does_not_read_are_left_out() -> None:
    model, batch = language_model("bert")
    space = ParameterSpace(model, Geometry.parse("adaptive"))
    whole = space.size
    objective = Objective(model, loss_of(batch), space.parameters)
    _, gradients = objective.gradient(batch)
    full = space.pull(gradients, space.zeros(), space.zeros())
    space.focus(gradients)
    part = space.pull(gradients, space.zeros(), space.zeros())
    read = batch["input_ids"].unique().numel() + batch["input_ids"].shape[1]
    assert space.size == whole - (64 + 128 - read) * 16  # words and positions; there are two token types only
    assert float(part.norm()) == pytest.approx(float(full.norm()), rel=1e-12)
    space.widen()
    assert space.size == whole


def test_a_table_that_is_also_an_output_layer_is_left_whole() -> None:
    model, batch = language_model("gpt2")  # ties its output layer to its embedding
    space = ParameterSpace(model, Geometry.parse("adaptive"))
    _, gradients = Objective(model, loss_of(batch), space.parameters).gradient(batch)
    before = space.size
    space.focus(gradients)
    assert space.size == before - (128 - 11) * 16  # positions only; the last of 12 predicts nothing


def test_shared_tensors_have_one_set_of_coordinates() -> None:
    model, _ = language_model("gpt2")
    space = ParameterSpace(model, Geometry.parse("euclidean"))
    assert space.size == sum(tensor.numel() for tensor in model.parameters())


def test_frozen_parameters_stay_and_their_block_is_no_block() -> None:
    model, batch = classifier()
    symmetries = qs.find_symmetries(model, batch[0])
    model.encoder.layers[0].self_attn.in_proj_weight.requires_grad_(False)
    space = ParameterSpace(model, Geometry.parse("geodesic"), symmetries)
    frozen = model.encoder.layers[0].self_attn.in_proj_weight
    before = frozen.detach().clone()
    space.move_(space.random(torch.Generator().manual_seed(0)))
    assert torch.equal(frozen, before)
    space.restore_()
    assert sum("frozen" in note for note in space.notes) == 2


@pytest.mark.parametrize("retraction", ["christoffel", "geodesic"])
def test_geodesics_are_integrated_finely_enough(retraction: str) -> None:
    model, batch = classifier()
    symmetries = qs.find_symmetries(model, batch[0])
    space = ParameterSpace(model, Geometry.parse("geodesic", "mix", retraction), symmetries)
    z = space.random(torch.Generator().manual_seed(0)) * 0.8
    for pair in space._pairs:
        pair.levels = 2
    coarse = float(space.move_(z))
    space.prepare(z, 0.8)
    fine = float(space.move_(z))
    space.restore_()
    if retraction == "christoffel":
        assert coarse == fine == 0
    else:
        assert coarse > space.error_bound >= fine


def test_a_geodesic_that_leaves_the_manifold_is_reported() -> None:
    model, batch = classifier()
    symmetries = qs.find_symmetries(model, batch[0])
    space = ParameterSpace(model, Geometry.parse("geodesic", "mix", "geodesic"), symmetries)
    z = space.random(torch.Generator().manual_seed(0)) * 100
    space.prepare(z, 100)
    assert float(space.move_(z)) > space.error_bound
    assert not space.refine()
    space.restore_()


@pytest.mark.parametrize(
    ("argument", "value"),
    [("geometry", "hyperbolic"), ("metric", "max"), ("retraction", "cayley"), ("blocks", "some"), ("free", "fast")],
)
def test_arguments_are_named_when_they_are_wrong(argument: str, value: str) -> None:
    with pytest.raises(ValueError, match=f"^{argument} must be"):
        Geometry.parse(**{argument: value})


def test_a_model_without_parameters_is_refused() -> None:
    with pytest.raises(ValueError, match="no floating-point parameters"):
        ParameterSpace(nn.Identity(), Geometry.parse("euclidean"))


def test_pairs_of_lower_rank_keep_their_rank() -> None:
    model, batch = classifier()
    symmetries = qs.find_symmetries(model, batch[0])
    block = next(block for block in symmetries if block.kind == "vo")
    point = block.read(model).detach()
    point[0, block.n :] = 0  # one head writes nothing
    point[1, :, 0] = 0  # the other has lost one direction
    block.write_(model, point)
    for metric in ("inv", "mix"):
        for retraction in RETRACTIONS:
            space = ParameterSpace(model, Geometry.parse("geodesic", metric, retraction), symmetries)
            space.move_(space.random(torch.Generator().manual_seed(0)) * 0.1)
            moved = block.read(model).detach()
            product = moved[:, : block.n] @ moved[:, block.n :].mT
            values = torch.linalg.svdvals(product)
            space.restore_()
            assert bool(product.isfinite().all())
            assert float(values[0].max()) == 0
            assert float(values[1][block.h - 2]) > 1e-6
            assert float(values[1][block.h - 1]) < 1e-12
            assert "2 pairs of weights are of lower rank" in space.notes[0]
    with pytest.raises(ValueError, match="needs pairs of full rank"):
        ParameterSpace(model, Geometry.parse("geodesic", 0.3, "geodesic"), symmetries)
    assert math.isfinite(float(default_loss(model, batch).detach()))
