"""What an agent can do to an episode, and what then stands in its record: the rows of the table in docs/errors.md.

``test_agent_faults.py`` plays each row in a real sandbox, and holds the table in the docs against this one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from light import SOLVE, TASK


@dataclass(frozen=True)
class AgentFault:
    """``work``: Python that the light agent runs in its work folder after its model calls. ``reason``: words of
    the record that say why: of ``error.message``, or of ``grading.summary``."""

    cause: str
    work: str = "pass"
    status: str = "completed"
    reward: float | None = 0.0
    fault: str | None = None
    reason: str = ""
    turns: int = 1
    task: dict[str, Any] = field(default_factory=lambda: TASK)
    limits: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    slow: bool = False

    @property
    def id(self) -> str:
        return self.cause.replace("`", "")

    @property
    def row(self) -> str:
        reward = "as graded" if self.reward else f"{self.reward:g}" if self.reward is not None else "null"
        return f"| {self.cause} | `{self.status}` | {reward} | {self.fault or '–'} |"


def _brief(seconds: float) -> dict[str, Any]:
    """The task with little time for its tests."""
    return {**TASK, "tests": {**TASK["tests"], "timeout_s": seconds}}


_FILL = """
block = bytes(1 << 20)
for folder in ('/tmp', '/dev/shm', os.path.expanduser('~'), '.'):
    try:
        with open(folder + '/full', 'wb') as out:
            while True:
                out.write(block)
    except OSError:
        pass
"""
_AT_GRADING = "open('answer.py', 'w').write({!r})"
_FORKS = """
import subprocess
try:
    while True:
        subprocess.Popen(['sleep', '1000'], start_new_session=True)
except OSError:
    pass
"""

AGENT_FAULTS = [
    # What cannot be fetched.
    AgentFault("`chmod 000` on a file", "os.chmod('answer.py', 0)", reason="permission denied"),
    AgentFault("`chmod 000` on the work folder", f"{SOLVE}; os.chmod('.', 0)", reason="permission denied"),
    AgentFault(
        "work above `sandboxes.max_archive_bytes`",
        f"{SOLVE}; out = open('big', 'wb'); [out.write(bytes(1 << 20)) for _ in range(90)]",
        reason="larger than",
    ),
    AgentFault(
        "a file of holes above it", f"{SOLVE}; open('big', 'wb').truncate(100 << 20)", reason="larger than"
    ),
    AgentFault(
        "folders 4,000 deep",
        f"{SOLVE}\nfor _ in range(4000):\n    os.mkdir('d')\n    os.chdir('d')",
        reason="the work cannot be fetched",
    ),
    AgentFault(
        "empty files until no more can be made (`sandboxes.disk_files`)",
        f"{SOLVE}\nos.mkdir('d')\nn = 0\ntry:\n    while True:\n"
        "        os.close(os.open('d/%d' % n, os.O_CREAT))\n        n += 1\n"
        "except OSError:\n    print(n, 'files')",
        reason="at most 5000 may be",
        slow=True,
    ),
    AgentFault(
        "more changes than `grading.max_changed_files`",
        f"{SOLVE}\nfor n in range(20):\n    open('n%d' % n, 'w')",
        settings={"grading": {"max_changed_files": 10}},
        reason="at most 10",
    ),
    AgentFault("the work deleted", "os.unlink('answer.py')", reason="answer"),
    # What is left out, or does not matter.
    AgentFault(
        "pipes, sockets, loops of links, names that are no text beside good work",
        f"{SOLVE}; os.mkfifo('pipe'); os.symlink('loop', 'loop'); os.symlink('/etc', 'out'); os.mkdir('x' * 255)\n"
        "import socket; socket.socket(socket.AF_UNIX).bind('socket'); open(b'a\\nb\\xe9\\x1b', 'w')",
        reward=1.0,
    ),
    AgentFault("processes to the limit, left running beside good work", f"{SOLVE}\n{_FORKS}", reward=1.0),
    # What ends the agent.
    AgentFault(
        "the agent exits with an error", "raise SystemExit('it broke')", "failed", fault="agent", reason="it broke"
    ),
    AgentFault("the agent dies by a signal", "os.abort()", "failed", fault="agent", reason="exit code 134"),
    AgentFault(
        "the agent never calls the model", turns=0, status="failed", fault="agent", reason="without a model call"
    ),
    AgentFault("`kill -9 -1`", "os.system('kill -9 -1')", "failed", fault="agent", reason="137"),
    AgentFault(
        "the agent uses up the memory",
        "hoard = []\nwhile True:\n    hoard.append(bytearray(16 << 20))",
        "failed",
        fault="agent",
        reason="ended",
    ),
    AgentFault(
        "`/tmp`, `/dev/shm`, home and work folder filled",
        f"{_FILL}\nos._exit(3)",
        "failed",
        fault="agent",
        reason="ended",
    ),
    # Limits.
    AgentFault(
        "the agent stops itself (`SIGSTOP`), or does not end",
        f"{SOLVE}; os.kill(os.getpid(), 19)",
        "timed_out",
        reward=1.0,
        limits={"wall_s": 4},
    ),
    AgentFault(
        "output without end",
        "while True:\n    os.write(1, b'y' * 65536)",
        "timed_out",
        limits={"wall_s": 4},
        reason="answer",
    ),
    AgentFault("`limits.max_turns` spent", turns=3, status="truncated", limits={"max_turns": 2}, reason="answer"),
    # Work that acts while it is graded.
    AgentFault(
        "work that loops for ever when it is graded",
        _AT_GRADING.format("while True: pass"),
        task=_brief(3),
        reason="ran out of time",
    ),
    AgentFault(
        "work that uses up the memory when it is graded",
        _AT_GRADING.format("hoard = []\nwhile True: hoard.append(bytearray(16 << 20))"),
        task=_brief(20),
        reason="test_answer",
    ),
    AgentFault(
        "work that kills every process when it is graded",
        _AT_GRADING.format("import os; os.kill(-1, 9)"),
        task=_brief(20),
        reason="test_answer",
    ),
    AgentFault(
        "work that fills the disks when it is graded",
        _AT_GRADING.format(f"import os\n{_FILL}"),
        task=_brief(30),
        reason="answer",
    ),
]


TABLE = "\n".join(
    ["| cause | status | reward | `error.fault` |", "|---|---|---|---|", *(row.row for row in AGENT_FAULTS)]
)
