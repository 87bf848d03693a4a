"""One episode, from its creation to its stored end: prepare → run → drain → grade → store.

``EpisodeRun.run_to_end`` is the one task that owns an episode, whether this server launches the agent or an
external agent comes in over the network. Everything else only calls ``request_stop`` with an outcome: the agent's
exit, a finish, a submission, a cancellation, the end of a budget, a limit of time, the death of the sandbox. What
must hold:

1. An episode ends exactly once. ``Lifecycle`` decides how; only ``run_to_end`` acts on it, in one straight line.
2. The end is durable before anyone sees it: ``_store`` appends to the journal, then reports. An end that the
   journal refuses is tried again until it is stored; meanwhile the episode takes no calls and keeps its last
   status.
3. Own tools are released, the sandbox is destroyed and the environment is closed before the end is stored. The
   place among ``episodes.max_running`` is free once the sandbox is gone and the work is to be judged, where one
   more may wait for that; else after the end. ``run_to_end`` releases all of them on every path: success, failure,
   stop, a bug, shutdown.
4. A reward comes from a grading that was finished, or is 0 where the agent failed at a task that is graded;
   otherwise it is None.
5. At shutdown (``interrupt``) an episode without a stop request is not ended or stored: the next start finds it
   unfinished and records ``server_restarted``. The same holds while grading runs. A stop that was requested and
   needs no grade is still stored.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import anyio
from anyio.abc import TaskGroup

from turnstile.models import Episode, EpisodeStatus, NetworkReport, SpanKind
from turnstile_server.backends import Backends
from turnstile_server.engines.versions import WeightVersions
from turnstile_server.episodes.bounds import EpisodeBounds
from turnstile_server.episodes.grading import EpisodeGrading
from turnstile_server.episodes.groups import EpisodeGroup
from turnstile_server.episodes.lifecycle import DRAINED, Lifecycle
from turnstile_server.episodes.outcome import (
    Outcome,
    failed_by,
    outcome_of_exhaustion,
    outcome_of_exit,
    outcome_of_nobody,
    outcome_of_overdue,
)
from turnstile_server.episodes.own_tools import EpisodeOwnTools
from turnstile_server.episodes.places import PlaceClaim, Places
from turnstile_server.episodes.plan import Plan, new_session, opened_environment
from turnstile_server.episodes.rests import EpisodeRests
from turnstile_server.episodes.resumption import ResumedEpisode
from turnstile_server.episodes.run_records import RunRecords
from turnstile_server.episodes.run_tools import RunTools
from turnstile_server.episodes.sandbox import EpisodeSandbox
from turnstile_server.episodes.snapshots import Snapshots
from turnstile_server.episodes.staleness import EpisodeStaleness, StaleAction
from turnstile_server.episodes.steps import EpisodeSteps
from turnstile_server.episodes.store import Forest, Stored
from turnstile_server.episodes.turn_spans import seconds_spent
from turnstile_server.episodes.work_store import WorkStore
from turnstile_server.errors import Gone, SandboxFailed, SandboxUnavailable, TurnstileError
from turnstile_server.gate.pipeline import CallPipeline
from turnstile_server.journal.protocol import Journal
from turnstile_server.journal.records import answer_record, span_record
from turnstile_server.replay.recorder import Replays
from turnstile_server.settings import Settings
from turnstile_server.spans import OpenSpan, SpanRecorder
from turnstile_server.tasks.episode_task import started
from turnstile_server.trace_context import TraceContext

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RunParts:
    """The parts that every run shares. ``places``: one for each of ``episodes.max_running``. ``changed(run,
    before)`` is called after each change of status, with the status before it; for the last one, after the end is
    durable. ``weights(run)``: other weights than before have sampled a token of it."""

    journal: Journal
    pipeline: CallPipeline
    backends: Backends
    settings: Settings
    places: Places
    versions: WeightVersions
    works: WorkStore
    snapshots: Snapshots
    replays: Replays
    changed: Callable[[EpisodeRun, EpisodeStatus], None]
    weights: Callable[[EpisodeRun], None]


class EpisodeRun:
    """A running episode: its owner task, its model calls, its sandbox.

    ``env``: what the trainer adds to the agent's environment; it is in no record, because it may hold secrets.
    ``resumed``: where it goes on from, after a restart of the server.
    """

    def __init__(
        self,
        stored: Stored,
        plan: Plan,
        group: EpisodeGroup,
        key: str,
        env: Mapping[str, str],
        parts: RunParts,
        resumed: ResumedEpisode | None = None,
    ) -> None:
        episode, settings = stored.episode, parts.settings
        self._stored = stored
        self._plan = plan
        self._key = key
        self._env = env
        self._parts = parts
        self.spans = SpanRecorder(
            episode.timings.created_at,
            settings.episodes.bounds_of(EpisodeBounds).max_spans,
            lambda meta: parts.journal.append_soon(span_record(episode.episode_id, meta)),
        )
        self._life = Lifecycle(episode, graded=plan.task.graded, now=self.spans.zero)
        self._sandbox = EpisodeSandbox.of(episode.episode_id, plan, parts.backends, settings, self.spans)
        replay = parts.replays.of(episode.episode_id) if plan.replay else None
        self._rests = EpisodeRests(episode.episode_id, plan, self._sandbox, parts.snapshots, replay, self.spans)
        self.session = new_session(
            episode,
            plan,
            settings.gate,
            on_exhausted=lambda error: self.request_stop(outcome_of_exhaustion(error)),
            group_since=group.since,
            on_weights=lambda: parts.weights(self),
            between_turns=self._rests.after_turn if self._rests.wanted else None,
            spans=self.spans,
            trace=TraceContext.of(episode.episode_id, episode.traceparent, exported=settings.tracing.otlp),
            resting=parts.pipeline.resting,
        )
        self._resumed = resumed
        if resumed is not None:
            self.session.take_up(resumed.forest.tree, resumed.forest.discarded, resumed.record_bytes)
            self._life.go_on_after(
                (resumed.forest.last_turn_at or 0.0) - episode.timings.created_at, time.monotonic()
            )
        bound = None if episode.staleness is None else episode.staleness.bound
        self.staleness = EpisodeStaleness(bound, group, parts.versions, lambda: self.session.sampled_versions)
        self._environment = opened_environment(
            plan.task,
            self.session,
            parts.backends,
            settings,
            lambda: self._sandbox.for_environment if self._sandbox is not None else None,
        )
        tools_grader = plan.task.tools_grader
        judged_tools = None if tools_grader is None else tools_grader.open_tools(settings.grading)
        self._grader = EpisodeGrading(
            self.episode_id,
            self._sandbox,
            self._environment,
            judged_tools,
            parts.backends,
            parts.works,
            self.spans,
            self._leave_place,
        )
        of_steps = (plan.task, self._sandbox, self._grader, self._life, self.session, parts.pipeline, self.spans)
        self._steps = EpisodeSteps(*of_steps, settings.gate, self._agent_outcome) if plan.task.steps else None
        self._judge = self._steps or self._grader
        self._own_tools = EpisodeOwnTools((*plan.own_tools, self._environment, judged_tools))
        self._records = RunRecords(self._life, parts.journal, self._complete)
        self._stopping = anyio.Event()
        parts_of_run = (self._life, plan.agent, self.session, self._sandbox, self._environment, self._own_tools)
        self.tools = RunTools(
            *parts_of_run,
            self._steps,
            self.spans,
            self.request_stop,
            self._stopping,
            self._store_answer if plan.outlives_server else None,
            None if resumed is None else resumed.answer,
        )
        """The MCP endpoint's view."""
        self._grading = anyio.CancelScope()
        self._has_place = self._left_place = False
        self._changed = anyio.Event()  # set, and replaced, at each change of status
        self._retry = anyio.Event()
        """Set to store a refused end again at once."""

    async def run_to_end(self) -> None:
        """The whole life of the episode. Never raises, and ignores cancellation: ``interrupt`` ends it early."""
        with anyio.CancelScope(shield=True):
            try:
                async with anyio.create_task_group() as tasks:
                    try:
                        await self._prepare_run_and_drain(tasks)
                        await self._rests.end(self.session.latest_turn_id)
                        await self._grade()
                    except Exception as error:  # noqa: BLE001 - the boundary: it fails this episode and no other
                        self._log_bug("an episode failed")
                        failed = failed_by(error, "the server failed")
                        self.request_stop(failed)  # closes the session, if nothing has requested a stop yet
                        self._life.settle(failed)  # replaces an outcome that was requested before the bug
                    finally:
                        self._parts.pipeline.ended(self.session)
                        await self._own_tools.close()
                        if self._sandbox is not None:
                            await self._sandbox.give_up()
                        if self._environment is not None:
                            await self._environment.close()
                await self._store()
            except Exception:  # noqa: BLE001 - the same boundary: the next start finds the episode unfinished
                self._log_bug("the owner task of an episode failed")
            finally:
                if self._has_place:
                    self._parts.places.release()
                elif self._left_place:
                    self._parts.places.end()
                self._records.close(SandboxUnavailable("the server is stopping"))

    async def _prepare_run_and_drain(self, tasks: TaskGroup) -> None:
        """Lasts until a stop is requested. The agent lives until its calls in flight are drained, to receive the
        replies. ``tasks`` holds the own tools, which outlive the agent."""
        async with anyio.create_task_group() as active:
            if self._plan.prepared:
                active.start_soon(self._prepare_and_run, tasks)
            else:
                active.start_soon(self._agent_outcome)
            await self._stopping.wait()
            with self.spans.span(SpanKind.DRAIN):
                await self._own_tools.stop_calls()
                await self._drain()
            active.cancel_scope.cancel()

    async def _prepare_and_run(self, tasks: TaskGroup) -> None:
        """Requests the stop itself: with the agent's exit, or with what failed."""
        try:
            with self.spans.span(SpanKind.QUEUE, start_s=0.0):
                await self._parts.places.acquire(PlaceClaim(self.episode.priority, self.staleness.group.since))
                self._has_place = True
            self._move(EpisodeStatus.PREPARING)
            with self.spans.span(SpanKind.SETUP) as span:
                await self._prepare(tasks, span)
            await self._rests.begin()
            self._move(EpisodeStatus.RUNNING)
            outcome = await (self._agent_outcome() if self._steps is None else self._steps.play())
        except SandboxFailed as error:
            cause = self._sandbox.cause_of(error) if self._sandbox is not None else error
            outcome = Outcome(EpisodeStatus.FAILED, cause)
        except TurnstileError as error:
            outcome = Outcome(EpisodeStatus.FAILED, error)
        except Exception as error:  # noqa: BLE001 - the boundary to agents and sandboxes: it fails this one only
            self._log_bug("an episode failed")
            outcome = failed_by(error, "the server failed")
        self.request_stop(outcome)

    async def _prepare(self, tasks: TaskGroup, span: OpenSpan) -> None:
        """The environment first, because it may write the instruction and the files of the work folder."""
        if self._environment is not None:
            with span.child(SpanKind.WORLD, "reset"):
                start = await self._environment.reset(self.episode.seed)
            task = started(self._plan.task, start, self._parts.settings.tasks)
            self._plan = replace(self._plan, task=task)
            self._life.instruct(task.instruction)
        if self._sandbox is not None:
            await self._sandbox.prepare(self._plan.task, span)
        if self._own_tools:
            with span.child(SpanKind.OWN_TOOLS):
                await self._own_tools.open(self.tools, tasks)

    async def _agent_outcome(self) -> Outcome:
        """The outcome of the agent. With an external agent, this lasts until a stop that is requested elsewhere
        cancels it, or its sandbox dies."""
        agent, session, sandbox = self._plan.agent, self.session, self._sandbox
        before = len(session.tree)
        with self.spans.span(SpanKind.AGENT, self.episode.agent, stoppable=True, step=session.step) as span:
            if sandbox is None:
                await anyio.sleep_forever()
            assert sandbox is not None
            if agent is None:
                raise await sandbox.death()
            if self._steps is not None:
                await self._rests.begin()
            try:
                end = await sandbox.run_agent(self._key, session.limits.max_turns, self._env)
            finally:
                self._life.note_killed(sandbox.killed_output)
            turns = len(session.tree) - before
            outcome = outcome_of_exit(end, agent, turns=turns, last_refusal=session.last_refusal)
            span.note(exit_code=end.exit_code)
            span.error = None if outcome.error is None else outcome.error.type
            return outcome

    async def _store_answer(self, answer: str) -> None:
        await self._parts.journal.append(answer_record(self.episode_id, answer))

    async def _drain(self) -> None:
        """Lets model calls in flight end by themselves for ``gate.drain_s``, then has the engine abort them."""
        stop = self._life.stop
        if stop is not None:
            wait_s = self._parts.settings.gate.drain_s if stop.status in DRAINED else 0.0
            await self._parts.pipeline.drain(self.session, wait_s, stop.status.value)

    def _leave_place(self) -> None:
        """Another episode may be prepared while the work of this one waits to be judged."""
        if self._has_place and self._parts.places.leave():
            self._has_place, self._left_place = False, True

    async def _grade(self) -> None:
        """Settles the outcome with its grade, or with why there is none. A cancellation or a shutdown cuts it
        short; then it settles nothing."""
        stop = self._life.stop
        if stop is None or self._life.shutting_down:
            return
        if stop.by_agent and stop.error is not None and self.graded:
            grade = self._judge.unearned(self._plan.task, f"agent: {stop.error.message}")
            self._life.settle(replace(stop, grade=grade))
        if not self._life.needs_grade:
            return
        if self._environment is not None and self._environment.turn_rewards:
            await self._records.keep()
        self._move(EpisodeStatus.GRADING)
        graded = None
        with self._grading:
            graded = await self._judge.graded(stop, self._plan.task, self.tools.answer)
        if graded is not None and self._life.needs_grade:
            self._life.settle(graded)

    async def _store(self) -> None:
        """Stores a decided outcome, again and again until the journal has taken it or the server stops."""
        while self._life.decided and not await self._try_to_store() and not self._life.shutting_down:
            self._retry = anyio.Event()
            with anyio.move_on_after(self._parts.settings.episodes.bounds_of(EpisodeBounds).watch_interval_s):
                await self._retry.wait()

    async def _try_to_store(self) -> bool:
        before = self.episode.status
        stored = await self._records.end(self._seal)
        if stored:
            self._report(before)
        return stored

    def _seal(self) -> None:
        self.session.seal()
        self.spans.seal()

    def _complete(self, episode: Episode) -> Stored:
        measured = self.measured(episode)
        if episode.status.ended:
            spent = seconds_spent(episode, self.session.tree, self.spans)
            measured = measured.model_copy(update={"seconds": spent})
        return replace(self._stored, episode=measured, network=self.network)

    async def store_rewarded(self, make: Callable[[Episode, Sequence[str]], Episode]) -> Episode | None:
        """Stores what ``make`` makes of the running record and its turns' ids. None: it has ended meanwhile."""
        return await self._records.change(lambda episode: make(episode, self.forest.own_turn_ids))

    def _move(self, status: EpisodeStatus) -> None:
        before = self.episode.status
        self._life.move(status, time.monotonic())
        self._report(before)

    def _report(self, before: EpisodeStatus) -> None:
        try:
            self._parts.changed(self, before)
        except Exception:  # noqa: BLE001 - the boundary to metrics and readers: no episode fails by them
            self._log_bug("a change of status could not be reported")
        changed, self._changed = self._changed, anyio.Event()
        changed.set()

    def _log_bug(self, message: str) -> None:
        _LOG.exception(message, extra={"episode_id": self.episode_id})

    # Stop requests

    def request_stop(self, outcome: Outcome) -> None:
        """Asks the owner task to end the episode. From now on it admits no call. May be repeated: ``Lifecycle``
        says which request counts; any request makes the next attempt to store a decided end immediate."""
        if self._life.request_stop(outcome):
            self.session.close(
                Gone(f"episode {self.episode_id} has ended ({outcome.status.value}); its key is dead")
            )
            if self._stopping.is_set():  # a cancellation that replaces an earlier outcome
                self._grading.cancel()
            self._stopping.set()
        self._retry.set()

    @property
    def stopping(self) -> bool:
        return self._life.stop is not None

    def stop_stale(self, action: StaleAction) -> None:
        status = EpisodeStatus.CANCELLED if action is StaleAction.CANCEL else EpisodeStatus.TRUNCATED
        self.request_stop(Outcome(status, self.staleness.error()))

    def check_limits(self) -> None:
        """Requests a stop when the episode is over its wall or idle limit."""
        session = self.session
        error = self._life.overdue(
            time.monotonic(), calls_in_flight=bool(session.in_flight), last_activity=session.last_activity
        )
        if error is not None:
            outcome = outcome_of_overdue(error, self.episode.status)
            self.request_stop(outcome_of_nobody() if self._nobody_came else outcome)

    @property
    def _nobody_came(self) -> bool:
        """The server was restarted while the episode ran, and its agent has done nothing since."""
        session = self.session
        if self._resumed is None or self.tools.answer != self._resumed.answer:
            return False
        return not session.last_activity and not session.in_flight

    def interrupt(self) -> None:
        """The server stops. ``run_to_end`` returns soon; see the head of this module for what it still stores."""
        self._life.shut_down()
        self._stopping.set()
        self._rests.give_up()
        self._grading.cancel()
        self._retry.set()

    # What others see

    @property
    def episode(self) -> Episode:
        """The record as it is now, without statistics."""
        return self._life.episode

    def measured(self, episode: Episode) -> Episode:
        """The record with its statistics, staleness and rewards of turns as they are now."""
        given = {**({} if self._environment is None else self._environment.turn_rewards), **episode.turn_rewards}
        update = {"staleness": self.staleness.measured(), "turn_rewards": given}
        return self.forest.counted(episode).model_copy(update=update)

    @property
    def episode_id(self) -> str:
        return self._life.episode.episode_id

    @property
    def key_nonce(self) -> str:
        return self._stored.key_nonce

    @property
    def graded(self) -> bool:
        """The task says how to grade the work."""
        return self._plan.task.graded

    @property
    def network(self) -> NetworkReport | None:
        """None without a sandbox."""
        return None if self._sandbox is None else self._sandbox.network.report(self.episode_id)

    @property
    def forest(self) -> Forest:
        return Forest(self.session.tree, self.session.discarded)

    async def wait_for_change(self, seconds: float) -> None:
        """Returns at the next change of status, or after ``seconds``."""
        seen = self._life.episode
        with anyio.move_on_after(seconds):
            while self._life.episode is seen:
                await self._changed.wait()

    async def wait_until_stored(self) -> None:
        """Returns when the end is stored. Raises what the next failed attempt raised (JournalUnavailable), or
        SandboxUnavailable when the server stops first."""
        await self._records.wait()
