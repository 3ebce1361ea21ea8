"""quotientsharp: measure, use and remove the parameter symmetries of transformers."""

from . import manifolds
from ._version import __version__
from .manifolds import GLQuotient, RescalingQuotient
from .sharpness import Progress, SharpnessCurve, SharpnessResult, sharpness
from .symmetry import Symmetries, find_symmetries

__all__ = [
    "GLQuotient",
    "Progress",
    "RescalingQuotient",
    "SharpnessCurve",
    "SharpnessResult",
    "Symmetries",
    "__version__",
    "find_symmetries",
    "manifolds",
    "sharpness",
]
