"""Removes the symmetry: canonical weights, minimal parameters, horizontal steps, invariant attention, distances."""

from .align import align_, permutable
from .barrier import Barrier, barrier
from .distance import Distance, distance
from .horizontal import HorizontalHook, conserved, horizontal_
from .minimal import MinimalRank, from_minimal_, to_minimal_
from .relational import RelationalAttention

__all__ = [
    "Barrier",
    "Distance",
    "HorizontalHook",
    "MinimalRank",
    "RelationalAttention",
    "align_",
    "barrier",
    "conserved",
    "distance",
    "from_minimal_",
    "horizontal_",
    "permutable",
    "to_minimal_",
]
