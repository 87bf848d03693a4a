"""Counts of items on a shelf."""

from shelf.inventory import OutOfStock, Shelf
from shelf.report import report

__all__ = ["OutOfStock", "Shelf", "report"]
