"""The census: tiny random configurations and what must be found in each.

Per model: the class, its configuration, and the expected blocks as (kind, group, style, copies, parameter pattern), the
pattern standing for every layer: ``{}`` is the number of the layer.
"""

from __future__ import annotations

from typing import Any

import transformers as tf
from torch import nn

TEXT: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}
GROUPED = {**TEXT, "num_key_value_heads": 2}
IMAGE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 4,
}
BART: dict[str, Any] = {
    "vocab_size": 64,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
}
SOUND: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "conv_dim": (16, 16),
    "conv_stride": (3, 2),
    "conv_kernel": (4, 3),
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 2,
    "num_feat_extract_layers": 2,
}
GPT2 = {
    "vocab_size": 64,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

Row = tuple[str, str, str, int, tuple[str, ...]]


def qk(group: str, copies: int, *names: str, style: str = "") -> Row:
    return ("qk", group, style, copies, names)


def vo(group: str, copies: int, *names: str) -> Row:
    return ("vo", group, "", copies, names)


def units(copies: int, *names: str) -> Row:
    return ("rescaling", "Rescaling", "", copies, names)


def attention(
    prefix: str,
    names: str,
    *,
    qk_bias: str = "both",
    v_bias: bool = True,
    group: str = "GL(8)",
    copies: int = 4,
    style: str = "",
    value: str = "GL(8)",
) -> list[Row]:
    """Both rows of an attention with four separate layers."""
    q, k, v, o = (f"{prefix}{name}" for name in names.split())
    score = (
        [f"{q}.weight"] + [f"{q}.bias"] * (qk_bias != "none") + [f"{k}.weight"] + [f"{k}.bias"] * (qk_bias == "both")
    )
    mixed = [f"{v}.weight"] + [f"{v}.bias"] * v_bias + [f"{o}.weight"]
    return [qk(group, copies, *score, style=style), vo(value, copies, *mixed)]


def gated(prefix: str, copies: int = 48) -> Row:
    return units(copies, f"{prefix}.up_proj.weight", f"{prefix}.down_proj.weight")


BERT = attention("encoder.layer.{}.attention.", "self.query self.key self.value output.dense")
PROJ = "q_proj k_proj v_proj o_proj"
LLAMA = [
    *attention("layers.{}.self_attn.", PROJ, qk_bias="none", v_bias=False, group="R(8)", copies=2, style="half"),
    gated("layers.{}.mlp"),
]
NORMED = [
    vo("GL(8)", 2, "layers.{}.self_attn.v_proj.weight", "layers.{}.self_attn.o_proj.weight"),
    gated("layers.{}.mlp"),
]
OUT = "q_proj k_proj v_proj out_proj"


def _t5(gate: str) -> tuple[type, Any]:
    return tf.T5Model, tf.T5Config(
        vocab_size=64, d_model=32, d_kv=6, num_heads=4, d_ff=48, num_layers=2, feed_forward_proj=gate
    )


def _t5_rows(up: str) -> list[Row]:
    rows = []
    for place in ("encoder.block.{}.layer.0.SelfAttention.", "decoder.block.{}.layer.0.SelfAttention.",
                  "decoder.block.{}.layer.1.EncDecAttention."):  # fmt: skip
        rows += attention(place, "q k v o", qk_bias="none", v_bias=False, group="GL(6)", value="GL(6)")
    for place in ("encoder.block.{}.layer.1.DenseReluDense.", "decoder.block.{}.layer.2.DenseReluDense."):
        rows.append(units(48, f"{place}{up}.weight", f"{place}wo.weight"))
    return rows


def _three(qk_bias: str = "both") -> list[Row]:
    """Encoder, decoder and cross-attention with the names of Bart."""
    rows = []
    for place in ("encoder.layers.{}.self_attn.", "decoder.layers.{}.self_attn.", "decoder.layers.{}.encoder_attn."):
        rows += attention(place, OUT, qk_bias=qk_bias)
    return rows


def _grouped(name: str, **more: Any) -> tuple[type, Any]:
    return getattr(tf, f"{name}Model"), getattr(tf, f"{name}Config")(**GROUPED, **more)


VIT = attention("layers.{}.attention.", PROJ)
FULL: dict[str, tuple[tuple[type, Any], list[Row]]] = {
    "bert": ((tf.BertModel, tf.BertConfig(**TEXT)), BERT),
    "roberta": ((tf.RobertaModel, tf.RobertaConfig(**TEXT)), BERT),
    "electra": ((tf.ElectraModel, tf.ElectraConfig(**TEXT, embedding_size=16)), BERT),
    "distilbert": (
        (
            tf.DistilBertModel,
            tf.DistilBertConfig(
                vocab_size=64, dim=32, hidden_dim=48, n_layers=2, n_heads=4, max_position_embeddings=128
            ),
        ),
        attention("transformer.layer.{}.attention.", "q_lin k_lin v_lin out_lin"),
    ),
    "mpnet": ((tf.MPNetModel, tf.MPNetConfig(**TEXT)), attention("encoder.layer.{}.attention.attn.", "q k v o")),
    "gpt2": (
        (tf.GPT2Model, tf.GPT2Config(**GPT2)),
        [
            qk("GL(8)", 4, "h.{}.attn.c_attn.weight", "h.{}.attn.c_attn.bias"),
            vo("GL(8)", 4, "h.{}.attn.c_attn.weight", "h.{}.attn.c_attn.bias", "h.{}.attn.c_proj.weight"),
        ],
    ),
    "gpt_neo": (
        (
            tf.GPTNeoModel,
            tf.GPTNeoConfig(
                vocab_size=64,
                hidden_size=32,
                num_layers=2,
                num_heads=4,
                window_size=16,
                attention_types=[[["global", "local"], 1]],
                max_position_embeddings=128,
            ),
        ),
        attention("h.{}.attn.attention.", OUT, qk_bias="none", v_bias=False),
    ),
    "opt": (
        (
            tf.OPTModel,
            tf.OPTConfig(
                vocab_size=64,
                hidden_size=32,
                ffn_dim=48,
                num_hidden_layers=2,
                num_attention_heads=4,
                max_position_embeddings=128,
                word_embed_proj_dim=32,
            ),
        ),
        [
            *attention("decoder.layers.{}.self_attn.", OUT),
            units(48, *(f"decoder.layers.{{}}.{n}" for n in ("fc1.weight", "fc1.bias", "fc2.weight"))),
        ],
    ),
    "bart": ((tf.BartModel, tf.BartConfig(**BART, max_position_embeddings=128)), _three()),
    "whisper": (
        (
            tf.WhisperModel,
            tf.WhisperConfig(
                **BART,
                num_mel_bins=8,
                max_source_positions=60,
                max_target_positions=64,
                pad_token_id=0,
                bos_token_id=1,
                eos_token_id=2,
                decoder_start_token_id=1,
            ),
        ),
        _three("query"),
    ),
    "t5": (_t5("relu"), _t5_rows("wi")),
    "t5_gated": (_t5("gated-gelu"), _t5_rows("wi_1")),
    "gpt_neox": (
        (tf.GPTNeoXModel, tf.GPTNeoXConfig(**{**TEXT, "hidden_size": 64}, rotary_pct=0.25)),
        [
            qk(
                "R(4) x GL(12)",
                4,
                *(f"layers.{{}}.attention.query_key_value.{n}" for n in ("weight", "bias")),
                style="half",
            ),
            vo(
                "GL(16)",
                4,
                *(
                    f"layers.{{}}.attention.{n}"
                    for n in ("query_key_value.weight", "query_key_value.bias", "dense.weight")
                ),
            ),
        ],
    ),
    "gptj": (
        (tf.GPTJModel, tf.GPTJConfig(vocab_size=64, n_embd=64, n_layer=2, n_head=4, n_positions=128, rotary_dim=8)),
        attention(
            "h.{}.attn.", OUT, qk_bias="none", v_bias=False, group="R(8) x GL(8)", style="interleaved", value="GL(16)"
        ),
    ),
    "bloom": (
        (tf.BloomModel, tf.BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=4)),
        [
            qk("GL(8)", 4, *(f"h.{{}}.self_attention.query_key_value.{n}" for n in ("weight", "bias"))),
            vo(
                "GL(8)",
                4,
                *(
                    f"h.{{}}.self_attention.{n}"
                    for n in ("query_key_value.weight", "query_key_value.bias", "dense.weight")
                ),
            ),
        ],
    ),
    "llama": (_grouped("Llama"), LLAMA),
    "mistral": (_grouped("Mistral"), LLAMA),
    "qwen2": (
        _grouped("Qwen2"),
        [*attention("layers.{}.self_attn.", PROJ, group="R(8)", copies=2, style="half"), gated("layers.{}.mlp")],
    ),
    "gemma": (_grouped("Gemma", head_dim=8), LLAMA),
    "gemma2": (_grouped("Gemma2", head_dim=8), LLAMA),
    "mixtral": (_grouped("Mixtral", num_local_experts=4, num_experts_per_tok=2), LLAMA[:2]),
    "qwen3": (_grouped("Qwen3", head_dim=8), NORMED),
    "gemma3": (_grouped("Gemma3Text", head_dim=8), NORMED),
    "esm_rotary": (
        (tf.EsmModel, tf.EsmConfig(**TEXT, position_embedding_type="rotary", pad_token_id=1)),
        attention(
            "encoder.layer.{}.attention.", "self.query self.key self.value output.dense", group="R(8)", style="half"
        ),
    ),
    "esm_absolute": ((tf.EsmModel, tf.EsmConfig(**TEXT, position_embedding_type="absolute", pad_token_id=1)), BERT),
    "vit": ((tf.ViTModel, tf.ViTConfig(**IMAGE)), VIT),
    "deit": ((tf.DeiTModel, tf.DeiTConfig(**IMAGE)), VIT),
    "beit": ((tf.BeitModel, tf.BeitConfig(**IMAGE)), attention("layers.{}.attention.", PROJ, qk_bias="query")),
    "dinov2": (
        (
            tf.Dinov2Model,
            tf.Dinov2Config(
                hidden_size=32, mlp_ratio=2, num_hidden_layers=2, num_attention_heads=4, image_size=32, patch_size=4
            ),
        ),
        attention("encoder.layer.{}.attention.", PROJ),
    ),
    "clip_text": (
        (tf.CLIPTextModel, tf.CLIPTextConfig(**TEXT, eos_token_id=3)),
        attention("encoder.layers.{}.self_attn.", OUT),
    ),
    "siglip_text": ((tf.SiglipTextModel, tf.SiglipTextConfig(**TEXT)), attention("encoder.layers.{}.self_attn.", OUT)),
    "wav2vec2": ((tf.Wav2Vec2Model, tf.Wav2Vec2Config(**SOUND)), attention("encoder.layers.{}.attention.", OUT)),
    "hubert": ((tf.HubertModel, tf.HubertConfig(**SOUND)), attention("encoder.layers.{}.attention.", OUT)),
}


def build(name: str) -> nn.Module:
    """A model of the census with random weights."""
    (kind, config), _ = FULL[name]
    model: nn.Module = kind(config).eval()
    return model
