"""The GL(h) quotient and the rescaling quotient: geometry alone, tensors in, tensors out.

`GLQuotient` and `RescalingQuotient` are Geoopt manifolds; `PymanoptGLQuotient` and `PymanoptRescalingQuotient` are the
same
geometry for Pymanopt. The pure functions underneath are in the modules ``gl``, ``geodesics`` and ``rescaling``.
"""

from .adapters import PymanoptGLQuotient, PymanoptRescalingQuotient
from .metric import Metric
from .points import FactoredPoint
from .quotients import GLQuotient, RescalingQuotient, SubgroupQuotient

__all__ = [
    "FactoredPoint",
    "GLQuotient",
    "Metric",
    "PymanoptGLQuotient",
    "PymanoptRescalingQuotient",
    "RescalingQuotient",
    "SubgroupQuotient",
]
