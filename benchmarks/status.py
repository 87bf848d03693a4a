"""What it costs to ask about episodes: a poll by the length of the episode, a page by the number of episodes.

    python benchmarks/status.py

*Poll* is what ``GET /episodes/{id}`` does on the server: the record with its present statistics, as JSON. *Samples
of the whole tree* is one export, whose statistics are summed over all turns, as every poll once did. *Page* is one
page of ``GET /episodes``: the newest episodes, those of the oldest group, and the failed ones (there are none).
Rows that are compared are measured in turns, in one run; a time is the median of its rounds. The run fails if a
poll's statistics are not those of the whole tree.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable
from functools import partial

from turnstile.models import (
    Episode,
    EpisodePage,
    EpisodeStatus,
    EpisodeTimings,
    Limits,
    Message,
    Sampling,
    SamplingUsed,
    TaskRef,
    Turn,
    TurnTimings,
    WeightSpan,
)
from turnstile_server.capture import EpisodeFacts, TokenTree, export_samples
from turnstile_server.capture.keys import tools_key
from turnstile_server.episodes.archive import Archive
from turnstile_server.episodes.store import Forest, Stored

TURNS = (0, 100, 1_000, 10_000)
EPISODES = (100, 1_000, 20_000)
PAGE = 50
ROUNDS = 9


def turn(number: int, parent: int | None, *, tools: bool, began: float) -> Turn:
    return Turn(
        turn_id=f"turn_{number}",
        episode_id="ep_1",
        parent_id=f"turn_{parent}" if parent is not None else None,
        seq=number,
        dialect="chat",
        context_ids=[1, 2, 3],
        completion_ids=[4, 5],
        logprobs=[-0.5, -0.1],
        weight_spans=(WeightSpan(start=0, end=2, version="w"),),
        finish_reason="stop",
        sampling=SamplingUsed(max_new_tokens=64),
        template_hash="t",
        tools_key="offers tools" if tools else tools_key((), "t"),
        request_key=f"request {number}",
        new_messages=(Message("user", f"{number}"),),
        reply=Message("assistant", f"{number}"),
        timings=TurnTimings(started_at=began),
    )


def forest(turns: int) -> Forest:
    """One long conversation; every 500th turn is a side call, a root of its own."""
    tree, last = TokenTree(), None
    for number in range(turns):
        side = number % 500 == 499
        tree.add(turn(number, None if side else last, tools=not side, began=float(number)))
        last = last if side else number
    return Forest(tree, Counter())


def episode(number: int, status: EpisodeStatus = EpisodeStatus.COMPLETED) -> Episode:
    return Episode(
        episode_id=f"ep_{number}",
        status=status,
        agent="external",
        task=TaskRef(instruction="t" * 400),
        group_id=f"group_{number // PAGE}",
        rollout_id=f"ep_{number}",
        sampling=Sampling(),
        limits=Limits(),
        timings=EpisodeTimings(created_at=0.0),
    )


def archive(count: int) -> Archive:
    kept = Archive(None, 1, None)  # type: ignore[arg-type] - nothing is read from a journal here
    for number in range(count):
        made = episode(number)
        kept.created(Stored(made, "nonce", None, "digest"))
        kept.add_ended(made)
    return kept


def microseconds(work: Callable[[], object], enough_s: float = 0.02) -> float:
    """Time of one call, over as many as take ``enough_s``."""
    calls, taken, began = 0, 0.0, time.perf_counter()
    while calls == 0 or taken < enough_s:
        work()
        calls += 1
        taken = time.perf_counter() - began
    return taken / calls * 1e6


def compared(works: dict[int, Callable[[], object]]) -> dict[int, float]:
    """Median time of each, measured in turns."""
    rounds = [{size: microseconds(work) for size, work in works.items()} for _ in range(ROUNDS)]
    return {size: statistics.median(times[size] for times in rounds) for size in works}


def polls() -> None:
    running = episode(0, EpisodeStatus.RUNNING)
    facts = EpisodeFacts(episode_id="ep_0", rollout_id="ep_0", status=EpisodeStatus.RUNNING)
    forests = {turns: forest(turns) for turns in TURNS}
    for turns, made in forests.items():
        if made.counted(running).stats != export_samples(made.tree, facts).stats:
            raise SystemExit(f"{turns} turns: the statistics of a poll are not those of the whole tree")
    poll = compared({n: partial(polled, made, running) for n, made in forests.items()})
    whole = {n: microseconds(partial(export_samples, made.tree, facts), 0.0) for n, made in forests.items()}
    print("| turns | poll, µs | ratio to an empty episode | samples of the whole tree, µs |")
    print("|---:|---:|---:|---:|")
    for turns in TURNS:
        print(f"| {turns:,} | {poll[turns]:.0f} | {poll[turns] / poll[0]:.2f} | {whole[turns]:,.0f} |")


def polled(made: Forest, running: Episode) -> str:
    return made.counted(running).model_dump_json()


def pages() -> None:
    archives = {count: archive(count) for count in EPISODES}
    filters = {"newest": (None, None), "one group": (None, "group_0"), "failed": (EpisodeStatus.FAILED, None)}
    print(f"\n| page of {PAGE} | " + " | ".join(f"of {count:,}, µs" for count in EPISODES) + " | ratio |")
    print("|---|" + "---:|" * (len(EPISODES) + 1))
    for name, (status, group) in filters.items():
        times = compared({n: partial(page, kept, status, group) for n, kept in archives.items()})
        cells = " | ".join(f"{times[count]:.1f}" for count in EPISODES)
        print(f"| {name} | {cells} | {times[EPISODES[-1]] / times[EPISODES[0]]:.2f} |")


def page(kept: Archive, status: EpisodeStatus | None, group: str | None) -> EpisodePage:
    found, _ = kept.page(status, group, None, PAGE)
    return EpisodePage(episodes=tuple(filter(None, map(kept.get, found))))


def main() -> None:
    polls()
    pages()


if __name__ == "__main__":
    main()
