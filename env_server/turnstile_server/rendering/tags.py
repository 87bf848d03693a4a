"""The tags that a model writes around its thinking and its calls, and where thinking is open.

Read once at start from the chat template's text and the added tokens of the vocabulary; nothing is guessed per
call. Where thinking is open is read off ids, never off text that a caller could have written.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from turnstile.models import Int32Array
from turnstile_server.rendering.call_formats.protocol import CallFormat
from turnstile_server.rendering.detokenizer import Detokenizer, TokenBytes
from turnstile_server.rendering.protocol import PathEnd
from turnstile_server.rendering.vocabulary import Vocabulary

THINKING_TAGS = (
    ("<think>", "</think>"),
    ("<seed:think>", "</seed:think>"),
    ("<mm:think>", "</mm:think>"),
    ("<think:opensource>", "</think:opensource>"),
    ("[THINK]", "[/THINK]"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|channel>thought\n", "<channel|>"),
    ("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
    ("<|inner_prefix|>", "<|inner_suffix|>"),
)
_LOOK_BACK = 64
"""Prompt ids in which an opening thinking tag is looked for."""


@dataclass(frozen=True, slots=True)
class Tags:
    """The tags a model writes. ``think``: opening and closing; None where it has none. ``marked``: the literals of
    added tokens that occur in a tag or in a mark of ``call_format``, long ones first."""

    think: tuple[str, str] | None = None
    call_format: CallFormat | None = None
    marked: tuple[str, ...] = ()


def find_tags(vocabulary: Vocabulary, call_format: CallFormat | None, shown: str = "") -> Tags:
    """The thinking tags that the vocabulary or the template has, and the marks of ``call_format``. ``shown``: what
    the template writes around thinking, as far as that is known."""
    text = "\n".join((*vocabulary.chat_templates.values(), shown))
    tokens = {token.text for token in vocabulary.control}
    think = next(
        (
            (opening, closing)
            for opening, closing in THINKING_TAGS
            if closing in text or (opening in tokens and closing in tokens)
        ),
        None,
    )
    literals: Sequence[str] = (*(think or ()), *(call_format.marks if call_format is not None else ()))
    marked = {token for token in tokens if any(token in literal for literal in literals)}
    return Tags(think, call_format, tuple(sorted(marked, key=lambda token: (-len(token), token))))


def opened_by(prompt_tail: Int32Array, tags: Tags, table: TokenBytes) -> bool:
    """True when the prompt ends in an opening thinking tag (whitespace may follow it)."""
    if tags.think is None:
        return False
    return _inner(prompt_tail[-_LOOK_BACK:], table).rstrip().endswith(_marked(tags.think[0], tags).rstrip())


def may_hold_thinking(end: PathEnd, tags: Tags, table: TokenBytes) -> bool:
    """True when a path may hold thinking that a template could drop."""
    if tags.think is None:
        return False
    return (
        end.earlier_thinking
        or bool(end.reply.reasoning)
        or any(_mentions(ids, tags.think, tags, table) for ids in (end.prompt_tail, end.completion_ids))
    )


def _mentions(ids: Int32Array, think: tuple[str, str], tags: Tags, table: TokenBytes) -> bool:
    text = _inner(ids, table)
    return any(_marked(literal, tags) in text for literal in think)


def _inner(ids: Int32Array, table: TokenBytes) -> str:
    """The text of ids, each control token between two surrogates, which decoded text has not."""
    detokenizer = Detokenizer(table)
    pieces = detokenizer.feed(ids.tolist()) + detokenizer.finish()
    return "".join(piece.text if piece.control is None else f"\ud800{piece.text}\udfff" for piece in pieces)


def _marked(literal: str, tags: Tags) -> str:
    """``literal`` as ``_inner`` writes it."""
    if not tags.marked:
        return literal
    return re.sub("|".join(map(re.escape, tags.marked)), lambda found: f"\ud800{found.group()}\udfff", literal)
