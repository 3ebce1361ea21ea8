"""Compare the three retractions of the GL(h) quotient, for both metrics.

First the error on G H^T against the exact geodesic, over the length of the step: a first-order step is wrong by
t^2, the Christoffel correction by t^3. Then one matrix-completion problem, solved with each retraction by Geoopt and by
Pymanopt: what does a better retraction buy an optimizer?

Run: python examples/compare_retractions.py --out DIR
"""

from __future__ import annotations

import argparse
import time
import warnings
from pathlib import Path

with warnings.catch_warnings():  # geoopt compiles with torch.jit, which torch calls deprecated
    warnings.simplefilter("ignore")
    import geoopt
import matplotlib as mpl
import numpy as np
import pymanopt
import torch
from pymanopt.optimizers import ConjugateGradient, TrustRegions
from quotientsharp.manifolds import GLQuotient, PymanoptGLQuotient
from torch import Tensor

mpl.use("Agg")
import matplotlib.pyplot as plt

METRICS = ("inv", "mix")
RETRACTIONS = ("first_order", "christoffel", "geodesic")
STEPS = torch.logspace(-3, -0.5, 11, dtype=torch.float64).tolist()


def errors(metric: str, retraction: str, seed: int = 0) -> list[float]:
    """Error on G H^T against the geodesic, relative to |G H^T|, for every step length."""
    manifold = GLQuotient(24, metric=metric, retraction=retraction)
    x = manifold.random(40, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    u = manifold.random_tangent(x, generator=torch.Generator().manual_seed(seed + 1))
    u = u / manifold.norm(x, u, keepdim=True)
    scale = manifold.product(x).norm()
    gaps = (manifold.product(manifold.retr(x, t * u)) - manifold.product(manifold.expmap(x, t * u)) for t in STEPS)
    return [float(gap.norm() / scale) for gap in gaps]


def slope(values: list[float]) -> float:
    """Slope of the log-log line through the short steps."""
    return float(np.polyfit(np.log(STEPS[:6]), np.log(values[:6]), 1)[0])


def completion_problem(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """A 60 x 50 matrix of rank 4, half of its entries, and a start near the truth's size."""
    gen = torch.Generator().manual_seed(seed)
    left, right = (torch.randn(size, 4, generator=gen, dtype=torch.float64) for size in (60, 50))
    truth = left @ right.T
    seen = (torch.rand(60, 50, generator=gen) < 0.5).double()
    left, s, right = torch.linalg.svd(2 * seen * truth, full_matrices=False)
    start = torch.cat([left[:, :4] * s[:4].sqrt(), right.T[:, :4] * s[:4].sqrt()])
    return truth / 10, seen, start / 10**0.5


def solve_with_geoopt(metric: str, retraction: str) -> tuple[int, float, float]:
    """Riemannian conjugate gradients with line search: iterations, error on unseen entries, seconds."""
    truth, seen, start = completion_problem()
    manifold = GLQuotient(60, metric=metric, retraction=retraction)
    x = geoopt.ManifoldParameter(start.clone(), manifold=manifold)
    optimizer = geoopt.optim.rlinesearch.RiemannianLineSearch([x], cg_method="fr")

    def closure() -> float:
        optimizer.zero_grad()
        loss = (seen * (manifold.product(x) - truth)).square().sum() / 2
        loss.backward()
        return loss.item()

    begin, steps = time.perf_counter(), 0
    while closure() > 1e-12 and steps < 300:
        optimizer.step(closure)
        steps += 1
    return steps, recovery(manifold.product(x.detach()), truth, seen), time.perf_counter() - begin


def solve_with_pymanopt(metric: str, retraction: str, kind: type) -> tuple[int, float, float]:
    """A Pymanopt optimizer: iterations, error on unseen entries, seconds."""
    truth, seen, start = completion_problem()
    manifold = PymanoptGLQuotient(60, 50, 4, metric=metric, retraction=retraction)

    @pymanopt.function.pytorch(manifold)
    def cost(G: Tensor, H: Tensor) -> Tensor:
        return (seen * (G @ H.T - truth)).square().sum() / 2

    optimizer = kind(verbosity=0, max_iterations=300, min_gradient_norm=1e-7, min_step_size=1e-14)
    problem = pymanopt.Problem(manifold, cost)
    result = optimizer.run(problem, initial_point=(start[:60].numpy(), start[60:].numpy()))
    G, H = (torch.from_numpy(part) for part in result.point)
    return result.iterations, recovery(G @ H.T, truth, seen), result.time


def recovery(found: Tensor, truth: Tensor, seen: Tensor) -> float:
    """Relative error on the entries that were not given."""
    return float(((1 - seen) * (found - truth)).norm() / ((1 - seen) * truth).norm())


def picture(curves: dict[tuple[str, str], list[float]], path: Path) -> None:
    """Log-log plot of the errors, one panel per metric, slopes in the legend."""
    figure, panels = plt.subplots(1, 2, figsize=(9, 3.8), sharey=True)
    for panel, metric in zip(panels, METRICS, strict=True):
        for retraction, color in (("first_order", "tab:orange"), ("christoffel", "tab:blue")):
            values = curves[metric, retraction]
            text = f"{retraction} (slope {slope(values):.2f})"
            panel.loglog(STEPS, values, "o-", color=color, markersize=4, label=text)
        panel.set(title=f"metric {metric}", xlabel="length of the step")
        panel.grid(alpha=0.3, which="both")
        panel.legend(frameon=False)
    panels[0].set_ylabel("error on $G H^T$ (relative)")
    figure.suptitle("Distance from the exact geodesic")
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main() -> None:
    """Run both comparisons, print the tables, write the picture, and assert what they show."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(), help="folder for compare_retractions.png")
    out: Path = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)

    curves = {(metric, kind): errors(metric, kind) for metric in METRICS for kind in RETRACTIONS}
    picture(curves, out / "compare_retractions.png")
    print("error on G H^T against the exact geodesic (relative)")
    print(f"{'metric':8}{'retraction':14}{'slope':>7}{'t = 0.01':>11}{'t = 0.1':>11}")
    for (metric, retraction), values in curves.items():
        order = f"{slope(values):7.2f}" if retraction != "geodesic" else f"{'exact':>7}"
        print(f"{metric:8}{retraction:14}{order}{values[4]:11.1e}{values[8]:11.1e}")
        if retraction != "geodesic":
            assert abs(slope(values) - (2 if retraction == "first_order" else 3)) < 0.15

    print("\nmatrix completion, 60 x 50 of rank 4, half of the entries given")
    print(f"{'metric':8}{'retraction':14}{'optimizer':32}{'iterations':>11}{'unseen error':>14}{'seconds':>9}")
    for metric in METRICS:
        for retraction in RETRACTIONS:
            rows = {
                "geoopt RiemannianLineSearch": solve_with_geoopt(metric, retraction),
                "pymanopt ConjugateGradient": solve_with_pymanopt(metric, retraction, ConjugateGradient),
                "pymanopt TrustRegions": solve_with_pymanopt(metric, retraction, TrustRegions),
            }
            for name, (steps, error, seconds) in rows.items():
                print(f"{metric:8}{retraction:14}{name:32}{steps:11d}{error:14.1e}{seconds:9.2f}")
                assert error < 1e-3, "every combination recovers the matrix"
    print(f"\npicture: {out / 'compare_retractions.png'}")


if __name__ == "__main__":
    main()
