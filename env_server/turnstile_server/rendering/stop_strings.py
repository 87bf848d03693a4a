"""The caller's stop strings: they cut what is shown, never what was sampled.

What must hold: the cut depends on the text alone, not on how it arrives. Text that may begin a stop string is
held back until that is decided; what was passed is never taken back.
"""

from __future__ import annotations

from collections.abc import Sequence

from turnstile_server.rendering.detokenizer import Piece


def held_suffix(text: str, needles: Sequence[str]) -> int:
    """Length of the longest suffix of ``text`` that is a proper beginning of a needle."""
    longest = min(len(text), max((len(needle) for needle in needles), default=0) - 1)
    for length in range(longest, 0, -1):
        suffix = text[-length:]
        if any(len(needle) > length and needle.startswith(suffix) for needle in needles):
            return length
    return 0


class StopFilter:
    """Passes pieces until a stop string ends; of several, the one that ends first (then the longest) counts."""

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
