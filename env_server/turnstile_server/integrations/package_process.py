"""A program of ours that runs in another package's Python, and scores works there.

What must hold: one request at a time; a request that takes too long, is cancelled, or breaks the protocol ends the
process with its whole process group, and the next request starts a new one; after ``close`` none is started; the
process ends when the server does (it reads the end of its standard input); its environment is built from nothing
but what the settings name.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import anyio
import anyio.to_thread
from anyio.abc import Process
from anyio.streams.buffered import BufferedByteReceiveStream

from turnstile_server.child_processes import start_process

MAX_LINE_BYTES = 64 << 20
_TAIL = 1000
_MAX_SAID_BYTES = 1 << 20
_EXIT_S = 1.0
"""A process whose output has ended is about to end."""

Answer = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]
"""Does what the program asks for. Raises PackageRefusal for what cannot be done by the work's fault."""


class PackageBroken(Exception):
    """The program cannot be run, took too long, or broke the protocol: ``str`` says how, and what to do."""


class PackageStalled(PackageBroken):
    """It took too long over one request."""


class PackageError(Exception):
    """The package itself failed. ``by_work``: over a file that the work did not leave."""

    def __init__(self, message: str, *, by_work: bool) -> None:
        super().__init__(message)
        self.by_work = by_work


class PackageRefusal(Exception):
    """The program asked for something that the work does not have."""


@dataclass(frozen=True, slots=True)
class PackageProgram:
    """A program of ours for another package.

    ``kind``: its name, also in the setting ``tasks.package_pythons``. ``requirement``: the package whose API it
    was written for, pinned.
    """

    kind: str
    requirement: str
    path: Path


@dataclass(frozen=True, slots=True)
class PackagePython:
    """The Python that has a package, the program that uses it, and the variables that its process gets."""

    program: PackageProgram
    python: Path
    environment: tuple[str, ...] = ()
    """Names of the server's own variables that it gets."""

    @property
    def kind(self) -> str:
        return self.program.kind

    @property
    def install(self) -> str:
        """Text that says how to install the package."""
        return (
            f"install {self.program.requirement} into a virtual environment of its own, and name its Python in "
            f"the setting tasks.package_pythons.{self.kind} "
            f"(TURNSTILE_TASKS__PACKAGE_PYTHONS__{self.kind.upper()})"
        )

    def command(self, *arguments: str) -> tuple[str, ...]:
        return (str(self.python), "-I", "-B", str(self.program.path), *arguments)

    @property
    def env(self) -> Mapping[str, str]:
        kept = {name: os.environ[name] for name in self.environment if name in os.environ}
        own = {"PATH": os.environ.get("PATH", os.defpath), "HOME": str(Path.home()), "LANG": "C.UTF-8"}
        return {**own, **kept}

    def failure(self, how: str, stderr: bytes) -> str:
        tail = stderr[-_TAIL:].decode(errors="replace").strip()
        hint = ""
        if "ModuleNotFoundError" in tail:
            hint = f". {self.python} lacks a package: {self.install}"
        return f"the program for {self.kind} {how}{hint}{': ' + tail if tail else ''}"

    def no_place(self, error: OSError) -> PackageBroken:
        return PackageBroken(f"the program for {self.kind} has no place for its temporary files: {error}")


def python_of(program: PackageProgram, pythons: Mapping[Any, Path], environment: Sequence[str]) -> PackagePython:
    """The Python of the settings, else the server's own."""
    return PackagePython(program, pythons.get(program.kind, Path(sys.executable)), tuple(environment))


class PackageProcess:
    """Started by the first request; ``close`` ends it."""

    def __init__(self, python: PackagePython, *, start_timeout_s: float) -> None:
        self._python = python
        self._start_timeout_s = start_timeout_s
        self._turn = anyio.Lock()
        self._flight = anyio.CancelScope()
        """Cancel scope of the request whose turn it is; ``close`` cancels it."""
        self._closed = False
        self._process: Process | None = None
        self._lines: BufferedByteReceiveStream | None = None
        self._said: IO[bytes] | None = None
        """Its standard error, which has what the package prints. A file, because it is read at the end alone."""
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        """The process's current folder: packages read and leave files there."""
        self.version = ""
        """Version of the package; known after the first request."""

    async def request(self, fields: Mapping[str, Any], answer: Answer, *, timeout_s: float) -> dict[str, Any]:
        """Its result. ``timeout_s``: from when it is this request's turn, without the start.

        Raises PackageBroken (PackageStalled), PackageError.
        """
        async with self._turn:
            if not self._closed:
                with anyio.CancelScope() as self._flight:
                    await self._start()
                    return await self._result(fields, answer, timeout_s)
            raise PackageBroken(f"the program for {self._python.kind} was closed: the server stops")

    async def _result(self, fields: Mapping[str, Any], answer: Answer, timeout_s: float) -> dict[str, Any]:
        try:
            with anyio.fail_after(timeout_s):
                return await self._exchange(fields, answer)
        except TimeoutError:
            await self._end()
            raise PackageStalled(f"the program for {self._python.kind} took longer than {timeout_s:g} s") from None
        except PackageError:
            raise
        except BaseException:
            await self._end()
            raise

    async def close(self) -> None:
        """Requests that are being answered, wait or come later raise PackageBroken."""
        self._closed = True
        self._flight.cancel()
        with anyio.CancelScope(shield=True):
            async with self._turn:  # a request ends its process by itself
                await self._end()

    async def _start(self) -> None:
        if self._process is not None and self._process.returncode is None:
            return
        await self._end()
        try:
            self._said = tempfile.TemporaryFile("a+b")  # noqa: SIM115 - `_end` closes it
            self._folder = tempfile.TemporaryDirectory(
                prefix=f"turnstile-{self._python.kind}-", ignore_cleanup_errors=True
            )
        except OSError as error:
            await self._end()
            raise self._python.no_place(error) from error
        try:
            self._process = process = await start_process(
                self._python.command("serve"),
                env=self._python.env,
                cwd=self._folder.name,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._said,
            )
        except OSError as error:
            await self._end()
            raise PackageBroken(
                f"{self._python.python} cannot be started: {error.strerror}. Else {self._python.install}"
            ) from error
        assert process.stdout is not None
        self._lines = BufferedByteReceiveStream(process.stdout)
        try:
            with anyio.fail_after(self._start_timeout_s):
                self.version = str((await self._receive())["ready"])
        except TimeoutError:
            await self._end()
            raise PackageBroken(
                f"the program for {self._python.kind} was not ready within {self._start_timeout_s:g} s "
                "(grading.package_start_timeout_s)"
            ) from None
        except BaseException:
            await self._end()
            raise

    async def _exchange(self, fields: Mapping[str, Any], answer: Answer) -> dict[str, Any]:
        assert self._said is not None
        if os.fstat(self._said.fileno()).st_size > _MAX_SAID_BYTES:
            os.ftruncate(self._said.fileno(), 0)
        await self._send(fields)
        while True:
            said = await self._receive()
            if "ask" in said:
                try:
                    reply = await answer(said)
                except PackageRefusal as refusal:
                    reply = {"error": str(refusal)}
                await self._send(reply)
            elif "error" in said:
                raise PackageError(str(said["error"]), by_work=bool(said.get("by_work")))
            elif isinstance(said.get("result"), dict):
                return dict(said["result"])
            else:
                raise PackageBroken(f"the program for {self._python.kind} sent a line without a result")

    async def _send(self, value: Mapping[str, Any]) -> None:
        process = self._process
        assert process is not None
        assert process.stdin is not None
        line = await anyio.to_thread.run_sync(_line_of, value)
        try:
            await process.stdin.send(line)
        except (anyio.BrokenResourceError, anyio.ClosedResourceError):
            raise await self._ended() from None

    async def _receive(self) -> dict[str, Any]:
        assert self._lines is not None
        try:
            line = await self._lines.receive_until(b"\n", MAX_LINE_BYTES)
        except (anyio.EndOfStream, anyio.IncompleteRead, anyio.BrokenResourceError):
            raise await self._ended() from None
        except anyio.DelimiterNotFound:
            raise PackageBroken(
                f"the program for {self._python.kind} sent a line of more than {MAX_LINE_BYTES} bytes"
            ) from None
        try:
            # Not in a thread: CPython's reader keeps the interpreter for the whole line, so the loop would stand
            # as long (0.1 s for one text of 60 MiB, 0.4 s for 40 MiB of small objects).
            said = json.loads(line)
        except ValueError:
            said = None
        if not isinstance(said, dict):
            raise PackageBroken(f"the program for {self._python.kind} sent a line that is no JSON object")
        return said

    async def _ended(self) -> PackageBroken:
        process = self._process
        assert process is not None
        with anyio.move_on_after(_EXIT_S):
            await process.wait()
        how = "closed its output" if process.returncode is None else f"ended with {process.returncode}"
        return PackageBroken(self._python.failure(how, self._last_words()))

    def _last_words(self) -> bytes:
        return b"" if self._said is None else _last_of(self._said)

    async def _end(self) -> None:
        process, self._process = self._process, None
        said, self._said = self._said, None
        folder, self._folder = self._folder, None
        with anyio.CancelScope(shield=True):
            if process is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
                await process.aclose()
            if said is not None:
                said.close()
            if folder is not None:
                await anyio.to_thread.run_sync(folder.cleanup)


def _last_of(said: IO[bytes]) -> bytes:
    size = os.fstat(said.fileno()).st_size
    return os.pread(said.fileno(), _TAIL, max(0, size - _TAIL))


def _line_of(value: Mapping[str, Any]) -> bytes:
    """For a thread: in pieces, because ``dumps`` keeps the interpreter, and with it the event loop, to its end."""
    return "".join((*json.JSONEncoder().iterencode(value), "\n")).encode()


def listed(python: PackagePython, name: str, config: Mapping[str, Any], out: Any, *, timeout_s: float) -> None:
    """Writes the program's list of tasks into the file ``out``. For the start of a server, before its loop.

    Raises PackageBroken.
    """
    command = python.command("list", name, json.dumps(config))
    try:
        said = tempfile.TemporaryFile()  # noqa: SIM115 - what follows closes it
    except OSError as error:
        raise python.no_place(error) from error
    with said:
        code = _list_into(out, said, python, command, name, timeout_s)
        if code != 0:
            raise PackageBroken(python.failure(f"ended with {code}", _last_of(said)))


def _list_into(
    out: Any, said: IO[bytes], python: PackagePython, command: Sequence[str], name: str, timeout_s: float
) -> int:
    """The exit status. ``said``: a file for what it says beside its list, which may be any amount."""
    try:
        with subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=said,
            env=dict(python.env),
            start_new_session=True,
        ) as process:
            try:
                return process.wait(timeout=timeout_s)
            except subprocess.TimeoutExpired:
                raise PackageBroken(
                    f"{name}: its tasks were not listed within {timeout_s:g} s (tasks.package_list_timeout_s)"
                ) from None
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
    except OSError as error:
        raise PackageBroken(
            f"{python.python} cannot be started: {error.strerror}. Else {python.install}"
        ) from error
