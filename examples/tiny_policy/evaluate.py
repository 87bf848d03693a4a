"""Measures how often a checkpoint solves held-out errands at temperature 1: many episodes at once, in memory.

    python -m tiny_policy.evaluate CHECKPOINT [--episodes 600] [--seed 991]     (in examples/)

The scheduler is the embedded engine's, the renderer is the gate's, the tools are ``world``'s. There is no server
and no sandbox, so it plays some ten episodes a second on a core instead of one. Each errand is played once.
Progress goes to standard error.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import queue
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers.utils.logging import disable_progress_bar

from tiny_policy.conversation import Conversation
from tiny_policy.network import MAX_COMPLETION
from tiny_policy.world import offered_tools
from turnstile_server.demo.errands import LEVELS, Errand, errands
from turnstile_server.engines.embedded.model import LoadedModel
from turnstile_server.engines.embedded.sampling import SamplingParameters
from turnstile_server.engines.embedded.scheduler import EngineCall, NewTokens, Scheduler, SchedulerLimits
from turnstile_server.engines.embedded.stopping import StopRule
from turnstile_server.rendering.factory import create_renderer
from turnstile_server.settings import RenderingSettings

WINDOW = 1024
SILENCE_S = 60.0
"""An engine that is silent for this long has crashed."""
REPORT_EVERY_S = 5.0


@dataclass(frozen=True, slots=True)
class Score:
    """How many episodes were played and how many solved, by level."""

    episodes: Counter[int]
    solved: Counter[int]

    @classmethod
    def from_json(cls, text: str | bytes) -> Score:
        """Read what ``--json`` prints."""
        found = json.loads(text)
        episodes, solved = (
            Counter({int(level): count for level, count in found[name].items()}) for name in ("episodes", "solved")
        )
        return cls(episodes, solved)

    @property
    def rate(self) -> float:
        return self.solved.total() / self.episodes.total()

    @property
    def standard_error(self) -> float:
        return math.sqrt(self.rate * (1 - self.rate) / self.episodes.total())

    def __str__(self) -> str:
        levels = ", ".join(
            f"level {level} {self.solved[level] / count:.1%}" for level, count in sorted(self.episodes.items())
        )
        return f"{self.rate:.1%} ± {self.standard_error:.1%} of {self.episodes.total()} ({levels})"


def play(
    checkpoint: Path,
    tasks: Iterable[Errand],
    *,
    seed: int = 0,
    temperature: float = 1.0,
    batch: int = 64,
    on_ended: Callable[[int], None] = lambda _: None,
) -> list[Conversation[Errand]]:
    """Play every errand once by the policy in the folder ``checkpoint``, ``batch`` at a time.

    ``on_ended`` is called with the number of ended episodes whenever it grows.
    """
    said: queue.SimpleQueue[tuple[EngineCall, NewTokens]] = queue.SimpleQueue()

    def post(events: list[tuple[EngineCall, NewTokens]]) -> None:
        for event in events:
            said.put(event)

    def crash() -> None:
        raise SystemExit  # ends the engine's thread, which has printed why

    renderer = create_renderer(checkpoint, RenderingSettings())
    limits = SchedulerLimits(max_batch=batch, prefill_chunk=1024, window=WINDOW)
    model = LoadedModel(checkpoint, "evaluated")
    scheduler = Scheduler(model, limits, renderer.decode, post, crash=crash, seed=seed)
    sampling = SamplingParameters(temperature=temperature)
    stop = StopRule(MAX_COMPLETION, frozenset(renderer.stop_token_ids), ())
    numbers = itertools.count()
    running: dict[str, Conversation[Errand]] = {}

    def ask(conversation: Conversation[Errand]) -> None:
        rid = str(next(numbers))
        running[rid] = conversation
        scheduler.submit(EngineCall(rid, conversation.ids.copy(), sampling, stop, lambda _: None))

    tools = offered_tools()
    waiting = (Conversation(renderer, tools, errand) for errand in tasks)
    ended: list[Conversation[Errand]] = []
    scheduler.start()
    try:
        for conversation in itertools.islice(waiting, batch):
            ask(conversation)
        while running:
            call, event = said.get(timeout=SILENCE_S)
            if event.finish is None:
                continue
            conversation = running.pop(call.rid)
            if conversation.reply(call.output, "length" if event.finish["type"] == "length" else "stop"):
                ask(conversation)
                continue
            ended.append(conversation)
            on_ended(len(ended))
            for following in itertools.islice(waiting, 1):
                ask(following)
    finally:
        scheduler.stop()
    return ended


def score(conversations: Iterable[Conversation[Errand]]) -> Score:
    episodes: Counter[int] = Counter()
    solved: Counter[int] = Counter()
    for conversation in conversations:
        episodes[conversation.errand.level] += 1
        solved[conversation.errand.level] += int(conversation.reward)
    return Score(episodes, solved)


def reporter(total: int) -> Callable[[int], None]:
    """Says on standard error how many of ``total`` episodes have ended, every few seconds."""
    started = shown = time.monotonic()

    def report(ended: int) -> None:
        nonlocal shown
        now = time.monotonic()
        if now - shown >= REPORT_EVERY_S or ended == total:
            shown = now
            sys.stderr.write(f"          {ended} of {total} episodes, {now - started:.0f} s\n")

    return report


def held_out(episodes: int, seed: int, levels: tuple[int, ...] = LEVELS) -> list[Errand]:
    return list(itertools.islice(errands(seed, levels, held_out=True), episodes))


def main() -> int:
    parser = argparse.ArgumentParser(description="How often a checkpoint solves held-out errands.")
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--episodes", type=int, default=600)
    parser.add_argument("--seed", type=int, default=991, help="of the errands and of the sampling")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--json", action="store_true", help="episodes and successes by level, as JSON")
    arguments = parser.parse_args()
    disable_progress_bar()  # type: ignore[no-untyped-call]
    torch.set_num_threads(1)
    tasks = held_out(arguments.episodes, arguments.seed)
    ended = play(
        arguments.checkpoint,
        tasks,
        seed=arguments.seed,
        temperature=arguments.temperature,
        on_ended=reporter(len(tasks)),
    )
    found = score(ended)
    print(json.dumps({"episodes": found.episodes, "solved": found.solved}) if arguments.json else found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
