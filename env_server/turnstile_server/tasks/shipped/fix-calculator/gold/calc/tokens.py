"""Text to tokens: numbers as floats, everything else as one character."""

from __future__ import annotations

import re
from typing import Union

from calc.errors import CalcError

Token = Union[float, str]

_TOKEN = re.compile(r"\s*(?:([0-9]+(?:\.[0-9]*)?|\.[0-9]+)|([-+*/^()]))")


def tokenize(text: str) -> list[Token]:
    """Raises CalcError for text that is no token."""
    text = text.rstrip()
    tokens: list[Token] = []
    at = 0
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            raise CalcError(f"did not expect {text[at:].strip()[:1]!r}")
        number, sign = match.groups()
        tokens.append(float(number) if number else sign)
        at = match.end()
    return tokens
