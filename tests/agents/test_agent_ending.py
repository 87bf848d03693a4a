"""How an agent's end is told: by rules on its own log, held against the logs that agents wrote in sandboxes.

endings/AGENT.CASE.jsonl is the end of one: of an episode that went well (`ok`), with a prompt that became too
long (`context_full`), an episode that had ended (`gone`), a model that never stopped calling tools (`turns`) or
said nothing (`empty`) or was cut by its length (`too_long`).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from turnstile.models import EpisodeStatus
from turnstile_server.agents.ending import LoggedEnding, read_ending
from turnstile_server.agents.registry import load_registry
from turnstile_server.agents.spec import AgentResources, AgentSpec, EndRule
from turnstile_server.episodes.outcome import AgentEnd, outcome_of_exit
from turnstile_server.errors import ContextOverflow, EngineUnavailable, FormatTimeout, TurnstileError
from turnstile_server.settings import SandboxSettings
from turnstile_server.tasks.model import Task
from turnstile_server.tasks.workspace import sandbox_spec

LOGS = Path(__file__).with_name("endings")
DONE = LoggedEnding(failed=False, reason=None)
TOLD: dict[tuple[str, str], tuple[int, str | None]] = {
    # The exit code, and a part of the reason where the agent says that it failed.
    ("claude-code", "ok"): (0, None),
    ("claude-code", "empty"): (0, None),
    ("claude-code", "turns"): (1, None),
    ("claude-code", "context_full"): (1, "Prompt is too long"),
    ("claude-code", "gone"): (1, "API Error: 410 episode has ended"),
    ("codex", "ok"): (0, None),
    ("codex", "empty"): (0, None),
    ("codex", "too_long"): (1, None),
    ("codex", "context_full"): (1, "context_length_exceeded"),
    ("codex", "gone"): (1, "unexpected status 410 Gone: episode has ended"),
    ("gemini-cli", "ok"): (0, None),
    ("gemini-cli", "empty"): (0, None),
    ("gemini-cli", "turns"): (53, None),
    ("gemini-cli", "context_full"): (144, "prompt is too long"),
    ("gemini-cli", "gone"): (154, "episode has ended"),
    ("goose", "ok"): (0, None),
    ("goose", "empty"): (0, None),
    ("goose", "turns"): (0, None),
    ("goose", "context_full"): (0, "Ran into this error trying to compact"),
    ("goose", "gone"): (0, "Request failed with status 410 Gone"),
}


def spec(**fields: Any) -> AgentSpec:
    return AgentSpec(name="mine", version="1", summary="s", command=("true",), **fields)


def test_every_recorded_log_is_looked_at() -> None:
    recorded = {tuple(path.stem.split(".")) for path in LOGS.glob("*.jsonl")}
    assert recorded == TOLD.keys()


@pytest.mark.parametrize(("agent", "case"), sorted(TOLD))
def test_what_agents_wrote_at_their_end_is_read_right(agent: str, case: str) -> None:
    known = load_registry().get(agent)
    code, reason = TOLD[agent, case]
    log = (LOGS / f"{agent}.{case}.jsonl").read_text()
    outcome = outcome_of_exit(AgentEnd(code, log, read_ending(known.end, log)), known, turns=1, last_refusal=None)
    if reason is None:
        assert (outcome.status, outcome.error) == (EpisodeStatus.COMPLETED, None)
    else:
        assert outcome.status is EpisodeStatus.FAILED
        assert outcome.error is not None
        assert reason in outcome.error.message


def rule(**fields: Any) -> tuple[EndRule, ...]:
    return (EndRule.model_validate({"last": {"type": "end"}, "means": "failed", **fields}),)


@pytest.mark.parametrize(
    ("fields", "event", "applies"),
    [
        ({}, {}, True),
        ({"when": {"a.b": "x"}}, {"a": {"b": "x"}}, True),
        ({"when": {"a.b": "x"}}, {"a": "x"}, False),
        ({"when": {"a.1": "x"}}, {"a": ["y", "x"]}, True),
        ({"when": {"a.2": "x"}}, {"a": ["y", "x"]}, False),
        ({"when": {"ok": True}}, {"ok": 1}, False),
        ({"when": {"n": 1}}, {"n": True}, False),
        ({"when": {"n": None}}, {"n": None}, True),
        ({"when": {"n": None}}, {}, True),
        ({"when": {"n": None}}, {"n": 0}, False),
        ({"when": {"t": {"match": "^no|t$"}}}, {"t": "is it"}, True),
        ({"when": {"t": {"match": "^no"}}}, {"t": "or no"}, False),
        ({"when": {"t": {"match": "."}}}, {"t": 7}, False),
    ],
)
def test_fields_are_compared_with_their_type(fields: Any, event: dict[str, Any], applies: bool) -> None:
    told = read_ending(rule(**fields), json.dumps({"type": "end", **event}))
    assert (told is not None) is applies


def test_the_last_such_event_decides_and_the_first_rule_that_applies_to_it() -> None:
    rules = (*rule(when={"code": 2}, means="done"), *rule(when={"code": 2}, reason="why"), *rule(when={"code": 1}))
    lines = [{"type": "end", "code": 2}, {"type": "end", "code": 3}, {"type": "other", "code": 2}]
    assert read_ending(rules, "\n".join(map(json.dumps, lines))) is None
    assert read_ending(rules, "\n".join(map(json.dumps, [*lines, lines[0]]))) == DONE
    assert read_ending(rules[1:], json.dumps({"type": "end", "code": 2, "why": {"a": 1}})) == LoggedEnding(
        True, '{"a": 1}'
    )
    assert read_ending(rules[1:], json.dumps({"type": "end", "code": 2})) == LoggedEnding(True, None)


@pytest.mark.parametrize("noise", ["", "banner", '{"type": "end"', "[1]", "{" * 5000, '{"a":' * 5000, "\x00{}"])
def test_lines_that_are_no_events_are_passed_over(noise: str) -> None:
    assert read_ending(rule(), noise) is None
    assert read_ending(rule(), f'{noise}\n{{"type": "end"}}\n{noise}') == LoggedEnding(True, None)


@pytest.mark.parametrize(
    "fields", [{"last": {}}, {"when": {"a": {"match": "("}}}, {"when": {"a": [1]}}, {"means": "truncated"}]
)
def test_a_rule_that_can_mean_nothing_is_refused(fields: Any) -> None:
    with pytest.raises(ValidationError):
        rule(**fields)


def test_what_an_agent_says_of_its_end_comes_after_refusals_and_before_its_exit_code() -> None:
    agent = spec(needs=("git", "libstdc++6"))
    failed = AgentEnd(0, "words", LoggedEnding(True, None))
    overflow, broken = ContextOverflow("full"), EngineUnavailable("gone")
    assert outcome_of_exit(failed, agent, turns=1, last_refusal=broken).error is broken
    assert outcome_of_exit(failed, agent, turns=1, last_refusal=overflow).status is EpisodeStatus.TRUNCATED
    by_choice = outcome_of_exit(AgentEnd(0, "words"), agent, turns=1, last_refusal=FormatTimeout("slow"))
    assert (by_choice.status, by_choice.error) == (EpisodeStatus.COMPLETED, None)
    bug = TurnstileError("the gate failed")
    for turns in (0, 1):
        ended = outcome_of_exit(AgentEnd(1, "words"), agent, turns=turns, last_refusal=bug)
        assert (ended.status, ended.error, ended.by_agent) == (EpisodeStatus.FAILED, bug, False)
    told = outcome_of_exit(failed, agent, turns=1, last_refusal=None)
    assert told.status is EpisodeStatus.FAILED
    assert told.error is not None
    assert told.error.message.endswith("failed; its last output: words")
    assert (
        outcome_of_exit(AgentEnd(9, "", DONE), agent, turns=1, last_refusal=None).status is EpisodeStatus.COMPLETED
    )
    unheard = outcome_of_exit(failed, agent, turns=0, last_refusal=overflow)
    assert unheard.status is EpisodeStatus.FAILED
    assert unheard.error is not None
    assert (
        unheard.error.message
        == f"every model call of the agent was refused, the last one with: {overflow.message}"
    )
    silent = outcome_of_exit(AgentEnd(127, "", DONE), agent, turns=0, last_refusal=None)
    assert silent.error is not None
    assert "its image must have git, libstdc++6" in silent.error.message
    mute = outcome_of_exit(AgentEnd(1, "noise", LoggedEnding(True, "no key")), spec(), turns=0, last_refusal=None)
    assert mute.error is not None
    assert mute.error.message == "the agent ended with exit code 1 without a model call: no key"


def test_an_agent_gets_the_memory_it_needs_and_its_task_what_it_asks() -> None:
    settings = SandboxSettings(memory_mb=1000, pids=100)

    def limits(agent: AgentResources, **wish: int) -> tuple[int, int]:
        task = Task.model_validate({"id": "t", "instruction": "i", "sandbox": wish})
        made = sandbox_spec(task, settings, (), agent).limits
        return made.memory_bytes >> 20, made.pids

    assert limits(AgentResources()) == (1000, 100)
    assert limits(AgentResources(memory_mb=2000, pids=200)) == (2000, 200)
    assert limits(AgentResources(memory_mb=500, pids=50)) == (1000, 100)
    assert limits(AgentResources(memory_mb=500), memory_mb=300, pids=30) == (500, 30)
