"""Sharpness: the worst loss in a ball around a model, in a geometry of the user's choice."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, overload

import numpy as np
import torch
from torch import Tensor, nn

from .ascent import Across, Ascent, Peak, Report, Surface, length, orthogonal_
from .measurement import Measurement, open_measurement, read_count, read_number
from .objective import Loss, Objective
from .space import Geometry, ParameterSpace
from .symmetry import Symmetries

_LEAVES = "a geodesic of this length leaves the manifold"


@dataclass(frozen=True)
class Progress:
    """What `sharpness` tells its ``progress`` callback after every gradient.

    Attributes:
        batch: Number of the batch, from 0.
        batches: Number of batches, if known.
        rho: Radius of the ball.
        restart: Number of the ascent within the batch, from 0.
        step: Gradients taken in this ascent.
        steps: Most gradients it may take.
        value: Largest rise of the loss so far.
        done: Whether the batch is finished.
    """

    batch: int
    batches: int | None
    rho: float
    restart: int
    step: int
    steps: int
    value: float
    done: bool = False


@dataclass
class SharpnessResult:
    """What `sharpness` measures.

    Attributes:
        value: Mean over batches of the largest rise of the loss in the ball (m-sharpness).
        per_batch: That rise for each batch.
        loss: Mean loss of the model itself.
        interval: Bootstrap interval of 95 % for the mean over batches; None for a single batch.
        converged: Whether every ascent ended with less left to gain than the tolerance asks for.
        residual: Largest ``1 - cos(gradient, xi)`` over batches, where the worst losses were found; 0 at a maximum on
            the boundary of the ball.
        first_order: Mean over batches of ``rho |gradient|``, the first-order estimate of the same number.
        gradients: Gradients taken for each batch, over all restarts.
        by_block: The value by block and free parameter: its shares of the squared length of the worst step. At a
            maximum on the boundary these are also their shares of the first-order rise. They sum up to the value.
        by_layer: The same by layer.
        by_head: The same by block and copy (head, or hidden unit for small blocks).
        rho: Radius of the ball.
        geometry: The geometry.
        metric: The metric of the blocks.
        retraction: Their retraction.
        notes: What a reader should know beside the numbers.
    """

    value: float
    per_batch: list[float]
    loss: float
    interval: tuple[float, float] | None
    converged: bool
    residual: float
    first_order: float
    gradients: list[int]
    by_block: dict[str, float]
    by_layer: dict[str, float]
    by_head: dict[str, float]
    rho: float
    geometry: str
    metric: str | float
    retraction: str
    notes: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """The result as JSON can hold it.

        Returns:
            A dictionary of numbers, strings, lists and dictionaries.
        """
        return asdict(self)

    def __str__(self) -> str:
        """A few lines for a terminal."""
        kind = f"geodesic ({self.metric}, {self.retraction})" if self.geometry == "geodesic" else self.geometry
        spread = "" if self.interval is None else f" [{self.interval[0]:.4g}, {self.interval[1]:.4g}]"
        count = len(self.per_batch)
        state = "converged" if self.converged else f"not converged (residual {self.residual:.1e})"
        lines = [
            f"{kind} sharpness at rho = {self.rho:g}: {self.value:.6g}{spread}",
            f"loss {self.loss:.6g}, first-order estimate {self.first_order:.4g}, {count} "
            f"batch{'es' if count > 1 else ''}, {sum(self.gradients)} gradients, {state}",
        ]
        top = sorted(self.by_block.items(), key=lambda item: -item[1])[:5]
        lines += [f"  {share / self.value:6.1%}  {name}" for name, share in top if self.value > 0]
        return "\n".join(lines + [f"note: {note}" for note in self.notes])


class SharpnessCurve(Sequence[SharpnessResult]):
    """Sharpness over several radii.

    Args:
        results: One result per radius.
    """

    def __init__(self, results: Sequence[SharpnessResult]) -> None:
        self._results = list(results)

    @overload
    def __getitem__(self, index: int) -> SharpnessResult: ...

    @overload
    def __getitem__(self, index: slice) -> SharpnessCurve: ...

    def __getitem__(self, index: int | slice) -> SharpnessResult | SharpnessCurve:
        """One result, or a shorter curve."""
        return SharpnessCurve(self._results[index]) if isinstance(index, slice) else self._results[index]

    def __len__(self) -> int:
        """Number of radii."""
        return len(self._results)

    @property
    def rhos(self) -> list[float]:
        """The radii."""
        return [result.rho for result in self]

    @property
    def values(self) -> list[float]:
        """The sharpness at each radius."""
        return [result.value for result in self]

    @property
    def converged(self) -> bool:
        """Whether every ascent converged."""
        return all(result.converged for result in self)

    def to_dict(self) -> dict[str, Any]:
        """The curve as JSON can hold it.

        Returns:
            ``{"results": [...]}``.
        """
        return {"results": [result.to_dict() for result in self]}

    def __str__(self) -> str:
        """One paragraph per radius."""
        return "\n".join(str(result) for result in self)


class ModelSurface(Surface):
    """The loss of a model on one batch over the coordinates of a parameter space.

    Args:
        objective: The loss.
        space: The space.
        batch: The batch.
    """

    def __init__(self, objective: Objective, space: ParameterSpace, batch: Any) -> None:
        self.objective, self.space, self.batch = objective, space, batch
        self.error_bound, self.resolution = space.error_bound, 0.0

    def open(self) -> tuple[float, Tensor]:
        """Loss and gradient at the model itself, in the coordinates that the batch can move.

        Returns:
            The loss, and the gradient at the origin of the coordinates, which the space has from now on.

        Raises:
            ValueError: If the loss is not finite.
        """
        space = self.space
        space.widen()
        space.move_(space.zeros())
        loss, gradients = self.objective.gradient(self.batch)
        center = finite_loss(float(loss))
        self.resolution = torch.finfo(loss.dtype).eps * abs(center)
        space.focus(gradients)
        zeros = space.zeros()
        space.move_(zeros)
        return center, space.pull(gradients, zeros, torch.empty_like(zeros))

    def value(self, z: Tensor) -> tuple[Tensor, Tensor | None]:
        """The loss; see `Surface.value`."""
        error = self.space.move_(z)
        return self.objective.value(self.batch), error

    def gradient(self, z: Tensor, out: Tensor) -> tuple[Tensor, Tensor | None]:
        """The loss and its gradient; see `Surface.gradient`."""
        error = self.space.move_(z)
        loss, gradients = self.objective.gradient(self.batch)
        self.space.pull(gradients, z, out)
        return loss, error

    def refine(self) -> bool:
        """Integrate geodesics more finely; see `Surface.refine`."""
        return self.space.refine()


@overload
def sharpness(
    model: nn.Module, batches: Any, rho: float = ..., *, rhos: None = ..., **options: Any
) -> SharpnessResult: ...


@overload
def sharpness(
    model: nn.Module, batches: Any, rho: float = ..., *, rhos: Sequence[float], **options: Any
) -> SharpnessCurve: ...


# The overloads only tell the two kinds of results apart; the keywords are below.
def sharpness(  # type: ignore[misc]
    model: nn.Module,
    batches: Any,
    rho: float = 0.05,
    *,
    rhos: Sequence[float] | None = None,
    loss: Loss | str | None = None,
    geometry: str = "geodesic",
    metric: str | float = "mix",
    retraction: str = "christoffel",
    relaxation: float = 0.0,
    steps: int = 20,
    tolerance: float = 1e-3,
    restarts: int = 1,
    blocks: str = "all",
    free: str = "first_order",
    symmetries: Symmetries | None = None,
    seed: int = 0,
    progress: Callable[[Progress], None] | None = None,
) -> SharpnessResult | SharpnessCurve:
    r"""Worst rise of the loss in a ball around a model.

    ``S = mean over batches of max { L(R_theta(xi)) - L(theta) : xi horizontal, |xi|_theta <= rho }`` ("Hide & Seek",
    arXiv 2505.05409). With the geodesic geometry the number depends on the function that the network computes and not
    on which of the equivalent weights happen to represent it. The model is measured in evaluation mode and comes back
    bit for bit as it was, also after an exception or an interrupt.

    Args:
        model: Any PyTorch model. Parameters that do not require a gradient stay fixed, unless none requires one.
        batches: An iterable of mappings as Hugging Face models take them, with labels, or of pairs of inputs and class
            indices; one such batch will do. It is read once.
        rho: Radius of the ball.
        rhos: Several radii in place of one; each ascent starts where the one before ended.
        loss: None for the model's own loss (a mapping) or cross-entropy (a pair); ``"logit_normalized"``; or a callable
            ``loss(model, batch) -> scalar``.
        geometry: ``"geodesic"``, ``"adaptive"`` or ``"euclidean"``.
        metric: Metric of the blocks: ``"inv"``, ``"mix"`` or a number between 0 (inv) and 1 (mix).
        retraction: How blocks move: ``"first_order"``, ``"christoffel"`` or ``"geodesic"``.
        relaxation: Invariant relaxation of the metric: adds this share of the largest singular value to all.
        steps: Most gradients per ascent.
        tolerance: An ascent stops when less than this share of its gain seems left; 0 takes all steps.
        restarts: Ascents per batch and radius. The second and later start at random, every other one after an ascent
            among the directions orthogonal to the best so far.
        blocks: Which blocks move on their quotients: ``"all"`` that are verified, ``"attention"`` only (the paper's
            choice), or ``"none"``.
        free: How other parameters move: ``"first_order"``, ``w (1 + z)`` as in the paper, or ``"geodesic"``,
            ``w exp(z)``.
        symmetries: The model's symmetries, if `find_symmetries` was called already.
        seed: Seed of random starts, of the bootstrap and of whatever the model draws.
        progress: Called with a `Progress` after every gradient.

    Returns:
        A `SharpnessResult`; with ``rhos`` a `SharpnessCurve` in their order.

    Raises:
        ValueError: If an argument is out of range, a batch is unusable or the loss at the model itself is not finite.
    """
    radii = [read_number("rho", rho)] if rhos is None else [read_number("rhos", value) for value in rhos]
    if not radii:
        raise ValueError("rhos must hold at least one radius.")
    read_count("steps", steps)
    read_count("restarts", restarts)
    read_number("tolerance", tolerance, zero=True)
    chosen = Geometry.parse(geometry, metric, retraction, relaxation=relaxation, blocks=blocks, free=free)
    climb = _Climb(sorted(set(radii)), steps, tolerance, restarts, seed, progress)
    with open_measurement(model, batches, chosen, loss=loss, symmetries=symmetries, seed=seed) as measurement:
        rows = [climb.batch(measurement, number, batch) for number, batch in enumerate(measurement.batches())]
        notes = [*measurement.space.notes, *measurement.notes]
    results = {
        radius: _summarize(chosen, radius, [row[radius] for row in rows], seed, tolerance, notes)
        for radius in climb.radii
    }
    return results[radii[0]] if rhos is None else SharpnessCurve([results[radius] for radius in radii])


def average_sharpness(
    model: nn.Module,
    batches: Any,
    rho: float = 0.05,
    *,
    samples: int = 20,
    loss: Loss | str | None = None,
    geometry: str = "geodesic",
    metric: str | float = "mix",
    retraction: str = "christoffel",
    relaxation: float = 0.0,
    blocks: str = "all",
    free: str = "first_order",
    symmetries: Symmetries | None = None,
    seed: int = 0,
) -> AverageResult:
    """Mean rise of the loss over the sphere of radius ``rho``: average-case sharpness.

    Args:
        model: Any PyTorch model; it comes back as it was.
        batches: As for `sharpness`.
        rho: Length of the random steps, which are uniform on the horizontal sphere.
        samples: Random steps per batch.
        loss: As for `sharpness`.
        geometry: ``"geodesic"``, ``"adaptive"`` or ``"euclidean"``.
        metric: Metric of the blocks.
        retraction: Their retraction.
        relaxation: Invariant relaxation of the metric.
        blocks: ``"all"``, ``"attention"`` or ``"none"``.
        free: ``"first_order"`` or ``"geodesic"``.
        symmetries: The model's symmetries, if known.
        seed: Seed of the random steps.

    Returns:
        An `AverageResult`.

    Raises:
        ValueError: If an argument is out of range, a batch is unusable or a geodesic leaves the manifold.
    """
    radius = read_number("rho", rho)
    read_count("samples", samples)
    chosen = Geometry.parse(geometry, metric, retraction, relaxation=relaxation, blocks=blocks, free=free)
    rises: list[float] = []
    per_batch: list[float] = []
    with open_measurement(model, batches, chosen, loss=loss, symmetries=symmetries, seed=seed) as measurement:
        space, objective = measurement.space, measurement.objective
        generator = torch.Generator(device=space.device).manual_seed(seed)
        space.prepare(space.random(generator).mul_(radius), radius)
        losses = []
        for batch in measurement.batches():
            space.move_(space.zeros())
            losses.append(finite_loss(float(objective.value(batch))))
            found: list[float] = []
            for _ in range(samples):
                z = space.random(generator).mul_(radius)
                if not space.reach_(z):
                    raise ValueError(f"{_LEAVES}; a smaller rho, or metric='inv', would do.")
                found.append(float(objective.value(batch)) - losses[-1])
            rises += found
            per_batch.append(float(np.mean(found)))
        notes = [*space.notes, *measurement.notes]
    error = float(np.std(rises, ddof=1) / math.sqrt(len(rises))) if len(rises) > 1 else math.nan
    return AverageResult(
        float(np.mean(per_batch)), error, per_batch, float(np.mean(losses)), radius, chosen.name, notes
    )


@dataclass
class AverageResult:
    """What `average_sharpness` measures.

    Attributes:
        value: Mean rise of the loss over random steps and batches.
        error: Its standard error over the random steps.
        per_batch: The mean rise of each batch.
        loss: Mean loss of the model itself.
        rho: Length of the steps.
        geometry: The geometry.
        notes: What a reader should know beside the numbers.
    """

    value: float
    error: float
    per_batch: list[float]
    loss: float
    rho: float
    geometry: str
    notes: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """The result as JSON can hold it.

        Returns:
            A dictionary of numbers, strings and lists.
        """
        return asdict(self)


def finite_loss(value: float) -> float:
    """Refuse a model whose own loss is not finite.

    Args:
        value: The loss.

    Returns:
        The loss.

    Raises:
        ValueError: If it is not finite.
    """
    if not math.isfinite(value):
        raise ValueError(
            f"the loss at the model itself is {value}; sharpness needs weights and data that give a finite loss."
        )
    return value


@dataclass
class _Row:
    """One batch at one radius."""

    loss: float
    gain: float
    slope: float
    gradients: int
    residual: float
    converged: bool
    left_manifold: bool
    resolution: float
    shares: dict[str, Tensor]


@dataclass
class _Climb:
    """The ascents of one batch."""

    radii: list[float]
    steps: int
    tolerance: float
    restarts: int
    seed: int
    progress: Callable[[Progress], None] | None

    def batch(self, measurement: Measurement, number: int, batch: Any) -> dict[float, _Row]:
        space, objective = measurement.space, measurement.objective
        surface = ModelSurface(objective, space, batch)
        center, gradient = surface.open()
        slope = length(gradient)
        generator = torch.Generator(device=space.device).manual_seed(self.seed + number)
        rows: dict[float, _Row] = {}
        best: Peak | None = None
        before = 0.0
        for radius in self.radii:
            ascent = Ascent(surface, center, radius, steps=self.steps, tolerance=self.tolerance)
            peaks: list[Peak] = []
            keep: Peak | None = None
            if slope > 0:
                space.prepare(gradient * (radius / slope), radius)
            for restart in range(self.restarts):

                def report(step: int, value: float, restart: int = restart, radius: float = radius) -> None:
                    self._tell(measurement, number, radius, restart, step, value)

                if restart == 0 and best is not None and best.z is not None:
                    peaks.append(ascent.run(best.z.mul(radius / before), report=report))
                elif restart == 0 and slope > 0:
                    last = len(self.radii) == 1 and self.restarts == 1
                    peaks.append(
                        ascent.run(space.zeros(), gradient=gradient if last else gradient.clone(), report=report)
                    )
                else:
                    start = space.random(generator)
                    if restart % 2 == 1 and keep is not None and keep.z is not None:
                        peaks += self._detour(ascent, start, keep.z, report)
                        start = peaks[-1].z if peaks[-1] is not keep and peaks[-1].z is not None else start
                    peaks.append(ascent.run(start.mul_(radius / length(start)), report=report))
                keep = max(peaks, key=lambda peak: peak.gain)
                for peak in peaks:
                    peak.z = peak.z if peak is keep else None
            best = max(peaks, key=lambda peak: peak.gain)
            before = radius
            rows[radius] = _Row(
                center,
                best.gain,
                slope,
                sum(peak.gradients for peak in peaks),
                best.residual,
                best.converged or best.gain == 0 == slope,
                any(peak.left_manifold for peak in peaks),
                surface.resolution,
                {} if best.z is None else {k: v.cpu() for k, v in space.squares(best.z).items()},
            )
        self._tell(measurement, number, before, self.restarts - 1, self.steps, rows[before].gain, done=True)
        return rows

    def _detour(self, ascent: Ascent, start: Tensor, known: Tensor, report: Report) -> list[Peak]:
        """Climb orthogonally to the best direction so far: random starts alone tend to end there again."""
        direction = known / length(known)
        start = orthogonal_(start.clone(), direction)
        if length(start) < 1e-6:  # there is but one direction
            return []
        start.mul_(ascent.rho / length(start))
        across = Across(ascent.surface, direction)
        detour = Ascent(across, ascent.center, ascent.rho, steps=ascent.steps, tolerance=max(ascent.tolerance, 1e-2))
        return [detour.run(start, report=report)]

    def _tell(
        self,
        measurement: Measurement,
        number: int,
        radius: float,
        restart: int,
        step: int,
        value: float,
        *,
        done: bool = False,
    ) -> None:
        if self.progress is not None:
            event = Progress(number, measurement.count, radius, restart, step, self.steps, max(value, 0.0), done)
            self.progress(event)


def _summarize(
    geometry: Geometry, radius: float, rows: Sequence[_Row], seed: int, tolerance: float, notes: Sequence[str]
) -> SharpnessResult:
    gains = np.array([row.gain for row in rows])
    blocks: dict[str, float] = {}
    layers: dict[str, float] = {}
    heads: dict[str, float] = {}
    for row in rows:
        total = float(sum(part.double().sum() for part in row.shares.values()))
        for name, part in row.shares.items():
            scale = row.gain / len(rows) / total if total > 0 else 0.0
            amount = scale * float(part.double().sum())
            blocks[name] = blocks.get(name, 0.0) + amount
            layers[layer_of(name)] = layers.get(layer_of(name), 0.0) + amount
            if part.ndim == 1 and part.numel() <= _MOST_HEADS:
                for copy, value in enumerate(part.double().tolist()):
                    key = f"{name}[{copy}]"
                    heads[key] = heads.get(key, 0.0) + scale * value
    told = list(notes)
    unfinished = sum(not row.converged for row in rows)
    if unfinished and tolerance > 0:
        told.append(
            f"{unfinished} of {len(rows)} ascents had more than {tolerance:g} of their gain left; more steps would do"
        )
    if any(row.left_manifold for row in rows):
        told.append(f"{_LEAVES} and was taken back; metric='inv' has no such end")
    if any(0 < row.gain < 1e3 * row.resolution for row in rows):
        told.append(
            "the rise of the loss is near the resolution of its dtype; a larger rho or float64 weights would do"
        )
    return SharpnessResult(
        value=float(gains.mean()),
        per_batch=gains.tolist(),
        loss=float(np.mean([row.loss for row in rows])),
        interval=bootstrap_interval(gains, seed),
        converged=unfinished == 0,
        residual=max(row.residual for row in rows),
        first_order=radius * float(np.mean([row.slope for row in rows])),
        gradients=[row.gradients for row in rows],
        by_block=blocks,
        by_layer=layers,
        by_head=heads,
        rho=radius,
        geometry=geometry.name,
        metric=geometry.metric.name,
        retraction=geometry.retraction,
        notes=told,
    )


_MOST_HEADS = 256  # blocks with more copies are hidden units, not heads


def layer_of(name: str) -> str:
    """The layer a block or parameter belongs to.

    Args:
        name: Its name.

    Returns:
        The name up to its first number, such as ``encoder.layer.3``; for names without one, the module.
    """
    found = re.match(r"(.*?\.\d+)(?:\.|$)", name)
    return found.group(1) if found else name.rpartition(".")[0] or name


def bootstrap_interval(values: np.ndarray[Any, np.dtype[np.float64]], seed: int) -> tuple[float, float] | None:
    """Percentile bootstrap of the mean, 95 %.

    Args:
        values: The values.
        seed: Seed.

    Returns:
        The interval, or None for fewer than two values.
    """
    if len(values) < 2:
        return None
    generator = np.random.default_rng(seed)
    draws = generator.integers(0, len(values), size=(10_000, len(values)))
    low, high = np.quantile(values[draws].mean(1), [0.025, 0.975])
    return float(low), float(high)
