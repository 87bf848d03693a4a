"""The reply to a prompt that the client rendered itself: its text as it was sampled, and no more."""

from __future__ import annotations

from collections.abc import Sequence

from turnstile.models import Int32Array, Message, ParseNote
from turnstile_server.rendering.detokenizer import Detokenizer, Piece, StopFilter, TokenBytes
from turnstile_server.rendering.protocol import Delta, ParsedReply, TextDelta
from turnstile_server.rendering.reply_parser import as_ints


class RawReplyParser:
    """A ``ReplyParser`` that reads neither thinking nor calls, and trims nothing. Special tokens are not shown, as
    other servers do (``skip_special_tokens``)."""

    def __init__(self, table: TokenBytes, stop: Sequence[str], stop_ids: frozenset[int]) -> None:
        self._detokenizer = Detokenizer(table)
        self._stop = StopFilter(stop)
        self._stop_ids = stop_ids
        self._special = table.special_texts
        self._shown: list[str] = []

    def feed(self, ids: Sequence[int] | Int32Array) -> list[Delta]:
        return self._show(self._detokenizer.feed(as_ints(ids)))

    def finish(self) -> tuple[list[Delta], ParsedReply]:
        deltas = self._show(self._detokenizer.finish())
        if held := "".join(piece.text for piece in self._stop.finish()):
            self._shown.append(held)
            deltas.append(TextDelta(held))
        padding = tuple(self._detokenizer.without_token)
        notes = (ParseNote.ID_WITHOUT_TOKEN,) if padding else ()
        message = Message("assistant", "".join(self._shown))
        return deltas, ParsedReply(message, (), self._stop.matched, notes, padding)

    def _show(self, pieces: list[Piece]) -> list[Delta]:
        seen = [piece for piece in pieces if not self._hidden(piece)]
        text = "".join(piece.text for piece in self._stop.feed(seen))
        if not text:
            return []
        self._shown.append(text)
        return [TextDelta(text)]

    def _hidden(self, piece: Piece) -> bool:
        return piece.control is not None and (piece.control in self._stop_ids or piece.text in self._special)
