"""The picture's numbers: they pass through the model and reach the worst point."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional

import quotientsharp as qs

from .models import classifier


@pytest.mark.parametrize("geometry", ["geodesic", "adaptive", "euclidean"])
def test_curves_pass_through_the_model_and_reach_the_worst_point(geometry: str) -> None:
    model, batch = classifier()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    found = qs.landscape(model, batch, 0.1, points=5, geometry=geometry)
    loss = float(functional.cross_entropy(model(batch[0]), batch[1]).detach())
    assert found.loss == pytest.approx(loss)
    for curve in (found.geodesic, found.straight, found.plane[2], found.plane[:, 2]):
        assert curve[2] == pytest.approx(loss, rel=1e-9)
    assert found.geodesic[-1] == pytest.approx(loss + found.worst[0], rel=1e-9)
    assert found.plane[2] == pytest.approx(found.geodesic)
    assert found.plane[-1, 2] == pytest.approx(loss + found.worst[1], rel=1e-9)
    assert found.worst[0] >= found.worst[1] >= 0
    assert found.plane.shape == (5, 5)
    if geometry == "euclidean":
        assert found.straight == pytest.approx(found.geodesic)
    else:
        assert np.abs(found.straight - found.geodesic).max() > 1e-8
    # Both curves start in the same direction.
    middle = qs.landscape(model, batch, 1e-4, points=3, geometry=geometry, plane=False)
    assert middle.straight == pytest.approx(middle.geodesic, rel=1e-7)
    assert middle.plane.size == 0
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_progress_counts_forward_passes() -> None:
    model, batch = classifier()
    seen: list[tuple[int, int]] = []
    qs.landscape(
        model, batch, 0.1, points=3, geometry="adaptive", progress=lambda done, total: seen.append((done, total))
    )
    assert seen == [(i, 15) for i in range(1, 16)]


def test_the_plane_of_the_mixed_metric_has_no_holes() -> None:
    model, batch = classifier()
    found = qs.landscape(model, batch, 0.3, points=5, metric="mix")
    assert np.isfinite(found.plane).all()
