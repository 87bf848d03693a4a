"""Text that an agent, a model, a task or a tool wrote, made safe to show: on a terminal, and in a log.

A terminal obeys what it is sent: an escape sequence can set its title and clipboard, move the cursor over earlier
lines, or hide text; marks of direction reorder what is read; a line break in a log message forges a line.

What must hold: what ``visible`` gives moves no cursor, reorders nothing and begins no line of its own; nothing is
dropped silently, for each such character is shown as its escape (``\\x1b``, ``\\u202e``).
"""

from __future__ import annotations

import json
import re
import unicodedata

_CANDIDATES = re.compile(r"[^\x20-\x7e]")
"""Most text has none."""
_BLANK = re.compile(r"[ \t\r\n]+")
_NAMED = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}


def visible(text: str, *, lines: bool = False) -> str:
    """``text`` with every character that is not shown as itself replaced by its escape: control characters (C0,
    DEL, C1), marks of direction and of format, separators of lines, half characters. ``lines``: line feeds and
    tabs stay; a carriage return before a line feed is dropped."""

    def shown(found: re.Match[str]) -> str:
        return found[0] if _harmless(found[0]) or (lines and found[0] in "\n\t") else _escape(found[0])

    return _CANDIDATES.sub(shown, text.replace("\r\n", "\n") if lines else text)


def visible_line(text: str, most: int) -> str:
    """``text`` as one line of at most ``most`` characters, for a place in a sentence: blanks, tabs and line ends
    become single spaces, the rest is as ``visible`` shows it, and what is cut off leaves an ellipsis."""
    # Escapes only grow, so nothing behind these characters could be shown.
    begin = text[: 4 * most]
    shown = visible(_BLANK.sub(" ", begin).strip(" "))
    return shown if len(shown) <= most and len(begin) == len(text) else f"{shown[: most - 1].rstrip(' ')}…"


def visible_json(text: str) -> str:
    """JSON with the same characters escaped: the same value, for every reader of JSON."""

    def shown(found: re.Match[str]) -> str:
        return found[0] if found[0] == "\n" or _harmless(found[0]) else _json_escape(found[0])

    return _CANDIDATES.sub(shown, text)


def _harmless(character: str) -> bool:
    # Spaces other than the usual one (Zs) are not "printable" to Python, and harmless.
    return character.isprintable() or unicodedata.category(character) == "Zs"


def _escape(character: str) -> str:
    code = ord(character)
    form = f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
    return _NAMED.get(character, form)


def _json_escape(character: str) -> str:
    """``json`` leaves DEL as it is."""
    return "\\u007f" if character == "\x7f" else json.dumps(character)[1:-1]
