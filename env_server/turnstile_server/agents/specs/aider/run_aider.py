"""One task for aider, without a person: it is shown the files of the work folder and told the instruction once.

    run_aider.py PACKAGES INSTRUCTION_FILE WORKDIR SETTINGS MAX_TURNS

Its working directory is its own folder, so that no `.env`, `.aider.conf.yml` or module of the work folder is read.
Exit codes: 0 the model was done (or its tries were used up), 1 the model door gave no reply, 5 the context is full.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MAX_FILE_BYTES = 64 << 10
MAX_ALL_BYTES = 256 << 10
"""Of what is shown; the prompt holds all of it. Files after that, by path, are left out."""

NO_REPLY, CONTEXT_FULL = 1, 5


def shown_files(folder: Path) -> Iterator[Path]:
    """Text files, hidden ones and those in hidden folders left out, by path."""
    left = MAX_ALL_BYTES
    for path in sorted(folder.rglob("*")):
        names = path.relative_to(folder).parts
        if path.is_symlink() or not path.is_file() or any(name.startswith((".", "__pycache__")) for name in names):
            continue
        size = path.stat().st_size
        if size > min(MAX_FILE_BYTES, left) or b"\0" in (data := path.read_bytes()) or not _is_text(data):
            continue
        left -= size
        yield path


def _is_text(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def play(coder: Any, instruction: str, workdir: Path, max_turns: int) -> int:
    """``coder``: aider's, which asks the model and edits the files. The exit code."""
    coder.root = str(workdir)  # else the folder that all files shown have in common: new files would go there
    coder.max_reflections = max_turns - 1
    coder.run(with_message=instruction)
    if coder.num_exhausted_context_windows:
        return CONTEXT_FULL
    return 0 if coder.message_tokens_received or coder.total_tokens_received else NO_REPLY


def main() -> int:
    packages, instruction_file, workdir, settings, max_turns = sys.argv[1:]
    sys.path.insert(0, packages)
    from aider.main import main as aider  # type: ignore[import-not-found]  # there now

    os.chdir(Path(settings).parent)
    folder = Path(workdir)
    coder = aider(["--config", settings, *map(str, shown_files(folder))], return_coder=True)
    if isinstance(coder, int) or coder is None:
        return coder or NO_REPLY
    return play(coder, Path(instruction_file).read_text("utf-8"), folder, int(max_turns))


if __name__ == "__main__":
    sys.exit(main())
