"""One running episode as its tools see it: what ``EpisodeTools`` asks of it, and the answer that was submitted."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager

import anyio

from turnstile.models import EndedBy, EpisodeStatus, SpanKind
from turnstile_server.agents.spec import AgentSpec
from turnstile_server.episodes.lifecycle import Lifecycle
from turnstile_server.episodes.outcome import Outcome
from turnstile_server.episodes.own_tools import EpisodeOwnTools
from turnstile_server.episodes.sandbox import EpisodeSandbox
from turnstile_server.episodes.steps import EpisodeSteps
from turnstile_server.errors import Conflict, TurnstileError
from turnstile_server.gate.session import EpisodeSession
from turnstile_server.sandboxes.protocol import Sandbox
from turnstile_server.spans import OpenSpan, SpanRecorder
from turnstile_server.tasks.environment import EpisodeEnvironment
from turnstile_server.tools.protocol import ServedTool


class RunTools:
    """Implements the MCP endpoint's EpisodeTools. Owns nothing: what it is made of is the run's. ``stopping`` is
    set at the first stop request, or when the server stops. ``store_answer`` makes an answer durable before it
    counts; None: it is lost with the server, as all else that the episode needs. ``answer``: submitted before a
    restart."""

    def __init__(
        self,
        life: Lifecycle,
        agent: AgentSpec | None,
        session: EpisodeSession,
        sandbox: EpisodeSandbox | None,
        environment: EpisodeEnvironment | None,
        own_tools: EpisodeOwnTools,
        steps: EpisodeSteps | None,
        spans: SpanRecorder,
        request_stop: Callable[[Outcome], None],
        stopping: anyio.Event,
        store_answer: Callable[[str], Awaitable[object]] | None = None,
        answer: str | None = None,
    ) -> None:
        self.answer = answer
        """The answer that was submitted last."""
        self._life = life
        self._agent = agent
        self._session = session
        self._sandbox = sandbox
        self._environment = environment
        self._own_tools = own_tools
        self._steps = steps
        self._spans = spans
        self._request_stop = request_stop
        self._stopping = stopping
        self._store_answer = store_answer

    @property
    def episode_id(self) -> str:
        return self._session.episode_id

    def recorded(self, tool: str, bytes_in: int) -> AbstractContextManager[OpenSpan]:
        turn_id = self._session.latest_turn_id
        return self._spans.span(SpanKind.TOOL, tool, turn_id=turn_id, bytes_in=bytes_in)

    @property
    def sandbox(self) -> Sandbox | None:
        return self._sandbox.for_tools if self._sandbox is not None else None

    @property
    def own_tools(self) -> tuple[ServedTool, ...]:
        return self._own_tools.tools

    @property
    def has_user(self) -> bool:
        return self._environment is not None and self._environment.talks

    @property
    def plain_tools(self) -> bool:
        return self._agent is not None and self._agent.plain_tools

    async def submit(self, answer: str) -> str | None:
        self.check_open()
        if self._store_answer is not None:
            await self._store_answer(answer)
            self.check_open()
        self.answer = answer
        try:
            said = await self._environment.respond(answer) if self._environment is not None else None
        except TurnstileError as error:
            self._request_stop(Outcome(EpisodeStatus.FAILED, error))
            raise
        ends = said is None and self._agent is not None and self._agent.ends_on_submit
        if self._steps is not None:
            self._steps.submit(answer, ends=ends)
        elif ends:
            self._request_stop(Outcome(EpisodeStatus.COMPLETED, by=EndedBy.SUBMISSION))
        return said

    def check_open(self) -> None:
        self._session.check_open()
        if self._life.episode.status in (EpisodeStatus.QUEUED, EpisodeStatus.PREPARING):
            raise Conflict("the episode is still being prepared; wait until the episode is running")

    async def stop_requested(self) -> None:
        await self._stopping.wait()
