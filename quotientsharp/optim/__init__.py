"""Optimizers on quotients, and one that conserves energy."""

from .adam import RiemannianAdam
from .ecd import ECD
from .sam import Ascent, GeodesicSAM
from .sgd import RiemannianSGD

__all__ = ["ECD", "Ascent", "GeodesicSAM", "RiemannianAdam", "RiemannianSGD"]
