"""Volatile text: parts of an agent's system messages that change from call to call and mean nothing.

An agent spec names them by regular expressions (``volatile``): dates, counters, the state of a work folder. What
they match is left out when system and developer messages are compared, so a clock does not break the
conversation: the text that the model was fed first stays in its context (stored wins), and the difference is
counted as ``system_volatile``. The text of users, tools and the model is never masked.

What must hold: masking takes bounded time on any text, because an agent writes it. The patterns are run by the
``regex`` package, which stops a search after ``MASK_TIMEOUT_S``. A text that takes longer is compared as it is,
and after ``MAX_TIMEOUTS`` such texts the episode's patterns are not tried again.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

import regex

from turnstile.models import Message
from turnstile_server.capture.keys import SYSTEM_ROLES

MASK_TIMEOUT_S = 0.05
"""CPU seconds of all patterns on one text; a pattern for a date reads a megabyte in less."""
MAX_TIMEOUTS = 3
MAX_PATTERNS = 32
MAX_PATTERN_CHARS = 1_000
REMEMBERED_TEXTS = 16
"""System texts whose masked form is remembered: an agent sends the same few with every call."""

_MASK = "\ufffc"
_PROSE = "You are a careful agent.\nAnswer in one sentence; then stop."
_PROBES = ("0" * 2_000, "a" * 2_000, " " * 2_000, "0-:., " * 400, "\n" * 2_000, "aA0_-/.:" * 250)
_LOG = logging.getLogger(__name__)


def check_patterns(patterns: Sequence[str]) -> None:
    """Raises ValueError for patterns that cannot be used, and names the pattern.

    Refused are: too many patterns or too long ones, a pattern that is not a regular expression, one that
    matches an empty text or all of any text, and one whose search takes too long on simple texts.
    """
    if len(patterns) > MAX_PATTERNS:
        raise ValueError(f"{len(patterns)} volatile patterns; at most {MAX_PATTERNS} are allowed")
    for pattern in patterns:
        if len(pattern) > MAX_PATTERN_CHARS:
            raise ValueError(f"a volatile pattern has {len(pattern)} characters; at most {MAX_PATTERN_CHARS}")
        try:
            compiled = regex.compile(pattern)
            left = [compiled.sub("", probe, timeout=MASK_TIMEOUT_S) for probe in (_PROSE, *_PROBES)]
            empty = compiled.search("", timeout=MASK_TIMEOUT_S)
        except regex.error as error:
            raise ValueError(f"{pattern!r} is not a regular expression: {error}") from error
        except TimeoutError as error:
            raise ValueError(
                f"{pattern!r} takes too long on simple texts: give its repetitions an upper bound, {{1,20}} for +"
            ) from error
        if empty or not left[0].strip():
            raise ValueError(f"{pattern!r} matches an empty text or any text: name what changes, and only that")


class VolatileText:
    """Masks what the patterns match. Owned by one episode; not safe in several threads."""

    def __init__(self, patterns: Sequence[str] = ()) -> None:
        """``patterns``: those of an agent spec, which passed ``check_patterns`` when the spec was loaded."""
        self._patterns = [regex.compile(pattern) for pattern in patterns]
        self._masked: dict[str, str] = {}
        self._timeouts = 0

    def masked(self, messages: Sequence[Message]) -> Sequence[Message]:
        """The messages with one mark for each match in system and developer text; ``messages`` itself where there
        is nothing to mask."""
        if not self._patterns:
            return messages
        masked = [self._masked_message(message) for message in messages]
        return masked if any(new is not old for new, old in zip(masked, messages, strict=True)) else messages

    def _masked_message(self, message: Message) -> Message:
        if message.role not in SYSTEM_ROLES:
            return message
        content = self._mask(message.content)
        return message if content == message.content else replace(message, content=content)

    def _mask(self, text: str) -> str:
        known = self._masked.pop(text, None)
        if known is None:
            known = self._searched(text)
        self._masked[text] = known
        if len(self._masked) > REMEMBERED_TEXTS:
            del self._masked[next(iter(self._masked))]
        return known

    def _searched(self, text: str) -> str:
        if self._timeouts >= MAX_TIMEOUTS:
            return text
        masked = text
        try:
            for pattern in self._patterns:
                masked = pattern.sub(_MASK, masked, timeout=MASK_TIMEOUT_S / len(self._patterns))
        except TimeoutError:
            self._timeouts += 1
            _LOG.warning("a volatile pattern took too long on a system text of %d characters", len(text))
            return text
        return masked
