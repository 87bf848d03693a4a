"""What a tool call gives back, and how it is kept within its bounds: pure functions of text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What the model is told. ``is_error``: the tool could not do what was asked (a command that ran and failed
    is no error of the tool)."""

    text: str
    is_error: bool = False


def decoded(data: bytes) -> str:
    """Output of a command as text; bytes that are not UTF-8 become U+FFFD."""
    return data.decode("utf-8", "replace")


def cut_middle(text: str, max_chars: int, dropped_bytes: int = 0) -> str:
    """``text`` with at most ``max_chars`` characters of it left, from both ends, and how much went between them.

    ``dropped_bytes``: what was left out of its middle before it got here.
    """
    if len(text) <= max_chars and not dropped_bytes:
        return text
    kept = min(len(text), max_chars)
    head, tail = text[: kept - kept // 2], text[len(text) - kept // 2 :]
    middle = text[len(head) : len(text) - len(tail)]
    left_out = dropped_bytes + len(middle.encode("utf-8", "replace"))
    return f"{head}\n[… {left_out} bytes left out here; narrow the command to see them …]\n{tail}"


def numbered(lines: Sequence[str], first: int, max_chars: int) -> tuple[str, int]:
    """Lines as ``cat -n`` prints them, from line number ``first``, as many as fit ``max_chars`` (the first one is
    cut where even it does not fit), and how many these are."""
    shown: list[str] = []
    room = max_chars
    for number, line in enumerate(lines, first):
        row = f"{number:6d}\t{line}"
        if len(row) > room:
            if not shown:
                cut = len(row) - room
                shown.append(f"{row[:room]}[… {cut} characters of this line left out …]")
            break
        shown.append(row)
        room -= len(row) + 1
    return "\n".join(shown), len(shown)
