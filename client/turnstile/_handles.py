"""Handles of single episodes, for asyncio: what ``AsyncClient`` gives for an episode that it created or was asked
for."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Literal, Protocol, Self, Unpack

import anyio

from turnstile import errors
from turnstile._operations import Operations
from turnstile._retry import ClientSettings
from turnstile.models import (
    AuditReport,
    BreakReport,
    CompletionAccepted,
    Episode,
    EpisodeCreated,
    NetworkReport,
    PendingCalls,
    Regrade,
    ReplayListing,
    ReplayReport,
    SampleSet,
    SnapshotInfo,
    SpanReport,
    TokenForest,
    TokenMatches,
    TokenWindow,
    Turn,
    TurnOutline,
    WorkDiff,
)
from turnstile.models.arrays import NumberSequence, TokenSequence
from turnstile.rollout import ForkOptions, RegradeOptions, task_ref


class EpisodeOwner(Protocol):
    """The client that a handle belongs to."""

    _operations: Operations
    _settings: ClientSettings

    async def audit(self, episode_id: str) -> AuditReport: ...

    async def network(self, episode_id: str) -> NetworkReport: ...


class AsyncEpisodeHandle:
    """A handle of one episode. As a context manager it cancels the episode when the block raises."""

    def __init__(self, client: EpisodeOwner, episode_id: str) -> None:
        self._client = client
        self.episode_id = episode_id

    async def status(self) -> Episode:
        """The episode as it is now."""
        return await self._client._operations.episode(self.episode_id)

    async def ready(self, timeout: float | None = None) -> Episode:  # noqa: ASYNC109 - the time-out is the point
        """The episode once its sandbox and its world are there (or it has ended): an external agent may begin.
        Raises Timeout after ``timeout`` seconds."""
        return await self._client._operations.ready(self.episode_id, timeout)

    async def wait(self, timeout: float | None = None) -> Episode:  # noqa: ASYNC109 - the time-out is the point
        """The episode once it has ended. Raises Timeout after ``timeout`` seconds; None waits without end."""
        return await self._client._operations.wait(self.episode_id, timeout)

    async def finish(self) -> Episode:
        """Reports that the external agent is done. Returns the episode once it is graded and has ended."""
        return await self._client._operations.finish(self.episode_id)

    async def cancel(self) -> Episode:
        """Ends the episode now. An ended one stays as it is."""
        return await self._client._operations.cancel(self.episode_id)

    async def reward(
        self,
        reward: float | None = None,
        *,
        turn_rewards: Mapping[str, float] | None = None,
        key: str | None = None,
        replace: bool = False,
        by: str | None = None,
        why: str | None = None,
    ) -> Episode:
        """Gives an ended episode its reward, or turns (by id or number) theirs. The same ``key`` with the same
        values changes nothing. Raises Conflict where the task has no ``reward.late``, or a reward is there
        already."""
        fields = {"reward": reward, "turn_rewards": turn_rewards, "key": key, "replace": replace}
        return await self._client._operations.reward(self.episode_id, {**fields, "by": by, "why": why})

    async def trained(self, step: int, *, used: bool = True, version: str | None = None) -> Episode:
        """Says that the trainer's step ``step`` took the ended episode. See ``AsyncClient.trained``."""
        fields = {"step": step, "used": used, "version": version}
        return await self._client._operations.trained(self.episode_id, fields)

    async def regrade(self, **options: Unpack[RegradeOptions]) -> Regrade:
        """Judges the kept work of the ended episode again (``docs/regrade.md``). Raises Gone where it is not kept,
        and what a grading raises."""
        task = options.get("task")
        fields = {**options, "task": None if task is None else task_ref(task)}
        return await self._client._operations.regrade(self.episode_id, fields)

    async def snapshot(self) -> SnapshotInfo:
        """Stores the files of the running episode's sandbox, to be taken between two turns (``docs/fork.md``).
        Raises Conflict while a model or tool call runs."""
        return await self._client._operations.snapshot(self.episode_id)

    async def snapshots(self) -> tuple[SnapshotInfo, ...]:
        """The snapshots that are kept, oldest first."""
        return (await self._client._operations.snapshots(self.episode_id)).snapshots

    async def fork(self, **options: Unpack[ForkOptions]) -> tuple[AsyncNewEpisodeHandle, ...]:
        """Starts episodes that begin after a turn of this one, with the files of its snapshot: their agents go on
        with the same history."""
        made = await self._client._operations.fork(self.episode_id, options)
        return tuple(AsyncNewEpisodeHandle(self._client, created) for created in made.episodes)

    async def delete(self) -> None:
        """Removes the episode and all its turns for good."""
        await self._client._operations.delete(self.episode_id)

    async def turns(self) -> tuple[Turn, ...]:
        """Every recorded model call, in commit order."""
        return await self._client._operations.turns(self.episode_id)

    async def turn_outlines(self) -> tuple[TurnOutline, ...]:
        """Every recorded model call without its tokens, in commit order: light to fetch, for people to read."""
        return (await self._client._operations.turn_outlines(self.episode_id)).turns

    async def breaks(self, offset: int = 0, limit: int | None = None) -> BreakReport:
        """The breaks from ``offset`` on, each with the first message that differs, as it was known and as it came.
        ``limit``: at most so many; None: as many as the server gives at once."""
        return await self._client._operations.breaks(self.episode_id, offset, limit)

    async def tokens(self, turn_id: str, start: int = 0, count: int | None = None) -> TokenWindow:
        """Tokens of the path that ends with the turn, with their text, loss mask and logprobs. ``count``: at most
        so many; None: as many as the server gives at once."""
        return await self._client._operations.tokens(self.episode_id, turn_id, start, count)

    async def find_tokens(
        self,
        turn_id: str,
        text: str | None = None,
        *,
        token_id: int | None = None,
        after: int = -1,
        limit: int | None = None,
    ) -> TokenMatches:
        """The matches of a text or a token id on that path, after the token ``after``."""
        return await self._client._operations.find_tokens(self.episode_id, turn_id, text, token_id, after, limit)

    async def work(self) -> WorkDiff:
        """The changes in the kept work of the ended episode, file by file (``docs/look.md``). Raises Gone where it
        is not kept."""
        return await self._client._operations.work(self.episode_id)

    async def replay(self) -> ReplayReport:
        """The states of the work folder, and what each changed (``docs/replay.md``). Raises Conflict where they
        were not recorded, Gone where they are not kept."""
        return await self._client._operations.replay(self.episode_id)

    async def replay_files(self, state: int) -> ReplayListing:
        """All files of the work folder at a state, the first of which is 0."""
        return await self._client._operations.replay_files(self.episode_id, state)

    async def replay_content(self, digest: str) -> bytes:
        """The bytes of a file of one of the states, by their SHA-256. An agent wrote them."""
        return await self._client._operations.replay_content(self.episode_id, digest)

    async def samples(self, *, include_untrained: bool = False) -> SampleSet:
        """The rows for a trainer, as NumPy arrays, and an account of all other tokens.

        ``include_untrained`` adds rows whose mask is 0 throughout.
        """
        return await self._client._operations.samples(self.episode_id, include_untrained)

    async def tree(self, *, include_untrained: bool = False) -> TokenForest:
        """The same rows as a forest that holds each token once. Its ``to_samples()`` gives the rows."""
        return await self._client._operations.tree(self.episode_id, include_untrained)

    async def journal(self) -> bytes:
        """All that is recorded of the ended episode, in the bytes of the server's journal: a file of them can be
        looked at without the server (``docs/viewer.md``)."""
        return await self._client._operations.journal(self.episode_id)

    async def pending(self, timeout: float | None = None) -> PendingCalls:  # noqa: ASYNC109 - the time-out is the point
        """The model calls that wait for the training loop (``--engine trainer``), oldest first.

        Returns as soon as there is one. It has no calls once the episode has ended or ``timeout`` seconds have
        passed; ``timeout=None`` waits without end.
        """
        return await self._client._operations.pending(self.episode_id, timeout)

    async def complete(
        self,
        call_id: str,
        completion_ids: TokenSequence | None = None,
        logprobs: NumberSequence | None = None,
        *,
        text: str | None = None,
        weight_version: str | None = None,
        finish_reason: Literal["stop", "length"] | None = None,
    ) -> CompletionAccepted:
        """Answers a waiting call with a completion, or with a ``text``, which is not trained.

        ``completion_ids``: int[m]. ``logprobs``: float[m], log p under softmax(logits / T). The same answer may be
        sent again.

        Raises InvalidRequest for what cannot be a turn (the call goes on waiting), Conflict for a call that was
        answered otherwise, Gone for a call that no agent waits for any more.
        """
        fields = {
            "call_id": call_id,
            "completion_ids": completion_ids,
            "logprobs": logprobs,
            "text": text,
            "weight_version": weight_version,
            "finish_reason": finish_reason,
        }
        return await self._client._operations.complete(self.episode_id, fields)

    async def audit(self) -> AuditReport:
        return await self._client.audit(self.episode_id)

    async def network(self) -> NetworkReport:
        return await self._client.network(self.episode_id)

    async def spans(self) -> SpanReport:
        """The episode's spans so far: what it spent its time on (``docs/spans.md``)."""
        return await self._client._operations.spans(self.episode_id)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            return
        # Shielded: the block may have raised because its task is being cancelled.
        with anyio.move_on_after(self._client._settings.cancel_s, shield=True):
            try:
                await self.cancel()
            except errors.TurnstileError as failure:
                error.add_note(f"{self.episode_id} could not be cancelled: {failure}")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.episode_id!r})"


class AsyncNewEpisodeHandle(AsyncEpisodeHandle):
    """An episode that this client created.

    ``model_url``: base URL of the model API. ``tool_url``: the MCP endpoint, None without tools. ``episode_key``:
    the agent's API key for both, None where the server launches the agent.
    """

    def __init__(self, client: EpisodeOwner, created: EpisodeCreated) -> None:
        super().__init__(client, created.episode_id)
        self.created = created
        self.model_url = created.model_url
        self.tool_url = created.tool_url
        self.episode_key = created.episode_key
