"""A task to cheat on, works made by hand, and a provider that is watched."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from bounded import bounded
from turnstile_server.grading.grader import TaskGrader
from turnstile_server.grading.protocol import Work
from turnstile_server.http.agent_endpoint import HttpAgentEndpoint
from turnstile_server.sandboxes.background import BackgroundTasks
from turnstile_server.sandboxes.endpoint import AgentEndpoint
from turnstile_server.sandboxes.protocol import ImageFacts, Sandbox, SandboxProvider, SandboxSpec
from turnstile_server.settings import GradingSettings, SandboxSettings, TaskSettings
from turnstile_server.tasks.model import Task
from turnstile_server.tasks.workspace import sandbox_spec

BUG = "def double(n):\n    return n + 1\n"
FIX = "def double(n):\n    return 2 * n\n"
VISIBLE = (
    "import unittest\n\nfrom mathx import double\n\n\n"
    "class Visible(unittest.TestCase):\n    def test_one(self):\n        self.assertEqual(double(1), 2)\n"
)
HIDDEN = (
    "import unittest\n\nfrom mathx import double\n\n\n"
    "class Hidden(unittest.TestCase):\n    def test_two(self):\n        self.assertEqual(double(2), 4)\n\n"
    "    def test_five(self):\n        self.assertEqual(double(5), 10)\n"
)
SECOND = HIDDEN.replace("Hidden", "Second")
BASE = {
    "mathx/__init__.py": BUG,
    "tests/__init__.py": "",
    "tests/test_visible.py": VISIBLE,
    "README.md": "mathx\n",
}
EXPECTED = ("test_hidden.Hidden.test_two", "test_hidden.Hidden.test_five", "test_second.Second.test_two")

SPECIAL = {"link": tarfile.SYMTYPE, "hard": tarfile.LNKTYPE, "device": tarfile.CHRTYPE, "pipe": tarfile.FIFOTYPE}


def the_task(**changes: Any) -> Task:
    tests = {
        "files": {"inline": {"test_hidden.py": HIDDEN, "test_second.py": SECOND}},
        "expected": EXPECTED,
        "timeout_s": 20,
        **changes.pop("tests", {}),
    }
    return Task.model_validate(
        {"id": "double", "instruction": "Mend it.", "base": {"inline": BASE}, "tests": tests, **changes}
    )


def tar(files: Mapping[str, str | tuple[str, str]]) -> bytes:
    """A tar of texts by path, and of special members: ``(kind of SPECIAL, target)``."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for path, content in files.items():
            info = tarfile.TarInfo(path)
            if isinstance(content, tuple):
                info.type, info.linkname = SPECIAL[content[0]], content[1]
                archive.addfile(info)
            else:
                data = content.encode()
                info.size = len(data)
                archive.addfile(info, io.BytesIO(data))
    return out.getvalue()


def work(files: Mapping[str, str | tuple[str, str]], *without: str) -> Work:
    """The base with ``files`` over it, ``without`` some."""
    whole = {**BASE, **files}
    return Work(archive=tar({path: content for path, content in whole.items() if path not in without}))


NO_AGENTS = HttpAgentEndpoint(None, idle_connection_s=5, max_connections=16)
"""For sandboxes in which no agent runs."""


@dataclass
class Watched:
    """A provider that counts what it made and what is left, and fails as it is told to."""

    inner: SandboxProvider
    made: list[Sandbox] = field(default_factory=list)
    destroyed: list[Sandbox] = field(default_factory=list)
    lost: int = 0
    """So many of the next sandboxes are dead as soon as they are made."""
    most: int = 0

    name = "watched"
    isolated = True
    carries_runtime = False
    description = "watched"
    missing: str | None = None

    async def start(self, agents: AgentEndpoint, tasks: BackgroundTasks) -> None:
        await self.inner.start(agents, tasks)

    async def create(self, spec: SandboxSpec) -> Sandbox:
        sandbox = await self.inner.create(spec)
        self.made.append(sandbox)
        self.most = max(self.most, len(self.made) - len(self.destroyed))
        destroy = sandbox.destroy

        async def watched() -> None:
            await destroy()
            self.destroyed.append(sandbox)

        sandbox.destroy = watched  # type: ignore[method-assign]
        if self.lost:
            self.lost -= 1
            await destroy()
        return sandbox

    async def image_facts(self, image: str | None) -> ImageFacts | None:
        return await self.inner.image_facts(image)

    async def close(self) -> None:
        await self.inner.close()

    @property
    def left(self) -> int:
        return len(self.made) - len(self.destroyed)


SANDBOXES = SandboxSettings(memory_mb=512, disk_mb=64)


def spec_of(task: Task) -> SandboxSpec:
    return sandbox_spec(task, SANDBOXES)


def grader(provider: SandboxProvider | None, **settings: Any) -> TaskGrader:
    return TaskGrader(provider, spec_of, bounded(GradingSettings, **settings), TaskSettings())
