"""Proposals from module classes and names, for a model that cannot be exported. The numeric check decides as ever."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn

from .groups import Group, diagonal, general_linear, orthogonal, rotary, scalar
from .propose import Part, Refusal, Unit

QUERY = ("q", "query", "q_proj", "q_lin", "to_q", "wq", "w_q", "query_proj")
KEY = ("k", "key", "k_proj", "k_lin", "to_k", "wk", "w_k", "key_proj")
VALUE = ("v", "value", "v_proj", "v_lin", "to_v", "wv", "w_v", "value_proj")
OUTPUT = ("o", "out", "o_proj", "out_proj", "out_lin", "to_out", "wo", "w_o", "dense", "proj", "c_proj")
COUNT = ("num_heads", "num_attention_heads", "n_heads", "n_head", "heads", "nhead", "num_head")


def propose_by_name(model: nn.Module) -> tuple[list[Unit], list[Refusal]]:
    """Propose heads of attention modules whose layers and number of heads have usual names.

    Args:
        model: The model.

    Returns:
        Units and refusals.
    """
    units: list[Unit] = []
    refused: list[Refusal] = []
    names = {id(p): name for name, p in model.named_parameters()}
    done: set[int] = set()
    for place, module in model.named_modules():
        layers = [_child(module, options) for options in (QUERY, KEY, VALUE, OUTPUT)]
        if any(layer is None for layer in layers[:2]) or id(layers[0].weight) in done:  # type: ignore[union-attr]
            continue
        q, k, v, o = layers
        assert q is not None
        assert k is not None
        done.add(id(q.weight))
        heads = _count(model, module)
        if heads is None or q.out_features % heads or k.out_features % (q.out_features // heads):
            refused.append((f"{place}.qk", "the number of heads cannot be read off the module"))
            continue
        h = q.out_features // heads
        units += _pairs("qk", _rows(q, h, names), _rows(k, h, names), _query_groups(h))
        if v is not None and o is not None and v.out_features % h == 0 and o.in_features == q.out_features:
            units += _pairs("vo", _columns(o, h, names), _rows(v, h, names), [general_linear(h)], swap=True)
    if not units and not refused:
        refused.append(("model", "it cannot be exported, and no attention module with usual names was found"))
    return units, refused


def _child(module: nn.Module, options: tuple[str, ...]) -> nn.Linear | None:
    return next((c for name, c in module.named_children() if name in options and isinstance(c, nn.Linear)), None)


def _count(model: nn.Module, module: nn.Module) -> int | None:
    """Number of heads: of the module, else of the model."""
    places = (module, getattr(module, "config", None), model, getattr(model, "config", None))
    for owner, name in itertools.product(places, COUNT):
        value = getattr(owner, name, None)
        if isinstance(value, int) and value > 0:
            return value
    return None


def _rows(layer: nn.Linear, h: int, names: dict[int, str]) -> list[list[Part]]:
    """Per head: rows of the weight, and the bias."""
    width = layer.in_features
    start = torch.arange(layer.out_features).reshape(-1, 1, h)
    zero = torch.zeros(1, dtype=torch.long)
    result = []
    for channel in start:
        parts = [Part(names[id(layer.weight)], channel * width, torch.arange(width))]
        if layer.bias is not None:
            parts.append(Part(names[id(layer.bias)], channel, zero))
        result.append(parts)
    return result


def _columns(layer: nn.Linear, h: int, names: dict[int, str]) -> list[list[Part]]:
    """Per head: columns of the weight."""
    row: Tensor = torch.arange(layer.out_features) * layer.in_features
    start = torch.arange(layer.in_features).reshape(-1, 1, h)
    return [[Part(names[id(layer.weight)], channel, row)] for channel in start]


def _query_groups(h: int) -> list[Group]:
    groups = [general_linear(h)]
    if h % 2 == 0:
        groups.append(rotary(h, [(i, i + h // 2) for i in range(h // 2)]))
        groups.append(rotary(h, [(2 * i, 2 * i + 1) for i in range(h // 2)]))
    return [*groups, orthogonal(h), diagonal(h), scalar(h)]


def _pairs(
    kind: str, many: list[list[Part]], few: list[list[Part]], groups: list[Group], *, swap: bool = False
) -> list[Unit]:
    """Pair heads; grouped queries share one key head."""
    share = len(many) // len(few)
    units = []
    for index, single in enumerate(few):
        stacked = [part for parts in many[index * share : (index + 1) * share] for part in parts]
        left, right = (single, stacked) if swap else (stacked, single)
        units.append(Unit(kind, left, right, groups))
    return units
