"""quotientsharp: measure, use and remove the parameter symmetries of transformers."""

from . import manifolds
from ._version import __version__
from .curvature import HessianResult, hessian, relative_flatness
from .landscape import Landscape, landscape
from .manifolds import GLQuotient, RescalingQuotient
from .sharpness import AverageResult, Progress, SharpnessCurve, SharpnessResult, average_sharpness, sharpness
from .symmetry import Symmetries, find_symmetries

__all__ = [
    "AverageResult",
    "GLQuotient",
    "HessianResult",
    "Landscape",
    "Progress",
    "RescalingQuotient",
    "SharpnessCurve",
    "SharpnessResult",
    "Symmetries",
    "__version__",
    "average_sharpness",
    "find_symmetries",
    "hessian",
    "landscape",
    "manifolds",
    "relative_flatness",
    "sharpness",
]
