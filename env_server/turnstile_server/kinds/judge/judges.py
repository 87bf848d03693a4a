"""The judges of the settings: places, budgets, and replies that were given before."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import anyio

from turnstile_server.grading.errors import GraderUnavailable
from turnstile_server.kinds.judge.cache import FOLDER, VerdictCache
from turnstile_server.kinds.judge.client import JudgeClient, JudgeReply
from turnstile_server.settings import GradingSettings, JudgeSettings


@dataclass(slots=True)
class JudgeSpending:
    """Calls and tokens that were spent: since the server's start, or for one work."""

    calls: int = 0
    tokens: int = 0


class Judge:
    """One judge."""

    def __init__(self, name: str, settings: JudgeSettings, cache: VerdictCache) -> None:
        self.settings = settings
        self.spent = JudgeSpending()
        self._name = name
        self._cache = cache
        self._client = JudgeClient(name, settings)
        self._places = anyio.Semaphore(settings.parallel)

    async def ask(
        self,
        key: str,
        messages: Sequence[dict[str, str]],
        spent: JudgeSpending,
        check: Callable[[str], None],
    ) -> tuple[JudgeReply, bool]:
        """The reply, and whether it was given before. ``key``: of the same question in the cache. ``spent``: for
        this work. ``check`` raises ValueError for a reply without a verdict, which is not kept.

        Raises GraderUnavailable."""
        kept = await self._cache.get(key)
        if kept is not None and _passes(check, kept.text):
            return kept, True
        async with self._places:
            reply = await self._reply(messages, spent)
        try:
            check(reply.text)
        except ValueError as error:
            raise GraderUnavailable(
                f"the judge {self._name!r} gave no verdict: {error}", detail={"reply": reply.text[:2000]}
            ) from None
        await self._cache.put(key, reply)
        return reply, False

    async def _reply(self, messages: Sequence[dict[str, str]], spent: JudgeSpending) -> JudgeReply:
        self._check_budgets(spent)
        for one in (self.spent, spent):
            one.calls += 1
        with anyio.move_on_after(self.settings.timeout_s):
            reply = await self._client.ask(messages)
            for one in (self.spent, spent):
                one.tokens += reply.tokens
            return reply
        raise GraderUnavailable(
            f"the judge {self._name!r} gave no verdict within {self.settings.timeout_s:g} s (timeout_s)"
        )

    def _check_budgets(self, spent: JudgeSpending) -> None:
        settings = self.settings
        bounds = (
            (spent.calls, settings.max_calls_per_grading, "max_calls_per_grading"),
            (spent.tokens, settings.max_tokens_per_grading, "max_tokens_per_grading"),
            (self.spent.calls, settings.max_calls, "max_calls"),
            (self.spent.tokens, settings.max_total_tokens, "max_total_tokens"),
        )
        for used, bound, setting in bounds:
            if bound is not None and used >= bound:
                raise GraderUnavailable(
                    f"the budget of the judge {self._name!r} is spent: {used} of {bound} "
                    f"(grading.judges.{self._name}.{setting})"
                )


class Judges:
    """All of them, by name. ``data_dir``: where replies are kept; None: nowhere."""

    def __init__(self, settings: GradingSettings, data_dir: Path | None) -> None:
        cache = VerdictCache(None if data_dir is None else data_dir / FOLDER, settings.judge_cache_mb << 20)
        self._judges: Mapping[str, Judge] = {
            name: Judge(name, one, cache) for name, one in settings.judges.items()
        }

    def get(self, name: str) -> Judge | None:
        return self._judges.get(name)


def _passes(check: Callable[[str], None], text: str) -> bool:
    try:
        check(text)
    except ValueError:
        return False
    return True
