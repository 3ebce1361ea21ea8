"""The parameters of a model as one Riemannian manifold, in coordinates where the ball around the model is round.

A space is seen from the weights a model has when the space is made, ``theta``. A step is a flat vector ``z``: the
coordinates of a tangent vector in an orthonormal frame at ``theta``, so that norms, inner products and projections
onto a ball are those of plain vectors. What the geometries differ in is how a step moves the weights:

- euclidean: every parameter by ``z`` itself;
- adaptive: every parameter by ``w z``, which is the elementwise metric ``(xi / |w|)^2``; a parameter that is zero
  stays;
- geodesic: blocks of a symmetry move on their quotient manifolds, horizontally, by one of the retractions; all other
  parameters as in the adaptive geometry.

`ParameterSpace.move_` writes ``R(z)`` into the model, `ParameterSpace.pull` takes partial derivatives there back to
``z``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn

from .manifolds import gl, rescaling
from .manifolds.frame import Frame, Spectrum, balance, balanced_frame, factor, small_dtype, split_rows
from .manifolds.geodesics import default_order, geodesic, retraction_fields
from .manifolds.gl import Fields, Grams, Pair
from .manifolds.metric import Metric
from .manifolds.points import RETRACTIONS, known, work_dtype
from .symmetry import Block, Stack
from .symmetry.blocks import IntArray, assign_, refuse_attached, stacked

GEOMETRIES = ("geodesic", "adaptive", "euclidean")
FREE_STEPS = ("first_order", "geodesic")
_ATTENTION = ("qk", "vo")
_MOST_STEPS = 64


@dataclass(frozen=True)
class Geometry:
    """Which metric the parameters carry and how a step moves them.

    Attributes:
        name: ``"geodesic"``, ``"adaptive"`` or ``"euclidean"``.
        metric: Metric of the blocks.
        retraction: Retraction of the blocks.
        free: How parameters outside all blocks move: ``w (1 + z)`` for ``"first_order"``, the paper's choice, or
            their exact geodesic ``w exp(z)`` for ``"geodesic"``.
        blocks: ``"all"``, ``"attention"`` or ``"none"``.
    """

    name: str
    metric: Metric
    retraction: str
    free: str
    blocks: str

    @classmethod
    def parse(
        cls,
        geometry: str = "geodesic",
        metric: str | float = "mix",
        retraction: str = "christoffel",
        *,
        relaxation: float = 0.0,
        blocks: str = "all",
        free: str = "first_order",
    ) -> Geometry:
        """Read the arguments of `quotientsharp.sharpness`.

        Args:
            geometry: ``"geodesic"``, ``"adaptive"`` or ``"euclidean"``.
            metric: ``"inv"``, ``"mix"`` or a number between them.
            retraction: ``"first_order"``, ``"christoffel"`` or ``"geodesic"``.
            relaxation: The invariant relaxation of the metric.
            blocks: ``"all"``, ``"attention"`` or ``"none"``.
            free: ``"first_order"`` or ``"geodesic"``.

        Returns:
            The geometry.

        Raises:
            ValueError: If an argument is none of these.
        """
        choices = {
            "geometry": (geometry, GEOMETRIES),
            "retraction": (retraction, RETRACTIONS),
            "blocks": (blocks, ("all", "attention", "none")),
            "free": (free, FREE_STEPS),
        }
        for name, (value, allowed) in choices.items():
            if value not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, not {value!r}.")
        return cls(geometry, Metric.parse(metric, relaxation), retraction, free, blocks)


class Component(Protocol):
    """A part of the space: some parameters, and a slice of the coordinates."""

    size: int

    def move(self, parameters: Mapping[str, Tensor], z: Tensor) -> Tensor | None:
        """Write ``R(z)`` into the parameters.

        Args:
            parameters: The model's parameters.
            z: The component's coordinates.

        Returns:
            The relative error of the retraction, where it is integrated.
        """

    def pull(self, gradients: Mapping[str, Tensor], z: Tensor, out: Tensor) -> None:
        """Derivative of the loss in the coordinates, projected to the horizontal space.

        Args:
            gradients: Partial derivatives at ``R(z)``, where `move` was last called.
            z: The component's coordinates.
            out: Where to put it.
        """

    def project(self, z: Tensor) -> None:
        """Make coordinates horizontal, in place.

        Args:
            z: The component's coordinates.
        """

    def restore(self, parameters: Mapping[str, Tensor]) -> None:
        """Write the weights back, bit for bit.

        Args:
            parameters: The model's parameters.
        """

    def squares(self, z: Tensor) -> dict[str, Tensor]:
        """Squared length of the coordinates by place.

        Args:
            z: The component's coordinates.

        Returns:
            One number per parameter, or per copy of a block.
        """


class PairComponent:
    """Blocks of equal shape on their quotient manifold.

    A tangent vector ``(a, b)`` has coordinates ``(a C, b D)`` where ``C C^T`` and ``D D^T`` are the weights of the
    metric at the point. Where the symmetry is all of GL(h) the point first moves to the balanced gauge: the function
    stays, the frame becomes diagonal, and weights that a bad gauge had pushed apart come back into range. Singular
    values of the product that vanish to the precision of the weights mark directions in which the pair is no point of
    the manifold; they stay where they are, so that the pair moves among the pairs of its own rank.

    Args:
        stack: The blocks.
        geometry: Metric and retraction.
        parameters: The model's parameters.
        dtype: Dtype of the coordinates.
    """

    def __init__(self, stack: Stack, geometry: Geometry, parameters: Mapping[str, Tensor], dtype: torch.dtype) -> None:
        self.stack, self.metric, self.retraction = stack, geometry.metric, geometry.retraction
        self.n, self.h = stack.n, stack.h
        block = stack.blocks[0]
        device = parameters[block.parameters[0]].device
        self.original = torch.empty((stack.copies, *block.shape[1:]), dtype=dtype, device=device)
        stack.gather(parameters, self.original)
        x = self.original.reshape(stack.copies, block.shape[1], self.h)
        self.size = x.numel()
        self.radius: float | None = None
        self.levels, self.steps = default_order(dtype), 1
        self._diagonal = stack.kind == "rescaling" or block.group.dim == self.h**2
        self._tape: tuple[tuple[Tensor, ...], tuple[Tensor, ...]] | None = None
        if self._diagonal:
            self._balance(x)
        else:
            self._algebra = block.group.algebra().to(device, small_dtype(x))
            self._factor(x)
        self._tall = self.retraction == "geodesic" and not self.metric.is_rational and self.h > 1
        if self._tall and self.held:
            raise ValueError(
                f"retraction='geodesic' with metric={self.metric.name!r} needs pairs of full rank, and {self.held} of "
                f"{stack.blocks[0].name} are not; metric='inv' or 'mix', or retraction='christoffel', would do."
            )

    def _balance(self, x: Tensor) -> None:
        """Move to the balanced gauge, where the frame is diagonal."""
        G, H = split_rows(x, self.n)
        if self.h == 1:
            wide = small_dtype(x)
            length_g, length_h = (part.to(wide).norm(dim=-2, keepdim=True) for part in (G, H))
            s = (length_g * length_h).squeeze(-1)
            root = s.sqrt().unsqueeze(-1)
            shift_g, shift_h = (root / torch.where(length > 0, length, 1.0) for length in (length_g, length_h))
            x = torch.cat([(G * shift_g).to(x.dtype), (H * shift_h).to(x.dtype)], -2)
            alive = s > 0
        else:
            balanced = balance(G, H)
            s = balanced.s
            x = torch.cat([balanced.G, balanced.H], -2)
            alive = s > x.shape[-2] * torch.finfo(x.dtype).eps * s.narrow(-1, 0, 1)
        self.alive = alive
        live = alive.unsqueeze(-2).to(x.dtype)
        self.x = x * live
        # What stands in the place of a vanishing singular value is never used: its columns are zero and stay so.
        top = s.amax(-1, keepdim=True)
        s = torch.where(alive, s, torch.where(top > 0, top, torch.ones_like(top)))
        self.frame = balanced_frame(self.metric, s)
        root = self.metric.weights(s).sqrt()
        outward, inward = torch.where(alive, root, 0.0), torch.where(alive, 1 / root, 0.0)
        self.out = torch.diag_embed(outward), torch.diag_embed(outward)
        self.into = torch.diag_embed(inward), torch.diag_embed(inward)
        self.scale = inward.unsqueeze(-2).to(x.dtype)

    def _factor(self, x: Tensor) -> None:
        """Factor the point as it is: a smaller group does not reach the balanced gauge."""
        self.x = x.clone()
        G, H = split_rows(x, self.n)
        frame = factor(self.metric, G, H)
        balanced = balance(G, H)
        whole = (balanced.s > x.shape[-2] * torch.finfo(x.dtype).eps * balanced.s.narrow(-1, 0, 1)).all(-1)
        self.alive = whole.unsqueeze(-1).expand(balanced.s.shape)
        identity = torch.eye(self.h, dtype=frame.gram_g.dtype, device=x.device)
        mask = whole.unsqueeze(-1).unsqueeze(-1)
        grams = [torch.where(mask, part, identity) for part in (frame.gram_g, frame.gram_h)]
        spectrum = None
        if frame.spectrum is not None:
            basis, inverse = (torch.where(mask, part, identity) for part in frame.spectrum[:2])
            spectrum = Spectrum(basis, inverse, torch.where(whole.unsqueeze(-1), frame.spectrum.s, 1.0))
        self.frame = Frame(self.metric, grams[0], grams[1], spectrum)
        roots = [torch.linalg.cholesky_ex(weight).L for weight in (self.frame.weight_g, self.frame.weight_h)]
        inverses = [torch.linalg.solve_triangular(root, identity.expand(root.shape), upper=False) for root in roots]
        self.out = roots[0] * mask, roots[1] * mask
        self.into = inverses[0] * mask, inverses[1] * mask
        self._system = torch.linalg.inv_ex(gl.subgroup_system(self.frame, self._algebra)).inverse

    @property
    def held(self) -> int:
        """How many pairs have directions that stay where they are."""
        count = self.alive.logical_not().any(-1).sum()
        return int(count) if known(count > 0) else 0

    def refine(self) -> bool:
        """Integrate geodesics more finely: with more levels of extrapolation, then with more steps.

        Returns:
            Whether there was room for that.
        """
        if self.levels < default_order(self.x.dtype) and not self._tall:
            self.levels += 1
        elif self.steps < _MOST_STEPS:
            self.steps *= 2
        else:
            return False
        return True

    def _shape(self, z: Tensor) -> Tensor:
        return z.view(self.x.shape)

    def _gram(self, a: Tensor, c: Tensor) -> Tensor:
        dtype = self.frame.gram_g.dtype
        if self.h == 1:
            return (a * c).sum(-2, keepdim=True).to(dtype)
        return (a.mT @ c).to(dtype)

    def _sum(self, first: gl.Terms, second: gl.Terms, base: Pair | None, out: Tensor) -> None:
        """Add tall factors times small matrices into a packed tensor."""
        if self.h > 1:
            gl.assemble(first, second, base, out)
            return
        for index, (rows, terms) in enumerate(zip(split_rows(out, self.n), (first, second), strict=True)):
            tall, small = terms[0]
            if base is None:
                torch.mul(tall, small.to(out.dtype), out=rows)
            else:
                torch.addcmul(base[index], tall, small.to(out.dtype), out=rows)
            for tall, small in terms[1:]:
                rows.addcmul_(tall, small.to(out.dtype))

    def _fields(self, products: Grams) -> tuple[Fields, Tensor | None]:
        """Where a step ends, in the spans of point and coordinates, from the products of coordinates."""
        into_g, into_h = self.into
        vector = Grams(
            products.cross_g @ into_g,
            products.cross_h @ into_h,
            into_g.mT @ products.square_g @ into_g,
            into_h.mT @ products.square_h @ into_h,
        )
        if self.retraction == "geodesic" and self.h == 1:
            fields, reach = self._cone(vector)
            error: Tensor | None = torch.zeros_like(reach).masked_fill(reach <= 0, math.inf)
        else:
            fields, error = retraction_fields(
                self.retraction,
                self.metric,
                self.frame,
                vector,
                steps=self.steps,
                levels=self.levels,
                bound=self.radius,
            )
        return Fields(fields.on_g, into_g @ fields.on_a, fields.on_h, into_h @ fields.on_b), error

    def _cone(self, products: Grams) -> tuple[Fields, Tensor]:
        numbers = Grams(*(part.squeeze(-1) for part in products))
        square = self.frame.gram_g.squeeze(-1)
        frame = rescaling.Frame(square, square, square, square)
        fields, reach = rescaling.geodesic_fields(self.metric, frame, numbers)
        return Fields(*(part.unsqueeze(-1) for part in fields)), reach.squeeze(-1)

    def move(self, parameters: Mapping[str, Tensor], z: Tensor) -> Tensor | None:
        """Write ``R(z)`` into the parameters; see `Component.move`."""
        z = self._shape(z)
        point, error = torch.empty_like(self.x), None
        pair, vector = split_rows(self.x, self.n), split_rows(z, self.n)
        if self.retraction == "first_order":
            if self._diagonal:
                torch.addcmul(self.x, z, self.scale, out=point)
            else:
                self._sum([(vector[0], self.into[0])], [(vector[1], self.into[1])], pair, point)
        elif self._tall:
            error = self._move_tall(vector, point)
        else:
            sides = (pair[0], vector[0]), (pair[1], vector[1]), (vector[0], vector[0]), (vector[1], vector[1])
            products = Grams(*(self._gram(*side) for side in sides))
            fields, error = self._fields(products)
            self._tape = products, fields
            on_g, on_a, on_h, on_b = fields
            self._sum([(pair[0], on_g), (vector[0], on_a)], [(pair[1], on_h), (vector[1], on_b)], None, point)
        self.stack.scatter_(parameters, point.view(self.original.shape))
        return None if error is None else error.detach().amax()

    def _move_tall(self, vector: Pair, point: Tensor) -> Tensor | None:
        """Geodesics inside the family are integrated, and differentiated, in the tall factors."""
        with torch.enable_grad():
            leaves = tuple(part.detach().clone().requires_grad_() for part in vector)
            step = gl.combine(leaves[0], self.into[0]), gl.combine(leaves[1], self.into[1])
            end, error = geodesic(self.metric, self.frame, split_rows(self.x, self.n), step, steps=self.steps)
        self._tape = leaves, end
        torch.cat([part.detach() for part in end], -2, out=point)
        return error

    def pull(self, gradients: Mapping[str, Tensor], z: Tensor, out: Tensor) -> None:
        """Derivative of the loss in the coordinates; see `Component.pull`."""
        z, out = self._shape(z), self._shape(out)
        there = torch.empty_like(self.x)
        self.stack.gather(gradients, there.view(self.original.shape))
        (G, H), (Y, V), (a, b) = split_rows(self.x, self.n), split_rows(there, self.n), split_rows(z, self.n)
        if self._tall:
            assert self._tape is not None
            torch.cat(torch.autograd.grad(self._tape[1], self._tape[0], (Y, V)), -2, out=out)
            self.project(out)
            return
        cross_g, cross_h = self._gram(G, Y), self._gram(H, V)
        if self._tape is None:
            lift_g, lift_h = self._compensate(cross_g @ self.into[0].mT, cross_h @ self.into[1].mT)
            if self._diagonal:
                there.mul_(self.scale)
                self._sum([(G, lift_g)], [(H, lift_h)], (Y, V), out)
            else:
                self._sum([(Y, self.into[0].mT), (G, lift_g)], [(V, self.into[1].mT), (H, lift_h)], None, out)
            return
        products, fields = Grams(*self._tape[0]), Fields(*self._tape[1])
        by_fields = Fields(cross_g, self._gram(a, Y), cross_h, self._gram(b, V))
        # Computed once more, with derivatives: their intermediate results would otherwise lie beside the model's.
        leaves = Grams(*(part.requires_grad_() for part in products))
        with torch.enable_grad():
            again, _ = self._fields(leaves)
        bars = Grams(*torch.autograd.grad(again, leaves, by_fields))
        products = Grams(*(part.detach() for part in products))
        _, on_a, _, on_b = fields
        turn_g, turn_h = bars.square_g + bars.square_g.mT, bars.square_h + bars.square_h.mT
        along_g = cross_g @ on_a.mT + self.frame.gram_g @ bars.cross_g + products.cross_g @ turn_g
        along_h = cross_h @ on_b.mT + self.frame.gram_h @ bars.cross_h + products.cross_h @ turn_h
        lift_g, lift_h = self._compensate(along_g, along_h)
        self._sum(
            [(Y, on_a.mT), (a, turn_g), (G, bars.cross_g + lift_g)],
            [(V, on_b.mT), (b, turn_h), (H, bars.cross_h + lift_h)],
            None,
            out,
        )

    def _compensate(self, along_g: Tensor, along_h: Tensor) -> Pair:
        """What to add in multiples of the point so that coordinates become horizontal, from ``G^T z`` and ``H^T z``."""
        g_a, b_h = along_g @ self.into[0], (along_h @ self.into[1]).mT
        if self._diagonal:
            L = gl.compensator(self.metric, self.frame, g_a, b_h)
        else:
            weights = self._system @ gl.subgroup_right(self.frame, self._algebra, g_a, b_h)
            L = (weights.unsqueeze(-1) * self._algebra).sum(-3)
        return L @ self.out[0], -L.mT @ self.out[1]

    def project(self, z: Tensor) -> None:
        """Make coordinates horizontal; see `Component.project`."""
        z = self._shape(z)
        (G, H), (a, b) = split_rows(self.x, self.n), split_rows(z, self.n)
        z.mul_(self.alive.unsqueeze(-2).to(z.dtype))
        lift_g, lift_h = self._compensate(self._gram(G, a), self._gram(H, b))
        self._sum([(G, lift_g)], [(H, lift_h)], (a, b), z)

    def restore(self, parameters: Mapping[str, Tensor]) -> None:
        """Write the weights back; see `Component.restore`."""
        self.stack.scatter_(parameters, self.original)

    def squares(self, z: Tensor) -> dict[str, Tensor]:
        """Squared length by block and copy; see `Component.squares`."""
        lengths = self._shape(z).square().sum((-2, -1))
        parts = torch.split(lengths, [block.copies for block in self.stack.blocks])
        return {block.name: part for block, part in zip(self.stack.blocks, parts, strict=True)}


class FreeComponent:
    """Parameters outside all blocks, elementwise.

    In the adaptive metric a tangent vector ``xi`` has coordinates ``xi / w``; a step leads to ``w (1 + z)`` or, along
    the exact geodesic, to ``w exp(z)``. A parameter that is zero cannot move in that metric, and does not: its
    coordinate has derivative zero. In the Euclidean metric the coordinates are ``xi`` itself.

    Args:
        parts: The parameters and which of their elements are free.
        parameters: The model's parameters.
        dtype: Dtype of the coordinates.
        step: ``"euclidean"``, ``"first_order"`` or ``"geodesic"``.
    """

    def __init__(self, parts: Sequence[Part], parameters: Mapping[str, Tensor], dtype: torch.dtype, step: str) -> None:
        self.parts, self.step = tuple(parts), step
        self.sizes = [part.count(parameters[part.name]) for part in self.parts]
        self.size = sum(self.sizes)
        device = next(iter(parameters.values())).device
        self.base = torch.empty(self.size, dtype=dtype, device=device)
        for part, values in zip(self.parts, self._split(self.base), strict=True):
            part.read(parameters[part.name], values)

    def _split(self, flat: Tensor) -> tuple[Tensor, ...]:
        return torch.split(flat, self.sizes)

    def move(self, parameters: Mapping[str, Tensor], z: Tensor) -> None:
        """Write ``R(z)`` into the parameters; see `Component.move`."""
        for part, base, step in zip(self.parts, self._split(self.base), self._split(z), strict=True):
            tensor = parameters[part.name].detach()
            direct = part.whole(tensor) and tensor.dtype == base.dtype
            value = tensor.view(-1) if direct else torch.empty_like(base)
            if self.step == "euclidean":
                torch.add(base, step, out=value)
            elif self.step == "first_order":
                torch.addcmul(base, base, step, out=value)
            else:
                torch.mul(base, step.exp(), out=value)
            if not direct:
                part.write(tensor, value)

    def pull(self, gradients: Mapping[str, Tensor], z: Tensor, out: Tensor) -> None:
        """Derivative of the loss in the coordinates; see `Component.pull`."""
        splits = zip(self.parts, self._split(self.base), self._split(z), self._split(out), strict=True)
        for part, base, step, target in splits:
            gradient = gradients[part.name]
            if part.whole(gradient) and gradient.dtype == target.dtype and self.step == "first_order":
                torch.mul(gradient.view(-1), base, out=target)
                continue
            part.read(gradient, target)
            if self.step != "euclidean":
                target.mul_(base)
            if self.step == "geodesic":
                target.mul_(step.exp())

    def project(self, z: Tensor) -> None:
        """Fixed parameters have no coordinate; see `Component.project`."""
        if self.step != "euclidean":
            z.mul_((self.base != 0).to(z.dtype))

    def restore(self, parameters: Mapping[str, Tensor]) -> None:
        """Write the weights back; see `Component.restore`."""
        for part, base in zip(self.parts, self._split(self.base), strict=True):
            part.write(parameters[part.name].detach(), base)

    def squares(self, z: Tensor) -> dict[str, Tensor]:
        """Squared length by parameter; see `Component.squares`."""
        return {part.name: v.square().sum() for part, v in zip(self.parts, self._split(z), strict=True)}


@dataclass(frozen=True, eq=False)
class Part:
    """Some elements of one parameter.

    Attributes:
        name: Name of the parameter.
        index: Flat indices of the elements, or None for all.
        rows: Indices of rows, or None for all.
    """

    name: str
    index: Tensor | None = None
    rows: Tensor | None = None

    def whole(self, tensor: Tensor) -> bool:
        """Whether the part is a flat view of the tensor.

        Args:
            tensor: The parameter, or a tensor like it.

        Returns:
            Whether `tensor.view(-1)` is the part.
        """
        return self.index is None and self.rows is None and tensor.is_contiguous()

    def count(self, tensor: Tensor) -> int:
        """Number of elements.

        Args:
            tensor: The parameter.

        Returns:
            The number.
        """
        if self.rows is not None:
            return self.rows.numel() * (tensor.numel() // tensor.shape[0])
        return tensor.numel() if self.index is None else self.index.numel()

    def read(self, tensor: Tensor, out: Tensor) -> None:
        """Copy the elements out of a tensor.

        Args:
            tensor: The parameter, or a tensor like it.
            out: Where to put them, flat.
        """
        tensor = tensor.detach()
        if self.rows is not None:
            tensor = tensor.index_select(0, self.rows)
        flat = tensor.reshape(-1)
        assign_(out, flat if self.index is None else flat.index_select(0, self.index))

    def write(self, tensor: Tensor, values: Tensor) -> None:
        """Copy elements into a tensor.

        Args:
            tensor: The parameter; it is written in place.
            values: The elements, flat.
        """
        values = values.to(tensor.dtype)
        if self.rows is not None:
            tensor.index_copy_(0, self.rows, values.view(self.rows.numel(), *tensor.shape[1:]))
        elif self.index is None:
            assign_(tensor, values.view(tensor.shape))
        else:
            flat = tensor.reshape(-1)
            flat.index_copy_(0, self.index, values)
            if not tensor.is_contiguous():
                tensor.copy_(flat.view(tensor.shape))


class ParameterSpace:
    """The parameters of a model as one manifold around the weights it has now.

    Args:
        model: The model.
        geometry: The geometry.
        symmetries: The model's symmetries; only the geodesic geometry reads them.

    Attributes:
        size: Number of coordinates.
        notes: What a user should know: which blocks or parameters stay, and why.

    Raises:
        ValueError: If the parameters are not floating-point tensors on one device.
    """

    def __init__(self, model: nn.Module, geometry: Geometry, symmetries: Iterable[Block] = ()) -> None:
        if geometry.name == "geodesic":
            refuse_attached(model)
        self.geometry = geometry
        self.notes: list[str] = []
        self.parameters = moving_parameters(model)
        self._tables = _embedding_tables(model, self.parameters)
        devices = {str(tensor.device) for tensor in self.parameters.values()}
        if len(devices) > 1:
            raise ValueError(f"model must have its parameters on one device, not on {', '.join(sorted(devices))}.")
        self.device = next(iter(self.parameters.values())).device
        self.dtype = torch.float32
        for tensor in self.parameters.values():
            self.dtype = torch.promote_types(self.dtype, work_dtype(tensor.dtype))
        chosen = self._choose(symmetries) if geometry.name == "geodesic" and geometry.blocks != "none" else []
        self._pairs = [PairComponent(stack, geometry, self.parameters, self.dtype) for stack in stacked(chosen)]
        held = sum(pair.held for pair in self._pairs)
        if held:
            self.notes.append(
                f"{held} pairs of weights are of lower rank: they move among such pairs; those of rank 0 do not move"
            )
        self._parts = _free_parts(self.parameters, chosen)
        self._free: FreeComponent | None = None
        self.widen()

    def _make_free(self, parts: Sequence[Part]) -> FreeComponent:
        if self._free is not None:
            with torch.no_grad():
                self._free.restore(self.parameters)
        step = "euclidean" if self.geometry.name == "euclidean" else self.geometry.free
        return FreeComponent(parts, self.parameters, self.dtype, step)

    def _choose(self, symmetries: Iterable[Block]) -> list[Block]:
        """The blocks that move as blocks."""
        chosen = []
        for block in symmetries:
            if self.geometry.blocks == "attention" and block.kind not in _ATTENTION:
                continue
            if not block.verified:
                self.notes.append(f"{block.name} is no block here because it was not verified")
                continue
            frozen = [name for name in block.parameters if name not in self.parameters]
            if frozen:
                self.notes.append(f"{block.name} is no block here because {frozen[0]} is frozen")
            else:
                chosen.append(block)
        return chosen

    @property
    def components(self) -> tuple[Component, ...]:
        """The components, in the order of their coordinates."""
        assert self._free is not None
        return (*self._pairs, self._free)

    @property
    def size(self) -> int:
        """Number of coordinates."""
        return sum(component.size for component in self.components)

    def zeros(self) -> Tensor:
        """Coordinates of no step.

        Returns:
            A flat vector.
        """
        return torch.zeros(self.size, dtype=self.dtype, device=self.device)

    def gaussian(self, generator: torch.Generator) -> Tensor:
        """A standard normal vector on the horizontal space.

        Args:
            generator: Source of randomness, on the device of the space.

        Returns:
            A flat vector; in the mean its outer product with itself is the projection onto the horizontal space.
        """
        return self.project_(torch.randn(self.size, dtype=self.dtype, device=self.device, generator=generator))

    def random(self, generator: torch.Generator) -> Tensor:
        """A random horizontal direction of length one, uniform on the sphere.

        Args:
            generator: Source of randomness, on the device of the space.

        Returns:
            A flat vector.
        """
        z = self.gaussian(generator)
        return z.div_(torch.linalg.vector_norm(z, dtype=small_dtype(z)).to(z.dtype))

    def _slices(self, z: Tensor) -> tuple[Tensor, ...]:
        return torch.split(z, [component.size for component in self.components])

    def move_(self, z: Tensor) -> Tensor:
        """Write ``R(z)`` into the model.

        Args:
            z: Coordinates of a step.

        Returns:
            The largest relative error of an integrated retraction, a tensor without dimension; compare it with
            `error_bound`.
        """
        error = torch.zeros((), dtype=self.dtype, device=self.device)
        with torch.no_grad():
            for component, part in zip(self.components, self._slices(z), strict=True):
                found = component.move(self.parameters, part)
                if found is not None:
                    error = torch.maximum(error, found.nan_to_num(math.inf).to(self.dtype))
        # Autocast keeps copies of the weights it has cast.
        torch.clear_autocast_cache()
        return error

    def reach_(self, z: Tensor) -> bool:
        """Write ``R(z)`` into the model, integrated as finely as it needs. Reads a number back at every try.

        Args:
            z: Coordinates of a step.

        Returns:
            Whether the step ends on the manifold.
        """
        while known(self.move_(z) > self.error_bound):
            if not self.refine():
                return False
        return True

    @property
    def error_bound(self) -> float:
        """Largest error of a retraction that counts as none."""
        return 1e-12 if self.dtype == torch.float64 else 1e-8

    def refine(self) -> bool:
        """Integrate geodesics more finely from now on.

        Returns:
            Whether there was room for that; if not, the geodesic leaves the manifold.
        """
        finer = [pair.refine() for pair in self._pairs]  # all of them, whatever the first says
        return any(finer)

    def prepare(self, z: Tensor, radius: float) -> None:
        """Make ready for steps up to a length, and integrate their geodesics as finely as ``z`` needs.

        Args:
            z: Coordinates of a typical step.
            radius: Length that no later step exceeds, by more than rounding.
        """
        for pair in self._pairs:
            pair.radius, pair.levels, pair.steps = 1.01 * radius, 2, 1
        if self.geometry.retraction == "geodesic" and not self.geometry.metric.is_inv:
            self.reach_(z)

    def pull(self, gradients: Mapping[str, Tensor], z: Tensor, out: Tensor) -> Tensor:
        """Derivative of the loss in the coordinates at ``z``, where `move_` was last called.

        Args:
            gradients: Partial derivatives of the loss by parameter name.
            z: The coordinates.
            out: Where to put the derivative.

        Returns:
            ``out``: the gradient of ``z -> L(R(z))`` on the horizontal space.
        """
        with torch.no_grad():
            for component, part, target in zip(self.components, self._slices(z), self._slices(out), strict=True):
                component.pull(gradients, part, target)
        return out

    def project_(self, z: Tensor) -> Tensor:
        """Make coordinates horizontal, in place.

        Args:
            z: Any coordinates.

        Returns:
            The same tensor.
        """
        with torch.no_grad():
            for component, part in zip(self.components, self._slices(z), strict=True):
                component.project(part)
        return z

    def restore_(self) -> None:
        """Write the weights back, bit for bit."""
        with torch.no_grad():
            for component in self.components:
                component.restore(self.parameters)
        torch.clear_autocast_cache()

    def squares(self, z: Tensor) -> dict[str, Tensor]:
        """Squared length of coordinates by place.

        Args:
            z: The coordinates.

        Returns:
            For each block one number per copy; for each free parameter one number.
        """
        table: dict[str, Tensor] = {}
        for component, part in zip(self.components, self._slices(z), strict=True):
            table.update(component.squares(part))
        return table

    def focus(self, gradients: Mapping[str, Tensor]) -> None:
        """Leave out the rows of embedding tables that a batch does not read.

        Their derivative is zero for this batch wherever the weights are, so no ascent moves them. On fake tensors,
        whose values are unknown, nothing is left out.

        Args:
            gradients: Partial derivatives of the loss of the batch.
        """
        parts = []
        for part in self._parts:
            rows = None
            if part.index is None and part.name in self._tables:
                rows = _touched(gradients[part.name])
            parts.append(part if rows is None else Part(part.name, rows=rows))
        self._free = self._make_free(parts)

    def widen(self) -> None:
        """Take all rows of embedding tables in again."""
        self._free = self._make_free(self._parts)


def _touched(gradient: Tensor) -> Tensor | None:
    """Rows with a derivative, or None where that is not known or nearly all have one."""
    touched = gradient.ne(0).flatten(1).any(1)
    few = known(touched.sum() * 2 < touched.numel())
    return touched.nonzero().flatten() if few else None


def moving_parameters(model: nn.Module) -> dict[str, Tensor]:
    """The parameters that a perturbation moves.

    Args:
        model: The model.

    Returns:
        Floating-point parameters that require a gradient, by name; all of them if none does. Parameters that share
        their tensor appear under each name.

    Raises:
        ValueError: If the model has no such parameters.
    """
    named: dict[str, Tensor] = {
        name: tensor
        for name, tensor in model.named_parameters(remove_duplicate=False)
        if tensor.is_floating_point() and tensor.numel() > 0
    }
    if not named:
        raise ValueError("model has no floating-point parameters that could be perturbed.")
    trainable = {name: tensor for name, tensor in named.items() if tensor.requires_grad}
    return trainable or named


def _embedding_tables(model: nn.Module, parameters: Mapping[str, Tensor]) -> set[str]:
    """Names of embedding tables that nothing else reads."""
    uses: dict[int, int] = {}
    for tensor in parameters.values():
        uses[id(tensor)] = uses.get(id(tensor), 0) + 1
    return {
        f"{prefix}.weight".lstrip(".")
        for prefix, module in model.named_modules()
        if isinstance(module, nn.Embedding) and uses.get(id(module.weight)) == 1
    }


def _free_parts(parameters: Mapping[str, Tensor], blocks: Sequence[Block]) -> list[Part]:
    """What no block holds, each tensor once."""
    taken: dict[int, IntArray] = {}
    for block in blocks:
        for piece in block.pieces:
            tensor = parameters[piece.name]
            taken.setdefault(id(tensor), np.zeros(tensor.numel(), dtype=np.int64))[piece.flat()] = 1
    parts, seen = [], set()
    for name, tensor in parameters.items():
        if id(tensor) in seen:
            continue
        seen.add(id(tensor))
        held = taken.get(id(tensor))
        if held is None:
            parts.append(Part(name))
        elif not held.all():
            parts.append(Part(name, index=torch.from_numpy((held == 0).nonzero()[0]).to(tensor.device)))
    return parts
