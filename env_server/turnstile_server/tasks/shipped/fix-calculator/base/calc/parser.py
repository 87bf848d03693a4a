"""Expressions by recursive descent; the grammar is in README.md."""

from __future__ import annotations

from calc.errors import CalcError
from calc.tokens import tokenize


def evaluate(text: str) -> float:
    """The value of an expression. Raises CalcError."""
    parser = _Parser(tokenize(text))
    value = parser.sum()
    parser.end()
    return value


class _Parser:
    def __init__(self, tokens: list[float | str]) -> None:
        self._tokens = tokens
        self._at = 0

    def _take(self, *wanted: str) -> str | None:
        if self._at < len(self._tokens) and self._tokens[self._at] in wanted:
            self._at += 1
            return str(self._tokens[self._at - 1])
        return None

    def sum(self) -> float:
        value = self.product()
        sign = self._take("+", "-")
        if sign is not None:
            rest = self.sum()
            value = value + rest if sign == "+" else value - rest
        return value

    def product(self) -> float:
        value = self.signed()
        while True:
            sign = self._take("*", "/")
            if sign is None:
                return value
            factor = self.signed()
            value = value * factor if sign == "*" else value / factor

    def signed(self) -> float:
        sign = self._take("-")
        value = self.power()
        return -value if sign == "-" else value

    def power(self) -> float:
        value = self.atom()
        while self._take("^"):
            value = value ** self.atom()
        return value

    def atom(self) -> float:
        if self._take("("):
            value = self.sum()
            self._take(")")
            return value
        token = self._tokens[self._at]
        self._at += 1
        return float(token)

    def end(self) -> None:
        """Raises CalcError where something is left."""
        if self._at < len(self._tokens):
            raise CalcError(f"did not expect {self._tokens[self._at]!r}")
