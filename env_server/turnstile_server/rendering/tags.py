"""The tags that a model writes around its thinking and its calls, and where thinking is open.

Read once at start from the chat template's text and the added tokens of the vocabulary; nothing is guessed per
call. Where thinking is open is read off ids, never off text that a caller could have written.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from turnstile.models import Int32Array
from turnstile_server.rendering.call_formats.protocol import CallFormat
from turnstile_server.rendering.detokenizer import TokenBytes
from turnstile_server.rendering.protocol import PathEnd
from turnstile_server.rendering.vocabulary import Vocabulary

THINKING_TAGS = (
    ("<think>", "</think>"),
    ("<seed:think>", "</seed:think>"),
    ("[THINK]", "[/THINK]"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
)
_LOOK_BACK = 64
"""Prompt ids in which an opening thinking tag is looked for."""


@dataclass(frozen=True, slots=True)
class Tag:
    """A tag: its text, and its id where it is an added token."""

    text: str
    id: int | None = None


@dataclass(frozen=True, slots=True)
class Tags:
    """The tags a model writes; None where it has none."""

    think: tuple[Tag, Tag] | None = None
    call: tuple[Tag, Tag] | None = None
    call_format: CallFormat | None = None
    """The format of the text between the tags of ``call``."""


def find_tags(vocabulary: Vocabulary, call_format: CallFormat | None) -> Tags:
    """The thinking tags that the vocabulary or the template has, and the call tags of ``call_format``."""
    text = "\n".join(vocabulary.chat_templates.values())
    ids = {token.text: token.id for token in vocabulary.control}

    def pair(opening: str, closing: str) -> tuple[Tag, Tag]:
        return Tag(opening, ids.get(opening)), Tag(closing, ids.get(closing))

    think = next(
        (
            pair(opening, closing)
            for opening, closing in THINKING_TAGS
            if closing in text or (opening in ids and closing in ids)
        ),
        None,
    )
    if call_format is None:
        return Tags(think=think)
    return Tags(think=think, call=pair(call_format.opening, call_format.closing), call_format=call_format)


def opened_by(prompt_tail: Int32Array, tags: Tags, table: TokenBytes) -> bool:
    """True when the prompt ends in an opening thinking tag (whitespace may follow it)."""
    if tags.think is None:
        return False
    opening = tags.think[0]
    tail = prompt_tail[-_LOOK_BACK:].tolist()
    if opening.id is not None:
        while tail and tail[-1] not in table.control and not table[tail[-1]].strip():
            tail.pop()
        return bool(tail) and tail[-1] == opening.id
    text = b"".join(table[index] for index in tail).decode("utf-8", "replace")
    return text.rstrip().endswith(opening.text)


def may_hold_thinking(end: PathEnd, tags: Tags, table: TokenBytes) -> bool:
    """True when a path may hold thinking that a template could drop."""
    if tags.think is None:
        return False
    return (
        end.earlier_thinking
        or bool(end.reply.reasoning)
        or any(_mentions(ids, tags.think, table) for ids in (end.prompt_tail, end.completion_ids))
    )


def _mentions(ids: Int32Array, think: tuple[Tag, Tag], table: TokenBytes) -> bool:
    opening, closing = think
    if opening.id is not None and closing.id is not None:
        return bool(np.isin(ids, (opening.id, closing.id)).any())
    text = b"".join(table[index] for index in ids.tolist()).decode("utf-8", "replace")
    return opening.text in text or closing.text in text
