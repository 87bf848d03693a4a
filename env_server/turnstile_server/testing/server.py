"""A whole server around a policy: real gate, renderer, journal, sandboxes, agents and grading; no model, no port
but the agent door's.

Owns everything that it starts, on a temporary data folder, and releases it however the block is left: episodes,
sandboxes, the listener, the folder. Several rehearsals may run at once, in one process too.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import anyio
import anyio.to_thread
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
from turnstile.models.wire import decode_samples
from turnstile_server.app import Parts, assemble, model_folder
from turnstile_server.backends import Backends, build_backends
from turnstile_server.capture.keys import tools_key
from turnstile_server.data_dir import load_secret
from turnstile_server.episodes.keys import EpisodeKeys
from turnstile_server.errors import StartupError
from turnstile_server.http.listeners import Listener, bind, url_of
from turnstile_server.journal.journal import FileJournal
from turnstile_server.observability.metrics import Metrics
from turnstile_server.rendering.factory import create_renderer
from turnstile_server.rendering.vocabulary import load_vocabulary
from turnstile_server.settings import Settings
from turnstile_server.testing.chat import chat_format
from turnstile_server.testing.policy import Policy
from turnstile_server.testing.recording import RecordingProvider, Request, Watch, counted
from turnstile_server.testing.scripted_engine import CHUNK_TOKENS, ScriptedEngine

POLL_S = 30.0
"""One look at an episode that goes on."""


@dataclass(frozen=True, slots=True)
class Rehearsed:
    """An episode that ended. ``wall_s``: from its creation, the agent's installation included. ``peak_bytes``:
    most memory of its sandbox, None where that cannot tell. ``requests``: to the agent door, with how often."""

    episode: Episode
    turns: tuple[Turn, ...]
    samples: SampleSet
    audit: AuditReport
    wall_s: float
    peak_bytes: int | None
    requests: dict[Request, int]

    @property
    def accounted(self) -> bool:
        """Every sampled token is trained in one sample, or listed with a reason."""
        masked = sum(int(sample.loss_mask.sum()) for sample in self.samples.samples)
        listed = sum(entry.tokens for entry in self.samples.untrained)
        sampled = sum(len(turn.completion_ids) for turn in self.turns)
        stats = self.samples.stats
        return masked + listed == sampled == stats.sampled_tokens and stats.trained_tokens == masked

    @property
    def offered_tools(self) -> bool:
        """Whether a call offered the model any."""
        return any(turn.tools_key != tools_key((), turn.template_hash) for turn in self.turns)

    @property
    def tool_calls(self) -> int:
        """Calls that the agent took up: their results came back to the model."""
        given = {call.id for turn in self.turns for call in turn.reply.tool_calls}
        back = {message.tool_call_id for turn in self.turns for message in turn.new_messages}
        return len(given & back - {None})


class Rehearsal:
    """A server that is up. ``control``: its control door, without authentication."""

    def __init__(
        self, control: httpx.AsyncClient, agent_url: str, engine: ScriptedEngine, work: Backends, watch: Watch
    ) -> None:
        self.control = control
        self.agent_url = agent_url
        self.engine = engine
        self.work = work
        self._watch = watch

    async def create(self, request: EpisodeRequest) -> EpisodeCreated:
        """Raises RehearsalRefused."""
        answer = await self.control.post("/episodes", json=request.model_dump(mode="json", exclude_unset=True))
        return EpisodeCreated.model_validate_json(_checked(answer).content)

    async def play(
        self, agent: str, task: str | TaskRef, *, limits: Limits | None = None, env: dict[str, str] | None = None
    ) -> Rehearsed:
        """One episode from its creation to its end. ``task``: an id, or one brought along. An episode that is not
        seen to its end is cancelled. Raises RehearsalRefused for what no episode can be made of."""
        ref = TaskRef(id=task) if isinstance(task, str) else task
        began = time.monotonic()
        made = await self.create(EpisodeRequest(task=ref, agent=agent, limits=limits or Limits(), env=env or {}))
        try:
            episode = await self.ended(made.episode_id)
        except BaseException:
            with anyio.CancelScope(shield=True):
                await self.control.post(f"/episodes/{made.episode_id}/cancel")
            raise
        return await self.told(episode, time.monotonic() - began)

    async def ended(self, episode_id: str) -> Episode:
        while True:
            answer = await self.control.get(f"/episodes/{episode_id}", params={"wait": POLL_S})
            episode = Episode.model_validate_json(_checked(answer).content)
            if episode.status.ended:
                return episode

    async def told(self, episode: Episode, wall_s: float) -> Rehearsed:
        """All that the server recorded of an episode."""
        at = f"/episodes/{episode.episode_id}"
        turns = _checked(await self.control.get(f"{at}/turns")).json()["turns"]
        samples = _checked(await self.control.get(f"{at}/samples"))
        audit = _checked(await self.control.post(f"{at}/audit"))
        return Rehearsed(
            episode,
            tuple(Turn.model_validate(turn) for turn in turns),
            decode_samples(samples.content),
            AuditReport.model_validate_json(audit.content),
            wall_s,
            self._watch.peak_bytes.get(episode.episode_id),
            dict(self._watch.requests[episode.episode_id]),
        )


class RehearsalRefused(Exception):
    """The server's answer to a request that it refused: its sentence."""


def _checked(answer: httpx.Response) -> httpx.Response:
    if answer.is_error:
        raise RehearsalRefused(answer.json()["error"]["message"])
    return answer


@asynccontextmanager
async def rehearsing(
    settings: Settings,
    policy: Policy,
    *,
    watch: Watch | None = None,
    chunk_tokens: int = CHUNK_TOKENS,
    chunk_pause_s: float = 0.0,
) -> AsyncIterator[Rehearsal]:
    """``settings``: the data folder and the doors' ports of them are not used. Raises StartupError."""
    model = model_folder(settings)
    if model is None:
        raise StartupError("--engine none has no tokenizer; a rehearsal needs a model folder for it (--model)")
    watch = watch or Watch()
    failure: Exception | None = None
    async with AsyncExitStack() as stack:
        wanted = _placed(settings, stack)
        agent_socket = bind("agent", "127.0.0.1", 0)
        stack.callback(agent_socket.close)
        journal = await FileJournal.open(wanted.data_dir / "journal", wanted.journal)
        stack.push_async_callback(_shielded, journal.close)
        vocabulary = await anyio.to_thread.run_sync(load_vocabulary, model)
        renderer = await anyio.to_thread.run_sync(create_renderer, model, wanted.rendering)
        chat = chat_format(vocabulary, renderer)
        engine = ScriptedEngine(
            policy, chat, vocab_size=vocabulary.size, chunk_tokens=chunk_tokens, chunk_pause_s=chunk_pause_s
        )
        stack.push_async_callback(_shielded, engine.close)
        work = build_backends(wanted)
        work = replace(work, sandboxes=RecordingProvider(work.sandboxes, watch))
        keys = EpisodeKeys(load_secret(wanted.data_dir))
        parts = Parts(
            wanted,
            journal,
            renderer,
            engine,
            keys,
            Metrics(),
            work,
            observe=lambda app: counted(app, watch.requests),
        )
        doors = await assemble(parts, url_of(agent_socket), None, stack)
        idle_s, grace_s = wanted.gate.idle_connection_s, wanted.shutdown_grace_s
        listener = Listener(doors.agent, agent_socket, idle_s=idle_s, grace_s=grace_s, access_log=False)
        control = httpx.AsyncClient(
            transport=httpx.ASGITransport(app=doors.control), base_url="http://rehearsal", timeout=None
        )
        await stack.enter_async_context(control)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(listener.serve)
            try:
                yield Rehearsal(control, url_of(agent_socket), engine, work, watch)
            except Exception as error:  # noqa: BLE001 - raised below, as it is: task groups would wrap it
                failure = error
            finally:
                doors.closing.set()
                listener.stop()
    if failure is not None:
        raise failure


def _placed(settings: Settings, stack: AsyncExitStack) -> Settings:
    """The settings with folders of this rehearsal's own. Raises StartupError."""
    parent = settings.sandboxes.run_dir
    try:
        if parent is not None:
            parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Short: the sandboxes' sockets lie below it.
        made = tempfile.TemporaryDirectory(prefix="turnstile-r-", dir=parent, ignore_cleanup_errors=True)
    except OSError as error:
        raise StartupError(f"no folder can be made for a rehearsal: {error}") from error
    folder = Path(stack.enter_context(made)).absolute()
    sandboxes = settings.sandboxes.model_copy(update={"run_dir": folder / "run"})
    journal = settings.journal.model_copy(update={"durability": "process"})
    update = {"data_dir": folder / "data", "sandboxes": sandboxes, "journal": journal}
    return settings.model_copy(update=update)


async def _shielded(close: Callable[[], Awaitable[None]]) -> None:
    """Releases also when the block was cut off."""
    with anyio.CancelScope(shield=True):
        await close()
