"""The loss of a model on a batch, as a function of its weights, and the promise to leave the model as it was."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

Loss = Callable[[nn.Module, Any], Tensor]
LOSSES = ("cross_entropy", "logit_normalized")


def to_device(batch: Any, device: torch.device) -> Any:
    """Move the tensors of a batch.

    Args:
        batch: Tensors in mappings, tuples and lists.
        device: Where to.

    Returns:
        The same structure; what is there already is not copied.
    """
    if isinstance(batch, Tensor):
        return batch.to(device)
    if isinstance(batch, Mapping):
        return {key: to_device(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(to_device(value, device) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(to_device(value, device) for value in batch)
    return batch


def inputs_of(batch: Any) -> Any:
    """What the model takes of a batch: the batch without its labels.

    Args:
        batch: A mapping, or a pair of inputs and targets.

    Returns:
        A mapping or the inputs.
    """
    if isinstance(batch, Mapping):
        return {key: value for key, value in batch.items() if key not in ("labels", "label")}
    return batch[0] if isinstance(batch, list | tuple) and len(batch) == 2 else batch


def _pair(batch: Any) -> tuple[Any, Any]:
    if not isinstance(batch, list | tuple) or len(batch) != 2:
        raise ValueError(
            "batches must hold mappings with 'labels' or pairs (inputs, targets), "
            f"not {type(batch).__name__}; a loss=loss(model, batch) of your own takes any batch."
        )
    return batch[0], batch[1]


def _logits_and_targets(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    """Logits of shape (N, classes) and N targets."""
    if isinstance(batch, Mapping):
        if batch.get("labels") is None:
            raise ValueError(_NO_LABELS)
        logits, targets = model(**inputs_of(batch)).logits, batch["labels"]
        if logits.ndim == targets.ndim + 1 and logits.ndim == 3 and getattr(model, "loss_type", "") == "ForCausalLM":
            logits, targets = logits[:, :-1], targets[:, 1:]
    else:
        inputs, targets = _pair(batch)
        output = model(**inputs) if isinstance(inputs, Mapping) else model(inputs)
        logits = output if isinstance(output, Tensor) else getattr(output, "logits", output[0])
    if targets.is_floating_point() or logits.shape[:-1] != targets.shape:
        raise ValueError(
            f"targets must be class indices of shape {tuple(logits.shape[:-1])} for outputs of shape "
            f"{tuple(logits.shape)}, not {targets.dtype} of shape {tuple(targets.shape)}; for another task pass "
            "loss=loss(model, batch)."
        )
    return logits.flatten(0, -2), targets.flatten()


_NO_LABELS = "batches must hold mappings with 'labels', or loss must be a callable loss(model, batch)."


def default_loss(model: nn.Module, batch: Any) -> Tensor:
    """The model's own loss for a mapping, cross-entropy for a pair.

    Args:
        model: The model.
        batch: A mapping as Hugging Face models take it, with labels, or a pair of inputs and class indices.

    Returns:
        A scalar.

    Raises:
        ValueError: If the batch holds no labels.
    """
    if not isinstance(batch, Mapping):
        return functional.cross_entropy(*_logits_and_targets(model, batch))
    output = model(**batch)
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if loss is None:
        raise ValueError(_NO_LABELS)
    found: Tensor = loss
    return found


def logit_normalized_loss(model: nn.Module, batch: Any) -> Tensor:
    """Cross-entropy of normalized logits: their mean is subtracted and their norm divided out.

    So that a model cannot look flat by large logits (Andriushchenko et al. 2023, arXiv 2302.07011).

    Args:
        model: The model.
        batch: A mapping with labels, or a pair of inputs and class indices.

    Returns:
        A scalar.
    """
    logits, targets = _logits_and_targets(model, batch)
    centered = logits - logits.mean(-1, keepdim=True)
    # A row of equal logits has no direction; it counts as uniform.
    norm = centered.norm(dim=-1, keepdim=True)
    return functional.cross_entropy(centered / torch.where(norm > 0, norm, 1.0), targets)


def read_loss(loss: Loss | str | None) -> Loss:
    """Read the argument ``loss``.

    Args:
        loss: None or ``"cross_entropy"``, ``"logit_normalized"``, or a callable ``loss(model, batch) -> scalar``.

    Returns:
        The callable.

    Raises:
        ValueError: If it is none of these.
    """
    if loss is None or loss == "cross_entropy":
        return default_loss
    if loss == "logit_normalized":
        return logit_normalized_loss
    if callable(loss):
        return loss
    raise ValueError(f"loss must be None, 'logit_normalized' or a callable loss(model, batch) -> scalar, not {loss!r}.")


class Objective:
    """The loss on one batch and its derivatives, evaluated on the weights the model has at the time.

    Every evaluation sees the same random numbers, so the objective is a function even of a model that draws some.

    Args:
        model: The model.
        loss: The loss.
        parameters: The parameters to differentiate in.
        seed: Seed of the random numbers.
    """

    def __init__(self, model: nn.Module, loss: Loss, parameters: Mapping[str, Tensor], seed: int = 0) -> None:
        self.model, self.loss, self.parameters, self.seed = model, loss, parameters, seed
        self.forwards = self.backwards = 0

    def value(self, batch: Any) -> Tensor:
        """The loss.

        Args:
            batch: The batch.

        Returns:
            A detached scalar.
        """
        with torch.no_grad():
            return self._forward(batch).detach()

    def gradient(self, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss and its partial derivatives.

        Args:
            batch: The batch.

        Returns:
            A detached scalar, and one dense tensor per parameter name.

        Raises:
            ValueError: If the loss does not depend on the parameters.
        """
        for tensor in self.parameters.values():
            tensor.grad = None
        with torch.enable_grad():
            loss = self._forward(batch)
            if not loss.requires_grad:
                raise ValueError("loss must depend on the model's parameters through operations autograd knows.")
            self.backwards += 1
            loss.backward()  # type: ignore[no-untyped-call]
        gradients = {}
        for name, tensor in self.parameters.items():
            grad = tensor.grad
            if grad is None:
                grad = torch.zeros_like(tensor)
            gradients[name] = grad.to_dense() if grad.is_sparse else grad
        for tensor in self.parameters.values():
            tensor.grad = None
        return loss.detach(), gradients

    def _forward(self, batch: Any) -> Tensor:
        torch.manual_seed(self.seed)
        self.forwards += 1
        loss = self.loss(self.model, batch)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            shape = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise ValueError(f"loss must return a tensor with one element, not {shape}.")
        return loss.reshape(())


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Leave a model as it was, but for the values of its parameters: modes, buffers, flags, gradients, random numbers.

    Inside, the model is in evaluation mode and has no gradients.

    Args:
        model: The model.

    Yields:
        Nothing.
    """
    modes = [(module, module.training) for module in model.modules()]
    flags = [(tensor, tensor.requires_grad, tensor.grad) for tensor in model.parameters()]
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    states = random.getstate(), np.random.get_state()
    devices = sorted({t.device.index or 0 for t in model.parameters() if t.device.type == "cuda"})
    try:
        with torch.random.fork_rng(devices if torch.cuda.is_available() else []):
            model.eval()
            for tensor, _, _ in flags:
                tensor.grad = None
            yield
    finally:
        for module, mode in modes:
            module.training = mode
        for tensor, flag, grad in flags:
            tensor.requires_grad_(flag)
            tensor.grad = grad
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
        random.setstate(states[0])
        np.random.set_state(states[1])
