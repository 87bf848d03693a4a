"""Ids to text as they come, exact to the byte; and the caller's stop strings, which end the view of that text.

A token of a byte-level vocabulary is a run of bytes, not text: a character may be split over several tokens.
``Detokenizer`` holds an incomplete UTF-8 sequence back until it is decided. Bytes that can never become a
character give U+FFFD, as the tokenizer's own decode does. Ids without a token (padding of the model's
vocabulary) are empty.

``StopFilter`` cuts what is shown, never what was sampled. The cut depends on the text alone, not on how it
arrives. Text that may begin a stop string is held back until that is decided; what was passed is never taken back.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from turnstile_server.errors import StartupError
from turnstile_server.rendering.vocabulary import Vocabulary

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def byte_alphabet() -> dict[str, int]:
    """The byte-level BPE alphabet (GPT-2's `bytes_to_unicode`): printable character -> byte."""
    kept = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    table = {chr(value): value for value in kept}
    shifted = (value for value in range(256) if value not in set(kept))
    return table | {chr(256 + offset): value for offset, value in enumerate(shifted)}


@dataclass(frozen=True, slots=True)
class Piece:
    """Decoded text. ``control``: the id of the control token that it is the text of, None for ordinary text."""

    text: str
    control: int | None = None


class TokenBytes:
    """The bytes of every id of a vocabulary. Immutable; shared by all parsers."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.control = {token.id: token for token in vocabulary.control}
        self.special_texts = frozenset(token.text for token in vocabulary.control if token.special)
        tokenizer = vocabulary.tokenizer
        convert = _converter(json.loads(tokenizer.to_str())["decoder"])
        added = tokenizer.get_added_tokens_decoder()
        self.bytes: list[bytes] = [b""] * (
            max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        )
        for token, index in tokenizer.get_vocab(with_added_tokens=True).items():
            self.bytes[index] = token.encode() if index in added else convert(token)

    def __getitem__(self, index: int) -> bytes:
        return self.bytes[index] if 0 <= index < len(self.bytes) else b""


def _converter(decoder: dict[str, Any] | None) -> Callable[[str], bytes]:
    parts = decoder.get("decoders", [decoder]) if decoder else []
    kinds = {part["type"] for part in parts}
    if "ByteLevel" in kinds:
        alphabet = byte_alphabet()

        def byte_level(token: str) -> bytes:
            if all(character in alphabet for character in token):
                return bytes(alphabet[character] for character in token)
            return token.encode()

        return byte_level
    if kinds & {"Metaspace", "ByteFallback", "Replace"}:

        def pieces(token: str) -> bytes:
            byte = _BYTE_TOKEN.fullmatch(token)
            return bytes([int(byte.group(1), 16)]) if byte else token.replace("▁", " ").encode()

        return pieces
    raise StartupError(f"the tokenizer's decoder ({', '.join(sorted(kinds)) or 'none'}) is not supported")


class Detokenizer:
    """Ids to pieces of text, incrementally. ``finish`` releases an incomplete character as U+FFFD."""

    def __init__(self, table: TokenBytes) -> None:
        self._table = table
        self._control = table.control
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self.without_token: list[int] = []
        """The positions, among all ids fed, of those that no token has."""
        self._fed = 0

    def feed(self, ids: Iterable[int]) -> list[Piece]:
        """Text between two control tokens is one piece, however many ids it has."""
        pieces: list[Piece] = []
        run: list[bytes] = []
        known, control_of = self._table.bytes, self._control.get
        count = len(known)
        for position, index in enumerate(ids, self._fed):
            self._fed = position + 1
            control = control_of(index)
            if control is None:
                text_of = known[index] if 0 <= index < count else b""  # as the table does, without a call each
                if not text_of:
                    self.without_token.append(position)
                run.append(text_of)
                continue
            text = self._utf8.decode(b"".join(run), final=True)
            self._utf8.reset()
            run = []
            if text:
                pieces.append(Piece(text))
            pieces.append(Piece(control.text, index))
        text = self._utf8.decode(b"".join(run))
        if text:
            pieces.append(Piece(text))
        return pieces

    def finish(self) -> list[Piece]:
        text = self._utf8.decode(b"", final=True)
        return [Piece(text)] if text else []


def held_suffix(text: str, needles: Sequence[str]) -> int:
    """Length of the longest suffix of ``text`` that is a proper beginning of a needle."""
    longest = min(len(text), max((len(needle) for needle in needles), default=0) - 1)
    for length in range(longest, 0, -1):
        suffix = text[-length:]
        if any(len(needle) > length and needle.startswith(suffix) for needle in needles):
            return length
    return 0


class StopFilter:
    """Passes pieces of text until a stop string is complete. Of several, the one that ends first counts, then the
    longest. ``matched``: that stop string, None before."""

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = [needle for needle in stop if needle]
        self._held: list[Piece] = []
        self.matched: str | None = None

    def feed(self, pieces: list[Piece]) -> list[Piece]:
        if self.matched is not None:
            return []
        if not self._stop:
            return pieces
        self._held += pieces
        text = "".join(piece.text for piece in self._held)
        ends = [(text.find(needle) + len(needle), -len(needle), needle) for needle in self._stop if needle in text]
        if ends:
            end, length, self.matched = min(ends)
            passed = self._take(end + length)
            self._held = []
            return passed
        return self._take(len(text) - held_suffix(text, self._stop))

    def finish(self) -> list[Piece]:
        held, self._held = self._held, []
        return held

    def _take(self, length: int) -> list[Piece]:
        """Releases the first ``length`` characters; a control token only whole."""
        taken: list[Piece] = []
        while self._held:
            piece = self._held[0]
            if len(piece.text) <= length:
                taken.append(self._held.pop(0))
                length -= len(piece.text)
                continue
            if length > 0 and piece.control is None:
                taken.append(Piece(piece.text[:length]))
                self._held[0] = Piece(piece.text[length:])
            break
        return taken
