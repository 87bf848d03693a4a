"""A second byte-pair encoder (``tiktoken``) for ASCII text, used only where it gives the tokenizer's own ids.

``tiktoken`` takes a quarter of the time, but is another algorithm. ``tokenizers`` merges the pairs of a list, in
the order of the list. ``tiktoken`` merges any two neighbours that spell a token, the token of the lowest rank
first. Both give the same ids if

1. every single byte is a token;
2. the merges that make one token follow each other in the list, so that the list orders the tokens: their ranks;
3. every token with a merge is what ``tokenizers`` itself makes of the token's text. Others are never made of any
   text, and ``tiktoken`` does not get them.

Proof, by induction over the ranks. Let both be equal with the tokens below t alone. Where two neighbours spell t
and t is the lowest that can be merged, nothing below t can be merged any more, and nothing was merged across the
ends of the stretch that they spell. So the neighbours are what the tokens below t make of t's text alone, for both
the same two. By 3 these two have a merge in the list. So both merge them, and the leftmost first.

Before that, both split the text by the same expression. The engines of expressions differ in their Unicode tables
and in rare syntax. So the text is ASCII, the expression is made of what both know (``_KNOWN``), and both encoders
are compared on a probe. What the expression leaves out, ``tiktoken`` drops: the bytes are counted each time.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from turnstile.models import Int32Array
from turnstile_server.rendering.detokenizer import byte_alphabet
from turnstile_server.rendering.repeat_encoder import LEAST_CHARS, ids_of

if TYPE_CHECKING:
    from tiktoken import Encoding

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""The expression of ``ByteLevel``."""

_CLASS = r"\\p\{[A-Z][a-z]?\}|\\[rnstS]"
_KNOWN = re.compile(
    rf"(?:{_CLASS}|[A-Za-z0-9 '/]|\[\^?(?:{_CLASS}|[A-Za-z0-9 '/])+\]|\((?:\?:|\?i:|\?!|\?=)?|\)|\||"
    r"[?*+](?![?*+])|\{[0-9]+(?:,[0-9]*)?\}(?![?*+]))*"
)
"""Expressions that mean the same to both engines, for ASCII text."""

_CHECKED_AT_ONCE = 1 << 12
_WORDS = (
    "The quick brown fox's jumps, over 12 lazy dogs; they'LL say we've 3.14159 or 1,000,000.\r\n\n"
    "def f(x: int) -> str:\n\t\treturn {'a': [1, 2]}  # comment\n\n\n    if x == 0x1F:\n        pass\n"
    "diff --git a/x.py b/x.py\n@@ -1,7 +1,9 @@\n-    old\n+    new   \n   \t \n"
    'https://example.org/a?b=c&d=%20 "quoted" <tag attr=1/> $HOME ~/.ssh \\n \x00\x1b[0m\x7f\x0b\x0c'
)


class FastBpe:
    """Encodes ASCII text as a tokenizer does. Immutable, safe to use from several threads."""

    def __init__(self, encoding: Encoding, ids: Int32Array, sizes: NDArray[np.int32]) -> None:
        """``ids``, ``sizes``: the id and the bytes of each rank."""
        self._encoding = encoding
        self._ids = ids
        self._sizes = sizes

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> FastBpe | None:
        """The encoder for a tokenizer; None where the ids may differ, and where ``tiktoken`` is not installed."""
        try:
            from tiktoken import Encoding  # noqa: PLC0415 - optional
        except ImportError:
            return None
        spec = json.loads(tokenizer.to_str())
        pattern = _pattern(spec)
        ranks = _ranks(spec) if pattern is not None and _is_plain_bpe(spec) else None
        if pattern is None or ranks is None:
            return None
        ids = np.array(list(ranks.values()), dtype=np.int32)
        order = {text: rank for rank, text in enumerate(ranks)}
        encoding = Encoding("turnstile", pat_str=pattern, mergeable_ranks=order, special_tokens={})
        made = cls(encoding, ids, np.array([len(text) for text in ranks], dtype=np.int32))
        return made if all(made._agrees(tokenizer, text) for text in _probe()) else None

    def encode(self, text: str) -> Int32Array | None:
        """int32; None for a text that is not ASCII, is long, or has what the tokenizer's expression leaves out.

        Control tokens are not looked for: their text becomes ordinary tokens.
        """
        if not text.isascii() or len(text) >= LEAST_CHARS:
            return None
        ranks = np.array(self._encoding.encode_ordinary(text), dtype=np.int32)
        if int(self._sizes[ranks].sum()) != len(text):
            return None
        found: Int32Array = self._ids[ranks]
        return found

    def _agrees(self, tokenizer: Tokenizer, text: str) -> bool:
        ids = self.encode(text)
        return ids is not None and np.array_equal(ids, ids_of(tokenizer, text))


def _parts(spec: dict[str, Any] | None, name: str) -> list[dict[str, Any]]:
    if spec is None:
        return []
    return list(spec[name]) if spec["type"] == "Sequence" else [spec]


def _pattern(spec: dict[str, Any]) -> str | None:
    """The expression that splits a text; None where the text is treated in another way."""
    if any(part["type"] != "NFC" for part in _parts(spec["normalizer"], "normalizers")):  # ASCII is its own NFC
        return None
    match _parts(spec["pre_tokenizer"], "pretokenizers"):
        case [{"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}]:
            return _GPT2
        case [
            {"type": "Split", "pattern": {"Regex": str(pattern)}, "behavior": "Isolated", "invert": False},
            {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
        ] if _KNOWN.fullmatch(pattern):
            return str(pattern)
    return None


def _is_plain_bpe(spec: dict[str, Any]) -> bool:
    model = spec["model"]
    return model["type"] == "BPE" and not any(
        model.get(key) for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix")
    )


def _ranks(spec: dict[str, Any]) -> dict[bytes, int] | None:
    """The id of each token that can be made of a text, by its bytes, in the order of the ranks. None where the two
    algorithms may differ (see the head of this module)."""
    model, alphabet = spec["model"], byte_alphabet()
    vocabulary: dict[str, int] = model["vocab"]
    if not alphabet.keys() <= vocabulary.keys():
        return None
    merged: list[str] = []
    seen: set[str] = set(alphabet)
    for merge in model["merges"]:
        left, right = merge.split(" ") if isinstance(merge, str) else merge
        token = left + right
        if merged and token == merged[-1]:
            continue
        if token in seen or token not in vocabulary or not alphabet.keys() >= set(token):
            return None
        merged.append(token)
        seen.add(token)
    made = [token for token, whole in zip(merged, _made(model, vocabulary, merged), strict=True) if whole]
    if model.get("ignore_merges") and len(made) + len(alphabet) != len(vocabulary):
        return None  # a whole word becomes its token, merged or not
    return {bytes(alphabet[one] for one in token): vocabulary[token] for token in (*alphabet, *made)}


def _made(model: dict[str, Any], vocabulary: dict[str, int], tokens: list[str]) -> Iterator[bool]:
    """For each token: True if the merges make it of its own text."""
    spec: dict[str, Any] = {
        "version": "1.0",
        "added_tokens": [],
        **dict.fromkeys(("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor", "decoder")),
        "model": {**model, "ignore_merges": False},
    }
    bare = Tokenizer.from_str(json.dumps(spec))
    for start in range(0, len(tokens), _CHECKED_AT_ONCE):
        batch = tokens[start : start + _CHECKED_AT_ONCE]
        for token, encoded in zip(batch, bare.encode_batch_fast(batch, add_special_tokens=False), strict=True):
            yield encoded.ids == [vocabulary[token]]


def _probe() -> Iterator[str]:
    characters = [chr(code) for code in range(128)]
    pairs = "".join(map("".join, itertools.product(characters, repeat=2)))
    yield _WORDS
    for text in (pairs, re.sub("(..)", r"a\1 1", pairs, flags=re.DOTALL)):
        yield from (text[start : start + LEAST_CHARS - 1] for start in range(0, len(text), LEAST_CHARS - 1))
    for unit in (" ", "\n", "a", "7", "=", " \n", "\t x"):
        yield f"x{unit * 3000}y"
