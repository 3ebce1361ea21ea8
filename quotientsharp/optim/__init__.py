"""Optimizers on quotients."""

from .adam import RiemannianAdam
from .sam import Ascent, GeodesicSAM
from .sgd import RiemannianSGD

__all__ = ["Ascent", "GeodesicSAM", "RiemannianAdam", "RiemannianSGD"]
