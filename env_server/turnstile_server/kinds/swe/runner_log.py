"""The part of a script's log that its test runner wrote, and the runner's own exit status."""

from __future__ import annotations

import re

from turnstile_server.kinds.swe.options import END_MARKER, START_MARKER
from turnstile_server.sandboxes.protocol import ExecResult

_EXIT_STATUS = re.compile(r"^>>>>> Test Exit Code: *(-?\d+)", re.MULTILINE)
"""``swebench`` adds this line to every script, whose own status is that of its last ``git checkout``."""
_TRACE_OF_STATUS = re.compile(r"\n?\+* SWEBENCH_TEST_EXIT_CODE=-?\d+$")


class RunnerLog:
    """What stands between the two markers. ``text``: that, or the whole log of a script that never got so far.
    ``exit_code``: the runner's, or the script's where that did not say it."""

    def __init__(self, result: ExecResult) -> None:
        whole = result.stdout.decode(errors="replace")
        self.text = _between(whole)
        said = _EXIT_STATUS.findall(whole)
        self.exit_code = int(said[-1]) if said else result.exit_code


def _between(log: str) -> str:
    before, start, rest = log.partition(START_MARKER)
    # The start may be left out of a log that is too long.
    text = rest.partition("\n")[2] if start else before
    until, end, _ = text.partition(END_MARKER)
    if end:  # the marker's own line, which the shell's trace begins
        until = until.rpartition("\n")[0]
    return _TRACE_OF_STATUS.sub("", until.strip()).strip()
