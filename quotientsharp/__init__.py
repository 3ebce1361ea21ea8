"""quotientsharp: measure, use and remove the parameter symmetries of transformers."""

from . import breaking, manifolds, optim, reduction
from ._version import __version__
from .attached import attach, attached, detach
from .curvature import HessianResult, hessian, relative_flatness
from .landscape import Landscape, landscape
from .manifolds import GLQuotient, RescalingQuotient
from .problem import pymanopt_problem
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
    "attach",
    "attached",
    "average_sharpness",
    "breaking",
    "detach",
    "find_symmetries",
    "hessian",
    "landscape",
    "manifolds",
    "optim",
    "pymanopt_problem",
    "reduction",
    "relative_flatness",
    "sharpness",
]
