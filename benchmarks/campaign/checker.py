"""Holds three records of one episode against each other: the agent's, the engine's, and the server's export.

Pure, and independent of the server: it takes the JSON of ``GET /episodes/{id}``, ``/turns`` and ``/samples`` and
the logs of ``truth.py``. It finds replies that are *lost* (an agent has it, the export has not), *doubled* (one
generation is there, or is trained, twice), *wrong* (ids, logprobs, weights, prompt, mask, text, numbers).
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from campaign.truth import Acknowledged, EngineLog, Sampled, digest

Verdict = Literal["lost", "doubled", "wrong", "left behind"]
UNKNOWN_WEIGHTS = "unknown"
MATCHED = {"stop": "stop", "length": "length"}
Json = dict[str, Any]


@dataclass(frozen=True)
class Finding:
    verdict: Verdict
    episode: str
    what: str

    def __str__(self) -> str:
        return f"{self.verdict}: {self.episode}: {self.what}"


@dataclass(frozen=True)
class Export:
    """What the server says of one episode."""

    episode: Json
    turns: list[Json]
    samples: Json
    """``samples``, ``untrained`` and ``stats``; untrained rows included."""


@dataclass
class Counts:
    """What was held against each other, so that a report can say so."""

    episodes: int = 0
    turns: int = 0
    tokens: int = 0
    acknowledged: int = 0
    trained: int = 0
    untrained: Counter[str] = field(default_factory=Counter)


def check_episode(
    export: Export,
    engine: EngineLog,
    acknowledged: Collection[Acknowledged],
    counts: Counts,
    damaged: bool = False,
) -> list[Finding]:
    """``acknowledged``: whole replies that the agent got. ``damaged``: records of the episode were damaged on
    purpose, so turns may be missing; those that are there must be right all the same."""
    episode_id: str = export.episode["episode_id"]
    findings: list[Finding] = []

    def found(verdict: Verdict, what: str) -> None:
        findings.append(Finding(verdict, episode_id, what))

    known = {
        turn["turn_id"]: sampled
        for turn in export.turns
        if (sampled := engine.of(turn["logprobs"], episode_id)) is not None
    }
    for turn in export.turns:
        for what in _turn_faults(turn, known.get(turn["turn_id"]), episode_id):
            found("wrong", f"turn {turn['turn_id']}: {what}")
    for mark, count in Counter(sampled.mark for sampled in known.values()).items():
        if count > 1:
            found("doubled", f"[n:{mark}] is {count} turns")
    there = {sampled.mark: turn_id for turn_id, sampled in known.items()}
    whole = {mark for mark, turn_id in there.items() if _finish_of(export, turn_id) != "abort"}
    for reply in acknowledged:
        for verdict, what in _reply_faults(reply, engine.by_mark.get(reply.mark), there, whole):
            found(verdict, f"an agent got [n:{reply.mark}] ({reply.at}){what}")
    trained, shown = Counter[str](), set[str]()
    for row in export.samples["samples"]:
        for what in _row_faults(row, known, trained, shown):
            found("wrong", f"row {row['sample_id']}: {what}")
    for turn_id, what in _prompt_faults(export.turns, known):
        found("wrong", f"turn {turn_id}: {what}")
    for verdict, what in _accounting_faults(export, trained, shown):
        found(verdict, what)
    _count(counts, export, acknowledged, trained)
    if damaged:  # a turn may be gone, and what was built on it cannot be rebuilt
        return [
            finding for finding in findings if finding.verdict != "lost" and " its parent " not in finding.what
        ]
    return findings


def _count(counts: Counts, export: Export, acknowledged: Collection[Acknowledged], trained: Counter[str]) -> None:
    counts.episodes += 1
    counts.acknowledged += len(acknowledged)
    counts.trained += trained.total()
    counts.untrained.update(each["reason"] for each in export.samples["untrained"])
    counts.turns += len(export.turns)
    counts.tokens += sum(len(turn["completion_ids"]) for turn in export.turns)


def _turn_faults(turn: Json, sampled: Sampled | None, episode_id: str) -> Iterator[str]:
    if sampled is None:
        yield "it was never sampled"
        return
    ids, count = tuple(turn["completion_ids"]), len(turn["completion_ids"])
    if sampled.episode != episode_id:
        yield f"[n:{sampled.mark}] was sampled for episode {sampled.episode}"
    if ids != sampled.ids[:count]:
        yield f"its ids are not those of [n:{sampled.mark}]"
    if _float32(turn["logprobs"]) != sampled.logprobs[:count]:
        yield f"its logprobs are not those of [n:{sampled.mark}]"
    if turn["finish_reason"] != "abort" and (
        count != len(sampled.ids) or turn["finish_reason"] != MATCHED[sampled.finish]
    ):
        yield f"it has {count} of {len(sampled.ids)} tokens and finish {turn['finish_reason']}"
    for span in turn["weight_spans"]:
        for position in range(span["start"], span["end"]):
            if span["version"] not in (UNKNOWN_WEIGHTS, sampled.version_at(position)):
                yield f"token {position} has weights {span['version']}"
                return


def _prompt_faults(turns: list[Json], known: dict[str, Sampled]) -> Iterator[tuple[str, str]]:
    """Rebuilds each prompt along the parents and compares it with what the engine was fed."""
    tokens: dict[str, list[int]] = {}
    for turn in turns:
        parent = turn["parent_id"]
        if parent is not None and parent not in tokens:
            yield turn["turn_id"], f"its parent {parent} is not there"
            continue
        prompt = [*tokens.get(parent, []), *turn["context_ids"]]
        tokens[turn["turn_id"]] = [*prompt, *turn["completion_ids"]]
        sampled = known.get(turn["turn_id"])
        if sampled is not None and (len(prompt) != sampled.fed or sha_of(prompt) != sampled.fed_sha):
            yield turn["turn_id"], f"the engine was fed another prompt than these {len(prompt)} ids"


def _finish_of(export: Export, turn_id: str) -> str:
    return next(str(turn["finish_reason"]) for turn in export.turns if turn["turn_id"] == turn_id)


def _reply_faults(
    reply: Acknowledged, truth: Sampled | None, there: Collection[str], whole: Collection[str]
) -> Iterator[tuple[Verdict, str]]:
    """``there``, ``whole``: marks of the turns of the export, and of those that are no interrupted ones."""
    if truth is None:
        yield "wrong", ", which was never sampled"
    elif reply.mark not in whole:
        yield "lost", f", which is {'only in part' if reply.mark in there else 'not'} in the export"
    elif truth.text is not None and digest(truth.text) != reply.sha:
        yield "wrong", " with another text"


def _row_faults(row: Json, known: dict[str, Sampled], trained: Counter[str], shown: set[str]) -> Iterator[str]:
    """Adds the row's turns to ``shown``, and those that it trains to ``trained``."""
    length = len(row["input_ids"])
    if {len(row[column]) for column in ("loss_mask", "logprobs", "weight_version")} != {length}:
        yield "its columns differ in length"
        return
    mask, logprobs = np.zeros(length, np.uint8), np.zeros(length, np.float32)
    for span in row["turn_spans"]:
        start, end = span["start"], span["end"]
        shown.add(span["turn_id"])
        trained.update([span["turn_id"]] if span["trained"] else [])
        sampled = known.get(span["turn_id"])
        if sampled is None:
            yield f"the unknown turn {span['turn_id']}"
            continue
        if tuple(row["input_ids"][start:end]) != sampled.ids[: end - start]:
            yield f"other ids than were sampled for [n:{sampled.mark}]"
        if start != sampled.fed or sha_of(row["input_ids"][:start]) != sampled.fed_sha:
            yield f"another prompt than was fed for [n:{sampled.mark}]"
        versions = {(at, row["weight_version"][at]) for at in range(start, end)}
        if any(name not in (UNKNOWN_WEIGHTS, sampled.version_at(at - start)) for at, name in versions):
            yield f"other weights than those that sampled [n:{sampled.mark}]"
        if span["trained"]:
            mask[start:end] = 1
            logprobs[start:end] = sampled.logprobs[: end - start]
    if not np.array_equal(mask, np.array(row["loss_mask"], np.uint8)):
        yield "the mask is not that of its trained turns"
    if not np.array_equal(logprobs, np.array(row["logprobs"], np.float32)):
        yield "logprobs that were not sampled, or outside the mask"


def _accounting_faults(export: Export, trained: Counter[str], shown: set[str]) -> Iterator[tuple[Verdict, str]]:
    """Each turn is trained once or listed once, and the sums are right."""
    listed = {each["turn_id"]: each for each in export.samples["untrained"]}
    sizes = {turn["turn_id"]: len(turn["completion_ids"]) for turn in export.turns}
    for turn_id, size in sizes.items():
        if trained[turn_id] > 1:
            yield "doubled", f"turn {turn_id} is trained {trained[turn_id]} times"
        if trained[turn_id] and turn_id in listed:
            yield "doubled", f"turn {turn_id} is trained and listed as untrained"
        if not trained[turn_id] and turn_id not in listed:
            yield "lost", f"turn {turn_id} is neither trained nor listed as untrained"
        if turn_id not in shown:
            yield "lost", f"turn {turn_id} is in no row"
        if turn_id in listed and (listed[turn_id]["tokens"] != size or not listed[turn_id]["reason"]):
            yield "wrong", f"turn {turn_id} is listed with {listed[turn_id]}"
    if extra := ({turn_id for turn_id in trained if trained[turn_id]} | set(listed)) - set(sizes):
        yield "wrong", f"turns that are not there: {sorted(extra)}"
    sums = {
        "turns": len(sizes),
        "sampled_tokens": sum(sizes.values()),
        "trained_tokens": sum(size for turn_id, size in sizes.items() if trained[turn_id]),
    }
    for name, expected in sums.items():
        if export.samples["stats"][name] != expected:
            yield "wrong", f"stats.{name} is {export.samples['stats'][name]}, not {expected}"


def sha_of(ids: list[int]) -> str:
    return hashlib.sha256(np.array(ids, "<i4").tobytes()).hexdigest()


def fingerprint(export: Export) -> str:
    """Of what must never change once the episode has ended."""
    kept = [
        (turn["turn_id"], turn["parent_id"], turn["completion_ids"], turn["logprobs"]) for turn in export.turns
    ]
    return hashlib.sha256(repr(kept).encode()).hexdigest()


def _float32(values: list[float]) -> tuple[float, ...]:
    return tuple(np.array(values, np.float32).tolist())
