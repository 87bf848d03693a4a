"""What a chat template says about its model: call format, thinking tags, roles.

Read once at start from the template's text and the added tokens. Nothing is guessed per call.
"""

from __future__ import annotations

from collections.abc import Iterable

from jinja2 import Environment, TemplateSyntaxError

from turnstile_server.rendering.encoder import ControlText
from turnstile_server.rendering.reply_parser import Tag, Tags
from turnstile_server.rendering.vocabulary import Vocabulary

THINKING_TAGS = (
    ("<think>", "</think>"),
    ("<seed:think>", "</seed:think>"),
    ("[THINK]", "[/THINK]"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
)
CALL_TAGS = ("<tool_call>", "</tool_call>")


def speaks_hermes(sources: Iterable[str]) -> bool:
    """True when the template shows tools and asks for `<tool_call>{"name": …, "arguments": …}</tool_call>`."""
    text = "\n".join(sources)
    return (
        CALL_TAGS[0] in text
        and "arguments" in text
        and "tools" in text
        and "<function=" not in text
        and "<arg_key>" not in text
    )


def find_tags(vocabulary: Vocabulary, *, calls: bool) -> Tags:
    """The thinking tags that the vocabulary or the template has, and the call tags if ``calls``."""
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
    return Tags(think=think, call=pair(*CALL_TAGS) if calls else None)


def leaves_tokens_half_written(source: str, control: ControlText) -> bool:
    """True when a constant of the template begins or ends inside a control token (`'<' + name + '>'`)."""
    try:
        tokens = list(Environment().lex(source))
    except TemplateSyntaxError:
        return True
    for _, kind, value in tokens:
        if kind == "data" and control.edge(value):
            return True
        if kind == "string" and control.edge(value[1:-1]):
            return True
    return False
