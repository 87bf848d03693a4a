"""Where thinking is open: read off ids, never off text that a caller could have written."""

from __future__ import annotations

import numpy as np

from turnstile.models import Int32Array
from turnstile_server.rendering.detokenizer import TokenBytes
from turnstile_server.rendering.protocol import PathEnd
from turnstile_server.rendering.reply_parser import Tag, Tags

_LOOK_BACK = 64


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
