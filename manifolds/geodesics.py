"""Exact geodesics of the GL(h) quotient.

inv has a closed form. For mix the kinetic energy splits into two parts whose flows are elementary, which gives a
symmetric integrator; extrapolation raises its order. Every other member of the family goes through the modified
midpoint rule with the same extrapolation. All three reduce to tall factors times small matrices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .frame import Frame, factor, small_dtype, split_rows
from .gl import Fields, Grams, Pair, christoffel, christoffel_fields, grams, inner, spread
from .metric import Metric


class Arrival(NamedTuple):
    """Where a geodesic ends, how fast it is there, and how well its speed was kept on the way."""

    point: Pair
    velocity: Pair
    drift: Tensor  # relative change of the squared speed, one row per step of the integrator: (steps, ...)
    doubt: Tensor  # relative difference of the last two levels of extrapolation, likewise


class SplitPath(NamedTuple):
    """An `Arrival` in small matrices."""

    point: Fields
    velocity: Fields
    drift: Tensor
    doubt: Tensor


def closed_form(frame: Frame, x: Pair, u: Pair, t: float = 1.0) -> Pair:
    r"""Geodesic of the invariant metric.

    For a factor ``Y`` with Gram matrix ``S`` and velocity ``a``, put ``w = a S^-1 Y^T``. Then
    ``Y(t) = expm(t (w - w^T)) expm(t w^T) Y``, because the metric is the image of the right-invariant Frobenius metric
    of
    GL(n) under ``A -> A Y``. Both exponentials act inside the span of ``[a, Y]``: ``expm(t w^T) Y = Y E`` with the
    small
    matrix ``E = expm(t S^-1 a^T Y)``, and with ``w - w^T = U V^T``, ``U = [a, -Y]``, ``V = [Y S^-1, a S^-1]`` the
    intertwining relation ``expm(t U V^T) U = U expm(t V^T U)`` leaves one exponential of size 2h x 2h. The cost is
    O(n h^2), and geodesics exist for all times.

    Args:
        frame: The factored point (any metric).
        x: The point.
        u: The initial velocity; it need not be horizontal.
        t: Time.

    Returns:
        The point at time ``t``.
    """
    return spread(closed_fields(frame, grams(frame, x, u), t), x, u)


def exponential(matrices: Tensor, bound: float | None = None) -> Tensor:
    """Matrix exponential.

    Args:
        matrices: ``(..., k, k)``.
        bound: A bound of their spectral norms, if the caller knows one: then a Taylor polynomial of degree 8 and as
            many squarings as the bound asks for take a tenth of the time of torch's, whose derivative works on
            matrices of twice the size.

    Returns:
        Their exponentials.
    """
    if bound is None:
        result: Tensor = torch.linalg.matrix_exp(matrices)
        return result
    # The remainder is below theta^9 / 9!.
    theta = 1 / 16 if matrices.dtype == torch.float64 else 1 / 2
    squarings = max(0, math.ceil(math.log2(bound / theta))) if bound > 0 else 0
    x = matrices / 2**squarings
    one = torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)
    square = x @ x
    cube, fourth = x @ square, square @ square
    low = one + x + square / 2 + cube / 6
    high = one / 24 + x / 120 + square / 720 + cube / 5040 + fourth / 40320
    value: Tensor = low + fourth @ high
    for _ in range(squarings):
        value = value @ value
    return value


def closed_fields(frame: Frame, products: Grams, t: float = 1.0, *, bound: float | None = None) -> Fields:
    """The small matrices of `closed_form`.

    Args:
        frame: The factored point.
        products: Gram products of the initial velocity.
        t: Time.
        bound: A bound of the velocity's length in the metric inv, times ``t``, if one is known.

    Returns:
        The point at time ``t`` in the spans of point and velocity.
    """
    return Fields(
        *_closed_factor(products.cross_g, products.square_g, frame.root_g, frame.root_g_inverse, t, bound),
        *_closed_factor(products.cross_h, products.square_h, frame.root_h, frame.root_h_inverse, t, bound),
    )


def _closed_factor(
    cross: Tensor, square: Tensor, root: Tensor, root_inverse: Tensor, t: float, bound: float | None
) -> Pair:
    h = cross.shape[-1]
    mixed = root_inverse @ cross @ root_inverse.mT  # in the gauge where Y has orthonormal columns
    square = root_inverse @ square @ root_inverse.mT
    # Any scale of the block `a` gives the same result; this one keeps the exponent as small as the step.
    scale = square.detach().diagonal(dim1=-2, dim2=-1).sum(-1).clamp_min(1e-30).sqrt().unsqueeze(-1).unsqueeze(-1)
    identity = torch.eye(h, dtype=mixed.dtype, device=mixed.device)
    exponent = torch.cat([torch.cat([mixed, -scale * identity], -1), torch.cat([square / scale, -mixed.mT], -1)], -2)
    # Each of the four blocks has a norm of at most the velocity's length.
    turned = exponential(t * exponent, None if bound is None else 2 * bound)
    turn_a, turn_y = split_rows(turned.narrow(-1, h, h), h)
    stretch = exponential(t * mixed.mT, bound) @ root.mT
    return root_inverse.mT @ turn_y @ stretch, -(root_inverse.mT @ turn_a @ stretch) / scale


def _extrapolation_weights(numbers: Sequence[int]) -> list[float]:
    """Weights that combine a symmetric method's results at ``t/n`` into one of order ``2 len(numbers)``."""
    weights = []
    for j in numbers:
        weight = 1.0
        for i in numbers:
            if i != j:
                weight *= j * j / (j * j - i * i)
        weights.append(weight)
    return weights


State = tuple[Tensor, ...]


def _extrapolate(run: Callable[[State, int], State], start: State, numbers: Sequence[int]) -> tuple[State, Tensor]:
    """One step, and how far the level below the last one is from it."""
    parts = [run(start, number) for number in numbers]

    def mix(count: int) -> State:
        weights = _extrapolation_weights(numbers[:count])
        return tuple(
            torch.stack([weight * part for weight, part in zip(weights, column, strict=True)]).sum(0)
            for column in zip(*parts[:count], strict=True)
        )

    best = mix(len(numbers))
    with torch.no_grad():
        gaps = [(x - y).square().sum((-2, -1)) for x, y in zip(best, mix(len(numbers) - 1), strict=True)]
        sizes = [x.square().sum((-2, -1)) for x in start]
        doubt = (sum(gaps, torch.zeros_like(gaps[0])) / sum(sizes, torch.zeros_like(sizes[0]))).sqrt()
    return best, doubt


def default_order(dtype: torch.dtype) -> int:
    """Order of the integrators that suits a dtype.

    Args:
        dtype: Dtype of the points.

    Returns:
        The number of levels of the extrapolation; the order is twice that.
    """
    return 6 if dtype == torch.float64 else 4


def split_flow(frame: Frame, x: Pair, u: Pair, *, steps: int = 1, levels: int = 6) -> Arrival:
    r"""Geodesic of the mixed metric.

    In the momenta ``p = a SH``, ``r = b SG`` the energy is ``H1 + H2`` with ``H1 = tr(SH^-1 p^T p)/2``,
    ``H2 = tr(SG^-1 r^T r)/2``. The flow of ``H1`` leaves ``H`` and ``p`` alone: ``G`` grows by ``t p SH^-1``, ``r`` by
    ``t H a^T a`` with ``a = p SH^-1``; likewise for ``H2``. Both parts are GL(h)-invariant, so the composition
    conserves horizontality, and its error has even powers of the step only, which extrapolation removes. Everything
    happens in the spans of ``[G, a]`` and ``[H, b]``, so the state is a handful of h x h matrices.

    Args:
        frame: The factored point.
        x: The point.
        u: The initial velocity; it need not be horizontal.
        steps: Number of extrapolated steps to time 1.
        levels: Levels of extrapolation; the order is twice that.

    Returns:
        The point and velocity at time 1 and the drift of the squared speed. Where the geodesic leaves the manifold
        (``G H^T`` loses rank before time 1) the drift is large or not finite.
    """
    path = split_fields(frame, grams(frame, x, u), steps=steps, levels=levels)
    return Arrival(spread(path.point, x, u), spread(path.velocity, x, u), path.drift, path.doubt)


def split_fields(frame: Frame, products: Grams, *, steps: int = 1, levels: int = 6, arriving: bool = True) -> SplitPath:
    """The small matrices of `split_flow`.

    Args:
        frame: The factored point.
        products: Gram products of the initial velocity.
        steps: Number of extrapolated steps to time 1.
        levels: Levels of extrapolation; the order is twice that.
        arriving: Whether the velocity at time 1 needs a derivative.

    Returns:
        Point and velocity at time 1 in the spans of point and initial velocity, drift and doubt as in `Arrival`.
    """
    sides = (
        (products.cross_g, products.square_g, frame.root_g, frame.root_g_inverse, frame.gram_g_inverse, frame.gram_h),
        (products.cross_h, products.square_h, frame.root_h, frame.root_h_inverse, frame.gram_h_inverse, frame.gram_g),
    )
    start: list[Tensor] = []
    rests: list[Tensor] = []
    inside: list[Tensor] = []
    for cross, whole, root, root_inverse, gram_inverse, other in sides:
        part = root_inverse @ cross
        rests.append(whole - part.mT @ part)  # Gram matrix of the part outside the span
        inside.append(gram_inverse @ cross)
        start += [root.mT, torch.zeros_like(root), part @ other, other]
    rest_g, rest_h = rests

    def square(top: Tensor, low: Tensor, rest: Tensor) -> Tensor:
        return top.mT @ top + low.mT @ (rest @ low)

    def inverse(matrix: Tensor) -> Tensor:
        result: Tensor = torch.linalg.inv_ex(matrix).inverse
        return result

    def drive(mover: State, target: State, rest_m: Tensor, rest_t: Tensor, t: float) -> tuple[State, State]:
        """Flow of the part of the energy that holds the mover's momentum."""
        top, low, p_top, p_low = mover
        t_top, t_low, q_top, q_low = target
        dual = inverse(square(t_top, t_low, rest_t))
        a_top, a_low = p_top @ dual, p_low @ dual
        kinetic = t * square(a_top, a_low, rest_m)
        moved = (top + t * a_top, low + t * a_low, p_top, p_low)
        return moved, (t_top, t_low, q_top + t_top @ kinetic, q_low + t_low @ kinetic)

    def run(state: State, number: int) -> State:
        first, second = state[:4], state[4:]
        t = 1.0 / (steps * number)
        first, second = drive(first, second, rest_g, rest_h, t / 2)
        for k in range(number):
            second, first = drive(second, first, rest_h, rest_g, t)
            first, second = drive(first, second, rest_g, rest_h, t if k + 1 < number else t / 2)
        return first + second

    def speeds(state: State) -> tuple[Tensor, State]:
        top, low, p_top, p_low, t_top, t_low, q_top, q_low = state
        dual_h, dual_g = inverse(square(t_top, t_low, rest_h)), inverse(square(top, low, rest_g))
        energy = (dual_h * square(p_top, p_low, rest_g)).sum((-2, -1))
        energy = energy + (dual_g * square(q_top, q_low, rest_h)).sum((-2, -1))
        return energy, (p_top @ dual_h, p_low @ dual_h, q_top @ dual_g, q_low @ dual_g)

    state: State = tuple(start)
    with torch.no_grad():  # only compared
        begin, _ = speeds(state)
    drifts, doubts = [], []
    numbers = range(1, levels + 1)
    for _ in range(steps):
        state, doubt = _extrapolate(run, state, numbers)
        with torch.set_grad_enabled(arriving and torch.is_grad_enabled()):
            energy, rates = speeds(state)
        drifts.append(_drift(begin, energy))
        doubts.append(doubt)

    def unfold(side: int, top: Tensor, low: Tensor) -> Pair:
        return sides[side][3].mT @ top - inside[side] @ low, low

    point = Fields(*unfold(0, state[0], state[1]), *unfold(1, state[4], state[5]))
    velocity = Fields(*unfold(0, rates[0], rates[1]), *unfold(1, rates[2], rates[3]))
    return SplitPath(point, velocity, torch.stack(drifts), torch.stack(doubts))


def _drift(begin: Tensor, energy: Tensor) -> Tensor:
    tiny = torch.finfo(begin.dtype).tiny
    return ((energy - begin).abs() / begin.clamp_min(tiny)).detach()


def midpoint_flow(metric: Metric, x: Pair, u: Pair, *, steps: int = 1, levels: int = 6) -> Arrival:
    """Geodesic of any metric of the family from its Christoffel term.

    Args:
        metric: The metric.
        x: The point.
        u: The initial velocity.
        steps: Number of extrapolated steps to time 1.
        levels: Levels of extrapolation; the order is twice that.

    Returns:
        The point and velocity at time 1 and the drift of the squared speed.
    """

    def rate(state: State) -> State:
        G, H, a, b = state
        bend = christoffel(metric, factor(metric, G, H), (G, H), (a, b))
        return a, b, -bend[0], -bend[1]

    def step(state: State, change: State, t: float) -> State:
        return tuple(torch.add(y, dy, alpha=t) for y, dy in zip(state, change, strict=True))

    def run(state: State, number: int) -> State:
        t = 1.0 / (steps * number)
        before, now = state, step(state, rate(state), t)
        for _ in range(number - 1):
            before, now = now, step(before, rate(now), 2 * t)
        return now

    def energy(state: State) -> Tensor:
        velocity = (state[2], state[3])
        return inner(factor(metric, state[0], state[1]), velocity, velocity)

    state: State = (*x, *u)
    begin, drifts, doubts = energy(state), [], []
    numbers = range(2, 2 * levels + 1, 2)
    for _ in range(steps):
        state, doubt = _extrapolate(run, state, numbers)
        drifts.append(_drift(begin, energy(state)))
        doubts.append(doubt)
    return Arrival((state[0], state[1]), (state[2], state[3]), torch.stack(drifts), torch.stack(doubts))


def geodesic(metric: Metric, frame: Frame, x: Pair, u: Pair, *, steps: int = 1) -> tuple[Pair, Tensor | None]:
    """Geodesic of any metric at time 1, for a fixed number of integration steps.

    Args:
        metric: The metric.
        frame: The factored point.
        x: The point.
        u: The initial velocity.
        steps: Number of integration steps; the closed form of inv needs none.

    Returns:
        The point at time 1, and a bound on the relative error per step (None for the closed form): the drift of the
        squared speed, which shows the error itself, or a millionth of the difference of the last two levels, which
        shows a step too long to trust (a symmetric method can cross a singularity and keep its energy).
    """
    if metric.is_inv:
        return closed_form(frame, x, u), None
    levels = default_order(x[0].dtype)
    if metric.is_mix:
        arrival = split_flow(frame, x, u, steps=steps, levels=levels)
    else:
        wide = small_dtype(x[0])
        arrival = midpoint_flow(
            metric, (x[0].to(wide), x[1].to(wide)), (u[0].to(wide), u[1].to(wide)), steps=steps, levels=levels
        )
    point = arrival.point[0].to(x[0].dtype), arrival.point[1].to(x[1].dtype)
    return point, _error(arrival.drift, arrival.doubt)


def _error(drift: Tensor, doubt: Tensor) -> Tensor:
    return torch.maximum(drift, 1e-6 * doubt)


def retraction_fields(
    retraction: str,
    metric: Metric,
    frame: Frame,
    products: Grams,
    *,
    steps: int = 1,
    levels: int = 6,
    bound: float | None = None,
) -> tuple[Fields, Tensor | None]:
    """A retraction in small matrices: where it ends depends on point and step only through h x h products.

    Args:
        retraction: ``"first_order"``, ``"christoffel"`` or, for inv and mix, ``"geodesic"``.
        metric: The metric.
        frame: The factored point.
        products: Gram products of the step, as `gl.grams` gives them.
        steps: Number of integration steps of a geodesic of mix.
        levels: Levels of extrapolation of a geodesic of mix.
        bound: A bound of the step's length in the metric, if one is known; geodesics of inv are faster with it.

    Returns:
        The end point in the spans of point and step; the error of an integrated geodesic as `geodesic` gives it.
    """
    if retraction == "geodesic" and metric.is_inv:
        return closed_fields(frame, products, bound=bound), None
    if retraction == "geodesic":
        path = split_fields(frame, products, steps=steps, levels=levels, arriving=False)
        return path.point, _error(path.drift, path.doubt)
    identity = torch.eye(products.cross_g.shape[-1], dtype=products.cross_g.dtype, device=products.cross_g.device)
    if retraction == "first_order":
        whole = identity.expand(products.cross_g.shape)
        return Fields(whole, whole, whole, whole), None
    bend = christoffel_fields(metric, frame, products)
    return Fields(*(identity - part / 2 for part in bend)), None
