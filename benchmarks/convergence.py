"""How near the default stop comes to the best value known, and after how many gradients.

For every geometry and for radii up to where the loss has tripled, `qs.sharpness` with its defaults is compared with the
best of 200 steps and 5 restarts (half of which climb among the directions orthogonal to the best so far).

Run: python -m benchmarks.convergence digits|minilm --rows FILE.csv. Rows that the file holds already are not measured
again, so a stopped run goes on where it stopped. Without a model only the summary of the file is printed.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import quotientsharp as qs

GEOMETRIES: dict[str, dict[str, Any]] = {
    "euclidean": {"geometry": "euclidean"},
    "adaptive": {"geometry": "adaptive"},
    "inv christoffel": {"metric": "inv"},
    "mix christoffel": {"metric": "mix"},
    "inv geodesic": {"metric": "inv", "retraction": "geodesic"},
    "mix geodesic": {"metric": "mix", "retraction": "geodesic"},
}
SHARES = (0.03, 0.1, 0.3, 1.0)  # of the radius at which the loss has tripled
FIELDS = ("model", "geometry", "rho", "loss_ratio", "gradients", "share_of_best", "residual", "converged")


def digits() -> tuple[nn.Module, Any]:
    """A trained vision transformer and a batch of 128 training images."""
    from quotientsharp.zoo import digits as load
    from quotientsharp.zoo import trained_digits_vit

    images, labels = load()
    return trained_digits_vit(images[:1500], labels[:1500], steps=120), (images[:128], labels[:128])


def minilm() -> tuple[nn.Module, Any]:
    """MiniLM with a head fitted to movie snippets, and 4 of them."""
    import transformers

    from examples.orbit_minilm import fit_head, movie_snippets
    from examples.orbit_minilm import minilm as folder
    from quotientsharp.data import Reading, make_batches

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.manual_seed(0)
    path = str(folder())
    model = transformers.BertForSequenceClassification.from_pretrained(path, num_labels=2).eval()
    reading = Reading(batch_size=4, examples=256, max_length=16, tokenizer=path)
    batches = make_batches(movie_snippets(), model, "text-classification", reading).batches
    fit_head(model, batches)
    return model, batches[0]


def tripling_radius(model: nn.Module, batch: Any, options: dict[str, Any]) -> float:
    """Radius at which the worst loss is three times the loss, to 5 %.

    Args:
        model: The model.
        batch: The batch.
        options: The geometry.

    Returns:
        The radius.
    """
    low, high = 1e-4, 1e-4
    while True:
        result = qs.sharpness(model, [batch], high, **options)
        if result.value >= 2 * result.loss:
            break
        low, high = high, 2 * high
    while high / low > 1.05:
        middle = (low * high) ** 0.5
        result = qs.sharpness(model, [batch], middle, **options)
        low, high = (middle, high) if result.value < 2 * result.loss else (low, middle)
    return high


def read(path: Path) -> list[dict[str, str]]:
    """The rows of a file, or none.

    Args:
        path: The file.

    Returns:
        The rows.
    """
    if not path.is_file():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def measure(name: str, path: Path) -> None:
    """Measure what the file does not hold yet, row by row.

    Args:
        name: ``"digits"`` or ``"minilm"``.
        path: The file.
    """
    model, batch = digits() if name == "digits" else minilm()
    symmetries = qs.find_symmetries(model, None if name == "minilm" else batch[0])
    rows = read(path)
    for kind, chosen in GEOMETRIES.items():
        done = sum(row["model"] == name and row["geometry"] == kind for row in rows)
        if done == len(SHARES):
            continue
        options = {**chosen, "symmetries": symmetries}
        largest = tripling_radius(model, batch, options)
        for share in SHARES[done:]:
            rho = share * largest
            quick = qs.sharpness(model, [batch], rho, **options)
            best = qs.sharpness(model, [batch], rho, steps=200, tolerance=0, restarts=5, **options)
            values = (
                name, kind, f"{rho:.4g}", f"{1 + best.value / best.loss:.3f}", quick.gradients[0],
                f"{quick.value / best.value:.6f}", f"{quick.residual:.1e}", quick.converged,
            )  # fmt: skip
            fresh = not path.is_file()
            with path.open("a", newline="") as file:
                writer = csv.writer(file)
                if fresh:
                    writer.writerow(FIELDS)
                writer.writerow(values)
            print(*values, flush=True)


def main() -> None:
    """Measure and print a summary."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.convergence", description=__doc__)
    parser.add_argument("model", nargs="?", choices=["digits", "minilm"])
    parser.add_argument("--rows", type=Path, default=Path("docs/convergence.csv"))
    options = parser.parse_args()
    if options.model:
        measure(options.model, options.rows)
    for name in ("digits", "minilm"):
        rows = [row for row in read(options.rows) if row["model"] == name]
        if rows:
            median = statistics.median(int(row["gradients"]) for row in rows)
            worst = min(float(row["share_of_best"]) for row in rows)
            print(
                f"{name}: {len(rows)} cases, median {median:g} gradients, worst {100 * worst:.3f} % of the best known"
            )


if __name__ == "__main__":
    main()
