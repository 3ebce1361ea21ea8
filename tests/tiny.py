"""Tiny models that several tests train, with their symmetries found once."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import torch
import transformers as tf
from torch import Tensor, nn

import quotientsharp as qs

SIZE = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
# Token 0 is padding: its embedding has a zero gradient by decree.
IDS = torch.randint(1, 32, (4, 10), generator=torch.Generator().manual_seed(0))
LABELS = torch.tensor([0, 1, 2, 0])
Made = tuple[nn.Module, qs.Symmetries]


@cache
def _make(kind: str) -> Made:
    tf.logging.set_verbosity_error()
    torch.manual_seed(0)
    model: nn.Module
    if kind in ("bert", "shallow"):
        layers = {"num_hidden_layers": 1 if kind == "shallow" else 2}
        config = tf.BertConfig(
            **{**SIZE, **layers},
            num_labels=3,
            initializer_range=0.3,
            attention_probs_dropout_prob=0.0,
            max_position_embeddings=128,
        )
        model = tf.BertForSequenceClassification(config)
    elif kind == "gpt2":  # queries, keys and values in one parameter
        names = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 128, "vocab_size": 32}
        config = tf.GPT2Config(**names, bos_token_id=1, eos_token_id=2, pad_token_id=0, num_labels=3)
        model = tf.GPT2ForSequenceClassification(config)
    else:  # grouped queries, a rotary embedding, gated units
        size = {**SIZE, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
        model = tf.LlamaForSequenceClassification(tf.LlamaConfig(**size, pad_token_id=0, num_labels=3))
    model = model.double().eval()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model, qs.find_symmetries(model)


def make(kind: str = "bert") -> Made:
    model, symmetries = _make(kind)
    return copy.deepcopy(model), symmetries


def loss_of(model: nn.Module) -> Tensor:
    loss: Tensor = model(input_ids=IDS, labels=LABELS).loss
    return loss


def state(model: nn.Module) -> dict[str, Any]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_same(first: dict[str, Any], second: dict[str, Any]) -> None:
    assert list(first) == list(second)
    assert all(torch.equal(first[name], second[name]) for name in first)
