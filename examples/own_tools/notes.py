"""Tools of one's own, as docs/own-tools.md explains them: a note book on the host, and a counter in the
sandbox."""

from __future__ import annotations

from typing import TypedDict

from turnstile_server.own_tools import ToolContext, tool


class Note(TypedDict):
    """A note as the model gets it: structured, and as JSON text."""

    key: str
    text: str
    notes: int


@tool(where="host")
def remember(context: ToolContext, key: str, text: str) -> Note:
    """Writes a note, or replaces it.

    Args:
        key: Name of the note.
        text: What to remember.
    """
    notes: dict[str, str] = vars(context.state).setdefault("notes", {})
    notes[key] = text
    return {"key": key, "text": text, "notes": len(notes)}


@tool(where="host", read_only=True)
async def recall(context: ToolContext, key: str) -> str:
    """Reads a note.

    Args:
        key: Name of the note.
    """
    notes: dict[str, str] = vars(context.state).get("notes", {})
    if key not in notes:
        raise KeyError(f"there is no note {key!r}; there are {', '.join(sorted(notes)) or 'none'}")
    return notes[key]


@tool(where="sandbox", read_only=True)
def count_words(path: str, at_least: int = 1) -> dict[str, int]:
    """Counts the words of a text file in the work folder.

    Args:
        path: Path of the file.
        at_least: Leave out words that occur less often.
    """
    import collections  # noqa: PLC0415 - only this function's text goes into the sandbox

    with open(path, encoding="utf-8") as file:
        counted = collections.Counter(file.read().split())
    return {word: times for word, times in counted.items() if times >= at_least}
