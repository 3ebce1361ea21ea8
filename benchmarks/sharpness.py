"""Cost of a measurement: 20 steps of the ascent on MiniLM (batch 32 x 64) against 20 bare forward and backward passes.

The weights of the model fit its cache badly and its activations not at all, so a step pays for its passes over all
parameters; what a batch does not touch of the embedding is left out.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import quotientsharp as qs

from .optim import _batch, _model, _symmetries

if TYPE_CHECKING:
    from .__main__ import Ratio

STEPS, RHO = 20, 0.02
MEMORY_TARGET = 5.0


def _measurement(metric: str, retraction: str, geometry: str = "geodesic") -> Callable[[], object]:
    model, symmetries = _model(False).eval(), _symmetries(False)
    return lambda: qs.sharpness(
        model,
        [_batch()],
        RHO,
        geometry=geometry,
        metric=metric,
        retraction=retraction,
        steps=STEPS,
        tolerance=0,
        symmetries=symmetries,
    )


def _bare(passes: int = STEPS) -> Callable[[], object]:
    model = _model(False).eval()

    def run() -> None:
        for _ in range(passes):
            model.zero_grad()
            model(**_batch()).loss.backward()

    return run


def _cost(metric: str, retraction: str, target: float, geometry: str = "geodesic") -> Ratio:
    from .__main__ import Ratio

    name = geometry if geometry != "geodesic" else f"{metric}/{retraction}"
    title = f"sharpness, MiniLM 32 x 64, {STEPS} steps, {name}, to bare passes"
    return Ratio(title, _measurement(metric, retraction, geometry), _bare(), target)


RATIOS: list[Callable[[], Ratio]] = [
    partial(_cost, "mix", "first_order", 1.20, "adaptive"),
    partial(_cost, "mix", "christoffel", 1.20),
    partial(_cost, "inv", "christoffel", 1.25),
    partial(_cost, "mix", "geodesic", 1.35),
    partial(_cost, "inv", "geodesic", 1.35),
]

_PEAK = """
import resource, sys, warnings
warnings.simplefilter("ignore")
from benchmarks import sharpness as s
call = s._bare(2) if sys.argv[1] == "bare" else s._measurement("mix", sys.argv[1])
s._symmetries(False), s._batch()
call()
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
"""


def _peak(kind: str) -> float:
    """Peak resident memory of a process that does one thing, in MB."""
    done = subprocess.run([sys.executable, "-c", _PEAK, kind], check=True, capture_output=True, text=True)
    return float(done.stdout.split()[-1])


def print_memory() -> None:
    """Print what a measurement needs beyond a forward and backward pass, in units of the weights."""
    weights = sum(p.numel() * p.element_size() for p in _model(False).parameters()) / 2**20
    bare = _peak("bare")
    for retraction in ("christoffel", "geodesic"):
        ratio = (_peak(retraction) - bare) / weights
        name = f"peak memory beyond a bare pass, mix/{retraction}, in units of the weights"
        missed = "" if ratio <= MEMORY_TARGET else "  MISSED"
        print(f"{name:78}{'':20}{ratio:8.2f}{f'<= {MEMORY_TARGET}':>9}{missed}", flush=True)
