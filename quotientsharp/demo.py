"""`quotientsharp demo`: one function, many weights, and what three geometries call its sharpness."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch import nn

from . import plots
from .symmetry import Symmetries, find_symmetries
from .zoo import digits, trained_digits_vit

# What is compared: arguments of `quotientsharp.sharpness` by the name in the table.
GEOMETRIES: dict[str, dict[str, Any]] = {
    "euclidean": {"geometry": "euclidean"},
    "adaptive": {"geometry": "adaptive"},
    "geodesic inv": {"geometry": "geodesic", "metric": "inv"},
    "geodesic mix": {"geometry": "geodesic", "metric": "mix"},
}
RHO = 0.05
VIEW = 0.3  # radius of the picture of the loss: wider, so that it bends
SIZES = (0.01, 0.1, 1.0, 10.0, 100.0)


@dataclass(frozen=True)
class Orbit:
    """Sharpness of one function at several places of its orbit.

    Attributes:
        sizes: The factors a of ``A = a N`` with a Gaussian N.
        start: Sharpness of the weights as they were, by geometry.
        moved: Sharpness after each move, by geometry.
        drift: Largest change of the loss by a move, relative.
    """

    sizes: tuple[float, ...]
    start: dict[str, float]
    moved: dict[str, list[float]]
    drift: float

    def ratios(self, name: str) -> list[float]:
        """Sharpness after each move, divided by that before.

        Args:
            name: The geometry.

        Returns:
            One number per size.
        """
        return [value / self.start[name] for value in self.moved[name]]

    def change(self, name: str) -> float:
        """Largest relative change.

        Args:
            name: The geometry.

        Returns:
            0 if sharpness is the same everywhere.
        """
        return max(abs(ratio - 1) for ratio in self.ratios(name))


def along_orbit(
    model: nn.Module,
    batches: Sequence[Any],
    symmetries: Symmetries,
    geometries: Mapping[str, Mapping[str, Any]],
    *,
    sizes: Sequence[float] = SIZES,
    rho: float = RHO,
    seed: int = 0,
    said: Callable[[str], object] = lambda _: None,
) -> Orbit:
    """Measure one function at several places of its orbit.

    Args:
        model: The model; it is not changed.
        batches: The batches.
        symmetries: Its symmetries.
        geometries: Arguments of `quotientsharp.sharpness` by name.
        sizes: The factors a of ``A = a N``, see `Symmetries.move_gaussian_`.
        rho: The radius.
        seed: Seed of the matrices.
        said: Is told what comes next.

    Returns:
        The measurements.
    """
    from .sharpness import sharpness

    def measure(place: nn.Module, words: str) -> tuple[dict[str, float], float]:
        values, loss = {}, 0.0
        for name, options in geometries.items():
            said(f"{words}: {name}")
            result = sharpness(place, batches, rho, symmetries=symmetries, **options)
            values[name], loss = float(result.value), float(result.loss)
        return values, loss

    start, loss = measure(model, "as trained")
    moved: dict[str, list[float]] = {name: [] for name in geometries}
    drift = 0.0
    for offset, size in enumerate(sizes):
        place = copy.deepcopy(model)
        symmetries.move_gaussian_(place, size, seed + offset)
        values, here = measure(place, f"a = {size:g}")
        drift = max(drift, abs(here / loss - 1))
        for name, value in values.items():
            moved[name].append(value)
    return Orbit(tuple(sizes), start, moved, drift)


def orbit_table(orbit: Orbit) -> Table:
    """A table of the measurements.

    Args:
        orbit: The measurements.

    Returns:
        One row per geometry.
    """
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))  # narrow enough for 80 columns
    table.add_column("sharpness", no_wrap=True)
    for head in ("trained", *(f"a={size:g}" for size in orbit.sizes), "max/min"):
        table.add_column(head, justify="right", no_wrap=True)
    for name, values in orbit.moved.items():
        values = [orbit.start[name], *values]
        spread = max(values) / min(values)
        same = spread < 1.01
        cells = [*(f"{value:.3g}" for value in values), f"1+{spread - 1:.0e}" if same else f"{spread:.3g}"]
        table.add_row(name, *cells, style="green" if same else "red")
    return table


def demo(out: Path, *, quick: bool = False) -> Orbit:
    """Train a small vision transformer, move it along its orbit, print a table and draw a picture.

    Args:
        out: Folder for ``demo.png``.
        quick: A smaller model and fewer points, for tests.

    Returns:
        The measurements.
    """
    from .landscape import landscape

    console, quiet = Console(), Console(stderr=True)
    plots.new_figure(1.0, 1.0)  # before the work begins: is there something to draw with?
    images, labels = digits()
    seen, kept = slice(0, 1500), slice(1500, None)
    with quiet.status("training a vision transformer on the digits") as status:
        size = {"steps": 100, "width": 16, "depth": 1} if quick else {}
        model = trained_digits_vit(images[seen], labels[seen], **size)
        with torch.no_grad():
            right = (model(images[kept]).argmax(1) == labels[kept]).float().mean()
        status.update("finding its symmetries")
        symmetries = find_symmetries(model, images[:8])
        model = model.double()
        batches = [(images[:128].double(), labels[:128])]
        sizes = SIZES[::2] if quick else SIZES
        orbit = along_orbit(model, batches, symmetries, GEOMETRIES, sizes=sizes, said=status.update)
        status.update("drawing the loss around the weights")
        batch = (images[:128], labels[:128])
        points = 9 if quick else 31
        place = landscape(model.float(), batch, VIEW, metric="inv", points=points, symmetries=symmetries)
        path = out / "demo.png"
        curves = {name: orbit.ratios(name) for name in GEOMETRIES}
        plots.save(plots.demo_figure(orbit.sizes, curves, place), path)
    weights = sum(p.numel() for p in model.parameters())
    text = (
        f"A vision transformer with {weights:,} weights, {100 * right:.1f} % right on unseen digits. Its attention has"
        f" {symmetries.dim:,} redundant dimensions: a matrix A between queries and keys, or between values and outputs,"
        " gives other weights and the same function. Here A = a * Gaussian in every head; the loss changes by"
        f" {orbit.drift:.0e}."
    )
    console.print(text, highlight=False)
    console.print(orbit_table(orbit))
    console.print("Geodesic sharpness belongs to the function, the others to the weights.", highlight=False)
    console.print(f"picture: {path}", highlight=False, soft_wrap=True)
    return orbit
