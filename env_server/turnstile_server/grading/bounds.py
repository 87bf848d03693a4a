"""Constants of this package: bounds that nobody has asked to change. Times are seconds, sizes bytes."""

from __future__ import annotations

from dataclasses import dataclass

from turnstile_server.settings import Bounds


@dataclass(frozen=True)
class GradingBounds(Bounds):
    """Bounds of one grading, and of what it shows."""

    retry_pause_s: float = 1.0
    """Pause before a grader is asked again; doubled each time. A judge may ask for more."""
    max_retry_pause_s: float = 30.0
    """The longest such pause."""
    probe_timeout_s: float = 60.0
    """Time for each short command of a grader in its sandbox: to ask for an interpreter or a program, and to
    read a reward file."""
    runner_grace_s: float = 30.0
    """Time that the runner of tests, and the search for leaks, get beyond that of what they run: to start and
    to report."""
    diff_timeout_s: float = 60.0
    """Time to find and apply the work's changes; then the work scores 0."""
    regex_timeout_s: float = 5.0
    """Time to match one answer against a regular expression; then it scores 0."""
    schema_timeout_s: float = 10.0
    """Time to check one text against a JSON schema; then it scores 0."""
    max_read_bytes: int = 1 << 20
    """Largest file of a work that is read for a grader."""
    log_timeout_s: float = 60.0
    """Time for swebench to read one log, which takes it seconds. Its patterns are quadratic in a line's length."""
    max_log_bytes: int = 16 << 20
    """Output of the tests of rows of SWE-bench and R2E-Gym; of more, first and last half are kept."""
    max_reward_bytes: int = 64 << 10
    """Largest reward file that a script may leave; a larger one is none."""
    max_shown: int = 20
    """Failed tests listed in a grade, and changed paths of each kind."""
    shown_changes: int = 1000
    """Changed files in the answer to `GET /episodes/{id}/work`."""
    shown_diff_bytes: int = 4 << 20
    """Size of that answer; further diffs, then files, are left out. A file of more than `max_read_bytes` has
    no diff there."""
    leak_search_max_file_bytes: int = 32 << 20
    """Larger files are not looked at there, and no more of a packed one."""
    max_resource_session_bytes: int = 32 << 20
    """Calls of a resource server's tools in one episode and their answers, in bytes; further calls are refused."""
