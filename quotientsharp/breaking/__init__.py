"""Breaks the symmetries of attention by untrained biases, and reads off what the heads made of them."""

from .biases import KEY, QUERY, VALUE, Bias, SymmetryBreaking, break_symmetry, restore
from .interpret import Amplification, amplification

__all__ = [
    "KEY",
    "QUERY",
    "VALUE",
    "Amplification",
    "Bias",
    "SymmetryBreaking",
    "amplification",
    "break_symmetry",
    "restore",
]
