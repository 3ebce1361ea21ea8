"""The command line: arguments, and mistakes as one sentence."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from .loading import TASKS, UserError, load_model
from .objective import LOSSES


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        """Say what is wrong and leave with exit code 2.

        Args:
            message: What is wrong.
        """
        text = " ".join(message.split()).rstrip(".")
        self.exit(2, f"quotientsharp: {text} ({self.prog} --help lists the arguments).\n")


def positive(text: str) -> float:
    """A positive finite number.

    Args:
        text: What was typed.

    Returns:
        The number.

    Raises:
        argparse.ArgumentTypeError: If it is none.
    """
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError(f"must be a positive number such as 0.05, not {text!r}")
    return value


def radii(text: str) -> list[float]:
    """Positive numbers separated by commas, in ascending order.

    Args:
        text: What was typed.

    Returns:
        The numbers, each once.

    Raises:
        argparse.ArgumentTypeError: If one is not positive, or none is given.
    """
    values = sorted({positive(part.strip()) for part in text.split(",") if part.strip()})
    if not values:
        raise argparse.ArgumentTypeError(f"must be numbers such as 0.01,0.05, not {text!r}")
    return values


def at_least(least: int) -> Callable[[str], int]:
    """Type of an argument: a whole number of a certain size.

    Args:
        least: The smallest that is allowed.

    Returns:
        The function that reads it.
    """

    def read(text: str) -> int:
        value = int(text) if text.strip().lstrip("+-").isdecimal() else least - 1
        if value < least:
            raise argparse.ArgumentTypeError(f"must be a whole number of at least {least}, not {text!r}")
        return value

    return read


def tolerance(text: str) -> float:
    """Zero or a positive number.

    Args:
        text: What was typed.

    Returns:
        The number.
    """
    return 0.0 if text.strip() in {"0", "0.0"} else positive(text)


def metric(text: str) -> str | float:
    """A metric: ``inv``, ``mix`` or a number between them.

    Args:
        text: What was typed.

    Returns:
        The metric as the manifolds take it.

    Raises:
        argparse.ArgumentTypeError: If it is none.
    """
    if text in {"inv", "mix"}:
        return text
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0.0 <= value <= 1.0:
        raise argparse.ArgumentTypeError(f"must be inv, mix or a number from 0 (inv) to 1 (mix), not {text!r}")
    return value


def symmetries(options: argparse.Namespace) -> int:
    """Print the symmetries of a model.

    Args:
        options: The arguments; the model, see `load_model`.

    Returns:
        The exit code.

    Raises:
        UserError: If the model cannot be read.
    """
    from .symmetry import find_symmetries

    try:
        found = find_symmetries(load_model(options.model, trust_remote_code=options.trust_remote_code))
    except ValueError as error:
        raise UserError(str(error)) from error
    if sys.stdout.isatty():
        _print_rich(found)
    else:
        print(found.table())
    return 0


def _print_rich(found: Any) -> None:
    """A colored table on a terminal."""
    from rich.console import Console
    from rich.table import Table

    table = Table("block", "kind", "group", "copies", "dim", "parameters", "error")
    for row in found.rows():
        table.add_row(*row)
    console = Console()
    console.print(table)
    for line in found.summary():
        console.print(line, markup=False)


def _canonicalize(options: argparse.Namespace) -> int:
    from .canonicalize import canonicalize

    return canonicalize(options.model, Path(options.out), trust=options.trust_remote_code)


def _measure(options: argparse.Namespace) -> int:
    from .measure import measure

    return measure(options)


def _demo(options: argparse.Namespace) -> int:
    import torch

    from .demo import demo

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # for matrices this small, more threads mostly wait for each other
    try:
        demo(Path(options.out), quick=options.quick)
    except ImportError as error:
        raise UserError(str(error)) from error
    finally:
        torch.set_num_threads(threads)
    return 0


def build_parser() -> Parser:
    """The arguments of all commands.

    Returns:
        The parser.
    """
    parser = Parser(prog="quotientsharp", description="Sharpness and parameter symmetries of transformers.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=Parser)
    demo = commands.add_parser(
        "demo", help="train a small transformer, move it along its orbit, watch sharpness",
        description="Trains a small vision transformer on the digits of scikit-learn, moves it along its orbit, and"
        " compares what three geometries call its sharpness.",
    )  # fmt: skip
    demo.add_argument("--out", metavar="DIR", default="demo", help="folder for demo.png (default: demo)")
    demo.add_argument("--quick", action="store_true", help="a smaller model and fewer points")
    demo.set_defaults(run=_demo)
    _add_measure(commands)
    command = commands.add_parser("symmetries", help="print the parameter symmetries of a model")
    command.add_argument("model", metavar="MODEL", help="a local Hugging Face folder, a hub name, or module:factory")
    command.add_argument("--trust-remote-code", action="store_true", help="run Python code that lies in the folder")
    command.set_defaults(run=symmetries)
    command = commands.add_parser("canonicalize", help="write a model with canonical weights and the same function")
    command.add_argument("model", metavar="MODEL", help="a local Hugging Face folder, or module:factory")
    command.add_argument("out", metavar="OUT", help="a new folder")
    command.add_argument("--trust-remote-code", action="store_true", help="run Python code that lies in the folder")
    command.set_defaults(run=_canonicalize)
    return parser


def _add_measure(commands: Any) -> None:
    command = commands.add_parser(
        "measure", help="measure the sharpness of a model on a file",
        description="Measures how far the loss of a model can rise within a distance rho of its weights.",
    )  # fmt: skip
    add = command.add_argument
    add("model", metavar="MODEL", help="a local Hugging Face folder, a hub name (owner/name), or module:factory")
    add("--data", metavar="FILE", required=True, help=".jsonl, .csv or .npz; texts and labels, or arrays x and y")
    add("--task", choices=list(TASKS), help="what the model is for, if its configuration does not say")

    group = command.add_argument_group("what is measured")
    radius = group.add_mutually_exclusive_group()
    radius.add_argument("--rho", type=positive, default=0.05, help="radius of the ball (default: 0.05)")
    radius.add_argument("--rhos", type=radii, metavar="R,R,...", help="several radii, for a curve")
    add = group.add_argument
    add("--geometry", choices=["geodesic", "adaptive", "euclidean"], default="geodesic", help="(default: geodesic)")
    add("--metric", type=metric, default="mix", help="inv, mix or a number from 0 (inv) to 1 (mix) (default: mix)")
    add(
        "--retraction", choices=["first_order", "christoffel", "geodesic"], default="christoffel",
        help="how a direction becomes new weights (default: christoffel)",
    )  # fmt: skip
    add("--blocks", choices=["all", "attention"], default="all", help="symmetries divided out (default: all)")
    add(
        "--loss", type=lambda text: text.replace("-", "_"), choices=list(LOSSES), default=LOSSES[0],
        metavar="{cross-entropy,logit-normalized}", help="(default: cross-entropy)",
    )  # fmt: skip
    add("--steps", type=at_least(1), default=20, metavar="N", help="gradient steps of an ascent, at most (default: 20)")
    add("--tolerance", type=tolerance, default=1e-3, help="when an ascent stops; 0 runs all steps (default: 0.001)")
    add("--restarts", type=at_least(1), default=1, metavar="N", help="ascents per batch (default: 1)")

    add = command.add_argument_group("data").add_argument
    add("--examples", type=at_least(1), default=1024, metavar="N", help="examples drawn from the file, at most (1024)")
    add("--batch-size", type=at_least(1), default=32, metavar="N", help="examples in a batch (default: 32)")
    add("--max-length", type=at_least(2), default=128, metavar="N", help="texts are cut at N tokens (default: 128)")
    add("--input-column", metavar="NAME", help="column or array of the inputs (text, sentence, x, images ...)")
    add("--pair-column", metavar="NAME", help="column of the second texts (text_b, sentence2, hypothesis)")
    add("--label-column", metavar="NAME", help="column or array of the labels (label, labels, y ...)")
    add("--tokenizer", metavar="FOLDER", help="where the tokenizer is, if not beside the model")

    add = command.add_argument_group("how it runs").add_argument
    add("--seed", type=at_least(0), default=0, metavar="N", help="of the draw of examples and of restarts (default: 0)")
    add("--device", help="cpu, cuda, cuda:1, mps ... (default: cuda if there is one)")
    add("--dtype", choices=["float32", "float64"], help="type of the weights (default: as stored, at least float32)")
    add("--trust-remote-code", action="store_true", help="run Python code that comes with the model")

    add = command.add_argument_group("output").add_argument
    add("--json", metavar="OUT", help="write everything to this file")
    add("--plot", metavar="OUT", help="write a picture to this .png, .svg or .pdf file")
    command.set_defaults(run=_measure)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point.

    Args:
        argv: The arguments; those of the process if None.

    Returns:
        The exit code: 0, 2 for a mistake of the user, 130 for Ctrl-C.
    """
    try:
        options = build_parser().parse_args(argv)
        code: int = options.run(options)
    except UserError as error:
        print(f"quotientsharp: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("quotientsharp: interrupted.", file=sys.stderr)
        return 130
    return code


if __name__ == "__main__":
    sys.exit(main())
