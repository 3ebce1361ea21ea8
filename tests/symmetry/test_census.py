"""Every model of the census is found right: group, copies, dimension and exact parameter names."""

from __future__ import annotations

import re

import pytest
import torch
import transformers as tf

from quotientsharp.symmetry import Symmetries, find_symmetries

from . import zoo


def summary(found: Symmetries) -> list[tuple[str, str, str, int, tuple[str, ...]]]:
    return sorted((b.kind, str(b.group), b.group.style, b.copies, b.parameters) for b in found)


def dimension(group: str) -> int:
    """Dimension from the name, by the rules and not by the code."""
    total = 0
    for kind, size in re.findall(r"(GL|R)\((\d+)\)", group):
        total += int(size) ** 2 if kind == "GL" else int(size)
    return total or 1


@pytest.mark.parametrize("name", zoo.FULL)
def test_census(name: str) -> None:
    torch.manual_seed(0)
    found = find_symmetries(zoo.build(name))
    rows = zoo.FULL[name][1]
    expected = sorted((k, g, s, c, tuple(n.format(i) for n in names)) for k, g, s, c, names in rows for i in range(2))
    assert summary(found) == expected
    assert found.dim == 2 * sum(copies * dimension(group) for _, group, _, copies, _ in rows)
    assert all(block.verified and block.error < 1e-11 for block in found)


@pytest.mark.parametrize("name", ["qwen3", "gemma3"])
def test_norm_on_queries_and_keys_is_refused_with_its_reason(name: str) -> None:
    torch.manual_seed(0)
    found = find_symmetries(zoo.build(name))
    assert [place for place, _ in found.refused] == ["layers.0.self_attn.qk", "layers.1.self_attn.qk"]
    assert all("length" in reason for _, reason in found.refused)


def test_weights_that_serve_all_layers_are_one_unit() -> None:
    torch.manual_seed(0)
    model = tf.AlbertModel(tf.AlbertConfig(**{**zoo.TEXT, "num_hidden_layers": 3}, embedding_size=16))
    place = "encoder.albert_layer_groups.0.albert_layers.0.attention."
    rows = zoo.attention(place, "query key value dense")
    found = find_symmetries(model)
    assert summary(found) == sorted((k, g, s, c, n) for k, g, s, c, n in rows)
    assert found.dim == 2 * 4 * 8**2  # not three times that


def test_cross_attention_of_gpt2() -> None:
    torch.manual_seed(0)
    decoder = tf.GPT2LMHeadModel(tf.GPT2Config(**zoo.GPT2, add_cross_attention=True, is_decoder=True))
    model = tf.EncoderDecoderModel(encoder=tf.BertModel(tf.BertConfig(**zoo.TEXT)), decoder=decoder)
    cross = [b for b in find_symmetries(model) if "crossattention" in b.parameters[0]]
    place = "decoder.transformer.h.0.crossattention."
    names = ("q_attn.weight", "q_attn.bias", "c_attn.weight", "c_attn.bias")
    assert cross[0].parameters == tuple(place + n for n in names)
    assert [(b.kind, b.group, b.copies) for b in cross] == [("qk", "GL(8)", 4)] * 2 + [("vo", "GL(8)", 4)] * 2
    assert cross[3].parameters == tuple(
        "decoder.transformer.h.1.crossattention." + n for n in ("c_attn.weight", "c_attn.bias", "c_proj.weight")
    )
    assert {b.dim for b in cross} == {4 * 8**2}


def test_latent_attention_with_a_rotated_key_that_all_heads_share() -> None:
    torch.manual_seed(0)
    config = tf.DeepseekV3Config(
        **{**zoo.TEXT, "num_hidden_layers": 1},
        num_key_value_heads=4,
        q_lora_rank=16,
        kv_lora_rank=12,
        qk_rope_head_dim=4,
        qk_nope_head_dim=8,
        v_head_dim=8,
        first_k_dense_replace=1,
    )
    found = find_symmetries(tf.DeepseekV3Model(config))
    place = "layers.0.self_attn."
    assert [(b.kind, str(b.group), b.copies, b.parameters) for b in found[:3]] == [
        ("qk", "GL(8)", 4, (place + "q_b_proj.weight", place + "kv_b_proj.weight")),
        ("qk", "R(4)", 1, (place + "q_b_proj.weight", place + "kv_a_proj_with_mqa.weight")),
        ("vo", "GL(8)", 4, (place + "kv_b_proj.weight", place + "o_proj.weight")),
    ]


def test_a_table_of_sines_stored_as_a_parameter_is_a_constant() -> None:
    torch.manual_seed(0)
    found = find_symmetries(tf.RoFormerModel(tf.RoFormerConfig(**zoo.TEXT)))
    assert [(str(b.group), b.group.style) for b in found if b.kind == "qk"] == [("R(8)", "interleaved")] * 2


@pytest.mark.parametrize(
    ("name", "options", "group", "style"),
    [
        ("Phi", {"partial_rotary_factor": 0.5}, "R(4) x GL(4)", "half"),
        ("Cohere", {}, "R(8)", "interleaved"),
        ("Glm", {"head_dim": 8, "pad_token_id": 0}, "R(4) x GL(4)", "interleaved"),
        ("Olmo", {"clip_qkv": 0.1}, "", ""),
        ("Olmo2", {}, "", ""),
    ],
)
def test_architectures_beyond_the_census(name: str, options: dict[str, object], group: str, style: str) -> None:
    torch.manual_seed(0)
    found = find_symmetries(getattr(tf, f"{name}Model")(getattr(tf, f"{name}Config")(**zoo.GROUPED, **options)))
    scores = [(str(b.group), b.group.style, b.copies) for b in found if b.kind == "qk"]
    assert scores == ([(group, style, 2)] * 2 if group else [])
    assert sum(place.endswith("qk") for place, _ in found.refused) == (0 if group else 2)


def test_windows_of_swin() -> None:
    torch.manual_seed(0)
    config = tf.SwinConfig(image_size=32, patch_size=2, embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=4)
    found = find_symmetries(tf.SwinModel(config))
    assert [(b.kind, b.group, b.copies) for b in found] == [
        (kind, "GL(8)", copies) for kind in ("qk", "vo") for copies in (2, 2, 4, 4)
    ]
    assert found.dim == 2 * (2 + 2 + 4 + 4) * 8**2
    places = [f"encoder.layers.{i}.blocks.{j}.attention." for i in range(2) for j in range(2)]
    assert [b.parameters for b in found] == [*map(_scores, places), *(_values(place, "o_proj") for place in places)]


def _scores(place: str) -> tuple[str, ...]:
    return tuple(place + n for n in ("q_proj.weight", "q_proj.bias", "k_proj.weight", "k_proj.bias"))


def _values(place: str, out: str) -> tuple[str, ...]:
    return tuple(place + n for n in ("v_proj.weight", "v_proj.bias", f"{out}.weight"))


@pytest.mark.parametrize("name", ["CLIP", "Siglip"])
def test_text_and_image(name: str) -> None:
    torch.manual_seed(0)
    config = getattr(tf, f"{name}Config")(text_config={**zoo.TEXT, "eos_token_id": 3}, vision_config=zoo.IMAGE)
    found = find_symmetries(getattr(tf, f"{name}Model")(config))
    heads = {b.name for b in found if b.kind == "qk"}
    assert {f"{tower}_model.encoder.layers.{i}.self_attn.qk" for tower in ("text", "vision") for i in range(2)} <= heads
    assert {str(b.group) for b in found} == {"GL(8)"}
    assert len(found) == (8 if name == "CLIP" else 10)
    assert found.dim == len(found) * 4 * 8**2
    places = [f"{tower}_model.encoder.layers.{i}.self_attn." for tower in ("vision", "text") for i in range(2)]
    towers = [b.parameters for b in found if "encoder" in b.name]
    assert towers == [*map(_scores, places), *(_values(place, "out_proj") for place in places)]
