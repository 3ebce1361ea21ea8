"""Regenerates the table of docs/symmetries.md by running the finder on tiny random models.

Run from the root of the repository: ``python docs/make_symmetries.py``. With ``--check`` it only compares.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import transformers

from quotientsharp import find_symmetries

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
PAGE = ROOT / "docs" / "symmetries.md"
START, END = "<!-- table: start -->", "<!-- table: end -->"


def describe(name: str) -> str:
    """Make one row of the table.

    Args:
        name: A model of the census.

    Returns:
        The row.
    """
    from tests.symmetry import zoo

    torch.manual_seed(0)
    found = find_symmetries(zoo.build(name))
    cells = []
    for kind in ("qk", "vo", "rescaling"):
        blocks = [block for block in found if block.kind == kind]
        groups = dict.fromkeys(f"{block.group} {block.group.style}".strip() for block in blocks)
        cells.append(", ".join(groups) or "none")
    first = next((block for block in found if block.kind == "qk"), found[0])
    share = 100 * found.dim / found.total
    names = ", ".join(f"`{parameter}`" for parameter in first.parameters)
    return f"| {name} | {cells[0]} | {cells[1]} | {cells[2]} | {share:.2f} % | {names} |"


def main() -> int:
    """Write or compare the table.

    Returns:
        0, or 1 if ``--check`` finds a difference.
    """
    from tests.symmetry import zoo

    transformers.logging.set_verbosity_error()
    head = ["| model | (Q, K) | (V, O) | hidden units | redundant | first block |", "|---|---|---|---|---|---|"]
    table = "\n".join([START, *head, *(describe(name) for name in zoo.FULL), END])
    text = PAGE.read_text(encoding="utf-8")
    new = text[: text.index(START)] + table + text[text.index(END) + len(END) :]
    if "--check" in sys.argv[1:]:
        return 0 if new == text else 1
    PAGE.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
