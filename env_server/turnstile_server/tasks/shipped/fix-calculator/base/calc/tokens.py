"""Text to tokens: numbers as floats, everything else as one character."""

from __future__ import annotations

import re
from typing import Union

Token = Union[float, str]

_TOKEN = re.compile(r"\s*(?:([0-9]+(?:\.[0-9]+)?)|([-+*/^()]))")


def tokenize(text: str) -> list[Token]:
    tokens: list[Token] = []
    for number, sign in _TOKEN.findall(text):
        tokens.append(float(number) if number else sign)
    return tokens
