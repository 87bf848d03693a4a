"""The episode's sandbox for code that runs in a world's thread: blocking calls, bounded, made on the server's
loop."""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from turnstile_server.errors import FileProblem
from turnstile_server.own_tools import CommandOutput
from turnstile_server.sandboxes.protocol import Command, Sandbox
from turnstile_server.sandboxes.shell import shell_argv
from turnstile_server.settings import SandboxSettings
from turnstile_server.threads import LoopCaller
from turnstile_server.tools.functions import decoded

T = TypeVar("T")


class BlockingSandbox:
    """A ``WorldSandbox``. ``sandbox_of`` gives the sandbox while it may be used. Made on the server's loop.

    A sandbox that died raises SandboxFailed through the world's code, so the fault is not the task's.
    """

    def __init__(self, sandbox_of: Callable[[], Sandbox | None], settings: SandboxSettings) -> None:
        self._sandbox_of = sandbox_of
        self._settings = settings
        self._loop = LoopCaller()
        self.asked = False
        """The world's code has used it, also where it is not there."""
        self.answered = False
        """It has said something, which the agent may have made to mislead."""

    @property
    def workdir(self) -> str:
        return self._sandbox().workdir

    def read(self, path: str) -> bytes:
        sandbox = self._sandbox()
        return self._wait(sandbox.read(_absolute(sandbox, path), self._settings.max_file_bytes))

    def write(self, path: str, data: bytes) -> None:
        sandbox = self._sandbox()
        self._wait(sandbox.write(_absolute(sandbox, path), data))

    def run(self, command: str, *, timeout_s: float = 60.0) -> CommandOutput:
        argv = shell_argv(command)
        result = self._wait(self._sandbox().exec(Command(argv, timeout_s=timeout_s)))
        return CommandOutput(result.exit_code, decoded(result.stdout), decoded(result.stderr))

    def _sandbox(self) -> Sandbox:
        self.asked = True
        sandbox = self._sandbox_of()
        if sandbox is None:
            raise OSError("the episode's sandbox is not there: it is not ready yet, or gone")
        return sandbox

    def _wait(self, call: Coroutine[Any, Any, T]) -> T:
        self.answered = True
        try:
            return self._loop.wait_for(call)
        except FileProblem as error:
            raise OSError(error.message) from error


def _absolute(sandbox: Sandbox, path: str) -> str:
    return posixpath.join(sandbox.workdir, path)
