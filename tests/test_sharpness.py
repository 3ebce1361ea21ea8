"""Sharpness against maxima that are known, invariance along orbits, and what a measurement leaves behind."""

from __future__ import annotations

import copy
import json
import math
import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from scipy.optimize import minimize, minimize_scalar
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import quotientsharp as qs

from .models import Classifier, Diagonal, causal_loss, classifier, diagonal_problem, grouped, language_model, squares

RETRACTIONS = ["first_order", "christoffel", "geodesic"]


def test_diagonal_net_in_the_mixed_metric() -> None:
    """Oracle 7: ``max { |beta0 + d - beta*|^2 : |d| <= sqrt(2) rho }``, exactly."""
    model, batch, beta, target = diagonal_problem()
    miss = float((beta - target).norm())
    for rho in (0.01, 0.1):
        expected = (miss + math.sqrt(2) * rho) ** 2 - miss**2
        found = qs.sharpness(model, [batch], rho, loss=squares, metric="mix", retraction="geodesic", tolerance=1e-6)
        assert found.value == pytest.approx(expected, rel=1e-4)
        assert found.converged


def test_diagonal_net_in_the_invariant_metric() -> None:
    """Oracle 7: with ``beta = beta0 exp(2 b)`` and ``|xi|^2 = 2 |b|^2``, by SciPy, and its second-order form."""
    model, batch, beta, target = diagonal_problem()
    b0, bt = beta.numpy(), target.numpy()

    def loss(b: np.ndarray) -> float:
        return float(((b0 * np.exp(2 * b) - bt) ** 2).sum())

    for rho in (0.003, 0.1, 0.3):
        radius = rho / math.sqrt(2)
        best = -math.inf
        for seed in range(6):
            start = np.random.default_rng(seed).normal(size=b0.size)
            found = minimize(lambda v, r=radius: -loss(r * v / np.linalg.norm(v)), start, options={"gtol": 1e-10})
            best = max(best, -found.fun)
        expected = best - loss(np.zeros_like(b0))
        result = qs.sharpness(model, [batch], rho, loss=squares, metric="inv", retraction="geodesic", tolerance=1e-6)
        assert result.value == pytest.approx(expected, rel=1e-4)
    slope, curve = 4 * b0 * (b0 - bt), 8 * b0 * (2 * b0 - bt)
    from quotientsharp.curvature import trust_region

    small = qs.sharpness(model, [batch], 0.003, loss=squares, metric="inv", tolerance=1e-6).value
    assert small == pytest.approx(trust_region(slope, curve, 0.003 / math.sqrt(2)), rel=1e-4)


@pytest.mark.parametrize("rho", [0.01, 0.2, 1.0])
def test_scalar_net(rho: float) -> None:
    """Oracle 8."""
    g, h, x, y = 1.3, -0.7, 1.1, -0.4
    model = Diagonal(torch.tensor([g], dtype=torch.float64), torch.tensor([h], dtype=torch.float64))
    batch = torch.tensor([[x]], dtype=torch.float64), torch.tensor([y], dtype=torch.float64)
    y0, radius = g * h * x, rho / math.sqrt(2)

    def rise(b: float) -> float:
        return y0**2 * math.expm1(4 * b) - 2 * y * y0 * math.expm1(2 * b)

    inner = minimize_scalar(lambda b: -rise(b), bounds=(-radius, radius), method="bounded", options={"xatol": 1e-12})
    expected = max(rise(radius), rise(-radius), -inner.fun)
    found = qs.sharpness(
        model, batch, rho, loss=squares, metric="inv", retraction="geodesic", tolerance=1e-6, restarts=3, steps=60
    )
    assert found.value == pytest.approx(expected, rel=1e-4)


def adaptive_by_hand(model: nn.Module, batch: tuple[Tensor, Tensor], rho: float, steps: int = 400) -> float:
    """Gradient ascent in ``xi / |w|``, written out with plain tensors; weights that are zero stay."""
    weights = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    scaled = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}

    def loss(scaled: dict[str, Tensor]) -> Tensor:
        moved = {name: weights[name] + weights[name].abs() * scaled[name] for name in weights}
        return functional.cross_entropy(torch.func.functional_call(model, moved, (batch[0],)), batch[1])

    base, best = float(loss(scaled)), 0.0
    for step in range(steps):
        leaves = {name: tensor.detach().requires_grad_() for name, tensor in scaled.items()}
        value = loss(leaves)
        best = max(best, float(value.detach()) - base)
        slopes = dict(zip(leaves, torch.autograd.grad(value, list(leaves.values())), strict=True))
        norm = math.sqrt(sum(float(slope.square().sum()) for slope in slopes.values()))
        scaled = {name: scaled[name] + 2 * rho * 0.99**step * slopes[name] / norm for name in scaled}
        size = math.sqrt(sum(float(part.square().sum()) for part in scaled.values()))
        if size > rho:
            scaled = {name: part * (rho / size) for name, part in scaled.items()}
    return best


@pytest.mark.parametrize("rho", [0.05, 0.3])
def test_adaptive_sharpness_by_a_loop_of_its_own(rho: float) -> None:
    model, batch = classifier()
    with torch.no_grad():
        model.head.bias.zero_()
        model.encoder.layers[0].linear1.weight[0].zero_()
    expected = adaptive_by_hand(model, batch, rho)
    found = qs.sharpness(model, [batch], rho, geometry="adaptive", tolerance=1e-5)
    assert found.value == pytest.approx(expected, rel=1e-3)
    without = qs.sharpness(model, [batch], rho, retraction="first_order", blocks="none", tolerance=1e-5)
    assert without.value == found.value


def moved(model: nn.Module, symmetries: qs.Symmetries, scale: float, seed: int = 1) -> nn.Module:
    """The model elsewhere on its orbit: ``A = scale * Gaussian`` for GL blocks, group elements for smaller groups."""
    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    for block in symmetries:
        if block.group.dim == block.h**2 and block.kind != "rescaling":
            A = scale * torch.randn(block.copies, block.h, block.h, generator=generator, dtype=torch.float64)
        else:
            A = block.group.random(block.copies, 1.0, generator)
        block.write_(other, block.act(block.read(other).detach().double(), A).to(block.read(other).dtype))
    return other


@pytest.mark.parametrize("metric", ["inv", "mix"])
@pytest.mark.parametrize("retraction", RETRACTIONS)
@pytest.mark.parametrize("name", ["gelu", "relu", "grouped", "bert"])
def test_geodesic_sharpness_is_constant_along_orbits(name: str, retraction: str, metric: str) -> None:
    made = {
        "gelu": classifier,
        "relu": lambda: classifier(activation="relu"),
        "grouped": grouped,
        "bert": lambda: language_model("bert"),
    }
    model, batch = made[name]()
    symmetries = qs.find_symmetries(model, None if name == "bert" else batch[0])
    assert len(symmetries) >= 2
    options = {"metric": metric, "retraction": retraction, "symmetries": symmetries}
    here = qs.sharpness(model, [batch], 0.05, **options)
    adaptive = qs.sharpness(model, [batch], 0.05, geometry="adaptive").value
    for scale in (0.01, 100.0):
        there = moved(model, symmetries, scale)
        assert qs.sharpness(there, [batch], 0.05, **options).value == pytest.approx(here.value, rel=1e-8)
        other = qs.sharpness(there, [batch], 0.05, geometry="adaptive").value
        assert abs(other / adaptive - 1) > 0.01
    single = qs.sharpness(moved(model, symmetries, 1.0).float(), [_single(batch)], 0.05, **options)
    assert single.value == pytest.approx(here.value, rel=1e-3)


def _single(batch: object) -> object:
    return batch if isinstance(batch, dict) else (batch[0].float(), batch[1])


def test_a_dead_head_counts_as_the_zero_it_computes() -> None:
    """Only ``W_V W_O = 0`` matters, so what the values of a dead head are must not."""
    model, batch = classifier()
    symmetries = qs.find_symmetries(model, batch[0])
    block = next(block for block in symmetries if block.kind == "vo")
    values = []
    for seed in range(2):
        point = block.read(model).detach()
        point[0, : block.n] = torch.randn(block.n, block.h, generator=torch.Generator().manual_seed(seed)).double()
        point[0, block.n :] = 0
        block.write_(model, point)
        for metric in ("inv", "mix"):
            result = qs.sharpness(model, [batch], 0.05, metric=metric, symmetries=symmetries)
            assert any("rank 0" in note for note in result.notes)
            values.append(result.value)
    assert all(math.isfinite(value) and value > 0 for value in values)
    assert values[:2] == pytest.approx(values[2:], rel=1e-10)


def test_default_stop_is_near_the_best_of_many_steps() -> None:
    model, batch = classifier()
    symmetries = qs.find_symmetries(model, batch[0])
    for options in ({"geometry": "euclidean"}, {"geometry": "adaptive"}, {"metric": "inv"}, {"metric": "mix"}):
        quick = qs.sharpness(model, [batch], 0.1, symmetries=symmetries, **options)
        best = qs.sharpness(model, [batch], 0.1, symmetries=symmetries, steps=40, tolerance=0, **options)
        assert quick.value >= 0.998 * best.value
        assert quick.gradients[0] <= 8
        assert quick.converged
        assert quick.residual < 1e-2


def test_restarts_find_a_maximum_that_the_gradient_does_not_lead_to() -> None:
    """The gradient points along ``x`` and random starts follow its large curvature; the larger rise is along ``y``."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.zeros(40, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            first, second = self.w[0], self.w[1]
            return x * (0.1 * first + first**2 + 0.3 * second**2 + 2 * second**4)

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return model(batch[0]).sum() + 1

    one = torch.ones(1, dtype=torch.float64)
    values = [
        qs.sharpness(Two(), [(one, one)], 1.0, geometry="euclidean", loss=loss, restarts=restarts).value
        for restarts in (1, 2)
    ]
    assert values == pytest.approx([1.1, 2.3], rel=1e-2)


def test_several_radii_equal_one_by_one() -> None:
    model, batch = classifier()
    batches = [(batch[0][:12], batch[1][:12]), (batch[0][12:], batch[1][12:])]
    rhos = [0.1, 0.02, 0.05]
    curve = qs.sharpness(model, batches, rhos=rhos, tolerance=1e-4, steps=40)
    assert curve.rhos == rhos
    assert curve.values == pytest.approx(
        [qs.sharpness(model, batches, rho, tolerance=1e-4, steps=40).value for rho in rhos], rel=1e-3
    )
    assert curve.converged
    assert curve[1].value < curve[2].value < curve[0].value
    assert len(curve[:2]) == 2
    assert json.loads(json.dumps(curve.to_dict()))["results"][0]["rho"] == 0.1


def test_a_result_adds_up_and_says_what_it_is() -> None:
    model, batch = classifier()
    batches = [(batch[0][i : i + 8], batch[1][i : i + 8]) for i in range(0, 24, 8)]
    result = qs.sharpness(model, batches, 0.05)
    assert result.value == pytest.approx(np.mean(result.per_batch))
    assert result.loss == pytest.approx(
        np.mean([float(functional.cross_entropy(model(x), y).detach()) for x, y in batches])
    )
    for table in (result.by_block, result.by_layer):
        assert sum(table.values()) == pytest.approx(result.value)
    attention = sum(value for name, value in result.by_block.items() if name.endswith((".qk", ".vo")))
    assert sum(result.by_head.values()) == pytest.approx(attention)
    assert set(result.by_layer) >= {"encoder.layers.0", "encoder.layers.1", "head"}
    low, high = result.interval
    assert min(result.per_batch) <= low <= result.value <= high <= max(result.per_batch)
    assert json.loads(json.dumps(result.to_dict()))["geometry"] == "geodesic"
    assert "geodesic (mix, christoffel) sharpness at rho = 0.05" in str(result)
    assert qs.sharpness(model, batches[0], 0.05).interval is None


def test_attribution_is_the_first_order_share() -> None:
    """At a boundary maximum the shares of squared length are those of ``<gradient, step>``."""
    model, batch = classifier()
    result = qs.sharpness(model, [batch], 1e-4, geometry="adaptive", tolerance=1e-8)
    loss = functional.cross_entropy(model(batch[0]), batch[1])
    slopes = dict(zip(dict(model.named_parameters()), torch.autograd.grad(loss, model.parameters()), strict=True))
    squared = {
        name: float((slopes[name] * tensor).detach().square().sum()) for name, tensor in model.named_parameters()
    }
    for name, share in result.by_block.items():
        assert share / result.value == pytest.approx(squared[name] / sum(squared.values()), rel=1e-2, abs=1e-6)
    assert result.first_order == pytest.approx(1e-4 * math.sqrt(sum(squared.values())))


def test_attention_only_leaves_units_to_the_adaptive_metric() -> None:
    model, batch = classifier(activation="relu")
    symmetries = qs.find_symmetries(model, batch[0])
    assert {block.kind for block in symmetries} == {"qk", "vo", "rescaling"}
    result = qs.sharpness(model, [batch], 0.05, blocks="attention", symmetries=symmetries)
    assert "encoder.layers.0.linear1.weight" in result.by_block
    whole = qs.sharpness(model, [batch], 0.05, symmetries=symmetries)
    assert "encoder.layers.0.linear1.weight" not in whole.by_block
    assert result.value != whole.value


def test_average_sharpness_of_a_quadratic() -> None:
    """Over the sphere the mean of ``z.H z / 2`` is ``rho^2 tr(H) / 2N``; the linear part averages out."""
    torch.manual_seed(0)
    model = nn.Linear(5, 1, bias=False).double()
    x, y = torch.randn(20, 5, dtype=torch.float64), torch.randn(20, 1, dtype=torch.float64)

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return (model(batch[0]) - batch[1]).square().mean()

    expected = 0.3**2 * float((2 * x.mT @ x / 20).trace()) / (2 * 5)
    found = qs.average_sharpness(model, [(x, y)], 0.3, geometry="euclidean", samples=1500, loss=loss)
    assert abs(found.value - expected) < 4 * found.error
    assert found.error < 0.1 * expected + 0.05


def test_average_sharpness_is_constant_along_orbits() -> None:
    model, batch = classifier()
    symmetries = qs.find_symmetries(model, batch[0])
    values = [
        qs.average_sharpness(other, [batch], 0.5, samples=100, symmetries=symmetries)
        for other in (model, moved(model, symmetries, 10.0))
    ]
    assert abs(values[0].value - values[1].value) < 4 * math.hypot(values[0].error, values[1].error)
    plain = [
        qs.average_sharpness(other, [batch], 0.5, samples=25, geometry="euclidean")
        for other in (model, moved(model, symmetries, 0.01))
    ]
    assert abs(plain[0].value - plain[1].value) > 10 * plain[0].error


def test_logit_normalized_loss() -> None:
    model, batch = classifier()
    logits = model(batch[0])
    centered = logits - logits.mean(1, keepdim=True)
    expected = functional.cross_entropy(centered / centered.norm(dim=1, keepdim=True), batch[1])
    result = qs.sharpness(model, [batch], 0.05, loss="logit_normalized", geometry="adaptive")
    assert result.loss == pytest.approx(float(expected.detach()))
    bert, texts = language_model("bert")
    assert qs.sharpness(bert, [texts], 0.05, loss="logit_normalized", geometry="adaptive").value > 0


class Restless(Classifier):
    """Draws random numbers, counts its calls in a buffer and has dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.dropout = nn.Dropout(0.5)
        self.stop_after = 10**9
        self.error: BaseException = RuntimeError("stop")

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if int(self.calls) > self.stop_after:
            raise self.error
        return super().forward(self.dropout(x) + 0.01 * torch.randn_like(x)) + random.random() + np.random.rand()


def snapshot(model: nn.Module) -> tuple[object, ...]:
    return (
        {name: tensor.clone() for name, tensor in model.state_dict().items()},
        [module.training for module in model.modules()],
        [tensor.requires_grad for tensor in model.parameters()],
        [None if tensor.grad is None else (id(tensor.grad), tensor.grad.clone()) for tensor in model.parameters()],
        torch.get_rng_state(),
        random.getstate(),
        np.random.get_state()[1].tolist(),
    )


def same(a: object, b: object) -> bool:
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


@pytest.mark.parametrize("ending", [None, RuntimeError("stop"), KeyboardInterrupt()])
@pytest.mark.parametrize("geometry", ["geodesic", "adaptive", "euclidean"])
def test_the_model_comes_back_as_it_was(geometry: str, ending: BaseException | None) -> None:
    torch.manual_seed(0)
    model = Restless()
    x, y = torch.randn(4, 5, 4), torch.tensor([0, 1, 2, 0])
    symmetries = qs.find_symmetries(Classifier().double(), x.double())
    model.train()
    model.encoder.layers[1].eval()
    model.head.bias.requires_grad_(False)
    model.embed.weight.grad = torch.ones_like(model.embed.weight)
    if ending is not None:
        model.stop_after, model.error = int(model.calls) + 3, ending
    before = snapshot(model)
    if ending is None:
        result = qs.sharpness(model, [(x, y)], 0.05, geometry=geometry, symmetries=symmetries)
        assert result.value > 0
    else:
        with pytest.raises(type(ending)):
            qs.sharpness(model, [(x, y)], 0.05, geometry=geometry, symmetries=symmetries, tolerance=0)
    assert same(before, snapshot(model))


def test_a_noisy_model_is_measured_as_one_function() -> None:
    torch.manual_seed(0)
    model = Restless()
    x, y = torch.randn(4, 5, 4), torch.tensor([0, 1, 2, 0])
    first = qs.sharpness(model, [(x, y)], 0.05, geometry="adaptive").value
    torch.rand(17)
    assert qs.sharpness(model, [(x, y)], 0.05, geometry="adaptive").value == pytest.approx(first, rel=0.2)


class Checkpointed(Classifier):
    def forward(self, x: Tensor) -> Tensor:
        y = self.embed(x).requires_grad_()
        for layer in self.encoder.layers:
            y = checkpoint(layer, y, use_reentrant=True)
        return self.head(y.mean(1))


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_works_with_checkpointing_and_autocast() -> None:
    model, batch = classifier()
    plain = qs.sharpness(model, [batch], 0.05, geometry="adaptive")
    other = Checkpointed().double()
    other.load_state_dict(model.state_dict())
    assert qs.sharpness(other, [batch], 0.05, geometry="adaptive").value == pytest.approx(plain.value, rel=1e-10)
    model, batch = model.float(), (batch[0].float(), batch[1])
    symmetries = qs.find_symmetries(model, batch[0])
    single = qs.sharpness(model, [batch], 0.1, symmetries=symmetries).value
    with torch.autocast("cpu", dtype=torch.bfloat16):
        half = qs.sharpness(model, [batch], 0.1, symmetries=symmetries).value
    assert half == pytest.approx(single, rel=0.1)
    assert half != single


def test_half_precision_weights_say_what_they_resolve() -> None:
    model, batch = classifier()
    model = model.to(torch.bfloat16)
    result = qs.sharpness(model, [(batch[0].to(torch.bfloat16), batch[1])], 0.3, geometry="adaptive")
    assert result.value > 0
    assert any("bfloat16" in note for note in result.notes)


def test_a_rise_below_the_resolution_is_noted() -> None:
    model, batch = classifier()
    result = qs.sharpness(model.float(), [(batch[0].float(), batch[1])], 1e-6, geometry="adaptive")
    assert any("resolution" in note for note in result.notes)


def test_progress_is_told() -> None:
    model, batch = classifier()
    events: list[qs.Progress] = []
    result = qs.sharpness(model, [batch, batch], 0.05, geometry="adaptive", progress=events.append)
    assert [event.batch for event in events] == sorted(event.batch for event in events)
    assert sum(event.done for event in events) == 2
    assert all(event.batches == 2 and event.steps == 20 for event in events)
    assert len(events) == sum(result.gradients) + 2


def test_a_causal_language_model_with_rotary_attention() -> None:
    model, batch = language_model("llama")
    result = qs.sharpness(model, [batch], 0.05, loss=causal_loss)
    assert result.value > 0
    assert any(name.endswith("mlp.rescaling") or "mlp" in name for name in result.by_block)
    own = qs.sharpness(model, [batch], 0.05)
    assert own.value == pytest.approx(result.value, rel=1e-4)


def test_a_model_none_of_whose_parameters_require_gradients_moves_as_a_whole() -> None:
    model, batch = classifier()
    expected = qs.sharpness(model, [batch], 0.05, geometry="adaptive").value
    model.requires_grad_(False)
    assert qs.sharpness(model, [batch], 0.05, geometry="adaptive").value == expected
    assert not any(tensor.requires_grad for tensor in model.parameters())


def test_a_minimum_without_slope_starts_at_random() -> None:
    model = Diagonal(torch.ones(2, dtype=torch.float64), torch.ones(2, dtype=torch.float64))
    batch = torch.eye(2, dtype=torch.float64), torch.ones(2, dtype=torch.float64)
    found = qs.sharpness(model, [batch], 0.1, loss=squares, metric="mix", retraction="geodesic", tolerance=1e-6)
    assert found.value == pytest.approx(2 * 0.1**2, rel=1e-3)


def empty() -> Iterator[object]:
    yield from ()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rho": 0.0}, "rho must be a positive finite number, not 0.0"),
        ({"rho": -1.0}, "rho must be a positive finite number, not -1.0"),
        ({"rho": math.nan}, "rho must be a positive finite number, not nan"),
        ({"rhos": []}, "rhos must hold at least one radius"),
        ({"rhos": [0.1, -1.0]}, "rhos must be a positive finite number"),
        ({"steps": 0}, "steps must be a positive integer, not 0"),
        ({"restarts": 1.5}, "restarts must be a positive integer, not 1.5"),
        ({"tolerance": -1e-3}, "tolerance must be a non-negative finite number"),
        ({"batches": []}, "batches is empty"),
        ({"batches": empty()}, "batches is empty"),
        ({"batches": [torch.zeros(3)]}, "batches must hold mappings with 'labels' or pairs"),
        ({"batches": [(torch.zeros(2, 5, 4), torch.zeros(2))]}, "targets must be class indices of shape"),
        ({"loss": "mse"}, "loss must be None, 'logit_normalized' or a callable"),
        ({"loss": lambda model, batch: torch.zeros(())}, "loss must depend on the model's parameters"),
        ({"loss": lambda model, batch: model(batch[0])}, "loss must return a tensor with one element, not"),
        ({"geometry": "flat"}, "geometry must be one of"),
    ],
)
def test_wrong_arguments_are_named_in_one_sentence(change: dict[str, object], message: str) -> None:
    torch.manual_seed(0)
    options: dict[str, object] = {
        "batches": [(torch.randn(2, 5, 4), torch.tensor([0, 1]))],
        "geometry": "adaptive",
        **change,
    }
    batches = options.pop("batches")
    with pytest.raises(ValueError, match=message):
        qs.sharpness(Classifier(), batches, **options)


def test_wrong_types_are_named() -> None:
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module"):
        qs.sharpness(lambda x: x, [])
    with pytest.raises(TypeError, match="batches must be an iterable"):
        qs.sharpness(Classifier(), 3)


def test_labels_that_are_missing_are_named() -> None:
    model, batch = language_model("bert")
    with pytest.raises(ValueError, match="batches must hold mappings with 'labels'"):
        qs.sharpness(model, [{"input_ids": batch["input_ids"]}], geometry="adaptive")


def test_a_loss_that_is_not_finite_is_refused() -> None:
    model, batch = classifier()
    with torch.no_grad():
        model.head.weight[0, 0] = math.nan
    with pytest.raises(ValueError, match="loss at the model itself is nan"):
        qs.sharpness(model, [batch], geometry="adaptive")
