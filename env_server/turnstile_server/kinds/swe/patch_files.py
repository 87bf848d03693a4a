"""The files of a patch in git's format, before it and after it."""

from __future__ import annotations

import codecs
import re
from dataclasses import dataclass

_RANGE = re.compile(r"^@@ -\d+(?:,(\d+))? \+\d+(?:,(\d+))? @@")
_NOWHERE = "/dev/null"


@dataclass(slots=True)
class PatchedFile:
    """One file of a patch, by its path. None: there is no such file before, or after."""

    old: str | None
    new: str | None
    named: bool = False
    """The lines ``---`` and ``+++`` were there."""


def patched_files(patch: str) -> list[PatchedFile]:
    """The files in the order of the patch. A file that is copied has no path before: its source stays as it is."""
    found: list[PatchedFile] = []
    old = new = 0  # lines of the hunk that are still to come
    for line in patch.splitlines():
        if old > 0 or new > 0:
            old -= line[:1] not in ("+", "\\")
            new -= line[:1] not in ("-", "\\")
        elif (hunk := _RANGE.match(line)) is not None:
            old, new = (1 if length is None else int(length) for length in hunk.groups())
        elif line.startswith("diff --git "):
            found.append(_of_header(line.removeprefix("diff --git ")))
        elif line.startswith("--- "):
            if not found or found[-1].named:
                found.append(PatchedFile(None, None))
            found[-1].old, found[-1].named = _path(line[4:], "a/"), True
        elif line.startswith("+++ ") and found:
            found[-1].new = _path(line[4:], "b/")
        elif found:
            _read_extended(line, found[-1])
    return [file for file in found if file.old is not None or file.new is not None]


def _read_extended(line: str, file: PatchedFile) -> None:
    if line.startswith("new file mode"):
        file.old = None
    elif line.startswith("deleted file mode"):
        file.new = None
    elif line.startswith("copy from "):
        file.old = None
    elif line.startswith("rename from "):
        file.old = _path(line.removeprefix("rename from "))
    elif line.startswith(("rename to ", "copy to ")):
        file.new = _path(line.partition(" to ")[2])


def _of_header(names: str) -> PatchedFile:
    """``a/PATH b/PATH``: without the lines below it the two are equal (a mode, or binary content, has changed)."""
    if names.startswith('"'):
        first, _, second = names.partition('" ')
        return PatchedFile(_path(f'{first}"', "a/"), _path(second, "b/"))
    middle = len(names) // 2
    if names[:2] == "a/" and names[middle:] == f" b/{names[2:middle]}":
        return PatchedFile(names[2:middle], names[2:middle])
    return PatchedFile(None, None)


def _path(text: str, prefix: str = "") -> str | None:
    """A path as git writes it: a tab follows one with blanks, and one with odd letters is in C's quotes."""
    text = text.rstrip("\t\r")
    if text.startswith('"') and text.endswith('"') and len(text) > 1:
        raw = codecs.decode(text[1:-1].encode(errors="surrogateescape"), "unicode_escape")
        text = raw.encode("latin-1", errors="replace").decode(errors="replace")
    else:
        text = text.partition("\t")[0]
    return None if text == _NOWHERE else text.removeprefix(prefix)
