"""The campaign's checker finds what is wrong: a sound story passes, and every spoiled one is reported.

The story is an episode of three turns: a second one on the first, and a branch beside the second. Engine log,
agent log and export are made here by hand, as the engine, the agent and the server would write them.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from campaign.checker import Counts, Export, Finding, check_episode, fingerprint, sha_of
from campaign.truth import AgentLog, EngineLog, digest, read_agent_log

EPISODE = "c1"
MARKS = ("aaaaaaaaaaaa", "bbbbbbbbbbbb", "cccccccccccc")
SAMPLED = ([11, 12, 13], [21, 22], [31, 32, 33, 34])
LOGPROBS = ([-0.5, -0.25, -1.5], [-0.125, -2.0], [-0.75, -0.0625, -3.0, -0.1])
CONTEXT = ([1, 2, 3], [4, 5], [6])
PARENTS = (None, 0, 0)
VERSIONS = ("w0", "w0", "w1")


def prompt_of(turn: int) -> list[int]:
    parent = PARENTS[turn]
    before = [] if parent is None else [*prompt_of(parent), *SAMPLED[parent]]
    return [*before, *CONTEXT[turn]]


def text_of(turn: int) -> str:
    return f"[n:{MARKS[turn]}] said"


def engine_log(folder: Path) -> EngineLog:
    lines = [
        {
            "mark": MARKS[turn],
            "rid": f"r{turn}",
            "episode": EPISODE,
            "fed": len(prompt_of(turn)),
            "fed_sha": sha_of(prompt_of(turn)),
            "receipts": [[MARKS[0], digest(text_of(0))]] if turn else [],
            "ids": SAMPLED[turn],
            "logprobs": LOGPROBS[turn],
            "text": text_of(turn),
            "finish": "stop",
            "version": VERSIONS[turn],
        }
        for turn in range(3)
    ]
    path = folder / "truth.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"mark": "cut o')
    log = EngineLog(path)
    log.read_on()
    return log


def agent_log() -> AgentLog:
    return read_agent_log([got(MARKS[turn], digest(text_of(turn))) for turn in range(3)], "log")


def got(mark: str, sha: str) -> str:
    return json.dumps({"ev": "got", "mark": mark, "sha": sha, "port": 0})


def turn(index: int) -> dict[str, Any]:
    parent, count = PARENTS[index], len(SAMPLED[index])
    return {
        "turn_id": f"t{index}",
        "parent_id": None if parent is None else f"t{parent}",
        "context_ids": CONTEXT[index],
        "completion_ids": SAMPLED[index],
        "logprobs": [float(np.float32(value)) for value in LOGPROBS[index]],
        "weight_spans": [{"start": 0, "end": count, "version": VERSIONS[index]}],
        "finish_reason": "stop",
    }


def row(leaf: int, trained: list[int]) -> dict[str, Any]:
    path = [leaf] if PARENTS[leaf] is None else [0, leaf]
    ids, mask, logprobs, versions, spans = list[int](), list[int](), list[float](), list[str | None](), []
    for index in path:
        context = len(CONTEXT[index])
        start = len(ids) + context
        ids += [*CONTEXT[index], *SAMPLED[index]]
        own = index in trained
        mask += [0] * context + [int(own)] * len(SAMPLED[index])
        logprobs += [0.0] * context + [value if own else 0.0 for value in LOGPROBS[index]]
        versions += [None] * context + [VERSIONS[index]] * len(SAMPLED[index])
        spans.append({"turn_id": f"t{index}", "start": start, "end": len(ids), "trained": own})
    return {
        "sample_id": f"s{leaf}",
        "input_ids": ids,
        "loss_mask": mask,
        "logprobs": logprobs,
        "weight_version": versions,
        "turn_spans": spans,
    }


def sound() -> Export:
    samples = {
        "samples": [row(1, [0, 1]), row(2, [])],
        "untrained": [{"turn_id": "t2", "tokens": 4, "reason": "superseded"}],
        "stats": {"turns": 3, "sampled_tokens": 9, "trained_tokens": 5},
    }
    return Export({"episode_id": EPISODE, "status": "completed"}, [turn(0), turn(1), turn(2)], samples)


def check(folder: Path, export: Export, log: AgentLog | None = None, *, damaged: bool = False) -> list[Finding]:
    got = (agent_log() if log is None else log).got
    return check_episode(export, engine_log(folder), got, Counts(), damaged)


def test_a_sound_episode_passes_and_everything_in_it_was_held_against_the_truth(tmp_path: Path) -> None:
    counts = Counts()
    assert check_episode(sound(), engine_log(tmp_path), agent_log().got, counts) == []
    assert (counts.acknowledged, counts.turns, counts.tokens, counts.trained) == (3, 3, 9, 2)
    assert counts.untrained == {"superseded": 1}


Spoil = Callable[[Export], None]


def drop_turn(export: Export) -> None:
    del export.turns[2]
    del export.samples["samples"][1]
    export.samples["untrained"].clear()
    export.samples["stats"].update(turns=2, sampled_tokens=5)


def set_at(*path: Any, value: Any) -> Spoil:
    def spoil(export: Export) -> None:
        target: Any = export.turns if path[0] == "turns" else export.samples
        for step in path[1:-1] if path[0] == "turns" else path[:-1]:
            target = target[step]
        target[path[-1]] = value

    return spoil


def double_turn(export: Export) -> None:
    export.turns.append({**copy.deepcopy(export.turns[1]), "turn_id": "t9"})


def train_twice(export: Export) -> None:
    export.samples["samples"].append({**row(1, [1]), "sample_id": "s9"})


def train_listed(export: Export) -> None:
    export.samples["samples"][1] = row(2, [2])


def cut_short(export: Export) -> None:
    export.turns[1]["completion_ids"] = SAMPLED[1][:1]
    export.turns[1]["logprobs"] = LOGPROBS[1][:1]


def interrupted(export: Export) -> None:
    cut_short(export)
    export.turns[1]["finish_reason"] = "abort"


SPOILS: list[tuple[str, Spoil, str]] = [
    ("a turn is missing", drop_turn, "lost"),
    ("an id is altered", set_at("turns", 1, "completion_ids", value=[21, 99]), "wrong"),
    ("a logprob is altered", set_at("turns", 1, "logprobs", value=[-0.125, -2.0001]), "wrong"),
    ("a turn that was never sampled", set_at("turns", 1, "logprobs", value=[-7.0, -7.0]), "wrong"),
    ("a turn stands twice", double_turn, "doubled"),
    ("a turn is trained twice", train_twice, "doubled"),
    ("a turn is trained and listed", train_listed, "doubled"),
    ("a whole reply is half a turn", cut_short, "wrong"),
    ("a reply that was got is an interrupted turn", interrupted, "lost"),
    ("weights of a turn", set_at("turns", 2, "weight_spans", 0, "version", value="w0"), "wrong"),
    ("a prompt id", set_at("turns", 1, "context_ids", value=[4, 6]), "wrong"),
    ("another parent", set_at("turns", 1, "parent_id", value="t2"), "wrong"),
    ("a parent that is not there", set_at("turns", 1, "parent_id", value="gone"), "wrong"),
    ("a finish reason", set_at("turns", 0, "finish_reason", value="length"), "wrong"),
    ("a row's id", set_at("samples", 0, "input_ids", 4, value=99), "wrong"),
    ("a row's prompt", set_at("samples", 0, "input_ids", 0, value=99), "wrong"),
    ("a mask on context", set_at("samples", 0, "loss_mask", 0, value=1), "wrong"),
    ("a mask left out", set_at("samples", 0, "loss_mask", 3, value=0), "wrong"),
    ("a row's logprob", set_at("samples", 0, "logprobs", 3, value=-0.51), "wrong"),
    ("a logprob on context", set_at("samples", 0, "logprobs", 0, value=-0.5), "wrong"),
    ("a row's weights", set_at("samples", 0, "weight_version", 3, value="w1"), "wrong"),
    ("columns of different lengths", set_at("samples", 0, "loss_mask", value=[1]), "wrong"),
    ("a turn neither trained nor listed", set_at("untrained", value=[]), "lost"),
    ("a listed turn without a reason", set_at("untrained", 0, "reason", value=""), "wrong"),
    ("a sum", set_at("stats", "sampled_tokens", value=8), "wrong"),
]


@pytest.mark.parametrize(("what", "spoil", "verdict"), SPOILS, ids=[spoil[0] for spoil in SPOILS])
def test_every_spoiled_export_is_reported(tmp_path: Path, what: str, spoil: Spoil, verdict: str) -> None:
    export = copy.deepcopy(sound())
    spoil(export)
    assert verdict in {finding.verdict for finding in check(tmp_path, export)}


def test_a_text_that_the_engine_did_not_sample_is_wrong(tmp_path: Path) -> None:
    log = read_agent_log([got(MARKS[1], digest("else"))], "log")
    [finding] = check(tmp_path, sound(), log)
    assert finding.verdict == "wrong"
    assert "another text" in finding.what


def test_a_reply_from_nowhere_is_wrong(tmp_path: Path) -> None:
    log = read_agent_log([got("dddddddddddd", "0")], "log")
    [finding] = check(tmp_path, sound(), log)
    assert "never sampled" in finding.what


def test_receipts_in_later_prompts_are_an_agents_log_too(tmp_path: Path) -> None:
    export = copy.deepcopy(sound())
    drop_first = Export(export.episode, [], {"samples": [], "untrained": [], "stats": {}})
    drop_first.samples["stats"] = {"turns": 0, "sampled_tokens": 0, "trained_tokens": 0}
    engine = engine_log(tmp_path)
    [receipt] = engine.acknowledged(EPISODE)
    [finding] = check_episode(drop_first, engine, [receipt], Counts())
    assert finding.verdict == "lost"
    assert "receipt" in finding.what


def test_what_was_damaged_on_purpose_may_be_missing_but_not_wrong(tmp_path: Path) -> None:
    missing = copy.deepcopy(sound())
    drop_turn(missing)
    assert check(tmp_path, missing, damaged=True) == []
    spoiled = copy.deepcopy(sound())
    set_at("turns", 1, "completion_ids", value=[21, 99])(spoiled)
    assert "wrong" in {finding.verdict for finding in check(tmp_path, spoiled, damaged=True)}


def test_weights_that_changed_in_mid_reply_are_known_by_position(tmp_path: Path) -> None:
    engine = engine_log(tmp_path)
    with (tmp_path / "truth.jsonl").open("a") as file:
        file.write("\n" + json.dumps({"mark": MARKS[0], "from": 2, "version": "w5"}) + "\n")
    engine.read_on()
    assert [engine.by_mark[MARKS[0]].version_at(at) for at in range(3)] == ["w0", "w0", "w5"]


def test_a_changed_export_has_another_fingerprint() -> None:
    changed = copy.deepcopy(sound())
    set_at("turns", 1, "completion_ids", value=[21, 23])(changed)
    assert fingerprint(sound()) == fingerprint(sound()) != fingerprint(changed)
