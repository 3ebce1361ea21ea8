"""Speed as ratios: both sides of a ratio run in one process, interleaved, and the median of several rounds counts.

Run: python -m benchmarks [--rounds N] [--only WORD]. Nothing else should run on the machine.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch

with warnings.catch_warnings():  # geoopt compiles with torch.jit, which torch calls deprecated
    warnings.simplefilter("ignore")
    from . import manifolds, optim, sharpness


@dataclass
class Ratio:
    """One figure: what is measured, against what, and the target."""

    name: str
    ours: Callable[[], object]
    other: Callable[[], object]
    target: float
    faster: bool = False  # whether the target is a speed-up (other / ours, at least) or a cost (ours / other, at most)


def _seconds(call: Callable[[], object]) -> float:
    time.sleep(0.1)  # idle threads of the other side's BLAS spin for a while before they sleep
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def measure(ratio: Ratio, rounds: int) -> tuple[float, float, float]:
    """Median times of both sides and of their ratio.

    Args:
        ratio: What to measure.
        rounds: How often.

    Returns:
        Seconds of ours, seconds of the other, and the median of the ratios of neighboring runs.
    """
    ratio.ours(), ratio.other()
    pairs = [(_seconds(ratio.ours), _seconds(ratio.other)) for _ in range(rounds)]
    quotients = [b / a if ratio.faster else a / b for a, b in pairs]
    return statistics.median(a for a, _ in pairs), statistics.median(b for _, b in pairs), statistics.median(quotients)


def main() -> None:
    """Print one line per ratio."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", default="", help="run the ratios whose name contains this")
    options = parser.parse_args()
    threads = torch.get_num_threads()
    print(f"torch {torch.__version__}, {threads} threads, median of {options.rounds} interleaved rounds")
    print(f"{'figure':78}{'ours':>10}{'other':>10}{'ratio':>8}{'target':>9}")
    for make in (*manifolds.RATIOS, *sharpness.RATIOS, *optim.RATIOS):
        ratio = make()
        if options.only not in ratio.name:
            continue
        ours, other, value = measure(ratio, options.rounds)
        goal = f">= {ratio.target}" if ratio.faster else f"<= {ratio.target}"
        met = value >= ratio.target if ratio.faster else value <= ratio.target
        print(f"{ratio.name:78}{ours:9.3f}s{other:9.3f}s{value:8.2f}{goal:>9}{'' if met else '  MISSED'}", flush=True)
    if options.only in "peak memory":
        sharpness.print_memory()


if __name__ == "__main__":
    main()
