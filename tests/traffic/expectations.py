"""What a replay gave, as a page that a person can review: calls, turns, samples, by number instead of id.

No token counts: the tiny model's tokenizer is made from the running Python's library, so they differ by version.
Which turns are trained, and why others are not, is here; that the tokens add up is checked beside it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import yaml
from replaying import Replayed

from agents_matrix.recording import RecordedEpisode

EXPECTED = Path(__file__).parent / "expected"
SHOWN_CHARS = 60
HEAD = "# Written by: pytest tests/traffic --write-expectations. Review every line that changes.\n"

Json = Mapping[str, Any]


def path_of(recording: Path) -> Path:
    return EXPECTED / recording.parent.name / f"{recording.name.partition('.')[0]}.yaml"


def page(
    recording: RecordedEpisode, played: Sequence[Replayed], turns: Sequence[Json], samples: Json
) -> dict[str, Any]:
    numbers = {turn["turn_id"]: number for number, turn in enumerate(turns, 1)}
    threads = _threads(turns)
    fates = _fates(samples)
    found: dict[str, Any] = {
        "agent": recording.header.agent,
        "version": recording.header.version,
        "fault": recording.header.fault,
        "calls": [_call(number, one) for number, one in enumerate(played, 1)],
        "turns": [_turn(turn, numbers, threads, played, fates) for turn in turns],
        "samples": [_sample(sample, numbers) for sample in samples["samples"]],
    }
    untrained = {numbers[one["turn_id"]]: one["reason"] for one in samples["untrained"]}
    stats = samples["stats"]
    summary = {
        "untrained": untrained,
        "breaks": stats["breaks"],
        "cosmetic": stats["cosmetic"],
        "discarded": sorted(stats["discarded"]),
    }
    return found | {name: value for name, value in summary.items() if value}


def dump(expected: Mapping[str, Any]) -> str:
    """YAML with one line per call, turn and sample."""
    lines = []
    for name, value in expected.items():
        if isinstance(value, list):
            lines += [f"{name}:{'' if value else ' []'}", *(f"- {_line(item)}" for item in value)]
        else:
            lines.append(f"{name}: {_line(value)}")
    return HEAD + "\n".join(lines) + "\n"


def _line(value: Any) -> str:
    text: str = yaml.safe_dump(value, sort_keys=False, default_flow_style=True, width=100_000, allow_unicode=True)
    return text.removesuffix("...\n").strip()


def _call(number: int, one: Replayed) -> str:
    query = f"?{one.call.query}" if one.call.query else ""
    said = one.call.said
    if said is None:
        model = "not asked"
    elif said.refusal is not None:
        model = f"{said.refusal.type} after {'some words' if said.text else 'nothing'}"
    else:
        model = said.finish or "aborted"
    changed = "" if one.status == one.call.status else f" (recorded: {one.call.status})"
    return f"{number} {one.call.method} {one.call.path}{query} model {model}, status {one.status}{changed}"


def _turn(
    turn: Json,
    numbers: Mapping[str, int],
    threads: Mapping[str, str],
    played: Sequence[Replayed],
    fates: Mapping[str, str],
) -> dict[str, Any]:
    mark = turn["turn_id"].removeprefix("turn_").encode()
    answered = [number for number, one in enumerate(played, 1) if mark in one.answer]
    line: dict[str, Any] = {
        "turn": numbers[turn["turn_id"]],
        "calls": answered,
        "parent": numbers.get(turn["parent_id"]),
        "heard": _roles(turn["new_messages"]),
        "said": _reply(turn["reply"]),
        "fate": fates[turn["turn_id"]],
    }
    if turn["break"] is not None:
        at = turn["break"]["at"]
        where = "" if at is None else f" at {at['message']} {at['path']} {at['kind']}".rstrip()
        line["break"] = turn["break"]["reason"] + where
    if turn["finish_reason"] != "stop":
        line["finish"] = turn["finish_reason"]
    if turn["echo"]:
        line["echo"] = list(turn["echo"])
    if [status for status in turn["parse_status"] if status != "ok"]:
        line["parse"] = list(turn["parse_status"])
    if turn["thread"] is not None:
        named = {name: threads[value] for name, value in turn["thread"].items() if value}
        line["thread"] = f"{named.get('name')}{' of ' + named['parent'] if 'parent' in named else ''}"
    return line


def _sample(sample: Json, numbers: Mapping[str, int]) -> dict[str, Any]:
    spans = sample["turn_spans"]
    line: dict[str, Any] = {
        "kind": sample["kind"],
        "turns": [numbers[span["turn_id"]] for span in spans],
        "trained": [numbers[span["turn_id"]] for span in spans if span["trained"]],
        "status": sample["status"],
    }
    cause = sample.get("caused_by")
    if cause is not None:
        line["caused_by"] = f"turn {numbers[cause['turn_id']]}, {cause['by']}"
    return line


def _fates(samples: Json) -> dict[str, str]:
    found = {one["turn_id"]: f"untrained: {one['reason']}" for one in samples["untrained"]}
    for number, sample in enumerate(samples["samples"], 1):
        trained = [span["turn_id"] for span in sample["turn_spans"] if span["trained"]]
        found |= dict.fromkeys(trained, f"trained in sample {number}")
    return found


def _threads(turns: Iterable[Json]) -> dict[str, str]:
    """Letters for the agent's own names of its conversations."""
    names = [name for turn in turns for name in (turn["thread"] or {}).values() if name]
    return {name: chr(ord("A") + index) for index, name in enumerate(dict.fromkeys(names))}


def _roles(messages: Iterable[Json]) -> str:
    grouped = [(role, len(list(group))) for role, group in groupby(message["role"] for message in messages)]
    return " ".join(role if count == 1 else f"{role}*{count}" for role, count in grouped)


def _reply(reply: Json) -> str:
    text = " ".join(reply["content"].split())
    calls = Counter(call["name"] for call in reply["tool_calls"])
    called = "".join(f" + {name}{'*' + str(count) if count > 1 else ''}" for name, count in calls.items())
    shown = text if len(text) <= SHOWN_CHARS else f"{text[:SHOWN_CHARS]}… ({len(text)})"
    return f"{shown}{called}".strip() or "(nothing)"
