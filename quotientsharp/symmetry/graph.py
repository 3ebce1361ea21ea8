"""The exported graph of a model: who depends on what, and the numeric value of the parts that carry no weights.

Nothing here knows a name of an architecture. Values are computed lazily, in float64 and on the CPU; whatever depends on
weights is replaced by random numbers of the same shape, so that a model on the meta device can be read too.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import logging
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export.graph_signature import InputKind

LOW = {torch.float32, torch.float16, torch.bfloat16}


class ExportError(RuntimeError):
    """The model cannot be exported."""


def wide(value: Any) -> Any:
    """Replace lower precision by float64, and any device by the CPU, in an argument.

    Args:
        value: An argument of an operator.

    Returns:
        The argument to use instead.
    """
    if isinstance(value, torch.dtype):
        return torch.float64 if value in LOW else torch.complex128 if value == torch.complex64 else value
    if isinstance(value, torch.device):
        return torch.device("cpu")
    return value


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Run without the fast path of nn.MultiheadAttention, which hides its parts, and without foreign warnings.

    Yields:
        Nothing.
    """
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


@contextlib.contextmanager
def _silent(name: str) -> Iterator[None]:
    logger = logging.getLogger(name)
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def _is_wrapper(target: Any) -> bool:
    return isinstance(target, torch._ops.HigherOrderOperator)


class Graph:
    """An exported graph with the roles of its nodes.

    Args:
        model: The model, in eval mode.
        args: Its positional inputs.
        kwargs: Its keyword inputs.
        values: The inputs on the CPU, where the model itself is on the meta device; the inputs themselves if None.
        fixed: Names of parameters that are constants.

    Attributes:
        nodes: All nodes, in order of execution.
        parameters: Placeholder nodes of parameters, with the canonical name of the parameter.
        shapes: Shapes of the parameters, by canonical name.

    Raises:
        ExportError: If ``torch.export`` does not accept the model.
    """

    def __init__(
        self,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        values: tuple[Any, ...] | None = None,
        fixed: frozenset[str] = frozenset(),
    ) -> None:
        self.fixed = fixed
        # What torch.export prints about a model it refuses is replaced by one sentence.
        hush = contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO())
        with quiet(), torch.enable_grad(), hush[0], hush[1], _silent("torch.fx.experimental.symbolic_shapes"):
            try:
                program = torch.export.export(model, args, kwargs=kwargs, strict=False)
            except Exception as error:
                raise ExportError(f"{type(model).__name__} cannot be exported: {first_line(error)}") from error
            program = _without_mutation(program)
        self.module = program.graph_module
        self.nodes: list[fx.Node] = list(program.graph.nodes)
        self.order = {node: index for index, node in enumerate(self.nodes)}
        self.parameters: dict[fx.Node, str] = {}
        self.shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
        self.dtypes = {name: p.dtype for name, p in model.named_parameters()}
        self._known: dict[fx.Node, Any] = {}
        self._read_inputs(model, program, values if values is not None else (args, kwargs))
        self.on_parameters, self.on_inputs = self._reach(self.parameters), self._reach(self._user)
        self._ancestors: dict[fx.Node, set[fx.Node]] = {}
        self._prints: dict[fx.Node, str] = {}

    def _read_inputs(self, model: nn.Module, program: Any, values: tuple[Any, ...]) -> None:
        """Find out what every placeholder stands for."""
        canonical = {id(p): name for name, p in model.named_parameters()}
        every = dict(model.named_parameters(remove_duplicate=False))
        flat, _ = torch.utils._pytree.tree_flatten(values)
        self._user: list[fx.Node] = []
        placeholders = [node for node in self.nodes if node.op == "placeholder"]
        for node, spec in zip(placeholders, program.graph_signature.input_specs, strict=True):
            fixed = spec.kind == InputKind.PARAMETER and canonical.get(id(every.get(spec.target))) in self.fixed
            if spec.kind == InputKind.PARAMETER and spec.target in every and not fixed:
                self.parameters[node] = canonical[id(every[spec.target])]
            elif spec.kind == InputKind.USER_INPUT:
                self._known[node] = _double(flat[len(self._user)])
                self._user.append(node)
            else:
                value = program.state_dict.get(spec.target, program.constants.get(spec.target))
                self._known[node] = self._constant(value, node)

    def _constant(self, value: Any, node: fx.Node) -> Any:
        """Value of a buffer; generic numbers where it has none, as on the meta device."""
        if isinstance(value, Tensor) and value.is_meta:
            return self._random(node)
        return _double(value)

    def _reach(self, start: Iterable[fx.Node]) -> set[fx.Node]:
        """Everything that depends on the given nodes."""
        reached = set(start)
        for node in self.nodes:
            if _name(node) not in FRESH and any(source in reached for source in node.all_input_nodes):
                reached.add(node)
        return reached

    def ancestors(self, node: fx.Node) -> set[fx.Node]:
        """All nodes that a node depends on, itself included.

        Args:
            node: The node.

        Returns:
            The set.
        """
        if node not in self._ancestors:
            found, stack = {node}, [node]
            while stack:
                for source in stack.pop().all_input_nodes:
                    if source not in found:
                        found.add(source)
                        stack.append(source)
            self._ancestors[node] = found
        return self._ancestors[node]

    def fingerprint(self, node: fx.Node) -> str:
        """Text that is equal for nodes with equal values, as the angles that every layer computes anew.

        Args:
            node: The node.

        Returns:
            The shape for what depends on weights, and otherwise a hash of how the value is computed.
        """
        todo = [node]
        while todo:
            current = todo[-1]
            missing = [
                n for n in current.all_input_nodes if n not in self._prints and current not in self.on_parameters
            ]
            if current in self._prints or not missing:
                todo.pop()
                self._prints.setdefault(current, self._print(current))
            else:
                todo.extend(missing)
        return self._prints[node]

    def _print(self, node: fx.Node) -> str:
        if node in self.on_parameters:
            return f"~{_shapes(node.meta.get('val'))}"
        if node.op != "call_function":
            return f"{node.op}:{node.target}"
        inputs = fx.node.map_arg((node.args, node.kwargs), self._prints.__getitem__)
        return f"{node.target}:{hashlib.sha256(repr(inputs).encode()).hexdigest()}"

    def is_weight(self, node: Any) -> bool:
        """Whether a node is made of parameters (and constants) alone.

        Args:
            node: The node.

        Returns:
            True if no input of the model enters.
        """
        return isinstance(node, fx.Node) and node in self.on_parameters and node not in self.on_inputs

    def _random(self, node: fx.Node) -> Any:
        """Generic numbers of the shape that the export recorded."""
        value = node.meta.get("val")
        generator = torch.Generator().manual_seed(zlib.crc32(repr(_shapes(value)).encode()))
        return _fill(value, generator)

    def value(self, node: fx.Node) -> Any:
        """Value of a node that carries no weights; random numbers for one that does.

        Args:
            node: The node.

        Returns:
            A tensor, or whatever the node gives.
        """
        todo = [node]
        while todo:
            current = todo[-1]
            if current in self._known:
                todo.pop()
            elif current in self.on_parameters:
                self._known[current] = self._random(current)
            else:
                missing = [source for source in current.all_input_nodes if source not in self._known]
                if missing:
                    todo.extend(missing)
                else:
                    self._known[current] = self.execute(current, self._known.__getitem__)
        return self._known[node]

    def execute(self, node: fx.Node, value_of: Callable[[fx.Node], Any]) -> Any:
        """Run one node in float64 on the CPU.

        Args:
            node: The node.
            value_of: Gives the values of its inputs.

        Returns:
            Its value.
        """
        if node.op == "get_attr":
            return getattr(self.module, str(node.target))
        args = fx.node.map_arg(node.args, value_of)
        kwargs = fx.node.map_arg(node.kwargs, value_of)
        return apply(node.target, args, dict(kwargs))


def apply(target: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Call an operator of the graph in float64.

    Args:
        target: The operator.
        args: Its arguments.
        kwargs: Its keyword arguments.

    Returns:
        What it returns.
    """
    if "_assert" in str(target):
        return None
    if target in (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default):
        return args[0].reshape(args[1])  # strides of a float64 kernel may differ from those that were exported
    if target == torch.ops.aten.copy.default:  # has no derivative
        return args[1].expand(args[0].shape)
    if "new_empty" in str(target) or "empty_like" in str(target):
        return torch.zeros_like(target(*args, **{key: wide(value) for key, value in kwargs.items()}))
    args = torch.utils._pytree.tree_map(wide, args)
    kwargs = {key: wide(value) for key, value in kwargs.items()}
    if _is_wrapper(target):
        inner = [index for index, value in enumerate(args) if isinstance(value, fx.GraphModule)]
        if inner:
            return _Wide(args[inner[0]]).run(*args[inner[0] + 1 :])
    return target(*args, **kwargs)


class _Wide(fx.Interpreter):
    """Runs a graph inside the graph, in float64."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Run one operator.

        Args:
            target: The operator.
            args: Its arguments.
            kwargs: Its keyword arguments.

        Returns:
            Its value.
        """
        return apply(target, args, dict(kwargs))


FRESH = {"new_empty", "empty_like", "new_zeros", "zeros_like", "new_full", "full_like", "new_ones", "ones_like"}
"""Operators that take the shape of a tensor and not its values."""


def _name(node: fx.Node) -> str:
    return str(getattr(node.target, "overloadpacket", "")).split(".")[-1]


def _without_mutation(program: Any) -> Any:
    """Replace operators that write into a tensor by ones that return a new one, where there are any."""
    if not any(_name(node) in ("copy_", "index_put_", "fill_", "masked_fill_") for node in program.graph.nodes):
        return program
    try:
        return program.run_decompositions({})
    except Exception:  # the graph stays readable as it is, only less of it can be followed
        return program


def first_line(error: BaseException) -> str:
    """First line of an error's text, as one sentence.

    Args:
        error: The error.

    Returns:
        The sentence.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0][:200] if lines else type(error).__name__
    return text if text.endswith(".") else text + "."


def _double(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    value = value.detach()
    if value.is_meta:
        return value
    value = value.cpu()
    if value.dtype == torch.complex64:
        return value.to(torch.complex128)
    return value.double() if value.dtype in LOW else value


def _shapes(value: Any) -> Any:
    if isinstance(value, Tensor):
        return tuple(int(n) for n in value.shape), str(value.dtype)
    if isinstance(value, list | tuple):
        return tuple(_shapes(v) for v in value)
    return None


def _fill(value: Any, generator: torch.Generator) -> Any:
    """Random numbers like a recorded value: positive, so that no product of them vanishes."""
    if isinstance(value, list | tuple):
        return [_fill(v, generator) for v in value]
    if isinstance(value, Mapping) or not isinstance(value, Tensor):
        return value
    shape = [int(n) for n in value.shape]
    if value.dtype.is_floating_point:
        return 0.2 + torch.rand(shape, dtype=torch.float64, generator=generator)
    if value.dtype.is_complex:
        return torch.randn(shape, dtype=torch.complex128, generator=generator)
    if value.dtype == torch.bool:
        return torch.ones(shape, dtype=torch.bool)
    return torch.zeros(shape, dtype=value.dtype)
