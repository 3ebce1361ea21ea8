"""Models by what a user types on the command line: a Hugging Face folder, a hub name, or a Python factory.

A checkpoint never runs code: safetensors, or a pickle read with torch's weights-only unpickler; modeling code that lies
beside the weights is refused unless the user asks for it.
"""

from __future__ import annotations

import importlib
import logging
import pickle
import re
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

# Task, the class of transformers that loads it, and how the names of its models end.
TASKS: dict[str, tuple[str, tuple[str, ...]]] = {
    "text-classification": ("AutoModelForSequenceClassification", ("ForSequenceClassification",)),
    "image-classification": ("AutoModelForImageClassification", ("ForImageClassification",)),
    "causal-lm": ("AutoModelForCausalLM", ("ForCausalLM", "LMHeadModel")),
}


class UserError(Exception):
    """A mistake of the user, in one sentence."""


def one_line(error: BaseException) -> str:
    """The first line of an error's text, as a sentence.

    Args:
        error: The error.

    Returns:
        At most 300 characters and a full stop.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0][:300] if lines else type(error).__name__).rstrip(".:") + "."


def load_model(
    name: str,
    *,
    task: str | None = None,
    dtype: torch.dtype | None = None,
    complete: bool = False,
    trust_remote_code: bool = False,
) -> nn.Module:
    """Load a model by what a user types.

    Args:
        name: A folder of a Hugging Face model (safetensors or a weights-only checkpoint), a hub name ``owner/name``, or
            ``module:factory``, a Python callable without arguments that returns a model.
        task: One of `TASKS`, where the architecture that the configuration names is not the one wanted.
        dtype: Type of the weights; that of the checkpoint if None.
        complete: Whether to refuse a checkpoint that lacks some of the weights; transformers draws those at random.
        trust_remote_code: Whether Python code that comes with a checkpoint may run.

    Returns:
        The model in eval mode.

    Raises:
        UserError: If there is no such model.
    """
    module, colon, factory = name.partition(":")
    if Path(name).is_dir():
        if not (Path(name) / "config.json").is_file():
            raise UserError(f"MODEL {name!r} has no config.json, so it is no Hugging Face folder.")
        model = _from_pretrained(name, task, complete, trust_remote_code, local=True)
    elif re.fullmatch(r"[\w.-]+/[\w.-]+", name) and not Path(name).exists():
        model = _from_pretrained(name, task, complete, trust_remote_code, local=False)
    elif colon and module and factory:
        model = _from_factory(name, module, factory)
    else:
        raise UserError(
            f"MODEL must be a local Hugging Face folder, a hub name (owner/name) or module:factory, and {name!r} is"
            " neither of them."
        )
    return (model if dtype is None else model.to(dtype)).eval()


def task_of(model: nn.Module) -> str | None:
    """The task of a Hugging Face model, read off the name of its class.

    Args:
        model: The model, also with adapters around it.

    Returns:
        One of `TASKS`, or None.
    """
    base: Any = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
    return _task_of_name(type(base).__name__)


def _task_of_name(name: str) -> str | None:
    return next((task for task, (_, ends) in TASKS.items() if name.endswith(ends)), None)


def _from_factory(name: str, module: str, factory: str) -> nn.Module:
    sys.path.insert(0, str(Path.cwd()))
    try:
        made: Any = getattr(importlib.import_module(module), factory)
        model = made() if callable(made) and not isinstance(made, nn.Module) else made
    except Exception as error:
        raise UserError(f"MODEL {name!r} cannot be made: {type(error).__name__}: {one_line(error)}") from error
    finally:
        sys.path.pop(0)
    if not isinstance(model, nn.Module):
        raise UserError(f"MODEL {name!r} returns {type(model).__name__}, and a torch.nn.Module is needed.")
    return model


def quiet_transformers() -> Any:
    """Import transformers and silence its chatter.

    Returns:
        The module.

    Raises:
        UserError: If it is not installed.
    """
    try:
        import transformers
    except ImportError as error:
        raise UserError("A Hugging Face model needs transformers: pip install transformers.") from error
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    return transformers


def _from_pretrained(name: str, task: str | None, complete: bool, trust: bool, *, local: bool) -> nn.Module:
    transformers = quiet_transformers()
    where: dict[str, Any] = {"local_files_only": local, "trust_remote_code": trust}
    try:
        config = transformers.AutoConfig.from_pretrained(name, **where)
        if "/" in str(getattr(config, "_attn_implementation", None) or "") and not trust:
            raise ValueError("its configuration asks for an attention kernel from the hub, which is code")
        architecture = (getattr(config, "architectures", None) or ["AutoModel"])[0]
        wanted = task or _task_of_name(architecture)
        if wanted is not None:
            kind = getattr(transformers, TASKS[wanted][0])
        else:
            kind = getattr(transformers, architecture, transformers.AutoModel)
        if not hasattr(kind, "register"):  # a concrete class has no code to trust and refuses the word
            where.pop("trust_remote_code")
        model, report = kind.from_pretrained(name, config=config, weights_only=True, output_loading_info=True, **where)
    except Exception as error:
        lost = "" if local else " from the Hugging Face hub, and there is no such folder here"
        raise UserError(f"MODEL {name!r} cannot be loaded{lost}: {_why(error)}") from error
    missing = sorted(report["missing_keys"])
    if complete and missing:
        raise UserError(
            f"MODEL {name!r} has no weights for {missing[0]}, so the result would be that of a random"
            f" {type(model).__name__}; train it first, or choose another --task."
        )
    result: nn.Module = model
    return result


def _why(error: Exception) -> str:
    """What a user can do about a checkpoint that does not load."""
    if isinstance(error, pickle.UnpicklingError):
        return "its weights are a pickle with more than tensors in it, which is never run; save them as safetensors."
    if "trust_remote_code" in str(error):
        return "it comes with Python code of its own, which runs only with --trust-remote-code."
    return one_line(error)
