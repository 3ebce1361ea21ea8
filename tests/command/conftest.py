"""Tiny Hugging Face folders and data files. Few threads: the tests run two at a time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers as tf
from tokenizers import Tokenizer, models, pre_tokenizers, processors

torch.set_num_threads(1)
WORDS = (
    *("[PAD]", "[UNK]", "[CLS]", "[SEP]", "the", "a", "film", "is", "was", "good", "bad", "great", "dull", "not"),
    *("very", "it", "plot", "actors", "loved", "hated"),
)


def tokenizer() -> tf.PreTrainedTokenizerFast:
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return tf.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]",
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    )  # fmt: skip


def classifier(**options: object) -> tf.BertForSequenceClassification:
    torch.manual_seed(0)
    names = {"id2label": {0: "negative", 1: "positive"}, "label2id": {"negative": 0, "positive": 1}}
    config = tf.BertConfig(
        vocab_size=len(WORDS), hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=32, **{**names, **options},
    )  # fmt: skip
    return tf.BertForSequenceClassification(config).eval()


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ``bert``, ``gpt2``, ``vit`` and a file of sentences."""
    folder = tmp_path_factory.mktemp("models")
    classifier().save_pretrained(folder / "bert")
    torch.manual_seed(1)
    language = tf.GPT2Config(vocab_size=len(WORDS), n_embd=16, n_layer=1, n_head=2, n_positions=32)
    tf.GPT2LMHeadModel(language).save_pretrained(folder / "gpt2")
    for name in ("bert", "gpt2"):
        tokenizer().save_pretrained(folder / name)
    vision = tf.ViTConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, image_size=8, patch_size=4,
        num_channels=3, num_labels=3,
    )  # fmt: skip
    tf.ViTForImageClassification(vision).save_pretrained(folder / "vit")
    tf.ViTImageProcessorPil(size={"height": 8, "width": 8}).save_pretrained(folder / "vit")
    rows = [
        {"text": "the film was good", "label": "positive"},
        {"text": "a very dull plot", "label": "negative"},
        {"text": "loved it", "label": "positive"},
        {"text": "the actors hated it and it is not a great film", "label": "negative"},
        {"text": "great actors", "label": "positive"},
        {"text": "bad", "label": "negative"},
    ]
    (folder / "texts.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    return folder
