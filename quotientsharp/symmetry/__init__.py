"""Finds the parameter symmetries of a model and checks them numerically."""

from .blocks import Block, Piece, Stack, stacked
from .find import Symmetries, find_symmetries
from .groups import Group

__all__ = ["Block", "Group", "Piece", "Stack", "Symmetries", "find_symmetries", "stacked"]
