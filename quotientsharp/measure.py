"""`quotientsharp measure`: from a model and a file to a table, a JSON file and a picture."""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from torch import Tensor, nn

from . import plots, show
from ._version import __version__
from .data import Batches, Reading, make_batches, read_table
from .loading import TASKS, UserError, load_model, one_line, task_of
from .objective import inputs_of, read_loss

if TYPE_CHECKING:
    from .landscape import Landscape
    from .sharpness import SharpnessResult
    from .symmetry import Symmetries

POINTS = 21  # of the picture's lines; its plane takes the square of it in forward passes


def measure(options: argparse.Namespace) -> int:
    """Measure the sharpness of a model on a file.

    Args:
        options: The arguments of the command line.

    Returns:
        The exit code.

    Raises:
        UserError: If an argument does not fit.
    """
    start = time.monotonic()
    _check_outputs(options)
    console = Console()
    with Console(stderr=True).status(f"loading {options.model}"):
        model, notes = _model(options)
        task = options.task or task_of(model)
        made = make_batches(read_table(options.data), model, task, _reading(options, model, task))
        notes += made.notes
        _try_once(model, made.batches[0], options.loss)
    results, landscape = _run(options, model, made)
    notes += _notes(results)
    _print(console, options, results, made, notes)
    if options.json is not None:
        seconds = time.monotonic() - start
        _write_json(options, _report(options, task, results, made, notes, seconds))
        console.print(f"written: {options.json}", markup=False, highlight=False, soft_wrap=True)
    if landscape is not None:
        plots.save(plots.measurement_figure(results, landscape), Path(options.plot))
        console.print(f"written: {options.plot}", markup=False, highlight=False, soft_wrap=True)
    return 0


def _check_outputs(options: argparse.Namespace) -> None:
    """A long run must not fail at its end."""
    for flag, name in (("--json", options.json), ("--plot", options.plot)):
        if name is None:
            continue
        path = Path(name)
        if path.is_dir() or not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
            raise UserError(f"{flag} {name!r} cannot be written: it must be a file in a folder that exists.")
    if options.plot is not None:
        if Path(options.plot).suffix.lower() not in plots.SUFFIXES:
            raise UserError(f"--plot must end with {', '.join(plots.SUFFIXES)}, and {options.plot!r} does not.")
        try:
            plots.new_figure(1.0, 1.0)
        except ImportError as error:
            raise UserError(f"--plot needs matplotlib: pip install matplotlib ({one_line(error)})") from error


def _model(options: argparse.Namespace) -> tuple[nn.Module, list[str]]:
    """The model on its device and in its type, and what to say about that."""
    try:
        device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"--device {options.device!r} is not there: {one_line(error)}") from error
    model = load_model(options.model, task=options.task, complete=True, trust_remote_code=options.trust_remote_code)
    had = next((p.dtype for p in model.parameters() if p.is_floating_point()), None)
    if had is None:
        raise UserError(f"MODEL {options.model!r} has no weights to move.")
    dtype = getattr(torch, options.dtype) if options.dtype else had if had.itemsize >= 4 else torch.float32
    notes = []
    if dtype.itemsize > had.itemsize and not options.dtype:
        notes.append(f"The weights are {had} and were converted to {dtype}.".replace("torch.", ""))
    return model.to(device=device, dtype=dtype), notes


def _reading(options: argparse.Namespace, model: nn.Module, task: str | None) -> Reading:
    source = options.tokenizer or (options.model if ":" not in options.model else None)
    if hasattr(getattr(model, "config", None), "to_dict") and task is None:
        raise UserError(
            f"MODEL {options.model!r} is a {type(model).__name__}, which has no loss of its own; --task loads it with a"
            f" head: {', '.join(TASKS)}."
        )
    return Reading(
        batch_size=options.batch_size,
        examples=options.examples,
        max_length=options.max_length,
        seed=options.seed,
        input_column=options.input_column,
        pair_column=options.pair_column,
        label_column=options.label_column,
        tokenizer=source,
        trust_remote_code=options.trust_remote_code,
    )


def _try_once(model: nn.Module, batch: Any, loss: str) -> None:
    """One forward pass, so that a file that does not fit the model is told from an error inside."""
    try:
        with torch.no_grad():
            read_loss(loss)(model, batch)
    except Exception as error:
        parts = inputs_of(batch)
        named = parts.items() if isinstance(parts, dict) else [("inputs", parts)]
        shapes = ", ".join(f"{name} {tuple(part.shape)}" for name, part in named)
        raise UserError(f"MODEL does not take what --data gives ({shapes}): {one_line(error)}") from error


def _run(
    options: argparse.Namespace, model: nn.Module, made: Batches
) -> tuple[list[SharpnessResult], Landscape | None]:
    """The measurement, and the landscape of its first batch if a picture is wanted."""
    from .landscape import landscape
    from .sharpness import sharpness

    radii = options.rhos or [options.rho]
    names = ("loss", "geometry", "metric", "retraction", "blocks", "steps", "seed")
    how: dict[str, Any] = {name: getattr(options, name) for name in names}
    try:
        how["symmetries"] = _symmetries(options, model, made)
        units = len(made.batches) * len(radii) * options.restarts
        with show.progress_bar(units, len(made.batches)) as report:
            found = sharpness(
                model,
                made.batches,
                rhos=radii,
                tolerance=options.tolerance,
                restarts=options.restarts,
                progress=report,
                **how,
            )
        if options.plot is None:
            return list(found), None
        with Console(stderr=True).status("drawing") as status:
            picture = landscape(
                model, made.batches[0], radii[-1], points=POINTS,
                progress=lambda done, total: status.update(f"drawing the loss: {done}/{total}"), **how,
            )  # fmt: skip
    except ValueError as error:
        raise UserError(one_line(error)) from error
    return list(found), picture


def _symmetries(options: argparse.Namespace, model: nn.Module, made: Batches) -> Symmetries | None:
    """The symmetries of the model, found once; other geometries need none."""
    if options.geometry != "geodesic":
        return None
    from .symmetry import find_symmetries
    from .symmetry.inputs import make_inputs

    # A model that says what it takes gets inputs made to tell the groups apart; others see the batch.
    example = None if make_inputs(model) is not None else inputs_of(made.batches[0])
    with Console(stderr=True).status("finding the symmetries"):
        return find_symmetries(model, example)


def _print(
    console: Console, options: argparse.Namespace, results: Sequence[SharpnessResult], made: Batches, notes: list[str]
) -> None:
    drawn = f"{made.used:,} of {made.total:,} examples" if made.used < made.total else f"{made.used:,} examples"
    loss = f"loss {show.number(results[0].loss)}"
    console.print(f"{options.model} on {drawn} of {options.data}, {loss}", markup=False, highlight=False)
    console.print(f"{show.method(results[0])}:", markup=False, highlight=False)
    console.print(show.result_table(results))
    if results[-1].by_block:
        console.print(f"where it comes from, at rho = {results[-1].rho:g}:", highlight=False)
        console.print(show.block_table(results[-1]))
    for note in notes:
        console.print(f"note: {note}", markup=False, highlight=False)


def _notes(results: Sequence[SharpnessResult]) -> list[str]:
    """The notes of all results; those that do not hold at every radius say where they do."""
    radii: dict[str, list[str]] = {}
    for result in results:
        for note in result.notes:
            radii.setdefault(note, []).append(f"{result.rho:g}")
    return [
        note if len(where) == len(results) else f"at rho = {', '.join(where)}: {note}" for note, where in radii.items()
    ]


def _report(
    options: argparse.Namespace,
    task: str | None,
    results: Sequence[SharpnessResult],
    made: Batches,
    notes: list[str],
    seconds: float,
) -> dict[str, Any]:
    asked = {name: value for name, value in vars(options).items() if name not in {"command", "run"}}
    return {
        "quotientsharp": __version__,
        "torch": torch.__version__,
        "task": task,
        "arguments": asked,
        "examples": {"used": made.used, "total": made.total},
        "notes": notes,
        "seconds": seconds,
        "results": [result.to_dict() for result in results],
    }


def _write_json(options: argparse.Namespace, report: dict[str, Any]) -> None:
    text = json.dumps(_plain(report), indent=2, allow_nan=False)
    Path(options.json).write_text(text + "\n", encoding="utf-8")


def _plain(value: Any) -> Any:
    """Values that JSON knows; what is not finite becomes null."""
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, Tensor):
        return _plain(value.tolist())
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)
