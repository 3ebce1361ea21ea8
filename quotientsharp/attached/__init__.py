"""Model weights as manifold parameters, in place, and back."""

from .attach import attach, attached, detach, plain_values
from .stacks import Stacks

__all__ = ["Stacks", "attach", "attached", "detach", "plain_values"]
