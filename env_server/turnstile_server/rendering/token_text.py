"""Tokens as people see them: the exact bytes of each, its text, and where a text lies in a run of tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from turnstile.models import Int32Array
from turnstile_server.errors import TurnstileError

if TYPE_CHECKING:
    from turnstile_server.rendering.detokenizer import TokenBytes  # it imports transformers


class NoTokenizer(TurnstileError):
    """A text is looked for among tokens whose tokenizer is not known."""

    status = 409
    type = "no_tokenizer"


class TokenText:
    """Shows the tokens of one vocabulary, or of one that is not known. Immutable."""

    def __init__(self, table: TokenBytes | None) -> None:
        self._table = table

    @property
    def known(self) -> bool:
        """False: there is no tokenizer, and no token has bytes."""
        return self._table is not None

    def bytes_of(self, ids: Int32Array) -> list[bytes]:
        """One entry for each id. Joined and decoded (U+FFFD for what is no character) they are the text that the
        detokenizer gives. Empty for an id that the tokenizer does not have."""
        table = self._table
        return [b""] * len(ids) if table is None else [table[index] for index in ids.tolist()]

    def special(self, ids: Int32Array) -> list[bool]:
        """For each id: True if it is an added token that is more than whitespace."""
        control = {} if self._table is None else self._table.control
        return [index in control for index in ids.tolist()]

    def find(self, ids: Int32Array, text: str, after: int = -1) -> Iterator[tuple[int, int]]:
        """The runs ``[start, end)`` of tokens that hold the text, in order; one for each token behind ``after`` in
        which an occurrence begins. ``text`` is not empty. Raises NoTokenizer."""
        if self._table is None:
            raise NoTokenizer(
                "without the model's tokenizer no text is found: name its folder (--model DIR), or find by `id`"
            )
        pieces = self.bytes_of(ids)
        bounds = np.cumsum([0, *map(len, pieces)], dtype=np.int64)
        data, wanted = b"".join(pieces), text.encode()
        at = data.find(wanted, int(bounds[min(after + 1, len(pieces))]))
        while at >= 0:
            first, last = np.searchsorted(bounds, [at, at + len(wanted) - 1], side="right").tolist()
            yield first - 1, last
            at = data.find(wanted, int(bounds[first]))


def shown(piece: bytes) -> str:
    """A token's bytes as text: U+FFFD for what is only a part of a character."""
    return piece.decode(errors="replace")
