"""Text to ids. Text in content never becomes a control token (invariant 7).

How it holds. Before a template runs, each literal occurrence of a control token in the caller's strings is
replaced by one private-use character that occurs nowhere in the input: its *stand-in*. In the rendered text,
every control-token literal was then written by the template, and every stand-in by a caller.
``TextEncoder.encode`` cuts the text at the literals. It puts the callers' literals back into the pieces and
encodes each such piece with a second tokenizer that has no control tokens. Text without stand-ins goes through
the stock tokenizer in one call, so clean conversations encode exactly as stock.

A caller's text can also complete a control token together with the template's own characters (``<`` + ``think``
+ ``>``). A string that could do so (``normalise.prepare``) is fenced: rendered a second time with stand-ins around
it. A literal that crosses a fence is not a control token.

Characters of a caller are never dropped or changed, with one exception: lone surrogates, which no tokenizer
takes, become U+FFFD.

What must also hold, because an agent may send megabytes: no step on a whole text keeps the interpreter lock for
long. Tokenizers encode in native code without the lock (``RepeatEncoder``), searches go by slices, and a text that
surely has too many tokens (``most``) is not encoded at all.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np
from anyio import NoEventLoopError, from_thread
from tokenizers import AddedToken, Tokenizer

from turnstile.models import Int32Array
from turnstile_server.errors import InvalidRequest
from turnstile_server.rendering.fast_bpe import FastBpe
from turnstile_server.rendering.protocol import TooManyTokens
from turnstile_server.rendering.repeat_encoder import RepeatEncoder
from turnstile_server.rendering.token_floor import TokenFloor
from turnstile_server.rendering.vocabulary import ControlToken, Vocabulary

SLICE_CHARS = 1 << 16
"""Characters that one search looks at: it keeps the interpreter lock for a millisecond, or for seven where each
character could begin a control token."""

SURE_BYTES = 4
"""Bytes per token that is of use, above which a text is checked before it is encoded. Shorter texts may be too
long too, but they are encoded in a time that the context bounds."""

FAR_TOO_MANY = 2
"""Times the ids that are of use, above which ids are only counted."""

_PRIVATE = (range(0x100000, 0x10FFFE), range(0xF0000, 0xFFFFE))
_SURROGATE = re.compile("[\ud800-\udfff]")
_PRIVATE_IN_PYTHON = re.compile(r"\\U00(?:0f|10)[0-9a-f]{4}")
_PRIVATE_ESCAPE = re.compile(r"\\udb[89a-f][0-9a-f]\\ud[c-f][0-9a-f]{2}")
_ESCAPE_CHARS = len(r"\udbff\udfff")


@dataclass(frozen=True, slots=True)
class Shield:
    """The stand-ins of one rendering: each character, and the literal that it stands for ("" for a fence)."""

    stand_ins: dict[str, str] = field(default_factory=dict)

    def unescape(self, text: str) -> str:
        """``text`` with stand-ins that a template escaped (``tojson(ensure_ascii=True)``, or Python's ``repr``) as
        characters again."""
        for character in self.stand_ins:
            for escape in (json.dumps(character)[1:-1], repr(character)[1:-1]):
                text = text.replace(escape, character)
        return text

    def restore(self, text: str) -> str:
        """``text`` with the literals in the place of their stand-ins."""
        for character, literal in self.stand_ins.items():
            text = text.replace(character, literal)
        return text


NO_SHIELD = Shield()


@dataclass(frozen=True, slots=True)
class EncodedText:
    """Ids, and the number of UTF-8 bytes that went through the tokenizer to make them."""

    ids: list[int]
    tokenized_bytes: int


class ControlText:
    """Finds control-token literals in strings. Immutable; shared by all renderings."""

    def __init__(self, control: Iterable[ControlToken]) -> None:
        tokens = sorted(control, key=lambda token: -len(token.text))
        self.by_text = {token.text: token for token in tokens}
        self._first = tuple({token.text[0] for token in tokens})
        self._search = re.compile("|".join(re.escape(token.text) for token in tokens) or r"(?!)")
        self._cut = re.compile(
            "|".join(
                (r"\s*" if token.lstrip else "")
                + "(?:"
                + re.escape(token.text)
                + ")"
                + (r"\s*" if token.rstrip else "")
                for token in tokens
            )
            or r"(?!)"
        )
        self._swallows = any(token.lstrip or token.rstrip for token in tokens)
        self._heads = frozenset(text[:end] for text in self.by_text for end in range(1, len(text)))
        self._tails = frozenset(text[start:] for text in self.by_text for start in range(1, len(text)))
        self._longest = max((len(text) for text in self.by_text), default=0)

    def found(self, text: str) -> set[str]:
        """The distinct control-token literals in ``text``."""
        if not any(character in text for character in self._first):
            return set()
        return {text[start:end] for start, end in _spans(self._search, text, self._longest)}

    def replace(self, text: str, table: dict[str, str]) -> str:
        if not self.found(text):
            return text
        parts: list[str] = []
        position = 0
        for start, end in _spans(self._search, text, self._longest):
            parts += (text[position:start], table[text[start:end]])
            position = end
        return "".join((*parts, text[position:]))

    def cuts(self, text: str) -> Iterator[tuple[int, int]]:
        """Spans of the control tokens in rendered text, swallowed whitespace included."""
        if self._swallows:  # whitespace has no longest length
            return (match.span() for match in self._cut.finditer(text))
        return _spans(self._cut, text, self._longest)

    def edge(self, text: str) -> bool:
        """True when ``text`` ends as a control token begins, or begins as one ends."""
        for length in range(1, min(len(text), self._longest - 1) + 1):
            if text[-length:] in self._heads or text[:length] in self._tails:
                return True
        return False

    def glued(self, constants: Iterable[str]) -> frozenset[str]:
        """The strings that become a control token between two of a template's ``constants``.

        A constant that ends in `<` and one that begins with `>` turn a caller's `think` into `<think>`.
        """
        heads: set[str] = set()
        tails: set[str] = set()
        for text in constants:
            lengths = range(1, min(len(text), self._longest - 1) + 1)
            heads |= {text[-length:] for length in lengths} & self._heads
            tails |= {text[:length] for length in lengths} & self._tails
        return frozenset(
            token[len(head) : len(token) - len(tail)]
            for token in self.by_text
            for head in heads
            if token.startswith(head)
            for tail in tails
            if token.endswith(tail) and len(head) + len(tail) < len(token)
        )


def _spans(pattern: re.Pattern[str], text: str, longest: int) -> Iterator[tuple[int, int]]:
    """The spans of ``pattern.finditer(text)``, found slice by slice. No match has more than ``longest``
    characters, or depends on more than those."""
    position = 0
    while position < len(text):
        limit = position + SLICE_CHARS
        for match in pattern.finditer(text, position, limit + longest):
            if match.start() >= limit:
                break
            position = match.end()
            yield match.span()
        position = max(position, limit)


def free_characters(text: str) -> Iterator[str]:
    """Private-use characters of which neither the character nor its escape, JSON's or Python's, occurs in the
    input."""
    used: set[str] = set()
    if not text.isascii():
        for start in range(0, len(text), SLICE_CHARS):
            used.update(text[start : start + SLICE_CHARS])
    if "\\udb" in text:
        used.update(
            json.loads(f'"{text[start:end]}"') for start, end in _spans(_PRIVATE_ESCAPE, text, _ESCAPE_CHARS)
        )
    if "\\U00" in text:
        spans = _spans(_PRIVATE_IN_PYTHON, text, len(r"\U00100000"))
        used.update(chr(int(text[start + 2 : end], 16)) for start, end in spans)
    for plane in _PRIVATE:
        for point in plane:
            character = chr(point)
            if character not in used:
                yield character
    raise InvalidRequest(
        "the request uses every private-use character, so its control-token text cannot be marked"
    )


class TextEncoder:
    """Encodes rendered text. Immutable after construction, safe to use from several threads."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.control = ControlText(vocabulary.control)
        self.control_ids = frozenset(token.id for token in vocabulary.control)
        self._stock = RepeatEncoder(vocabulary.tokenizer)
        self._texts = {token.id: token.text for token in vocabulary.control}
        self.anchor_id = next(
            (token.id for token in vocabulary.control if token.special and not token.rstrip), None
        )
        """A control token that can stand for "something came before" (`encode`'s ``after``)."""
        # Random, so that no caller can write it: it marks "not at the start of the text" for tokenizers that
        # treat the start specially (Metaspace), and is cut off again.
        self._anchor = f"\U0010fffd{secrets.token_hex(16)}"
        self._plain = RepeatEncoder(_without_control(vocabulary, self._anchor))
        self._floor = TokenFloor.of(vocabulary.tokenizer)
        # With a normalizer, text that is no literal may still become an added token that is matched after
        # normalisation (full-width letters under NFKC). Only then must the outcome be counted.
        spec = json.loads(vocabulary.tokenizer.to_str())
        self._is_control = np.zeros(max(self.control_ids, default=-1) + 1, dtype=np.bool_)
        self._is_control[[*self.control_ids]] = True
        self._may_normalise = spec["normalizer"] is not None and any(
            token["normalized"] for token in spec["added_tokens"] if token["content"].strip()
        )

        self.divides = (
            self.anchor_id is not None
            and not self._may_normalise
            and not any(
                token[key] for token in spec["added_tokens"] for key in ("lstrip", "rstrip", "single_word")
            )
        )
        """True where the text between two control tokens is encoded as if nothing stood behind them (`run`)."""
        only_control = len(spec["added_tokens"]) == len(vocabulary.control)
        self._fast = FastBpe.of(vocabulary.tokenizer) if self.divides and only_control else None

    def run(self, text: str) -> Int32Array | None:
        """int32: the ids of a text between two control tokens, or behind one. None where it has a control token.
        For callers that saw to it that ``divides`` is True."""
        if self._fast is not None and (fast := self._fast.encode(text)) is not None:
            return None if self.control.found(text) else fast
        ids = self._stock.encode(f"{self._texts[self.anchor_id]}{text}" if self.anchor_id is not None else text)
        behind = ids[1:]
        known = behind[behind < len(self._is_control)]
        return None if not len(ids) or ids[0] != self.anchor_id or self._is_control[known].any() else behind

    def encode(
        self, text: str, shield: Shield = NO_SHIELD, *, after: int | None = None, most: int | None = None
    ) -> EncodedText:
        """Ids of rendered ``text`` (control literals in it are control tokens, stand-ins of ``shield`` are not).

        ``after``: a control token id that precedes the text in the sequence, for tokenizers whose encoding
        depends on it; it is not part of the result. ``most``: ids that are of use. Raises TooManyTokens for a text
        that surely has more, mostly with nothing encoded. In a worker thread of anyio whose caller was cancelled
        it ends early.
        """
        text, size = _encodable(text)
        if most is not None and self._floor is not None and size > SURE_BYTES * most:
            tokens = self._floor.over(text, most, shield.restore, _leave_if_cancelled)
            if tokens is not None:
                raise TooManyTokens(tokens)
        lead = "" if after is None else self._texts[after]
        marked = bool(shield.stand_ins) and any(character in text for character in shield.stand_ins)
        if not marked:
            _leave_if_cancelled()
            ids = self._ids(self._stock, lead + text, most)
            if not self._may_normalise or self._count(ids) == sum(1 for _ in self.control.cuts(lead + text)):
                return EncodedText(self._drop_lead(ids, after), size)
        return EncodedText(self._drop_lead(self._encode_cut(lead + text, shield, most), after), size)

    def _ids(self, encoder: RepeatEncoder, text: str, most: int | None) -> list[int]:
        """Raises TooManyTokens for far too many, before they become a list, which keeps the interpreter lock."""
        ids = encoder.encode(text)
        if most is not None and len(ids) > FAR_TOO_MANY * most:
            raise TooManyTokens(len(ids))
        found: list[int] = ids.tolist()
        return found

    def _count(self, ids: list[int]) -> int:
        return sum(1 for index in ids if index in self.control_ids)

    def _drop_lead(self, ids: list[int], after: int | None) -> list[int]:
        if after is None:
            return ids
        if not ids or ids[0] != after:
            raise InvalidRequest("the tokenizer merges a control token with the text after it")
        return ids[1:]

    def _encode_cut(self, text: str, shield: Shield, most: int | None) -> list[int]:
        """Cuts at control tokens; every piece between two is encoded without any."""
        ids: list[int] = []
        position = 0
        for start, end in self.control.cuts(text):
            self._plain_piece(text[position:start], shield, ids, most)
            ids.append(self.control.by_text[self._bare(text[start:end])].id)
            position = end
        self._plain_piece(text[position:], shield, ids, most)
        return ids

    def _bare(self, text: str) -> str:
        return text if text in self.control.by_text else text.strip()

    def _plain_piece(self, piece: str, shield: Shield, ids: list[int], most: int | None) -> None:
        """Appends the ids of ``piece``, stand-ins put back."""
        piece = shield.restore(piece)
        if not piece:
            return
        _leave_if_cancelled()
        encoded = self._encode_plain(piece, most, first=not ids)
        if any(index in self.control_ids for index in encoded):
            # The vocabulary itself spells the literal (Unigram, ignore_merges): break each literal in two.
            encoded = []
            for part in self._broken(piece):
                encoded += self._encode_plain(part, most, first=not ids and not encoded)
        if any(index in self.control_ids for index in encoded):
            raise InvalidRequest("text in the request cannot be encoded without a control token of this model")
        ids += encoded

    def _encode_plain(self, piece: str, most: int | None, *, first: bool) -> list[int]:
        if first:
            return self._ids(self._plain, piece, most)
        if self._anchor in piece:
            raise InvalidRequest("the request contains a reserved string")
        return self._ids(self._plain, self._anchor + piece, most)[1:]

    def _broken(self, piece: str) -> Iterator[str]:
        position = 0
        for start, end in self.control.cuts(piece):
            if end - start > 1:
                yield piece[position : start + 1]
                position = start + 1
        yield piece[position:]


def _encodable(text: str) -> tuple[str, int]:
    """``text`` without lone surrogates, and the number of its UTF-8 bytes."""
    try:
        return text, len(text.encode())
    except UnicodeEncodeError:
        slices = (text[start : start + SLICE_CHARS] for start in range(0, len(text), SLICE_CHARS))
        text = "".join(_SURROGATE.sub("\ufffd", part) for part in slices)
        return text, len(text.encode())


def _leave_if_cancelled() -> None:
    """Raises the cancellation of the task that this worker thread of anyio works for: its caller hung up, and the
    thread is free for the next one. Does nothing in any other thread."""
    with suppress(NoEventLoopError):
        from_thread.check_cancelled()


def completion_ids(encoder: TextEncoder, text: str, stop_ids: Sequence[int], close: int | None) -> Int32Array:
    """``Renderer.encode_completion``: ``text`` with its control tokens, ``close`` if no stop token ends it."""
    ids = encoder.encode(text, after=encoder.anchor_id).ids
    if close is not None and (not ids or ids[-1] not in stop_ids):
        ids = [*ids, close]
    return np.array(ids, dtype=np.int32)


def _without_control(vocabulary: Vocabulary, anchor: str) -> Tokenizer:
    """The same tokenizer with no control tokens, and ``anchor`` as its only mark."""
    names = {token.text for token in vocabulary.control}
    spec = json.loads(vocabulary.tokenizer.to_str())
    spec["added_tokens"] = [token for token in spec["added_tokens"] if token["content"] not in names]
    spec["post_processor"] = None
    tokenizer = Tokenizer.from_str(json.dumps(spec))
    tokenizer.add_special_tokens([AddedToken(anchor, special=True, normalized=False)])
    return tokenizer
