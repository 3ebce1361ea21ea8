"""Attaching changes what `model.parameters()` lists and nothing else."""

from __future__ import annotations

import copy
import io
from pathlib import Path

import geoopt
import pytest
import torch
import transformers as tf
from torch import nn

import quotientsharp as qs

from ..tiny import IDS, assert_same, loss_of, make, state

KINDS = ("bert", "gpt2", "llama")


def close(first: torch.Tensor, second: torch.Tensor) -> None:
    """Equal to rounding: a strided weight may take another matrix product."""
    torch.testing.assert_close(first, second, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("kind", KINDS)
def test_attach_then_detach_is_the_identity(kind: str) -> None:
    model, symmetries = make(kind)
    before, objects = state(model), dict(model.named_parameters())
    loss = loss_of(model)
    qs.attach(model, symmetries)
    assert_same(before, model.state_dict())
    close(loss_of(model), loss)
    qs.detach(model)
    assert_same(before, model.state_dict())
    assert all(p is objects[name] for name, p in model.named_parameters())
    assert torch.equal(loss_of(model), loss)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_the_plain_parameters(kind: str) -> None:
    model, symmetries = make(kind)
    loss_of(model).backward()
    plain = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    stacks = qs.attach(model, symmetries)
    for _ in range(2):  # two backward passes accumulate
        loss_of(model).backward()
    for stack, point in zip(stacks.blocks, stacks.points, strict=True):
        torch.testing.assert_close(point.grad / 2, stack.read(plain), rtol=1e-10, atol=1e-13)
    free = {name: p.grad for name, p in model.named_parameters() if not name.startswith("quotient.")}
    assert all(p is None or torch.allclose(p / 2, plain[name]) for name, p in free.items())


def test_second_derivatives_pass_through() -> None:
    for kind in ("bert", "gpt2"):
        model, symmetries = make(kind)
        stacks = qs.attach(model, symmetries)
        point = stacks.points[0]
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            (first,) = torch.autograd.grad(loss_of(model), point, create_graph=True)
            direction = torch.randn(point.shape, dtype=point.dtype, generator=torch.Generator().manual_seed(0))
            (second,) = torch.autograd.grad((first * direction).sum(), point)
            gradients = []
            for sign in (1, -1):
                with torch.no_grad():
                    point.add_(direction, alpha=sign * 1e-5)
                gradients.append(torch.autograd.grad(loss_of(model), point)[0])
                with torch.no_grad():
                    point.add_(direction, alpha=-sign * 1e-5)
        torch.testing.assert_close(second, (gradients[0] - gradients[1]) / 2e-5, rtol=1e-4, atol=1e-7)


def test_whole_weights_are_views() -> None:
    model, symmetries = make("bert")
    stacks = qs.attach(model, symmetries)
    start = {p.untyped_storage().data_ptr() for p in stacks.points}
    layer = model.bert.encoder.layer[0].attention
    for weight in (layer.self.query.weight, layer.self.key.bias, layer.self.value.weight, layer.output.dense.weight):
        assert weight.untyped_storage().data_ptr() in start


@pytest.mark.parametrize("kind", KINDS)
def test_checkpoints_go_both_ways(kind: str) -> None:
    model, symmetries = make(kind)
    stacks = qs.attach(model, symmetries)
    with torch.no_grad():
        for p in stacks.points:
            p.mul_(1.5)
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    saved = torch.load(buffer)
    plain, _ = make(kind)
    plain.load_state_dict(saved)
    close(loss_of(plain), loss_of(model))
    other, _ = make(kind)
    qs.attach(other, symmetries)
    before = loss_of(other)
    other.load_state_dict(plain.state_dict())
    assert torch.equal(loss_of(other), loss_of(model))
    assert not torch.equal(before, loss_of(other))


def test_load_state_dict_says_what_is_wrong() -> None:
    model, symmetries = make()
    qs.attach(model, symmetries)
    name = "bert.encoder.layer.0.attention.self.query.weight"
    values = state(model)
    missing = {key: value for key, value in values.items() if key != name}
    with pytest.raises(RuntimeError, match="Missing key"):
        model.load_state_dict(missing)
    assert model.load_state_dict(missing, strict=False).missing_keys == [name]
    with pytest.raises(RuntimeError, match="size mismatch"):
        model.load_state_dict({**values, name: torch.zeros(3)})
    with pytest.raises(RuntimeError, match="Unexpected key"):
        model.load_state_dict({**values, "extra": torch.zeros(3)})


def test_save_pretrained(tmp_path: Path) -> None:
    model, symmetries = make()
    qs.attach(model, symmetries)
    model.save_pretrained(tmp_path)
    again = tf.BertForSequenceClassification.from_pretrained(tmp_path, dtype=torch.float64).eval()
    close(loss_of(again), loss_of(model))


def test_deepcopy_is_independent() -> None:
    model, symmetries = make()
    qs.attach(model, symmetries)
    loss_of(model)  # fills what is remembered
    twin = copy.deepcopy(model)
    before = loss_of(model)
    assert torch.equal(loss_of(twin), before)
    with torch.no_grad():
        twin.quotient.stack0.mul_(2)
    assert torch.equal(loss_of(model), before)
    assert not torch.equal(loss_of(twin), before)
    assert isinstance(twin.quotient.stack0, geoopt.ManifoldParameter)
    qs.detach(twin)
    assert not torch.equal(loss_of(twin), before)


def test_dtype_and_device_moves() -> None:
    model, symmetries = make()
    qs.attach(model, symmetries)
    loss = loss_of(model)
    model.float()
    assert model.quotient.stack0.dtype == torch.float32
    torch.testing.assert_close(loss_of(model), loss.float())
    assert model.bert.encoder.layer[0].attention.self.query.weight.dtype == torch.float32
    model.to("meta")
    assert model.state_dict()["bert.encoder.layer.0.attention.self.query.weight"].is_meta


def test_writes_that_bypass_version_counters_are_seen() -> None:
    for kind in KINDS:
        model, symmetries = make(kind)
        qs.attach(model, symmetries)
        before = loss_of(model)
        for p in model.quotient.parameters():
            p.data.mul_(1.3)
        plain, _ = make(kind)
        plain.load_state_dict(model.state_dict())
        close(loss_of(model), loss_of(plain))
        assert not torch.equal(loss_of(model), before)


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable:FutureWarning")
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(reentrant: bool) -> None:
    model, symmetries = make("gpt2")
    qs.attach(model, symmetries)
    loss_of(model).backward()
    expected = [p.grad.clone() for p in model.quotient.points]
    model.zero_grad()
    model.train()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    model(input_ids=IDS, labels=torch.tensor([0, 1, 2, 0]), use_cache=False).loss.backward()
    for p, gradient in zip(model.quotient.points, expected, strict=True):
        torch.testing.assert_close(p.grad, gradient)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # raised inside dynamo
@pytest.mark.parametrize("kind", ["bert", "gpt2"])
def test_compiles_into_one_graph_and_sees_new_weights(kind: str) -> None:
    model, symmetries = make(kind)
    stacks = qs.attach(model, symmetries)
    inner = model.bert if kind == "bert" else model.transformer
    torch._dynamo.reset()
    compiled = torch.compile(inner, backend="aot_eager", fullgraph=True)
    for factor in (1.0, 1.5):
        with torch.no_grad():
            stacks.points[0].mul_(factor)
        model.zero_grad()
        out, reference = compiled(input_ids=IDS)[0], inner(input_ids=IDS)[0]
        torch.testing.assert_close(out, reference)
        out.sin().sum().backward()
        found = stacks.points[0].grad.clone()
        model.zero_grad()
        reference.sin().sum().backward()
        torch.testing.assert_close(found, stacks.points[0].grad)


class Tied(nn.Module):
    """Two attention layers that share their queries."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(12, 12) for _ in range(4))
        self.q2 = self.q
        self.k2 = nn.Linear(12, 12)
        self.k2.weight = self.k.weight
        self.k2.bias = self.k.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for q, k in ((self.q, self.k), (self.q2, self.k2)):
            heads = [part(x).unflatten(-1, (3, 4)).transpose(-2, -3) for part in (q, k, self.v)]
            mixed = (heads[0] @ heads[1].mT).softmax(-1) @ heads[2]
            x = x + self.o(mixed.transpose(-2, -3).flatten(-2))
        return x


def test_tied_weights_stay_tied() -> None:
    torch.manual_seed(0)
    model = Tied().double()
    x = torch.randn(2, 100, 12, dtype=torch.float64)
    before, out = state(model), model(x)
    stacks = qs.attach(model, example_inputs=x)
    assert {stack.kind for stack in stacks.blocks} == {"qk", "vo"}
    assert_same(before, model.state_dict())
    close(model(x), out)
    with torch.no_grad():
        stacks.points[0].mul_(0.5)
    assert torch.equal(model.k.weight, model.k2.weight)
    assert not torch.equal(model.k2.weight, before["k2.weight"])
    qs.detach(model)
    assert model.k2.weight is model.k.weight
    assert model.q2.weight is model.q.weight


def test_frozen_blocks_stay_plain() -> None:
    model, symmetries = make()
    attention = model.bert.encoder.layer[0].attention
    attention.self.query.weight.requires_grad_(False)
    for p in (attention.self.value.weight, attention.self.value.bias, attention.output.dense.weight):
        p.requires_grad_(False)
    stacks = qs.attach(model, symmetries)
    assert [reason for _, reason in stacks.skipped] == [
        "some of its parameters are frozen",
        "its parameters are frozen",
    ]
    assert isinstance(attention.self.query.weight, nn.Parameter)
    assert sum(stack.copies for stack in stacks.blocks) == 4


def test_elements_outside_all_blocks_are_a_plain_parameter() -> None:
    model, symmetries = make("gpt2")
    before = state(model)
    stacks = qs.attach(model, [block for block in symmetries if block.kind == "qk"])
    rest = stacks.rests["transformer.h.0.attn.c_attn.weight"]
    assert rest.numel() == 16 * 16
    assert_same(before, model.state_dict())
    loss_of(model).backward()
    assert rest.grad is not None
    assert bool((rest.grad != 0).any())
    plain, _ = make("gpt2")
    loss_of(plain).backward()
    values = plain.transformer.h[0].attn.c_attn.weight.grad[:, 32:]
    torch.testing.assert_close(rest.grad.reshape(16, 16), values)


def test_an_optimizer_from_before_attach_says_so() -> None:
    model, symmetries = make()
    early = torch.optim.AdamW(model.parameters())
    qs.attach(model, symmetries)
    loss_of(model).backward()
    with pytest.raises(RuntimeError, match=r"from before attach\(model\)"):
        early.step()
    late = torch.optim.SGD(model.parameters(), lr=0.1)
    late.step()
    qs.detach(model)
    with pytest.raises(RuntimeError, match=r"from before detach\(model\)"):
        late.step()
    loss_of(model).backward()
    early.step()


def test_replacing_a_weight_is_refused() -> None:
    model, symmetries = make()
    qs.attach(model, symmetries)
    query = model.bert.encoder.layer[0].attention.self.query
    with pytest.raises(AttributeError, match="part of a manifold parameter"):
        query.weight = nn.Parameter(torch.zeros(16, 16))
    with pytest.raises(AttributeError, match="part of a manifold parameter"):
        query.register_parameter("weight", None)


def test_bad_input() -> None:
    model, symmetries = make()
    with pytest.raises(ValueError, match="model must be a torch"):
        qs.attach(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="not attached"):
        qs.detach(model)
    with pytest.raises(ValueError, match="no block that can be attached"):
        qs.attach(model, [])
    with pytest.raises(ValueError, match="the model has no parameter"):
        qs.attach(nn.Linear(2, 2), symmetries)
    qs.attach(model, symmetries)
    with pytest.raises(ValueError, match="attached already"):
        qs.attach(model, symmetries)
    with pytest.raises(ValueError, match="model is attached"):
        qs.find_symmetries(model)
    with pytest.raises(ValueError, match="model is attached"):
        qs.sharpness(model, [{"input_ids": IDS, "labels": IDS[:, 0] % 3}], symmetries=symmetries)
    with pytest.raises(ValueError, match="very model that attach was given"):
        qs.detach(nn.Sequential(model))


def test_names_of_copies() -> None:
    model, symmetries = make()
    stacks = qs.attach(model, symmetries)
    assert stacks.where(0, 3) == "bert.encoder.layer.1.attention.self.qk, copy 1"
    assert "stack0: qk GL(8), 4 copies in 2 blocks" in repr(stacks)
    with pytest.raises(IndexError):
        stacks.where(0, 4)


def test_geoopt_trains_an_attached_model_as_it_is() -> None:
    def line_search(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        optimizer: torch.optim.Optimizer = geoopt.optim.rlinesearch.RiemannianLineSearch(parameters)
        return optimizer

    makers = {
        "adam": lambda parameters: geoopt.optim.RiemannianAdam(parameters, lr=1e-2),
        "sgd": lambda parameters: geoopt.optim.RiemannianSGD(parameters, lr=1e-2),
        "search": line_search,
    }
    for name, maker in makers.items():
        model, symmetries = make()
        qs.attach(model, symmetries)
        optimizer = maker(list(model.parameters()))

        def closure(model: nn.Module = model, optimizer: torch.optim.Optimizer = optimizer) -> float:
            optimizer.zero_grad()
            loss = loss_of(model)
            loss.backward()
            return loss.item()

        start = closure()
        for _ in range(10):
            optimizer.step(closure)
        assert closure() < start - 0.02, name
