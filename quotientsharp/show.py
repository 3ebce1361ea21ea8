"""What a user sees on a terminal: progress with an honest time left, and tables."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from .sharpness import Progress as Event
    from .sharpness import SharpnessResult

BLOCKS = 10  # of so many blocks the table shows the share


class TimeLeft:
    """Estimates how long a measurement still takes.

    A unit of work is one ascent (a batch, a radius and a restart). It stops by itself, so its length is not known
    before: as long as none is finished the estimate takes all steps and is an upper bound, afterwards their mean.

    Args:
        units: Number of ascents.
        clock: Gives the time in seconds.
    """

    def __init__(self, units: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.units = max(units, 1)
        self.clock = clock
        self.start = clock()
        self.limit = 1
        self.taken: dict[tuple[int, float, int], int] = {}  # steps by ascent; the last one is under way

    def update(self, event: Event) -> None:
        """Take in one step.

        Args:
            event: What `quotientsharp.sharpness` reports.
        """
        if not event.done:  # that is no step of its own
            key = (event.batch, event.rho, event.restart)
            self.taken[key] = self.taken.get(key, 0) + 1
            self.limit = event.steps

    @property
    def bound(self) -> bool:
        """Whether the estimate is an upper bound."""
        return len(self.taken) < 2

    def seconds(self) -> float | None:
        """Seconds left.

        Returns:
            None before the first step.
        """
        share = self.share()
        return (self.clock() - self.start) * (1 - share) / share if share else None

    def share(self) -> float:
        """Share of the work that is done.

        Returns:
            Between 0 and 1.
        """
        steps = list(self.taken.values())
        if not steps:
            return 0.0
        mean = self.limit if self.bound else sum(steps[:-1]) / (len(steps) - 1)
        rest = max(mean - steps[-1], 0.0) + mean * max(self.units - len(steps), 0)
        return sum(steps) / (sum(steps) + rest)


def clock_text(seconds: float) -> str:
    """Minutes and seconds.

    Args:
        seconds: How long.

    Returns:
        ``"1:05"`` or ``"2:00:00"``.
    """
    minutes, rest = divmod(math.ceil(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


@contextmanager
def progress_bar(units: int, batches: int) -> Iterator[Callable[[Event], None]]:
    """A progress bar on stderr; silent where stderr is no terminal.

    Args:
        units: Number of ascents.
        batches: Number of batches.

    Yields:
        The function to call with every event of `quotientsharp.sharpness`.
    """
    console = Console(stderr=True)
    left = TimeLeft(units)
    bar_columns = (TextColumn("{task.description}"), BarColumn(bar_width=None))
    time_columns = (TimeElapsedColumn(), TextColumn("{task.fields[left]}"))
    columns = (*bar_columns, *time_columns)
    with Progress(*columns, console=console, transient=True, expand=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("the first step", total=1.0, left="")

        def report(event: Event) -> None:
            left.update(event)
            seconds = left.seconds()
            words = "" if seconds is None else f"{'at most' if left.bound else 'about'} {clock_text(seconds)} left"
            place = f"batch {event.batch + 1}/{batches}  step {event.step}/{event.steps}  +{event.value:.3g}"
            bar.update(task, completed=left.share(), description=place, left=words)

        yield report


def number(value: float) -> str:
    """A number for a table.

    Args:
        value: The number.

    Returns:
        Four digits.
    """
    return f"{value:.4g}"


def result_table(results: Sequence[SharpnessResult]) -> Table:
    """A table of sharpness: a list of all there is to say of one result, a row per radius of several.

    Args:
        results: Results of `quotientsharp.sharpness` that differ in the radius alone.

    Returns:
        The table.
    """
    facts = [_facts(result) for result in results]
    if len(results) == 1:
        table = Table(show_header=False)
        table.add_column(style="bold")
        table.add_column(justify="right")
        for name, text in facts[0].items():
            table.add_row(name, text, style="green" if name == "sharpness" else None)
        return table
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))  # narrow enough for 80 columns
    shown = [name for name in facts[0] if name not in {"first-order estimate", "batches", "loss"}]
    for name in shown:
        table.add_column(name.removesuffix(" per batch"), justify="right", no_wrap=True)
    for row in facts:
        table.add_row(*(row[name] for name in shown))
    return table


def _facts(result: SharpnessResult) -> dict[str, str]:
    interval = result.interval
    spread = {} if interval is None else {"95 % interval": " to ".join(map(number, interval))}
    return {
        "rho": number(result.rho),
        "sharpness": number(result.value),
        **spread,
        "first-order estimate": number(result.first_order),
        "loss": number(result.loss),
        "batches": str(len(result.per_batch)),
        "gradients per batch": f"{np.mean(result.gradients):.1f}",
        "converged": "yes" if result.converged else "no",
        "residual": f"{result.residual:.1e}",
    }


def method(result: SharpnessResult) -> str:
    """How a result was found, in words.

    Args:
        result: A result of `quotientsharp.sharpness`.

    Returns:
        The geometry, and for the geodesic one its metric and retraction.
    """
    if result.geometry != "geodesic":
        return f"{result.geometry} sharpness"
    return f"geodesic sharpness, metric {result.metric}, retraction {result.retraction}"


def block_table(result: SharpnessResult) -> Table:
    """The blocks with the largest shares of the sharpness.

    Args:
        result: A result of `quotientsharp.sharpness`.

    Returns:
        The table.
    """
    table = Table("block")
    table.columns[0].overflow = "fold"
    for name in ("share", "sharpness"):
        table.add_column(name, justify="right", no_wrap=True)
    ranked = sorted(result.by_block.items(), key=lambda item: -abs(item[1]))
    for name, value in ranked[:BLOCKS]:
        table.add_row(Text(name), f"{100 * value / result.value:.1f} %" if result.value else "", number(value))
    rest = ranked[BLOCKS:]
    if rest:
        value = sum(part for _, part in rest)
        share = f"{100 * value / result.value:.1f} %" if result.value else ""
        table.add_row(f"{len(rest)} others", share, number(value))
    return table
