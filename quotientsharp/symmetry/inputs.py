"""Makes example inputs for a model, long enough to tell the groups apart, and reads those a user gives."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

TOKENS = 96  # fewer make wrong groups look right

Inputs = tuple[tuple[Any, ...], dict[str, Any]]


def read_inputs(model: nn.Module, example_inputs: Any) -> Inputs:
    """Positional and keyword inputs from what a user gives, or made from the model's configuration.

    Args:
        model: The model.
        example_inputs: A tensor, a tuple of positional inputs, a mapping of keyword inputs, or None.

    Returns:
        ``(args, kwargs)``.

    Raises:
        ValueError: If none are given and the model does not say what it takes.
    """
    if example_inputs is None:
        made = make_inputs(model)
        if made is None:
            raise ValueError(
                f"find_symmetries needs example_inputs for {type(model).__name__}: a tensor, a tuple or a dict."
            )
        return made
    if isinstance(example_inputs, Mapping):
        return (), _without_cache(model, dict(example_inputs))
    if isinstance(example_inputs, Tensor):
        return (example_inputs,), _without_cache(model, {})
    if isinstance(example_inputs, tuple | list):
        return tuple(example_inputs), _without_cache(model, {})
    raise ValueError(f"example_inputs must be a tensor, a tuple or a dict, not {type(example_inputs).__name__}.")


def arguments_of(model: nn.Module) -> set[str]:
    """Names of the arguments that a model takes.

    Args:
        model: The model, also with adapters around it.

    Returns:
        The names.
    """
    base: Any = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
    return set(inspect.signature(base.forward).parameters)


def _without_cache(model: nn.Module, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Keys and values kept for later calls are no output of the function."""
    if "use_cache" in arguments_of(model) and getattr(model, "config", None) is not None:
        kwargs.setdefault("use_cache", False)
    return kwargs


def make_inputs(model: nn.Module) -> Inputs | None:
    """Make inputs for a Hugging Face model or a module of torch.nn.

    Args:
        model: The model.

    Returns:
        ``(args, kwargs)``, or None if the model does not say what it takes.
    """
    generator = torch.Generator().manual_seed(0)
    config = getattr(model, "config", None)
    if config is not None and hasattr(config, "to_dict"):
        return _from_config(model, config, generator)
    args = _from_module(model, generator)
    return (args, {}) if args is not None else None


def _setting(config: Any, *names: str) -> Any:
    """First setting that is there, also in the configurations inside."""
    inner = [
        getattr(config, name, None) for name in ("text_config", "vision_config", "audio_config", "encoder", "decoder")
    ]
    for part in (config, *(c for c in inner if c is not None)):
        for name in names:
            value = getattr(part, name, None)
            if value is not None:
                return value
    return None


def _from_config(model: nn.Module, config: Any, generator: torch.Generator) -> Inputs | None:
    takes = arguments_of(model)
    kwargs: dict[str, Any] = {}
    text = "input_ids" in takes
    meta = any(p.is_meta for p in model.parameters())
    tokens = TOKENS // 4 if meta else TOKENS  # no numeric check there, and the graph alone needs few positions
    if "pixel_values" in takes and _setting(config, "image_size") is not None:
        size = _setting(config, "image_size")
        height, width = (size, size) if isinstance(size, int) else tuple(size)[-2:]
        shape = (1, int(_setting(config, "num_channels") or 3), height, width)
        kwargs["pixel_values"] = torch.randn(shape, generator=generator)
        text = text and hasattr(config, "text_config")
    if "input_features" in takes:
        length = 2 * int(_setting(config, "max_source_positions") or 100)
        kwargs["input_features"] = torch.randn(
            1, int(_setting(config, "num_mel_bins") or 80), length, generator=generator
        )
    if "input_values" in takes and _setting(config, "conv_stride") is not None:
        strides, kernels = _setting(config, "conv_stride"), _setting(config, "conv_kernel")
        length = math.prod(strides) * 64 + sum(kernels) * 2
        kwargs["input_values"] = torch.randn(1, length, generator=generator)
    elif "input_values" in takes and _setting(config, "num_mel_bins") and _setting(config, "max_length"):
        length, bins = int(_setting(config, "max_length")), int(_setting(config, "num_mel_bins"))
        kwargs["input_values"] = torch.randn(1, length, bins, generator=generator)
    if text and not ({"input_features", "input_values"} & set(kwargs)):
        kwargs["input_ids"] = _tokens(config, generator, tokens)
    if "decoder_input_ids" in takes and getattr(config, "is_encoder_decoder", False):
        kwargs["decoder_input_ids"] = _tokens(config, generator, tokens)
    return ((), _without_cache(model, kwargs)) if kwargs else None


def _tokens(config: Any, generator: torch.Generator, tokens: int) -> Tensor:
    vocabulary = int(_setting(config, "vocab_size") or 100)
    longest = _setting(config, "max_target_positions", "max_position_embeddings", "n_positions", "n_ctx")
    text = getattr(config, "text_config", None)
    if text is not None and getattr(text, "max_position_embeddings", None):
        longest = text.max_position_embeddings
    length = tokens if not isinstance(longest, int) or longest < 4 else min(tokens, longest - 2)
    low = min(5, vocabulary // 2)
    return torch.randint(low, vocabulary, (1, length), generator=generator)


def _from_module(model: nn.Module, generator: torch.Generator) -> tuple[Any, ...] | None:
    def batch(first: bool, width: int, length: int = 48) -> Tensor:
        return torch.randn((2, length, width) if first else (length, 2, width), generator=generator)

    if isinstance(model, nn.MultiheadAttention):
        first = model.batch_first
        return batch(first, model.embed_dim), batch(first, model.kdim, 40), batch(first, model.vdim, 40)
    inside = next((m for m in model.modules() if isinstance(m, nn.MultiheadAttention)), None)
    if inside is not None and isinstance(model, nn.Transformer | nn.TransformerDecoder | nn.TransformerDecoderLayer):
        return batch(inside.batch_first, inside.embed_dim), batch(inside.batch_first, inside.embed_dim, 40)
    if inside is not None and isinstance(model, nn.TransformerEncoder | nn.TransformerEncoderLayer):
        return (batch(inside.batch_first, inside.embed_dim),)
    leaf = next((m for m in model.modules() if not list(m.children())), None)
    if isinstance(model, nn.Sequential | nn.Linear) and isinstance(leaf, nn.Linear):
        return (torch.randn(2 * TOKENS, leaf.in_features, generator=generator),)
    if isinstance(model, nn.Sequential) and isinstance(leaf, nn.Embedding):
        return (torch.randint(0, leaf.num_embeddings, (2, TOKENS), generator=generator),)
    return None
