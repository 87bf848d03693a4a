"""A work judged in a copy of its task: a sandbox of its own in which no agent ever was.

The order: the clean task and its set-up; what a judge needs before the work is there; the agent's archive beside
it; the diff applied by our own program; the archive removed; then the judge, which may put hidden material there.

What must hold: the archive is never opened on the host; every sandbox made here is destroyed, also on
cancellation; only deaths of sandboxes are tried again; work that cannot be taken over, or ends every sandbox in
which it is judged (where nothing shows that the machine did), scores 0; nothing else becomes a score.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import anyio
import anyio.to_thread

from turnstile.models import SpanKind
from turnstile_server.egress.log import NetworkLog
from turnstile_server.egress.policy import NetworkPhase
from turnstile_server.errors import (
    FileProblem,
    SandboxDeath,
    SandboxFailed,
    SandboxUnavailable,
    TaskFailed,
    TurnstileError,
)
from turnstile_server.grading.bounds import GradingBounds
from turnstile_server.grading.digest import GraderDigests
from turnstile_server.grading.programs import PLACE, PROGRAMS, SHARED, pack_programs, python_of
from turnstile_server.grading.protocol import Component, GradingTools, Work
from turnstile_server.grading.verdict import DiffVerdict, read_diff
from turnstile_server.sandboxes.protocol import Command, Sandbox
from turnstile_server.settings import GradingSettings
from turnstile_server.spans import OpenSpan, nested
from turnstile_server.tasks.files import Files
from turnstile_server.tasks.model import Task
from turnstile_server.tasks.tarball import archive_of, pack
from turnstile_server.tasks.workspace import not_work_of, prepare_workspace

WORK = f"{PLACE}/work"
_KNOWN = 10_000
"""Tasks that are remembered: requests may bring any number of their own."""
RESULT_BYTES = 16 << 20


class CopyJudge(Protocol):
    """Judges one work in its copy."""

    @property
    def component(self) -> str:
        """Name of the component that it gives."""
        ...

    @property
    def protected(self) -> Sequence[str]:
        """Globs of paths whose changes are left out of the diff."""
        ...

    @property
    def elsewhere(self) -> bool:
        """It is at something outside of the work's sandbox, or was when it was ended: what goes wrong there, and
        the time that it takes, is not the work's doing."""
        ...

    async def prepare(self, sandbox: Sandbox) -> None:
        """Before the work is there: the task, its set-up and our programs are. Raises as ``judge`` does."""
        ...

    async def judge(self, sandbox: Sandbox, diff: DiffVerdict) -> Component:
        """Judges the work, which is in place; ``diff`` says what of it is. The component's detail and summary have
        the diff's, too.

        Raises TaskFailed, and SandboxFailed and SandboxUnavailable, which are tried again.
        """
        ...


@dataclass(slots=True)
class _Attempt:
    """Facts about one attempt at a grading."""

    with_work: bool = False
    """The work had come into the sandbox, so what happened from then on may be its doing."""
    elsewhere: bool = False
    """The judge was when it ended."""
    error: SandboxFailed | SandboxUnavailable | None = None

    @property
    def lost(self) -> bool:
        """Something outside ended it, as far as its judge and its sandbox show."""
        return (
            self.elsewhere or not isinstance(self.error, SandboxFailed) or self.error.death is SandboxDeath.OUTSIDE
        )


class JudgedCopies:
    """Makes the copies of one grading, at most ``grading.parallel`` at once over all graders."""

    def __init__(self, tools: GradingTools) -> None:
        self._provider = tools.sandboxes
        self._spec_of = tools.spec_of
        self._settings = tools.settings
        self._bounds = tools.settings.bounds_of(GradingBounds)
        self._task_settings = tools.tasks
        self._places = tools.places
        self._time: anyio.CancelScope | None = None
        """Bounds the grading while a work is judged."""
        self._pairs = tools.of_server.get(_Pairs, _Pairs)
        self._sound = tools.of_server.get(_SoundTasks, lambda: _SoundTasks(self.pack, tools.settings))

    async def judged(
        self, task: Task, work: Work, judge: CopyJudge, take_second: Callable[[Sandbox], None] | None = None
    ) -> Component:
        """The component that ``judge`` gives. ``take_second`` gets, before it judges, a second copy of the same,
        work and all. Raises as ``Grader.grade`` does."""
        if work.archive is None:
            return _none(judge, "no work was handed in")
        attempts: list[_Attempt] = []
        async with self._places.place(work.span):
            with anyio.move_on_after(self._settings.timeout_s) as time:
                self._time = time
                for _ in range(self._settings.attempts):
                    attempts.append(_Attempt())
                    try:
                        with nested(work.span, SpanKind.GRADER, f"attempt {len(attempts)}") as span:
                            return await self._attempt(task, judge, work, take_second, span, attempts[-1])
                    except (SandboxFailed, SandboxUnavailable) as error:
                        attempts[-1].error = error
        if attempts[-1].error is None:
            attempts[-1].error = SandboxFailed(
                f"Grading took longer than {self._settings.timeout_s:g} s (grading.timeout_s)."
            )
        # One that never had the work says nothing of it: the work could end the one before at such a time that no
        # other can begin.
        latest = next((one for one in reversed(attempts) if one.with_work), attempts[-1])
        assert latest.error is not None
        if not latest.with_work or latest.lost:
            raise latest.error
        return _none(judge, f"the work ended its own grading: {latest.error.message}")

    async def _attempt(
        self,
        task: Task,
        judge: CopyJudge,
        work: Work,
        take_second: Callable[[Sandbox], None] | None,
        span: OpenSpan | None,
        attempt: _Attempt,
    ) -> Component:
        log = work.network
        async with AsyncExitStack() as stack:
            # One after the other: gradings that each wait for their second, with the first in hand, would wait for
            # one another.
            async with nullcontext() if take_second is None else self._pairs.lock:
                copies = [
                    await stack.enter_async_context(self._sandbox(task, span))
                    for _ in range(1 if take_second is None else 2)
                ]
            with nested(span, SpanKind.FILES, "task"):
                await _at_once([partial(self._prepare, sandbox, task, judge, log) for sandbox in copies])
            attempt.with_work = True
            with nested(span, SpanKind.FILES, "diff"):
                for sandbox in copies:
                    diff = await self._apply_diff(sandbox, task, judge, work.archive or b"")
                    if not diff.applied:
                        return Component(0.0, {"diff": dict(diff.detail)}, diff.summary, spoiled=True)
            for sandbox in copies:
                sandbox.enter_phase(NetworkPhase.TESTS, log)
            if take_second is not None:
                take_second(copies[1])
            try:
                with nested(span, SpanKind.GRADER, "judge"):
                    return await judge.judge(copies[0], diff)
            finally:
                attempt.elsewhere = judge.elsewhere

    async def judge_untouched(self, task: Task, judge: Callable[[Sandbox], Awaitable[None]]) -> None:
        """``judge`` in the task as it begins, in a sandbox of its own, to whose work folder the tests may write,
        as where a work is. Not where a task of this content is known to have been judged: whether any work can be
        is the task's alone. The time of a grading begins again, so that a work that uses it up is not the
        infrastructure's failure. Raises as ``judged`` and ``judge`` do."""
        digest = await anyio.to_thread.run_sync(self._sound.digest, task)
        if digest in self._sound.known:
            return
        if self._time is not None:
            self._time.deadline = anyio.current_time() + self._settings.timeout_s
        async with self.without_work(task) as sandbox:
            await self._run_diff(sandbox, task, None, ())
            await judge(sandbox)
        self._sound.add(digest)

    @asynccontextmanager
    async def without_work(self, task: Task) -> AsyncIterator[Sandbox]:
        """The task as it begins, in a sandbox of its own, for a judge that compares. Raises as ``judged`` does."""
        async with self._sandbox(task) as sandbox:
            await self._prepare(sandbox, task, None, None)
            sandbox.enter_phase(NetworkPhase.TESTS, None)
            yield sandbox

    @asynccontextmanager
    async def _sandbox(self, task: Task, span: OpenSpan | None = None) -> AsyncIterator[Sandbox]:
        if self._provider is None:
            raise SandboxUnavailable(
                "This task is graded by tests, and this server has no sandboxes to run them in."
            )
        spec = self._spec_of(task)
        if task.script is not None and task.script.image is not None:
            spec = replace(spec, image=task.script.image)
        with nested(span, SpanKind.SANDBOX, "create") as creating:
            sandbox = await self._provider.create(spec)
            if creating is not None:
                creating.note(waited_s=sandbox.origin.waited_s, warm=sandbox.origin.warm)
        try:
            yield sandbox
        finally:
            with anyio.CancelScope(shield=True), nested(span, SpanKind.SANDBOX, "remove"):
                await sandbox.destroy()

    async def _prepare(
        self, sandbox: Sandbox, task: Task, judge: CopyJudge | None, log: NetworkLog | None
    ) -> None:
        try:
            await prepare_workspace(sandbox, task, self.pack, log)
            # Processes that the set-up left running could change files during the diff.
            await sandbox.stop_all()
            await sandbox.upload(await anyio.to_thread.run_sync(pack_programs, python_of(sandbox)), PROGRAMS)
            if judge is not None:
                await judge.prepare(sandbox)
        except FileProblem as error:
            raise TaskFailed(f"The files of task {task.id} cannot be unpacked: {error.message}") from None

    async def _apply_diff(self, sandbox: Sandbox, task: Task, judge: CopyJudge, archive: bytes) -> DiffVerdict:
        wrapped = await anyio.to_thread.run_sync(
            lambda: pack(None, self._task_settings, extra={"work.tar": archive})
        )
        try:
            await sandbox.upload(wrapped, WORK)
        except FileProblem as error:
            return DiffVerdict(False, detail={"refused": f"the work cannot be taken over: {error.message}"})
        return await self._run_diff(sandbox, task, f"{WORK}/work.tar", judge.protected)

    async def _run_diff(
        self, sandbox: Sandbox, task: Task, work: str | None, protected: Sequence[str]
    ) -> DiffVerdict:
        """``work``: the archive inside; None: only open the folder to the tests."""
        config = {
            "work": work,
            "root": sandbox.workdir,
            "shared": SHARED,
            "protected": protected,
            # With a history that was made for the agent alone, every file of git differs.
            "git": task.git_history == "keep",
            "not_work": not_work_of(task),
            "max_changed": self._settings.max_changed_files,
            "max_shown": self._bounds.max_shown,
        }
        diff = read_diff(
            await sandbox.exec(
                Command(
                    argv=(*python_of(sandbox), f"{PROGRAMS}/inside/start.py", "workdiff"),
                    cwd="/",
                    stdin=json.dumps(config).encode(),
                    timeout_s=self._bounds.diff_timeout_s,
                    max_output_bytes=RESULT_BYTES,
                )
            )
        )
        if diff.fault is not None:
            raise TaskFailed(diff.fault)
        if diff.broken is not None:
            raise SandboxFailed.of(SandboxDeath.OUTSIDE, diff.broken)
        return diff

    def pack(self, files: Files) -> bytes:
        """The task's files as a tar. Raises TaskFailed."""
        return archive_of(files, self._task_settings)


async def _at_once(calls: Sequence[Callable[[], Awaitable[None]]]) -> None:
    """Raises what the first raised that failed, when the others have ended: not in a group."""
    errors: list[TurnstileError] = []
    async with anyio.create_task_group() as group:

        async def run(call: Callable[[], Awaitable[None]]) -> None:
            try:
                await call()
            except TurnstileError as error:
                errors.append(error)
                group.cancel_scope.cancel()

        for call in calls:
            group.start_soon(run, call)
    if errors:
        raise errors[0]


class _Pairs:
    """Makes two sandboxes for one grading. One for a server."""

    def __init__(self) -> None:
        self.lock = anyio.Lock()


class _SoundTasks:
    """Tasks whose untouched files were judged, by their digests. One for a server."""

    def __init__(self, pack: Callable[[Files], bytes], settings: GradingSettings) -> None:
        self.digest = GraderDigests(pack, settings).of
        self.known: OrderedDict[str, None] = OrderedDict()

    def add(self, digest: str) -> None:
        self.known[digest] = None
        while len(self.known) > _KNOWN:
            self.known.popitem(last=False)


def _none(judge: CopyJudge, note: str) -> Component:
    """The component of work that was not judged, by its own doing."""
    return Component(0.0, {judge.component: {"note": note}}, (f"{judge.component}: {note}",), spoiled=True)
