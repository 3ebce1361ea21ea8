"""A few lines each for the trainers people use. Nothing here imports them: they are handed in."""

from .huggingface import use_geodesic_sam
from .lightning import geodesic_sam_optimizer

__all__ = ["geodesic_sam_optimizer", "use_geodesic_sam"]
