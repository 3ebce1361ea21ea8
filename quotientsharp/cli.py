"""The command line."""

from __future__ import annotations

import argparse
import importlib
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn


class UserError(Exception):
    """A mistake of the user, in one sentence."""


def load_model(name: str) -> nn.Module:
    """Load a model by what a user types.

    Args:
        name: A folder of a Hugging Face model (safetensors or weights-only checkpoints, no code of its own), or
            ``module:factory``, a Python callable without arguments that returns a model.

    Returns:
        The model in eval mode.

    Raises:
        UserError: If there is no such model.
    """
    if Path(name).is_dir():
        return _from_folder(Path(name))
    module, colon, factory = name.partition(":")
    if not colon or not module or not factory:
        raise UserError(f"MODEL must be a local Hugging Face folder or module:factory, and {name!r} is neither.")
    sys.path.insert(0, str(Path.cwd()))
    try:
        made: Any = getattr(importlib.import_module(module), factory)
        model = made() if callable(made) and not isinstance(made, nn.Module) else made
    except Exception as error:
        raise UserError(f"MODEL {name!r} cannot be made: {type(error).__name__}: {_line(error)}") from error
    finally:
        sys.path.pop(0)
    if not isinstance(model, nn.Module):
        raise UserError(f"MODEL {name!r} returns {type(model).__name__}, and a torch.nn.Module is needed.")
    return model.eval()


def _from_folder(folder: Path) -> nn.Module:
    if not (folder / "config.json").is_file():
        raise UserError(f"MODEL {str(folder)!r} has no config.json, so it is no Hugging Face folder.")
    try:
        import transformers
    except ImportError as error:
        raise UserError("Reading a Hugging Face folder needs transformers: pip install transformers.") from error
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        config = transformers.AutoConfig.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
        names = getattr(config, "architectures", None) or []
        kind = getattr(transformers, names[0], transformers.AutoModel) if names else transformers.AutoModel
        model = kind.from_pretrained(str(folder), config=config, local_files_only=True)
    except Exception as error:
        raise UserError(f"MODEL {str(folder)!r} cannot be loaded: {_line(error)}") from error
    result: nn.Module = model.eval()
    return result


def _line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0][:300] if lines else type(error).__name__).rstrip(".") + "."


def symmetries(name: str) -> int:
    """Print the symmetries of a model.

    Args:
        name: The model, see `load_model`.

    Returns:
        The exit code.

    Raises:
        UserError: If the model cannot be read.
    """
    from .symmetry import find_symmetries

    try:
        found = find_symmetries(load_model(name))
    except ValueError as error:
        raise UserError(str(error)) from error
    if sys.stdout.isatty():
        _print_rich(found)
    else:
        print(found.table())
    return 0


def _print_rich(found: Any) -> None:
    """A colored table on a terminal; the plain one where rich is not installed."""
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        print(found.table())
        return
    table = Table("block", "kind", "group", "copies", "dim", "parameters", "error")
    for row in found.rows():
        table.add_row(*row)
    console = Console()
    console.print(table)
    for line in found.summary():
        console.print(line, markup=False)


WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".onnx", ".gguf", ".index.json")
"""Files of a model's folder that hold weights and are not copied."""


def canonicalize(name: str, out: Path) -> int:
    """Write a model with the same function and canonical weights.

    Args:
        name: The model, see `load_model`.
        out: The folder to make. Of a Hugging Face folder everything but the weights is copied; other models are
            written as ``model.safetensors``.

    Returns:
        The exit code.

    Raises:
        UserError: If the model cannot be read or the folder is in use.
    """
    from .symmetry import find_symmetries

    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"OUT {str(out)!r} exists and is not an empty folder: name a new one.")
    model: Any = load_model(name)
    try:
        found = find_symmetries(model)
    except ValueError as error:
        raise UserError(str(error)) from error
    kept = found.canonicalize_(model)
    out.mkdir(parents=True, exist_ok=True)
    if Path(name).is_dir():
        for file in sorted(Path(name).iterdir()):
            if file.is_file() and not file.name.endswith(WEIGHTS):
                shutil.copy2(file, out / file.name)
            elif file.is_dir() and not file.name.startswith("."):
                shutil.copytree(file, out / file.name)
        model.save_pretrained(str(out))
    else:
        from safetensors.torch import save_model

        save_model(model, str(out / "model.safetensors"))
    print(f"{len(found)} blocks moved to the canonical gauge: {out}")
    for block, reason in kept:
        print(f"kept  {block}: {reason}")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point.

    Args:
        argv: The arguments; those of the process if None.

    Returns:
        The exit code: 0, or 2 for a mistake of the user.
    """
    parser = argparse.ArgumentParser(prog="quotientsharp", description="Parameter symmetries of transformers.")
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("symmetries", help="print the parameter symmetries of a model")
    command.add_argument("model", metavar="MODEL", help="a local Hugging Face folder, or module:factory")
    command = commands.add_parser("canonicalize", help="write a model with canonical weights and the same function")
    command.add_argument("model", metavar="MODEL", help="a local Hugging Face folder, or module:factory")
    command.add_argument("out", metavar="OUT", type=Path, help="a new folder")
    options = parser.parse_args(argv)
    try:
        if options.command == "canonicalize":
            return canonicalize(options.model, options.out)
        return symmetries(options.model)
    except UserError as error:
        print(f"quotientsharp: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
