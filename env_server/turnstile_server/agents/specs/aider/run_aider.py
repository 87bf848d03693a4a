"""One task for aider, without a person: it is shown the files of the work folder and told the instruction once.

    run_aider.py INSTRUCTION_FILE WORKDIR SETTINGS MAX_TURNS

It works from the folder of its settings, so that no `.env` and no `.aider.conf.yml` of the work folder is read.
Exit codes: 0 the model was done, or its tries were used up; 1 the model API gave no reply; 5 the context is full.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from aider.main import main as aider  # type: ignore[import-not-found]
from shown_files import shown_files  # type: ignore[import-not-found]

NO_REPLY, CONTEXT_FULL = 1, 5


def play(coder: Any, instruction: str, workdir: Path, max_turns: int) -> int:
    """``coder``: aider's, which asks the model and edits the files. The exit code."""
    coder.root = str(workdir)  # else the folder that all files shown have in common: new files would go there
    coder.max_reflections = max_turns - 1
    coder.run(with_message=instruction)
    if coder.num_exhausted_context_windows:
        return CONTEXT_FULL
    return 0 if coder.message_tokens_received or coder.total_tokens_received else NO_REPLY


def main() -> int:
    instruction_file, workdir, settings, max_turns = sys.argv[1:]
    os.chdir(Path(settings).parent)
    folder = Path(workdir)
    coder = aider(["--config", settings, *map(str, shown_files(folder))], return_coder=True)
    if isinstance(coder, int) or coder is None:
        return coder or NO_REPLY
    return play(coder, Path(instruction_file).read_text("utf-8"), folder, int(max_turns))


if __name__ == "__main__":
    sys.exit(main())
