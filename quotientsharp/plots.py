"""Pictures, with matplotlib; nothing else in the package needs it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from .landscape import Landscape
    from .sharpness import SharpnessResult

LAYERS = 24  # bars that can still be read
SUFFIXES = (".png", ".svg", ".pdf")
# Distinguishable in print and for the color-blind (Okabe & Ito).
COLORS = {"geodesic": "#0072B2", "adaptive": "#E69F00", "euclidean": "#D55E00", "inv": "#009E73", "gray": "#666666"}


def new_figure(width: float, height: float) -> Any:
    """A figure outside pyplot: no window, no state.

    Args:
        width: Inches.
        height: Inches.

    Returns:
        A ``matplotlib.figure.Figure``.

    Raises:
        ImportError: If matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("A picture needs matplotlib: pip install matplotlib.") from error
    return Figure(figsize=(width, height), layout="constrained")


def save(figure: Any, path: Path) -> None:
    """Write a picture; the suffix says of what kind.

    Args:
        figure: The figure.
        path: A .png, .svg or .pdf file; its folder is made if need be.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=160)


def draw_orbit(panel: Any, sizes: Sequence[float], curves: Mapping[str, Sequence[float]]) -> None:
    """Sharpness along an orbit, relative to where it starts.

    Args:
        panel: Matplotlib axes.
        sizes: The factors a of ``A = a N``.
        curves: Sharpness divided by that of the weights as trained, by name of the geometry.
    """
    styles = {
        "euclidean": (COLORS["euclidean"], "s-"),
        "adaptive": (COLORS["adaptive"], "D-"),
        "geodesic inv": (COLORS["inv"], "o-"),
        "geodesic mix": (COLORS["geodesic"], "o--"),
    }
    for name, values in curves.items():
        color, line = styles[name]
        large = name == "geodesic inv"  # both geodesic curves lie on one line; each stays visible
        panel.plot(
            sizes, values, line, color=color, label=name, markersize=9 if large else 5, alpha=0.55 if large else 1.0,
            linewidth=4 if large else 1.8,
        )  # fmt: skip
    panel.set(
        xscale="log", yscale="log", xlabel=r"$a$ in $A = a \cdot$ Gaussian", ylabel="sharpness / sharpness as trained"
    )
    panel.axhline(1.0, color=COLORS["gray"], linewidth=0.8, linestyle=":")
    panel.grid(alpha=0.25)
    panel.legend(frameon=False)


def draw_lines(panel: Any, landscape: Landscape, path: str = "along the geodesic") -> None:
    """Loss along the geodesic and along the straight line through the worst direction.

    Args:
        panel: Matplotlib axes.
        landscape: What `quotientsharp.landscape` returns.
        path: Name of the curve, where the retraction is not the geodesic.
    """
    panel.plot(landscape.t, landscape.geodesic, color=COLORS["geodesic"], linewidth=2.2, label=path)
    panel.plot(landscape.t, landscape.straight, "--", color=COLORS["euclidean"], linewidth=1.6, label="straight line")
    panel.axvline(0.0, color=COLORS["gray"], linewidth=0.8, linestyle=":")
    panel.set(
        xlabel=rf"distance from the weights, in $\rho$ = {landscape.rho:g}", ylabel="loss", title="Worst direction"
    )
    panel.grid(alpha=0.25)
    panel.legend(frameon=False)


def draw_plane(figure: Any, panel: Any, landscape: Landscape) -> None:
    """Loss over the plane of the two worst directions, with the ball that was searched.

    Args:
        figure: The figure, for the color bar.
        panel: Matplotlib axes.
        landscape: What `quotientsharp.landscape` returns, with its plane.
    """
    from matplotlib.ticker import MaxNLocator

    side = np.linspace(-1.0, 1.0, landscape.plane.shape[0])
    finite = landscape.plane[np.isfinite(landscape.plane)]
    levels = np.linspace(finite.min(), max(finite.max(), finite.min() + 1e-12), 25)
    filled = panel.contourf(side, side, landscape.plane, levels=levels, cmap="viridis")
    panel.contour(side, side, landscape.plane, levels=levels[::3], colors="white", linewidths=0.4, alpha=0.6)
    angle = np.linspace(0.0, 2 * np.pi, 200)
    panel.plot(np.cos(angle), np.sin(angle), color="white", linewidth=1.4)
    panel.plot(0.0, 0.0, "o", color="white", markersize=5)
    panel.plot(1.0, 0.0, "*", color=COLORS["euclidean"], markeredgecolor="white", markersize=13, clip_on=False)
    panel.set(
        aspect="equal",
        xlabel=r"worst direction, in $\rho$",
        ylabel=r"second worst, in $\rho$",
        title="Both worst directions",
    )
    panel.set(xticks=(-1, -0.5, 0, 0.5, 1), yticks=(-1, -0.5, 0, 0.5, 1))
    bar = figure.colorbar(filled, ax=panel, label="loss", format="%.3g")
    bar.locator = MaxNLocator(6)
    bar.update_ticks()


def draw_radii(panel: Any, results: Sequence[SharpnessResult]) -> None:
    """Sharpness over the radius, with the interval.

    Args:
        panel: Matplotlib axes.
        results: Results of `quotientsharp.sharpness`, one per radius.
    """
    radii = [result.rho for result in results]
    panel.plot(radii, [result.value for result in results], "o-", color=COLORS["geodesic"], linewidth=2)
    low, high = zip(*(result.interval or (result.value, result.value) for result in results), strict=True)
    panel.fill_between(radii, low, high, color=COLORS["geodesic"], alpha=0.2, linewidth=0)
    panel.set(xlabel=r"radius $\rho$", ylabel="sharpness", title="Sharpness over the radius")
    panel.set(xscale="log", yscale="log" if min(low) > 0 else "linear")
    panel.set_xticks(radii, [f"{radius:g}" for radius in radii], minor=False)
    panel.set_xticks([], minor=True)
    panel.grid(alpha=0.25)


def draw_layers(panel: Any, result: SharpnessResult) -> None:
    """Shares of the layers, or of the largest if there are many.

    Args:
        panel: Matplotlib axes.
        result: A result of `quotientsharp.sharpness`.
    """
    least = sorted(result.by_layer.values())[-LAYERS:][0]
    shown = {name: value for name, value in result.by_layer.items() if value >= least}
    panel.barh(list(shown), list(shown.values()), color=COLORS["geodesic"])
    panel.invert_yaxis()
    panel.set(xlabel="sharpness", title="Where it comes from")
    panel.tick_params(axis="y", labelsize="small")
    panel.grid(alpha=0.25, axis="x")


def measurement_figure(results: Sequence[SharpnessResult], landscape: Landscape) -> Any:
    """The picture of one measurement: radii or layers, the worst direction, the plane of both worst directions.

    Args:
        results: Results of `quotientsharp.sharpness`, one per radius.
        landscape: What `quotientsharp.landscape` returns, with its plane.

    Returns:
        A ``matplotlib.figure.Figure``.
    """
    figure = new_figure(13.0, 4.2)
    first, second, third = figure.subplots(1, 3)
    if len(results) > 1:
        draw_radii(first, results)
    else:
        draw_layers(first, results[0])
    exact = results[0].geometry == "geodesic" and results[0].retraction == "geodesic"
    draw_lines(second, landscape, "along the geodesic" if exact else "along the retraction")
    draw_plane(figure, third, landscape)
    return figure


def demo_figure(sizes: Sequence[float], curves: Mapping[str, Sequence[float]], landscape: Landscape) -> Any:
    """The picture of the demo: sharpness along the orbit, the worst direction, the plane of both worst directions.

    Args:
        sizes: See `draw_orbit`.
        curves: See `draw_orbit`.
        landscape: What `quotientsharp.landscape` returns, with its plane.

    Returns:
        A ``matplotlib.figure.Figure``.
    """
    figure = new_figure(14.0, 4.4)
    first, second, third = figure.subplots(1, 3, width_ratios=(1.25, 1.0, 1.1))
    draw_orbit(first, sizes, curves)
    first.set_title("One function, many weights")
    draw_lines(second, landscape)
    draw_plane(figure, third, landscape)
    return figure
