"""What a chat template says about its model: call format, thinking tags, roles.

Read once at start from the template's text and the added tokens. Nothing is guessed per call.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from jinja2 import Environment, TemplateSyntaxError

from turnstile_server.errors import StartupError
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


def reasoning_key(sources: Iterable[str]) -> str:
    """The field that the templates read a reply's reasoning from; the usual one where they read none."""
    text = "\n".join(sources)
    keys = ("reasoning_content", "reasoning", "thinking")
    return next((key for key in keys if re.search(rf"[.'\"]{key}\b", text)), keys[0])


def constants(source: str) -> list[str]:
    """The text and string constants of a template. Raises StartupError when it is no template."""
    try:
        tokens = list(Environment().lex(source))
    except TemplateSyntaxError as error:
        raise StartupError(f"the chat template cannot be read: {error}") from error
    data = [value for _, kind, value in tokens if kind == "data"]
    return data + [value[1:-1] for _, kind, value in tokens if kind == "string"]
