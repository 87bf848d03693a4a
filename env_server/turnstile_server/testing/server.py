"""A whole server around a scripted policy: real gate, renderer, journal, sandboxes, agents and grading; no model.

Built by the app's own assembly, with another engine and recording sandboxes. It opens one port, for agents; its
control API is called in this process. It owns everything that it starts, on a temporary data folder, and releases
all of it however the block is left. Several may run at once, in one process too.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import anyio
import httpx

from turnstile.models import (
    AuditReport,
    Episode,
    EpisodeCreated,
    EpisodeRequest,
    Limits,
    SampleSet,
    TaskRef,
    Turn,
)
from turnstile.models.samples_encoding import decode_samples
from turnstile_server.app import open_apps
from turnstile_server.backends import Backends, build_backends
from turnstile_server.capture.keys import tools_key
from turnstile_server.errors import StartupError
from turnstile_server.http.listeners import Listener, bind, url_of
from turnstile_server.rendering.protocol import Renderer
from turnstile_server.rendering.vocabulary import Vocabulary
from turnstile_server.settings import Settings
from turnstile_server.testing.chat_format import ChatFormat
from turnstile_server.testing.policy import Policy
from turnstile_server.testing.recording import AgentRequest, Recording, RecordingProvider, counted
from turnstile_server.testing.scripted_engine import CHUNK_TOKENS, ScriptedEngine

TOKENIZER_FOLDER: Final = Path(__file__).parent / "model"
"""Tokenizer and chat template of ``examples/make_tiny_model.py``, without weights."""

POLL_S: Final = 30.0
"""Longest wait of one request for the end of an episode."""

_NO_REFUSAL = (AgentRequest("DELETE", "/mcp", 410), AgentRequest("GET", "/mcp", 405))
"""The goodbye to the MCP endpoint may come when the agent's process has ended, and the episode with it. 405 is
MCP's answer where there is no stream."""


@dataclass(frozen=True, slots=True)
class PlayedEpisode:
    """An episode that ended, and all that the server recorded of it.

    ``wall_s`` counts from its creation and includes the agent's installation. ``peak_bytes`` is the peak memory
    of its sandbox, None where the sandbox cannot tell. ``requests`` counts the agent's requests by kind.
    """

    episode: Episode
    turns: tuple[Turn, ...]
    samples: SampleSet
    audit: AuditReport
    wall_s: float
    peak_bytes: int | None
    requests: dict[AgentRequest, int]

    @property
    def refused(self) -> dict[str, int]:
        """Number of the agent's refusals by request: ``{"POST /v1/no-such 404": 1}``, in alphabetical order.

        Without what MCP expects: ``_NO_REFUSAL``.
        """
        refused = {
            f"{one.method} {one.path} {one.status}": count
            for one, count in self.requests.items()
            if one.status >= 400 and one not in _NO_REFUSAL
        }
        return dict(sorted(refused.items()))

    @property
    def accounted(self) -> bool:
        """Every sampled token is trained in one sample, or listed as untrained with a reason."""
        masked = sum(int(sample.loss_mask.sum()) for sample in self.samples.samples)
        listed = sum(entry.tokens for entry in self.samples.untrained)
        sampled = sum(len(turn.completion_ids) for turn in self.turns)
        stats = self.samples.stats
        return masked + listed == sampled == stats.sampled_tokens and stats.trained_tokens == masked

    @property
    def offered_tools(self) -> bool:
        """True if a call offered the model any tools."""
        return any(turn.tools_key != tools_key((), turn.template_hash) for turn in self.turns)

    @property
    def tool_calls(self) -> int:
        """Tool calls that the agent ran: their results came back to the model."""
        return len(self.tool_results)

    @property
    def tool_results(self) -> dict[str, str]:
        """What came back to the model for its tool calls, by the id of the call."""
        given = {call.id for turn in self.turns for call in turn.reply.tool_calls}
        messages = (message for turn in self.turns for message in turn.new_messages)
        return {str(one.tool_call_id): one.content for one in messages if one.tool_call_id in given}


class ScriptedServer:
    """A running server. ``control`` calls its control API, without authentication."""

    def __init__(
        self, control: httpx.AsyncClient, agent_url: str, backends: Backends, recording: Recording
    ) -> None:
        self.control = control
        self.agent_url = agent_url
        self.backends = backends
        self._recording = recording

    async def create(self, request: EpisodeRequest) -> EpisodeCreated:
        """Starts an episode. Raises RequestRefused."""
        reply = await self.control.post("/episodes", json=request.model_dump(mode="json", exclude_unset=True))
        return EpisodeCreated.model_validate_json(_checked(reply).content)

    async def play(
        self, agent: str, task: str | TaskRef, *, limits: Limits | None = None, env: dict[str, str] | None = None
    ) -> PlayedEpisode:
        """Runs one episode from its creation to its end. ``task``: an id, or an inline task.

        An episode whose end is not awaited (a cancellation, an error) is cancelled. Raises RequestRefused.
        """
        ref = TaskRef(id=task) if isinstance(task, str) else task
        began = time.monotonic()
        created = await self.create(
            EpisodeRequest(task=ref, agent=agent, limits=limits or Limits(), env=env or {})
        )
        try:
            episode = await self.wait_for_end(created.episode_id)
        except BaseException:
            with anyio.CancelScope(shield=True):
                await self.control.post(f"/episodes/{created.episode_id}/cancel")
            raise
        return await self.records_of(episode, time.monotonic() - began)

    async def wait_for_end(self, episode_id: str) -> Episode:
        """Returns the episode when it has ended. Raises RequestRefused."""
        while True:
            reply = await self.control.get(f"/episodes/{episode_id}", params={"wait": POLL_S})
            episode = Episode.model_validate_json(_checked(reply).content)
            if episode.status.ended:
                return episode

    async def records_of(self, episode: Episode, wall_s: float) -> PlayedEpisode:
        """All that the server recorded of an episode. Raises RequestRefused."""
        at = f"/episodes/{episode.episode_id}"
        turns = _checked(await self.control.get(f"{at}/turns")).json()["turns"]
        samples = _checked(await self.control.get(f"{at}/samples"))
        audit = _checked(await self.control.post(f"{at}/audit"))
        return PlayedEpisode(
            episode,
            tuple(Turn.model_validate(turn) for turn in turns),
            decode_samples(samples.content),
            AuditReport.model_validate_json(audit.content),
            wall_s,
            self._recording.peak_bytes.get(episode.episode_id),
            dict(self._recording.requests[episode.episode_id]),
        )


class RequestRefused(Exception):
    """The server refused a request; the message is the server's."""


def _checked(reply: httpx.Response) -> httpx.Response:
    if reply.is_error:
        raise RequestRefused(reply.json()["error"]["message"])
    return reply


@asynccontextmanager
async def scripted_server(
    settings: Settings,
    policy: Policy | None,
    *,
    recording: Recording | None = None,
    chunk_tokens: int = CHUNK_TOKENS,
    chunk_pause_s: float = 0.0,
) -> AsyncIterator[ScriptedServer]:
    """Runs a server whose completions ``policy`` writes; None: the engine of ``settings`` does.

    Tokenizer and chat template are those of ``settings.model`` or, without one, of the shipped model. The ports,
    data folder and authentication of ``settings`` are not used. Raises StartupError.
    """
    recording = recording or Recording()

    def make_engine(vocabulary: Vocabulary, renderer: Renderer) -> ScriptedEngine:
        assert policy is not None
        chat = ChatFormat(vocabulary, renderer)
        return ScriptedEngine(
            policy, chat, vocab_size=vocabulary.size, chunk_tokens=chunk_tokens, chunk_pause_s=chunk_pause_s
        )

    failure: Exception | None = None
    async with AsyncExitStack() as stack:
        own = _own_settings(settings, stack)
        agent_socket = bind("agent", "127.0.0.1", 0)
        stack.callback(agent_socket.close)
        agent_url = url_of(agent_socket)
        backends = build_backends(own)
        backends = replace(backends, sandboxes=RecordingProvider(backends.sandboxes, recording))
        model = own.model or TOKENIZER_FOLDER
        apps = await open_apps(
            own,
            model,
            agent_url,
            stack,
            make_engine=None if policy is None else make_engine,
            backends=backends,
            observe=lambda app: counted(app, recording.requests),
        )
        idle_s, grace_s = own.gate.idle_connection_s, own.shutdown_grace_s
        listener = Listener(
            apps.agent, agent_socket, idle_s=idle_s, grace_s=grace_s, access_log=False, websockets=False
        )
        listener.last_words = apps.stopping.cut
        control = httpx.AsyncClient(
            transport=httpx.ASGITransport(app=apps.control), base_url="http://127.0.0.1", timeout=None
        )
        await stack.enter_async_context(control)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(listener.serve)
            try:
                yield ScriptedServer(control, agent_url, backends, recording)
            except Exception as error:  # noqa: BLE001 - raised below as it is; the task group would wrap it
                failure = error
            finally:
                apps.closing.set()
                listener.stop()
    if failure is not None:
        raise failure


def _own_settings(settings: Settings, stack: AsyncExitStack) -> Settings:
    """The settings with temporary folders, without keys. Raises StartupError."""
    parent = settings.sandboxes.run_dir
    try:
        if parent is not None:
            parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # A short name: the sandboxes' sockets are below it, and a socket's path is at most 107 bytes.
        made = tempfile.TemporaryDirectory(prefix="turnstile-r-", dir=parent, ignore_cleanup_errors=True)
    except OSError as error:
        raise StartupError(f"no temporary folder can be made for the server: {error}") from error
    folder = Path(stack.enter_context(made)).absolute()
    update = {
        "data_dir": folder / "data",
        "control": settings.control.model_copy(update={"auth": False}),
        "sandboxes": settings.sandboxes.model_copy(update={"run_dir": folder / "run"}),
        "journal": settings.journal.model_copy(update={"durability": "process"}),
    }
    return settings.model_copy(update=update)
