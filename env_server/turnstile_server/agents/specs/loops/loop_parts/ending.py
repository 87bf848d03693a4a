"""Exit codes of these agents, and the line that says why they end.

Python 3.9 or later, standard library only.
"""

from __future__ import annotations

import json
from collections.abc import Callable

FINISHED = 0
"""The model answered without calling a tool, or handed in its answer with `submit` and nobody replied."""
REFUSED = 3
"""The model API refused a call for good: a bad key, an episode that is over, a request that it does not serve."""
API_FAILED = 4
"""The model API failed, after the retries that were asked for."""
LIMIT = 5
"""The turns, the model's context or its budget are used up."""
TOOLS_FAILED = 6
"""The MCP endpoint cannot be reached or does not answer. (A tool that fails is the model's affair.)"""
NAMES = {
    FINISHED: "finished",
    REFUSED: "refused",
    API_FAILED: "api_failed",
    LIMIT: "limit",
    TOOLS_FAILED: "tools_failed",
}


class Ended(Exception):
    """The agent stops: an exit code, and a sentence with the reason."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


def say(**fields: object) -> None:
    print(json.dumps(fields), flush=True)  # noqa: T201 - standard output is how an agent tells what it does


def exit_code_of(play: Callable[[], None]) -> int:
    """Plays to the end, whichever it is, and tells of it."""
    code, message = FINISHED, ""
    try:
        play()
    except Ended as end:
        code, message = end.code, str(end)
    say(ending=NAMES[code], message=message)
    return code
