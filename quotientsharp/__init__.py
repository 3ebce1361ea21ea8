"""quotientsharp: measure, use and remove the parameter symmetries of transformers."""

from . import manifolds
from ._version import __version__
from .manifolds import GLQuotient, RescalingQuotient
from .symmetry import Symmetries, find_symmetries

__all__ = ["GLQuotient", "RescalingQuotient", "Symmetries", "__version__", "find_symmetries", "manifolds"]
