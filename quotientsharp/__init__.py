"""quotientsharp: measure, use and remove the parameter symmetries of transformers."""

from . import manifolds
from ._version import __version__
from .manifolds import GLQuotient, RescalingQuotient

__all__ = ["GLQuotient", "RescalingQuotient", "__version__", "manifolds"]
