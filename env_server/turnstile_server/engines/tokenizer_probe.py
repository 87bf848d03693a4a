"""Compares an engine's tokenizer with ours: texts, and the ids that ours gives them.

A server that renders with one tokenizer and samples with another records nonsense without an error. So an engine
compares at start and refuses to serve if they differ. This module never tokenizes by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from turnstile_server.errors import StartupError

PLAIN_TEXTS = (
    "The quick brown fox jumps over the lazy dog. 0123456789",
    "def f(x):\n    return {'a': [x ** 2, -1.5e-7], \"b\": None}  # tab:\there\n\n",
    "  leading and trailing spaces  ",
    "Grüße, Zürich! naïve café — “quotes” … 東京 Ελλάδα العربية हिन्दी 🙂👩‍👩‍👧",
    '{"name": "search", "arguments": {"query": "a\\nb"}}',
)


@dataclass(frozen=True, slots=True)
class TokenizerProbe:
    """``ids[i]`` are the ids of ``texts[i]``, without a beginning-of-text token, control tokens recognised.

    ``vocab_size``: ids at or above it are not our tokenizer's (added tokens included).
    """

    texts: tuple[str, ...]
    ids: tuple[tuple[int, ...], ...]
    vocab_size: int

    def check_fits(self, vocab_size: int) -> None:
        """Raises StartupError where our tokenizer has ids that a model of ``vocab_size`` has not."""
        largest = max((token for ids in self.ids for token in ids), default=0)
        if largest >= vocab_size:
            raise StartupError(
                f"Our tokenizer has id {largest}, the engine's model only {vocab_size} ids: "
                "--model and the engine's model are different."
            )

    def check_same(self, theirs: Sequence[Sequence[int]]) -> None:
        """``theirs``: the engine's ids of ``texts``, in their order. Raises StartupError where they differ."""
        index = self._first_difference(theirs)
        if index is not None:
            their_ids = theirs[index] if index < len(theirs) else None
            raise StartupError(
                f"The engine's tokenizer is not ours: for the text {self.texts[index]!r} we have "
                f"{list(self.ids[index])[:20]}, it has {their_ids[:20] if their_ids else their_ids}. "
                "Point --model at the engine's model folder."
            )

    def _first_difference(self, theirs: Sequence[Sequence[int]]) -> int | None:
        """Index of the first text whose ids differ from ``theirs`` (same order as ``texts``), None if none."""
        for index, ours in enumerate(self.ids):
            if index >= len(theirs) or list(ours) != list(theirs[index]):
                return index
        return None


def make_probe(
    encode: Callable[[str], Sequence[int]], added_tokens: Sequence[str], vocab_size: int
) -> TokenizerProbe:
    """Encodes plain texts, every added token alone, and all of them between words, with ``encode``.

    ``encode(text)`` must recognise control tokens in the text and add none of its own (Hugging Face:
    ``tokenizer.encode(text, add_special_tokens=False)``).
    """
    tokens = sorted(added_tokens)
    texts = (*PLAIN_TEXTS, *tokens)
    if tokens:
        texts = (*texts, "a" + " b\n".join(tokens) + "c")
    return TokenizerProbe(texts, tuple(tuple(int(i) for i in encode(text)) for text in texts), vocab_size)
