"""The command ``quotientsharp canonicalize``: a model with the same function and canonical weights."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from .loading import UserError, load_model

WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".onnx", ".gguf", ".index.json")
"""Files of a model's folder that hold weights and are not copied."""


def canonicalize(name: str, out: Path, *, trust: bool = False) -> int:
    """Write a model with the same function and canonical weights.

    Args:
        name: The model, see `load_model`.
        out: The folder to make. Of a Hugging Face folder everything but the weights is copied; other models are
            written as ``model.safetensors``.
        trust: Whether Python code that comes with a checkpoint may run.

    Returns:
        The exit code.

    Raises:
        UserError: If the model cannot be read or the folder is in use.
    """
    from .symmetry import find_symmetries

    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"OUT {str(out)!r} exists and is not an empty folder: name a new one.")
    model: Any = load_model(name, trust_remote_code=trust)
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
