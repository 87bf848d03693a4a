"""Handles of single episodes that block: the methods of ``AsyncEpisodeHandle``, run on the client's loop."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from types import TracebackType
from typing import Concatenate, Literal, ParamSpec, Protocol, Self, TypeVar, Unpack

from turnstile import errors
from turnstile._handles import AsyncEpisodeHandle
from turnstile.client import AsyncClient
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
from turnstile.rollout import ForkOptions, RegradeOptions

P = ParamSpec("P")
T = TypeVar("T")


class BlockingClient(Protocol):
    """The client that a handle belongs to."""

    def _run(
        self, method: Callable[Concatenate[AsyncClient, P], Awaitable[T]], *args: P.args, **kwargs: P.kwargs
    ) -> T: ...

    def audit(self, episode_id: str) -> AuditReport: ...

    def network(self, episode_id: str) -> NetworkReport: ...


class EpisodeHandle:
    """A handle of one episode. As a context manager it cancels the episode when the block raises."""

    def __init__(self, client: BlockingClient, episode_id: str) -> None:
        self._client = client
        self.episode_id = episode_id

    def status(self) -> Episode:
        """The episode as it is now."""
        return self._run(AsyncEpisodeHandle.status)

    def ready(self, timeout: float | None = None) -> Episode:
        """The episode once its sandbox and its world are there (or it has ended): an external agent may begin.
        Raises Timeout after ``timeout`` seconds."""
        return self._run(AsyncEpisodeHandle.ready, timeout)

    def wait(self, timeout: float | None = None) -> Episode:
        """The episode once it has ended. Raises Timeout after ``timeout`` seconds; None waits without end."""
        return self._run(AsyncEpisodeHandle.wait, timeout)

    def finish(self) -> Episode:
        """Reports that the external agent is done. Returns the episode once it is graded and has ended."""
        return self._run(AsyncEpisodeHandle.finish)

    def cancel(self) -> Episode:
        """Ends the episode now. An ended one stays as it is."""
        return self._run(AsyncEpisodeHandle.cancel)

    def reward(
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
        return self._run(
            AsyncEpisodeHandle.reward, reward, turn_rewards=turn_rewards, key=key, replace=replace, by=by, why=why
        )

    def trained(self, step: int, *, used: bool = True, version: str | None = None) -> Episode:
        """See ``AsyncEpisodeHandle.trained``."""
        return self._run(AsyncEpisodeHandle.trained, step, used=used, version=version)

    def regrade(self, **options: Unpack[RegradeOptions]) -> Regrade:
        """See ``AsyncEpisodeHandle.regrade``."""
        return self._run(AsyncEpisodeHandle.regrade, **options)

    def snapshot(self) -> SnapshotInfo:
        """See ``AsyncEpisodeHandle.snapshot``."""
        return self._run(AsyncEpisodeHandle.snapshot)

    def snapshots(self) -> tuple[SnapshotInfo, ...]:
        return self._run(AsyncEpisodeHandle.snapshots)

    def fork(self, **options: Unpack[ForkOptions]) -> tuple[NewEpisodeHandle, ...]:
        """See ``AsyncEpisodeHandle.fork``."""
        made = self._run(AsyncEpisodeHandle.fork, **options)
        return tuple(NewEpisodeHandle(self._client, handle.created) for handle in made)

    def delete(self) -> None:
        """Removes the episode and all its turns for good."""
        self._run(AsyncEpisodeHandle.delete)

    def turns(self) -> tuple[Turn, ...]:
        """Every recorded model call, in commit order."""
        return self._run(AsyncEpisodeHandle.turns)

    def turn_outlines(self) -> tuple[TurnOutline, ...]:
        """See ``AsyncEpisodeHandle.turn_outlines``."""
        return self._run(AsyncEpisodeHandle.turn_outlines)

    def breaks(self, offset: int = 0, limit: int | None = None) -> BreakReport:
        """See ``AsyncEpisodeHandle.breaks``."""
        return self._run(AsyncEpisodeHandle.breaks, offset, limit)

    def tokens(self, turn_id: str, start: int = 0, count: int | None = None) -> TokenWindow:
        """See ``AsyncEpisodeHandle.tokens``."""
        return self._run(AsyncEpisodeHandle.tokens, turn_id, start, count)

    def find_tokens(
        self,
        turn_id: str,
        text: str | None = None,
        *,
        token_id: int | None = None,
        after: int = -1,
        limit: int | None = None,
    ) -> TokenMatches:
        """See ``AsyncEpisodeHandle.find_tokens``."""
        return self._run(
            AsyncEpisodeHandle.find_tokens, turn_id, text, token_id=token_id, after=after, limit=limit
        )

    def work(self) -> WorkDiff:
        """See ``AsyncEpisodeHandle.work``."""
        return self._run(AsyncEpisodeHandle.work)

    def replay(self) -> ReplayReport:
        """The states of the work folder, and what each changed (``docs/replay.md``). Raises Conflict where they
        were not recorded, Gone where they are not kept."""
        return self._run(AsyncEpisodeHandle.replay)

    def replay_files(self, state: int) -> ReplayListing:
        """All files of the work folder at a state, the first of which is 0."""
        return self._run(AsyncEpisodeHandle.replay_files, state)

    def replay_content(self, digest: str) -> bytes:
        """The bytes of a file of one of the states, by their SHA-256. An agent wrote them."""
        return self._run(AsyncEpisodeHandle.replay_content, digest)

    def samples(self, *, include_untrained: bool = False) -> SampleSet:
        """The rows for a trainer, as NumPy arrays, and an account of all other tokens.

        ``include_untrained`` adds rows whose mask is 0 throughout.
        """
        return self._run(AsyncEpisodeHandle.samples, include_untrained=include_untrained)

    def tree(self, *, include_untrained: bool = False) -> TokenForest:
        """The same rows as a forest that holds each token once. Its ``to_samples()`` gives the rows."""
        return self._run(AsyncEpisodeHandle.tree, include_untrained=include_untrained)

    def journal(self) -> bytes:
        """All that is recorded of the ended episode, in the bytes of the server's journal: a file of them can be
        looked at without the server (``docs/viewer.md``)."""
        return self._run(AsyncEpisodeHandle.journal)

    def pending(self, timeout: float | None = None) -> PendingCalls:
        """The model calls that wait for the training loop (``--engine trainer``), oldest first.

        Returns as soon as there is one. It has no calls once the episode has ended or ``timeout`` seconds have
        passed; ``timeout=None`` waits without end.
        """
        return self._run(AsyncEpisodeHandle.pending, timeout)

    def complete(
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
        return self._run(
            AsyncEpisodeHandle.complete,
            call_id,
            completion_ids,
            logprobs,
            text=text,
            weight_version=weight_version,
            finish_reason=finish_reason,
        )

    def audit(self) -> AuditReport:
        return self._client.audit(self.episode_id)

    def network(self) -> NetworkReport:
        return self._client.network(self.episode_id)

    def spans(self) -> SpanReport:
        """The episode's spans so far: what it spent its time on (``docs/spans.md``)."""
        return self._run(AsyncEpisodeHandle.spans)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            return
        try:
            self.cancel()
        except errors.TurnstileError as failure:
            error.add_note(f"{self.episode_id} could not be cancelled: {failure}")

    def _run(
        self, method: Callable[Concatenate[AsyncEpisodeHandle, P], Awaitable[T]], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        return self._client._run(lambda client: method(client.episode(self.episode_id), *args, **kwargs))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.episode_id!r})"


class NewEpisodeHandle(EpisodeHandle):
    """An episode that this client created.

    ``model_url``: base URL of the model API. ``tool_url``: the MCP endpoint, None without tools. ``episode_key``:
    the agent's API key for both, None where the server launches the agent.
    """

    def __init__(self, client: BlockingClient, created: EpisodeCreated) -> None:
        super().__init__(client, created.episode_id)
        self.created = created
        self.model_url = created.model_url
        self.tool_url = created.tool_url
        self.episode_key = created.episode_key
