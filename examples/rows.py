"""Results of runs as lines of JSON, so that an example that was stopped goes on where it was."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]


class Rows:
    """A file of results.

    Args:
        path: The file; it is made if it is not there.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = path.read_text().splitlines() if path.exists() else []
        self.rows: list[Row] = [json.loads(line) for line in lines]

    def get(self, key: Row, make: Callable[[], Row]) -> Row:
        """A result from the file, or a new one.

        Args:
            key: What identifies the run.
            make: Runs it.

        Returns:
            Key and results together.
        """
        for row in self.rows:
            if all(row.get(name) == value for name, value in key.items()):
                return row
        row = {**key, **make()}
        self.rows.append(row)
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        return row


def cell(values: Sequence[float], digits: int) -> str:
    """Mean and standard deviation over seeds.

    Args:
        values: One number per seed.
        digits: Digits after the point.

    Returns:
        For example ``0.123 +- 0.004``.
    """
    spread = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.fmean(values):.{digits}f} +- {spread:.{digits}f}"
