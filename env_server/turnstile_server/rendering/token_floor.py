"""A lower bound on the number of tokens of a text, without the interpreter lock and without encoding the text.

Encoding a text of megabytes takes seconds and a hundred bytes of memory per token. Most of such texts cannot fit
the model's context, and this module says so first. It never says so of a text that would fit.

Why that holds. However a tokenizer merges, its tokens are strings of its vocabulary, and one after the other they
spell the (normalised) text. So it has at least as many tokens as the *shortest* way to spell the text with strings
of the vocabulary. A Unigram model whose strings all cost the same finds that shortest way, in native code that
releases the interpreter lock. The text is spelled in pieces, until there are enough tokens. A token that lies
across a cut is in no piece, and what it leaves of itself in the two pieces may cost up to its length there: each
cut takes the length of the longest token off the bound.

This needs a tokenizer whose tokens spell all of the text. ``TokenFloor.of`` gives None for every other one: a
normaliser or a pre-tokenizer that drops text, control tokens that swallow whitespace, characters that become no
token, models that are not BPE.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers.normalizers import Normalizer

from turnstile_server.rendering.detokenizer import byte_alphabet
from turnstile_server.rendering.repeats import PERIOD_CHARS, repeats

PIECE_CHARS = 1 << 16
"""Characters of one piece: long enough for the cuts to cost little, short enough to stop soon."""

_LEAST_REPEAT = 1 << 11
"""Characters of a repeat that is left out. A long one takes twenty times as long to spell as prose: the vocabulary
has a string of every length for it."""
_SPELLED_CHARS = 85 * PERIOD_CHARS
"""Characters of a repeat that are spelled in the place of those left out: periods, so that each such part is like
the others."""

_COST = 1000.0
"""The cost of a string of the vocabulary. The library adds 10 for a character that is in no string."""
_UNKNOWN_COST = _COST + 10.0


def _joins(character: str) -> bool:
    """True if a normal form may join the character with the one before it."""
    return unicodedata.category(character)[0] == "M" or "\u1160" <= character <= "\u11ff"


_MARKS = "".join(filter(_joins, map(chr, range(0x300, 0x20000))))
_STARTS = re.compile(f"[^{_MARKS}]")
"""A character that no normal form joins with the one before it, so that the text may be cut there."""
_KEEPING = ("Isolated", "Contiguous", "MergedWithPrevious", "MergedWithNext")
"""Behaviours of a ``Split`` that keep its matches; ``Removed`` drops them."""


class TokenFloor:
    """Bounds the token count of texts from below. Immutable, safe to use from several threads."""

    def __init__(self, spelling: Tokenizer, longest: int, unsafe: re.Pattern[str]) -> None:
        """``spelling`` encodes a piece into the fewest strings; ``longest``: characters of the longest string;
        ``unsafe``: what must not be in a piece that counts."""
        self._spelling = spelling
        self._longest = longest
        self._unsafe = unsafe

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> TokenFloor | None:
        """The bound for a tokenizer; None where its tokens need not spell the whole text."""
        spec = json.loads(tokenizer.to_str())
        if not spells_its_text(spec):
            return None
        model, parts = spec["model"], _parts(spec["pre_tokenizer"], "pretokenizers")
        normalizers = _parts(spec["normalizer"], "normalizers")
        bytewise = any(part["type"] == "ByteLevel" for part in parts)
        opening = _opening(normalizers, parts)
        kept = [part for part in normalizers if part["type"] != "Prepend"]
        if any(part["type"] == "Metaspace" for part in parts):
            kept.append({"type": "Replace", "pattern": {"String": " "}, "content": "▁"})
        normalizer = _normalizer(kept)
        written = {byte: character for character, byte in byte_alphabet().items()}
        strings = set(model["vocab"])
        for token in spec["added_tokens"]:
            for text in {token["content"], _normalised(normalizer, token["content"])}:
                strings.add("".join(written[byte] for byte in text.encode()) if bytewise else text)
        # A token may begin with the space that the tokenizer puts before a text; the text has the rest of it.
        strings |= {text[1:] for text in strings if opening and text[0] == opening and len(text) > 1}
        strings.discard("")
        unknown = "<unknown>"
        scored = [(text, -_COST) for text in sorted(strings | {unknown})]
        spelling = Tokenizer(models.Unigram(scored, sorted(strings | {unknown}).index(unknown), False))
        if bytewise:
            spelling.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        if normalizer is not None:
            spelling.normalizer = normalizer
        joins = any(part["type"] == "NFC" for part in normalizers)
        ends = {token["content"][-1] for token in spec["added_tokens"] if joins}
        return cls(spelling, max(map(len, strings)), _joined_marks(ends))

    def over(
        self,
        text: str,
        most: int,
        restored: Callable[[str], str] = str,
        checkpoint: Callable[[], None] = lambda: None,
    ) -> int | None:
        """None where ``text`` may have ``most`` tokens or fewer. A text that surely has more gives an estimate of
        how many; it reads no more of the text than it needs to be sure. ``restored`` gives a stretch of the text
        as it will be encoded: one after the other, because on the whole text that keeps the interpreter lock.
        ``checkpoint`` is called between them: what it raises ends the work.
        """
        at_least, end = 0.0, 0
        for stretch in _pieces(text):
            checkpoint()
            for whole in _pieces(restored(stretch)):
                piece, left_out = self._without_repeats(whole)
                at_least += left_out
                if not self._unsafe.search(piece):
                    at_least += self._spelled(piece)
                at_least -= self._longest  # a token may lie across the cut
                if at_least > most:
                    read = end + len(stretch)
                    return max(int(at_least * len(text) / read), most + 1)
            end += len(stretch)
        return None

    def _spelled(self, piece: str) -> float:
        """The fewest strings that spell ``piece``."""
        spelled = self._spelling.encode_batch_fast([piece], add_special_tokens=False)[0]
        return len(spelled) * _COST / _UNKNOWN_COST

    def _without_repeats(self, piece: str) -> tuple[str, float]:
        """``piece`` without the inside of its long repeats, and the tokens that these have at least; less than
        none where that is little, because a token may lie across each place where one was cut out."""
        parts: list[str] = []
        position, tokens = 0, 0.0
        for repeat in repeats(piece, _LEAST_REPEAT):
            size = (repeat.end - repeat.start - _LEAST_REPEAT // 2) // PERIOD_CHARS * PERIOD_CHARS
            cut = repeat.start + _LEAST_REPEAT // 4
            parts.append(piece[position:cut])
            position = cut + size
            tokens += self._repeated(piece[cut : cut + _SPELLED_CHARS], size) - 2 * self._longest - 2
        return "".join((*parts, piece[position:])), tokens

    def _repeated(self, part: str, size: int) -> float:
        """The tokens that ``size`` characters of a repeat have at least; ``part``: some of them. Each part of its
        length has as many as it, less those of a token across its end."""
        unit = part[:PERIOD_CHARS]
        if not unit.isascii() and not all(map(_STARTS.match, unit)):
            return 0.0  # normalised, it may have fewer characters
        return max(size / self._longest, size // len(part) * (self._spelled(part) - self._longest))


def _joined_marks(ends: Iterable[str]) -> re.Pattern[str]:
    """Matches a combining mark behind a character of ``ends``, the last ones of the control tokens. A tokenizer
    takes such a token out before it normalises, so the mark is not joined with it; here it would be."""
    last = "".join(sorted(ends))
    if not last:
        return re.compile("(?!)")
    return re.compile(f"[{re.escape(last)}][{_MARKS}]")


def _pieces(text: str) -> Iterator[str]:
    start = 0
    while start < len(text):
        found = _STARTS.search(text, start + PIECE_CHARS)
        end = len(text) if found is None else found.start()
        yield text[start:end]
        start = end


def _parts(spec: dict[str, Any] | None, name: str) -> list[dict[str, Any]]:
    if spec is None:
        return []
    return [part for one in spec[name] for part in _parts(one, name)] if spec["type"] == "Sequence" else [spec]


def spells_its_text(spec: dict[str, Any]) -> bool:
    """True if the tokens of every text, joined, are the normalised text. ``spec``: the tokenizer as JSON."""
    model, added = spec["model"], spec["added_tokens"]
    parts = _parts(spec["pre_tokenizer"], "pretokenizers")
    normalizers = _parts(spec["normalizer"], "normalizers")
    bytewise = any(part["type"] == "ByteLevel" for part in parts)
    if model["type"] != "BPE" or any(
        model.get(key) for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix")
    ):
        return False
    if any(token["lstrip"] or token["rstrip"] for token in added):
        return False
    if bytewise:
        whole = byte_alphabet().keys() <= model["vocab"].keys()
    else:
        whole = model["byte_fallback"] and all(f"<0x{byte:02X}>" in model["vocab"] for byte in range(256))
    return (
        whole
        and all(_keeps(part, bytewise=bytewise) for part in parts)
        and all(
            part["type"] in ("NFC", "Prepend")
            or (part["type"] == "Replace" and len(part["pattern"].get("String", "")) == 1 == len(part["content"]))
            for part in normalizers
        )
    )


def _keeps(part: dict[str, Any], *, bytewise: bool) -> bool:
    """True if a pre-tokenizer drops no text."""
    match part["type"]:
        case "Split":
            return part["behavior"] in _KEEPING
        case "ByteLevel" | "Digits":
            return True
        case "Metaspace":
            return not bytewise and part["replacement"] == "▁"
    return False


def _opening(normalizers: Iterable[dict[str, Any]], parts: Iterable[dict[str, Any]]) -> str | None:
    """The character that the tokenizer may put before a text; None where it puts none."""
    if any(part["type"] == "ByteLevel" and part["add_prefix_space"] for part in parts):
        return "Ġ"
    if any(part["type"] == "Prepend" for part in normalizers) or any(
        part["type"] == "Metaspace" and part.get("prepend_scheme") != "never" for part in parts
    ):
        return "▁"
    return None


def _normalizer(parts: list[dict[str, Any]]) -> Normalizer | None:
    """The normalizer of this description. The library reads one only as part of a tokenizer."""
    if not parts:
        return None
    spec = json.loads(Tokenizer(models.BPE()).to_str())
    spec["normalizer"] = {"type": "Sequence", "normalizers": parts}
    normalizer: Normalizer = Tokenizer.from_str(json.dumps(spec)).normalizer
    return normalizer


def _normalised(normalizer: Normalizer | None, text: str) -> str:
    return text if normalizer is None else str(normalizer.normalize_str(text))
