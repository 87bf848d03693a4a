"""Arithmetic expressions; see README.md."""

from calc.errors import CalcError
from calc.parser import evaluate

__all__ = ["CalcError", "evaluate"]
