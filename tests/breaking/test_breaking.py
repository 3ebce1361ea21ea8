"""Breaking: the distribution, where the bias goes, what is left of the group, saving, taking off, reading."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers as tf
from torch import Tensor, nn

from quotientsharp import breaking
from quotientsharp.symmetry import find_symmetries
from tests.symmetry import breakers, zoo

IDS = torch.randint(5, 60, (2, 20), generator=torch.Generator().manual_seed(0))


def tiny(name: str) -> nn.Module:
    torch.manual_seed(0)
    model = zoo.build(name)
    return model


def output(model: nn.Module, x: Tensor = IDS) -> Tensor:
    with torch.no_grad():
        result = model(x)
    return result if isinstance(result, Tensor) else result[0]


@pytest.mark.parametrize(
    ("name", "groups"),
    [
        ("gpt2", ["Aff(7)", "Aff(7)"]),
        ("bert", ["Aff(7)", "Aff(7)"]),
        ("bloom", ["Aff(7)", "Aff(7)"]),
        ("llama", ["none", "Aff(7)"]),  # of a rotary group not even one direction keeps the bias
        ("qwen3", ["none", "Aff(7)"]),  # there was no symmetry of the scores to begin with
        ("gpt_neox", ["GL", "Aff(15)"]),
    ],
)
def test_the_finder_reports_the_smaller_group(name: str, groups: list[str]) -> None:
    model = tiny(name)
    before = find_symmetries(model)
    breaking.break_symmetry(model, before)
    after = find_symmetries(model)
    assert after.dim < before.dim
    kinds = {kind: {str(b.group) for b in after if b.kind == kind} for kind in ("qk", "vo")}
    for kind, expected in zip(("qk", "vo"), groups, strict=True):
        if expected != "GL":
            assert kinds[kind] == (set() if expected == "none" else {expected})
    h = after[0].h
    for block in after:
        if str(block.group).startswith("Aff"):
            assert block.group.dim == block.h * (block.h - 1)
            kept = next(s for s in model.symmetry_breaking.shifts if s.block.name == block.name)
            A = block.group.random(1)[0]
            assert (kept.value.double() @ A - kept.value).abs().max() < 1e-6  # the drawn vector is what it keeps
            assert block.verified
    assert h == before[0].h
    breaking.restore(model)
    again = find_symmetries(model)
    assert [(b.name, str(b.group)) for b in again] == [(b.name, str(b.group)) for b in before]


def test_over_all_draws_nothing_is_left() -> None:
    """Every draw keeps its own vector; what keeps h of them is the identity alone."""
    model = tiny("gpt2")
    bias = breaking.break_symmetry(model)
    draws = []
    for _ in range(8):
        bias.draw_()
        draws.append(bias.shifts[0].value.clone())
    assert int(torch.linalg.matrix_rank(torch.stack(draws).double())) == 8


def attention_by_hand(model: Any, x: Tensor, b_q: Tensor, b_k: Tensor, b_v: Tensor) -> Tensor:
    """Plain attention with four linear layers, the biases added to every head."""
    q, k, v = (model.split(F.linear(x, layer.weight, layer.bias)) for layer in (model.q, model.k, model.v))
    weights = torch.softmax((q + b_q) @ (k + b_k).mT / breakers.H**0.5, -1)
    return x + model.o((weights @ (v + b_v)).transpose(-3, -2).flatten(-2))


def test_the_biases_are_added_to_every_head() -> None:
    torch.manual_seed(0)
    model = breakers.Attention().double()
    x = torch.randn(2, 24, 16, dtype=torch.float64)
    plain = model(x)
    bias = breaking.break_symmetry(model, example_inputs=x, key=breaking.KEY).double()
    b_q, b_k, b_v = (next(s for s in bias.shifts if s.role == role).value for role in ("query", "key", "value"))
    model.eval()
    torch.testing.assert_close(model(x), attention_by_hand(model, x, b_q, b_k, b_v), rtol=1e-12, atol=1e-12)
    assert (model(x) - plain).abs().max() > 1e-2
    without = attention_by_hand(model, x, b_q, torch.zeros_like(b_k), b_v)
    torch.testing.assert_close(model(x), without, rtol=1e-12, atol=1e-12)  # softmax does not see a bias of the keys
    breaking.restore(model)
    assert torch.equal(model(x), plain)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("width", [None, 12])
def test_multihead_attention(bias: bool, width: int | None) -> None:
    """Against torch's own function with the biases written into a copy of its parameter."""
    torch.manual_seed(0)
    model = nn.MultiheadAttention(16, 2, bias=bias, kdim=width, vdim=width, batch_first=True).double().eval()
    x, y = torch.randn(2, 30, 16).double(), torch.randn(2, 30, width or 16).double()
    plain = model(x, y, y)[0]
    names = [n for n, _ in model.named_parameters()]
    breaking.break_symmetry(model, example_inputs=(x, y, y))
    found = find_symmetries(model, (x, y, y))
    assert [str(b.group) for b in found] == ["Aff(7)", "Aff(7)"]
    assert [n for n, _ in model.named_parameters()] == names
    value = {s.role: s.value.double().repeat(2) for s in model.symmetry_breaking.shifts}
    other = nn.MultiheadAttention(16, 2, bias=True, kdim=width, vdim=width, batch_first=True).double().eval()
    with torch.no_grad():
        other.in_proj_bias.zero_(), other.out_proj.bias.zero_()
        other.load_state_dict({k: v for k, v in model.state_dict().items() if "breaking" not in k}, strict=False)
        other.in_proj_bias += torch.cat([value["query"], torch.zeros(16).double(), value["value"]])
    torch.testing.assert_close(model.double()(x, y, y)[0], other(x, y, y)[0], rtol=1e-12, atol=1e-12)
    with pytest.raises((RuntimeError, AssertionError)):
        model(x[..., :3], y, y)  # an error inside leaves the parameter as it was
    breaking.restore(model)
    assert torch.equal(model(x, y, y)[0], plain)


def test_encoder_layer_in_eval_mode_sees_the_bias() -> None:
    """The fused path of torch would skip the attention's hooks."""
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True).eval()
    x = torch.randn(2, 48, 16)
    plain = output(model, x)
    breaking.break_symmetry(model)
    assert (output(model, x) - plain).abs().max() > 1e-2
    model.train()
    model(x).sum().backward()
    assert model.self_attn.in_proj_bias.grad is not None


def test_training_draws_anew_and_evaluation_reuses_the_last_draw() -> None:
    model = tiny("gpt2")
    bias = breaking.break_symmetry(model)
    torch.manual_seed(3)
    state = torch.get_rng_state()
    model.eval()
    first = output(model)
    assert torch.equal(output(model), first)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    model.train()
    trained = output(model)
    assert not torch.equal(trained, first)
    model.eval()
    torch.testing.assert_close(output(model), trained, rtol=1e-6, atol=1e-6)
    assert torch.equal(torch.get_rng_state(), state)  # other random numbers are not disturbed
    model.train()
    draws = []
    for _ in range(3000):
        bias.draw_()
        draws.append(torch.stack([s.value for s in bias.shifts]))
    sample = torch.stack(draws)  # (draws, shifts, h)
    for index, shift in enumerate(bias.shifts):
        std = torch.linspace(0.05, 0.15, 8) if shift.role == "query" else torch.full((8,), 0.05)
        assert (sample[:, index].mean(0) - 0.5).abs().max() < 5 * 0.15 / 3000**0.5
        assert (sample[:, index].std(0) / std - 1).abs().max() < 0.1
    correlation = torch.corrcoef(sample.flatten(1).T) - torch.eye(sample[0].numel())
    assert correlation.abs().max() < 0.12  # independent between layers, roles and channels


def test_no_gradient_and_no_parameter() -> None:
    model = tiny("gpt2")
    count = sum(p.numel() for p in model.parameters())
    bias = breaking.break_symmetry(model)
    assert sum(p.numel() for p in model.parameters()) == count
    assert not any(b.requires_grad for b in bias.buffers())
    model.train()
    model(IDS).last_hidden_state.sum().backward()
    assert all(p.grad is not None for n, p in model.named_parameters() if "c_attn" in n)


def test_it_survives_saving_and_loading() -> None:
    model = tiny("gpt2")
    breaking.break_symmetry(model, seed=4)
    model.train()
    output(model)
    model.eval()
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    other = tiny("gpt2")
    breaking.break_symmetry(other, query=breaking.Bias(0.1, 0.1, 0.1))
    other.load_state_dict(torch.load(file))
    other.eval()
    assert torch.equal(output(other), output(model))
    model.symmetry_breaking.draw_(), other.symmetry_breaking.draw_()
    assert torch.equal(output(other), output(model))  # the stream goes on, with the distribution that was saved
    twin = copy.deepcopy(model)
    twin.symmetry_breaking.draw_()
    assert not torch.equal(output(twin), output(model))
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    assert torch.equal(output(torch.load(file, weights_only=False)), output(model))
    breaking.restore(twin)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in twin.modules())
    assert set(twin.state_dict()) == set(tiny("gpt2").state_dict())


def test_half_precision() -> None:
    model = tiny("gpt2").to(torch.bfloat16)
    breaking.break_symmetry(model)
    assert output(model).dtype == torch.bfloat16
    model.half()
    assert output(model.train()).dtype == torch.float16


@pytest.mark.parametrize("packed", [False, True])
def test_amplified_tokens(packed: bool, tmp_path: Path) -> None:
    """Scores per token against the derivative-free definition: attention logits with and without the bias."""
    torch.manual_seed(0)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(64, 16)
            self.attention = nn.MultiheadAttention(16, 2) if packed else breakers.Attention()

        def forward(self, ids: Tensor) -> Tensor:
            x = self.embed(ids)
            if not packed:
                return self.attention(x)
            x = x.transpose(0, 1)
            return self.attention(x, x, x)[0].transpose(0, 1)

    model = Model()
    bias = breaking.break_symmetry(model, example_inputs=torch.randint(0, 64, (2, 30)))
    batches = [torch.randint(0, 6, (4, 30)) for _ in range(2)]
    model.train()
    found = breaking.amplification(model, batches, lambda token: "abcdef"[token])
    assert model.training
    assert int(bias.count) == 1  # no draw was made
    assert found.tokens == [0, 1, 2, 3, 4, 5]
    b_q = next(s for s in bias.shifts if s.role == "query").value
    x = model.embed.weight[:6]
    if packed:
        weight, offset = model.attention.in_proj_weight[16:32], model.attention.in_proj_bias[16:32]
        k = F.linear(x, weight, offset)
    else:
        k = model.attention.k(x)
    expected = (k.reshape(6, 2, 8) @ b_q / 8**0.5).T.double().detach()
    counts = torch.bincount(torch.cat(batches).flatten()).double()
    expected = expected - (expected * counts).sum(1, keepdim=True) / counts.sum()
    (scores,) = found.scores["query"].values()
    torch.testing.assert_close(scores, expected, rtol=1e-5, atol=1e-6)
    best = "abcdef"[int(expected[0].argmax())]
    row = found.rows(top=1)[0]
    assert row[0] == "query"
    assert repr(best) in row[3]
    assert found.table().count("\n") == 4
    found.plot(tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 5_000


def test_masked_tokens_are_not_counted() -> None:
    torch.manual_seed(0)
    model = tf.GPT2Model(tf.GPT2Config(**zoo.GPT2))
    breaking.break_symmetry(model)
    mask = torch.ones_like(IDS)
    mask[:, 10:] = 0
    found = breaking.amplification(model, [{"input_ids": IDS, "attention_mask": mask}], least=1)
    assert sum(found.counts) == 20
    with pytest.raises(ValueError, match="least"):
        breaking.amplification(model, [{"input_ids": IDS}], least=1000)
    with pytest.raises(ValueError, match="input_ids"):
        breaking.amplification(model, [{"x": IDS}])


def test_errors() -> None:
    model = tiny("gpt2")
    with pytest.raises(ValueError, match="nothing to restore"):
        breaking.restore(model)
    with pytest.raises(ValueError, match="break_symmetry"):
        breaking.amplification(model, [IDS])
    with pytest.raises(ValueError, match="no attention symmetry"):
        breaking.break_symmetry(model, query=None, value=None)
    breaking.break_symmetry(model)
    with pytest.raises(ValueError, match="already"):
        breaking.break_symmetry(model)
    with pytest.raises(ValueError, match="no attention symmetry"):
        breaking.break_symmetry(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)))
    with pytest.raises(ValueError, match="Bias"):
        breaking.Bias(0.5, -0.1, 0.1)
    with pytest.raises(TypeError, match="not called"):
        model.symmetry_breaking()
