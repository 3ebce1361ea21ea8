"""Modules of torch.nn, hand-written attention, diagonal nets, ReLU layers and adapters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor, nn

from quotientsharp.symmetry import find_symmetries

from . import breakers, zoo

pytestmark = pytest.mark.filterwarnings("ignore")


def summary(model: nn.Module, inputs: Any = None) -> list[tuple[str, str, int, int, tuple[str, ...]]]:
    torch.manual_seed(0)
    found = find_symmetries(model, inputs)
    assert not found.refused
    return [(b.kind, str(b.group), b.copies, b.dim, b.parameters) for b in found]


PACKED = ("in_proj_weight", "in_proj_bias")
FORMS: list[tuple[dict[str, Any], tuple[str, ...], tuple[str, ...], int, int]] = [
    ({}, PACKED, (*PACKED, "out_proj.weight"), 34, 33),
    ({"batch_first": True}, PACKED, (*PACKED, "out_proj.weight"), 34, 33),
    ({"kdim": 12, "vdim": 10}, ("q_proj_weight", "in_proj_bias", "k_proj_weight"),
     ("v_proj_weight", "in_proj_bias", "out_proj.weight"), 30, 27),
    ({"add_bias_kv": True}, (*PACKED, "bias_k"), (*PACKED, "bias_v", "out_proj.weight"), 35, 34),
    ({"bias": False}, PACKED[:1], ("in_proj_weight", "out_proj.weight"), 32, 32),
    ({"add_zero_attn": True}, PACKED, (*PACKED, "out_proj.weight"), 34, 33),
    ({"add_bias_kv": True, "kdim": 12, "vdim": 10, "bias": False}, ("q_proj_weight", "k_proj_weight", "bias_k"),
     ("v_proj_weight", "bias_v", "out_proj.weight"), 29, 27),
]  # fmt: skip


@pytest.mark.parametrize(("options", "score", "value", "score_rows", "value_rows"), FORMS)
def test_multihead_attention(
    options: dict[str, Any], score: tuple[str, ...], value: tuple[str, ...], score_rows: int, value_rows: int
) -> None:
    model = nn.MultiheadAttention(16, 4, **options)
    assert summary(model) == [("qk", "GL(4)", 4, 64, score), ("vo", "GL(4)", 4, 64, value)]
    found = find_symmetries(model)
    assert [b.read(model).shape for b in found] == [(4, score_rows, 4), (4, value_rows, 4)]


def test_encoder_and_decoder() -> None:
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 4, 32, batch_first=True), 2)
    hidden = ("linear1.weight", "linear1.bias", "linear2.weight")
    rows = summary(encoder)
    assert [row[:4] for row in rows] == [("qk", "GL(4)", 4, 64)] * 2 + [("vo", "GL(4)", 4, 64)] * 2 + [
        ("rescaling", "Rescaling", 32, 32)
    ] * 2
    assert rows[-1][4] == tuple(f"layers.1.{name}" for name in hidden)
    decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(16, 4, 32), 1)
    places = [row[4][0] for row in summary(decoder)]
    attentions = [f"layers.0.{name}.in_proj_weight" for name in ("self_attn", "multihead_attn")]
    assert places == attentions * 2 + ["layers.0.linear1.weight"]
    assert len(summary(nn.TransformerEncoderLayer(16, 4, 32, activation="gelu"))) == 2


def test_frozen_and_training_models_are_left_as_they_were() -> None:
    model = nn.TransformerEncoderLayer(16, 4, 32).train()
    model.linear1.weight.requires_grad_(False)
    before = {name: p.clone() for name, p in model.named_parameters()}
    assert len(find_symmetries(model)) == 3
    assert model.training
    assert model.self_attn.training
    assert not model.linear1.weight.requires_grad
    assert model.linear2.weight.requires_grad
    assert all(torch.equal(before[name], p) for name, p in model.named_parameters())


def test_einsum_attention() -> None:
    assert summary(breakers.Einsum(), torch.randn(2, 48, 16)) == [
        ("qk", "GL(8)", 2, 128, ("wq", "bq", "wk")),
        ("vo", "GL(8)", 2, 128, ("wv", "bv", "wo")),
    ]


def test_diagonal_net() -> None:
    assert summary(breakers.Diagonal(), torch.randn(40, 16)) == [("rescaling", "Rescaling", 16, 16, ("u", "v"))]


def test_relu_layers_share_no_parameter_element() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 3))
    torch.manual_seed(0)
    found = find_symmetries(model)
    assert [(b.copies, b.parameters, b.group.positive) for b in found] == [
        (16, ("0.weight", "0.bias", "2.weight"), True)
    ]
    assert len(found.refused) == 1
    assert "2.weight" in found.refused[0][1]


def test_gated_units_may_change_sign() -> None:
    torch.manual_seed(0)
    model = breakers.Gated()
    (block,) = find_symmetries(model, torch.randn(2, 48, 16))
    assert (block.kind, block.copies, block.group.positive) == ("rescaling", 24, False)
    assert block.parameters == ("up.weight", "up.bias", "down.weight")


def test_packed_gate_and_up() -> None:
    torch.manual_seed(0)
    config = tf.Phi3Config(**{**zoo.GROUPED, "pad_token_id": 0})
    found = find_symmetries(tf.Phi3Model(config))
    assert [(b.kind, str(b.group), b.copies) for b in found] == [
        (kind, group, copies)
        for kind, group, copies in (("qk", "R(8)", 2), ("vo", "GL(8)", 2), ("rescaling", "Rescaling", 48))
        for _ in range(2)
    ]
    x = find_symmetries(tf.Phi3Model(config))[4]
    assert int(x.pieces[0].channel.min()) == 48 * 32  # the second half of gate_up_proj


def test_two_linear_layers() -> None:
    assert summary(nn.Sequential(nn.Linear(8, 3), nn.Linear(3, 8))) == [
        ("linear", "GL(3)", 1, 9, ("0.weight", "0.bias", "1.weight"))
    ]


def test_adapters() -> None:
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    base = tf.LlamaForCausalLM(tf.LlamaConfig(**zoo.GROUPED))
    model = peft.get_peft_model(base, peft.LoraConfig(r=3, target_modules=["q_proj", "v_proj"]))
    found = find_symmetries(model)
    place = "base_model.model.model.layers.{}.self_attn.{}_proj.lora_{}.default.weight"
    lora = [b for b in found if b.kind == "lora"]
    assert [(str(b.group), b.copies, b.dim, b.parameters) for b in lora] == [
        ("GL(3)", 1, 9, tuple(place.format(i, n, x) for x in "AB")) for i in range(2) for n in "qv"
    ]
    assert {b.kind for b in found} == {"lora", "rescaling"}
    assert all("lora_B" in reason for _, reason in found.refused)
    assert len(found.refused) == 4


class Learned(nn.Module):
    """Learned queries: a projection of a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.latent, self.attention = (
            nn.Parameter(torch.randn(1, 6, 16)),
            nn.MultiheadAttention(16, 4, batch_first=True),
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.attention(self.latent.expand(x.shape[0], -1, -1), x, x)[0]
        return out


def test_learned_queries() -> None:
    rows = summary(Learned(), torch.randn(2, 48, 16))
    assert [row[:3] for row in rows] == [("qk", "GL(4)", 4), ("vo", "GL(4)", 4)]
