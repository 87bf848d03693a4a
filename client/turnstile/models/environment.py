"""An episode's ``env`` as commands take it: words ``NAME=VALUE``, one per variable. Pure."""

from __future__ import annotations

from collections.abc import Iterable


def environment(words: Iterable[str]) -> dict[str, str]:
    """The variables; of one that is named twice, the last. A value may be empty, and have ``=`` in it.

    Raises ValueError, naming the word that is none.
    """
    env: dict[str, str] = {}
    for word in words:
        name, given, value = word.partition("=")
        if not name or not given:
            raise ValueError(f"{word!r} is not NAME=VALUE")
        env[name] = value
    return env
