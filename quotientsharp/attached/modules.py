"""Modules whose parameters are read from stacked points.

The class of such a module is replaced by a subclass of the same name in which the parameter is a property, as torch's
own parametrizations do. Torch's parametrizations themselves do not fit: there every parameter owns an original of its
own, while here one stacked point serves many modules, and the keys of ``state_dict`` must stay those of the plain
model.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from .stacks import Stacks

_KEY = "_quotient_reader"
_classes: dict[tuple[type[nn.Module], tuple[str, ...]], type[nn.Module]] = {}


class Reader:
    """Where a module finds its parameters. Not a module itself, so that the points appear once in the model.

    Args:
        stacks: The stacked points.
        names: Names in the model by local name.
    """

    def __init__(self, stacks: Stacks, names: dict[str, str]) -> None:
        self.stacks, self.names = stacks, names


def _reading(base: type[nn.Module], names: tuple[str, ...]) -> type[nn.Module]:
    """Subclass of a module class in which some parameters are properties, made once."""
    if (base, names) not in _classes:
        _classes[base, names] = _make(base, names)
    return _classes[base, names]


def _make(base: type[nn.Module], names: tuple[str, ...]) -> type[nn.Module]:

    def read(name: str) -> property:
        def value(self: nn.Module) -> Tensor:
            reader: Reader = self.__dict__[_KEY]
            return reader.stacks.value(reader.names[name])

        return property(value)

    def set_attribute(self: nn.Module, name: str, value: Any) -> None:
        if name in names:
            _refuse(name)
        base.__setattr__(self, name, value)

    def register(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if name in names:
            _refuse(name)
        base.register_parameter(self, name, param)

    def save(self: nn.Module, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        reader: Reader = self.__dict__[_KEY]
        # Placeholders keep the order of the keys.
        destination.update({prefix + name: None for name in self._parameters if name in names or _kept(self, name)})
        base._save_to_state_dict(self, destination, prefix, keep_vars)
        for name in names:
            value = reader.stacks.value(reader.names[name])
            destination[prefix + name] = (
                value if keep_vars else value.detach().clone(memory_format=torch.contiguous_format)
            )

    def load(
        self: nn.Module, state: dict[str, Any], prefix: str, metadata: Any, strict: bool,
        missing: list[str], unexpected: list[str], errors: list[str],
    ) -> None:  # fmt: skip
        reader: Reader = self.__dict__[_KEY]
        keys = {prefix + name: reader.names[name] for name in names}
        others = {key: value for key, value in state.items() if key not in keys}
        base._load_from_state_dict(self, others, prefix, metadata, strict, missing, unexpected, errors)
        for key, name in keys.items():
            if key in state:
                _load(reader.stacks, name, key, state[key], errors)
            elif strict:
                missing.append(key)

    def reduce(self: nn.Module, protocol: object) -> tuple[Any, ...]:
        return _rebuild, (base, names), self.__dict__.copy()

    namespace: dict[str, Any] = {name: read(name) for name in names}
    namespace |= {
        "__setattr__": set_attribute,
        "register_parameter": register,
        "_save_to_state_dict": save,
        "_load_from_state_dict": load,
        "__reduce_ex__": reduce,
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
    }
    return type(base.__name__, (base,), namespace)


def _kept(module: nn.Module, name: str) -> bool:
    return module._parameters[name] is not None


def _refuse(name: str) -> NoReturn:
    raise AttributeError(
        f"{name} is part of a manifold parameter and cannot be replaced; call quotientsharp.detach(model) first, or "
        "load new values with load_state_dict."
    )


def _load(stacks: Stacks, name: str, key: str, value: Any, errors: list[str]) -> None:
    shape = stacks.layouts[name].shape
    if not isinstance(value, Tensor) or value.shape != shape:
        given = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        errors.append(f"size mismatch for {key}: the checkpoint has {given}, the model {tuple(shape)}.")
    else:
        stacks.write_(name, value)


def _rebuild(base: type[nn.Module], names: tuple[str, ...]) -> nn.Module:
    kind = _reading(base, names)
    return kind.__new__(kind)


def install(module: nn.Module, names: dict[str, str], stacks: Stacks) -> None:
    """Let a module read parameters from stacked points.

    Args:
        module: The module.
        names: Names in the model by local name.
        stacks: The stacked points.
    """
    for name in names:
        module._parameters[name] = None  # keeps its place among the others
    module.__dict__[_KEY] = Reader(stacks, names)
    module.__class__ = _reading(type(module), tuple(names))


def remove(module: nn.Module, parameters: dict[str, nn.Parameter]) -> None:
    """Give a module its plain parameters back.

    Args:
        module: The module.
        parameters: The parameters by name in the model.
    """
    reader: Reader = module.__dict__.pop(_KEY)
    module.__class__ = type(module).__mro__[1]
    for local, name in reader.names.items():
        module._parameters[local] = parameters[name]


def reader_of(module: nn.Module) -> Reader | None:
    """The reader of a module.

    Args:
        module: Any module.

    Returns:
        Its reader, or None.
    """
    return module.__dict__.get(_KEY)
