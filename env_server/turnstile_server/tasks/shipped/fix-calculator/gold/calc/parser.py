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
        while sign := self._take("+", "-"):
            rest = self.product()
            value = value + rest if sign == "+" else value - rest
        return value

    def product(self) -> float:
        value = self.signed()
        while sign := self._take("*", "/"):
            factor = self.signed()
            if sign == "/" and factor == 0:
                raise CalcError("division by zero")
            value = value * factor if sign == "*" else value / factor
        return value

    def signed(self) -> float:
        sign = self._take("-", "+")
        if sign is None:
            return self.power()
        value = self.signed()
        return -value if sign == "-" else value

    def power(self) -> float:
        value = self.atom()
        if not self._take("^"):
            return value
        exponent = self.signed()
        try:
            result = value**exponent
        except (ZeroDivisionError, OverflowError) as error:
            raise CalcError(str(error)) from None
        if isinstance(result, complex):
            raise CalcError("a root of a negative number")
        return result

    def atom(self) -> float:
        if self._take("("):
            value = self.sum()
            if not self._take(")"):
                raise CalcError("a parenthesis is not closed")
            return value
        if self._at == len(self._tokens):
            raise CalcError("the expression is not complete")
        token = self._tokens[self._at]
        if not isinstance(token, float):
            raise CalcError(f"did not expect {token!r}")
        self._at += 1
        return token

    def end(self) -> None:
        """Raises CalcError where something is left."""
        if self._at < len(self._tokens):
            raise CalcError(f"did not expect {self._tokens[self._at]!r}")
