"""The text that stands in the place of a picture that the model is not shown.

Some families' chat templates have words of their own for it (GLM 5.2: "<reminder>You are unable to process this
image because you don't have multi-modal input ability. …"). They are found by rendering a message with a part of
that kind. A template that writes tokens there is that of a model that would see the picture, and one that writes
nothing has no words: then it is ``[image omitted]``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Final

from turnstile_server.errors import InvalidRequest

OMITTED: Final[Mapping[str, str]] = {kind: f"[{kind} omitted]" for kind in ("image", "audio", "video", "document")}
"""The words by the kind of the part, where a model has none of its own."""

_BEFORE, _BEHIND = "probebefore", "probebehind"
_MOST_CHARS = 1_000
_SENTENCE = re.compile(r"(?:\w+\W+){3}\w+")
"""Words, and no mark that a vision model's processor would replace (``<image>``)."""


def probe_media_words(
    render: Callable[[list[dict[str, Any]]], str], is_plain: Callable[[str], bool]
) -> Mapping[str, str]:
    """The words of a template. ``render``: messages in the template's own form to text; raises InvalidRequest.
    ``is_plain``: whether a text has no literal of a control token."""
    return {kind: _words(kind, render, is_plain) or words for kind, words in OMITTED.items()}


def _words(
    kind: str, render: Callable[[list[dict[str, Any]]], str], is_plain: Callable[[str], bool]
) -> str | None:
    """What the template writes between two texts for a part of this ``kind``; None where it is no sentence."""

    def between(*parts: dict[str, Any]) -> str | None:
        content = [{"type": "text", "text": _BEFORE}, *parts, {"type": "text", "text": _BEHIND}]
        try:
            text = render([{"role": "user", "content": content}])
        except InvalidRequest:
            return None
        found = re.search(f"{_BEFORE}(.*?){_BEHIND}", text, re.DOTALL)
        return None if found is None else found[1].strip()

    if between() != "":  # it does not read a list of parts, but writes it as Python does
        return None
    words = between({"type": kind}) or ""
    fits = len(words) <= _MOST_CHARS and _SENTENCE.search(words) is not None and is_plain(words)
    return words if fits else None
