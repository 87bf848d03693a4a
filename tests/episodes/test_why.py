"""The line that says why an episode ended and why it has its reward: of episodes that were played, of every kind
of record, and of records that nobody would write."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import pytest
from conversation import END, body, raw, url
from gate_support import Stage, says, staged
from hypothesis import given
from hypothesis import strategies as some
from light import SOLVE, light_work
from test_whole_episodes import ended

from turnstile.models import EndedBy, Episode, EpisodeStatus, Fault, explained, why_of
from turnstile.models.evidence import shown_number
from turnstile.models.why import MAX_WHY
from turnstile.visible import visible
from turnstile_server.episodes.store import Stored, stored_of

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

TEST = """
import unittest, answer
class T(unittest.TestCase):
    def test_answer(self):
        self.assertEqual(answer.ANSWER, 42)
    def test_type(self):
        self.assertIsInstance(answer.ANSWER, int)
    def test_even(self):
        self.assertEqual(answer.ANSWER % 2, 0)
"""
NAMES = ("answer", "type", "even")
TASK: dict[str, Any] = {
    "instruction": "Make ANSWER 42.",
    "base": {"inline": {"answer.py": "ANSWER = 41\n"}},
    "tests": {
        "files": {"inline": {"test_answer.py": TEST}},
        "expected": [f"test_answer.T.test_{name}" for name in NAMES],
    },
}
FAILED = "2 of 3 hidden tests failed: test_answer.T.test_answer, test_answer.T.test_even"


@pytest.fixture
async def server(tiny_model: Path, tmp_path: Path) -> AsyncIterator[Stage]:
    work, wanted = light_work(tiny_model, tmp_path / "data", tmp_path / "installs")
    async with staged(tiny_model, tmp_path / "data", work=work, **wanted) as stage:
        stage.engine.answers = [says([*stage.encode("hm"), *stage.encode(END)])]
        yield stage


PLAYED: dict[str, tuple[dict[str, Any], str]] = {
    "solved": (
        {"env": {"WORK": SOLVE, "TURNS": "3"}},
        "1: all 3 hidden tests passed; the agent stopped by itself after 3 turns",
    ),
    "idle": ({}, f"0: {FAILED}; the agent stopped by itself after 2 turns"),
    "out of turns": (
        {"limits": {"max_turns": 1}},
        f"0: {FAILED}; stopped by its budget after 1 turn: the episode's 1 turns are used up; stop here",
    ),
    "crashed": (
        {"env": {"WORK": "raise SystemExit('it broke')"}},
        "0: the agent failed after 2 turns: the agent ended with exit code 1; its last output: it broke",
    ),
    "killed": (
        {"env": {"WORK": "os.kill(os.getpid(), 9)"}},
        "0: the agent failed after 2 turns, killed by signal 9: the agent ended with exit code 137",
    ),
    "silent": (
        {"env": {"TURNS": "0"}},
        "0: the agent failed before its first turn: the agent ended with exit code 0 without a model call; its "
        "last output: thought 0 times",
    ),
    "too slow": (
        {"env": {"WORK": SOLVE, "STAY": "1000"}, "limits": {"wall_s": 4}},
        "1: all 3 hidden tests passed; stopped by a limit of time after 2 turns: the episode ran longer than "
        "limits.wall_s = 4 s",
    ),
    "ungraded": (
        {"task": {"instruction": "Think."}},
        "not graded: its task has no grader; the agent stopped by itself after 2 turns",
    ),
}


async def test_episodes_that_were_played_say_why(server: Stage) -> None:
    found: dict[str, str] = {}

    async def play(name: str, fields: dict[str, Any]) -> None:
        created = await server.episode(**{"task": TASK, "agent": "light", **fields})
        found[name] = (await ended(server, created))["why"]

    async with anyio.create_task_group() as tasks:
        for name, (fields, _) in PLAYED.items():
            tasks.start_soon(play, name, fields)
    assert found == {name: line for name, (_, line) in PLAYED.items()}


async def test_every_answer_with_an_episode_has_the_line_and_no_record_has_it(
    stage: Stage, tmp_path: Path
) -> None:
    created = await stage.episode()
    assert (await stage.get(created))["why"] == "running"
    async with raw(created) as agent:
        assert (await agent.post(url(created), json=body())).status_code == 200
    assert (await stage.get(created))["why"] == "running: 1 turn so far"
    line = "not graded: its task has no grader; its caller finished it after 1 turn"
    async with stage.control.stream("GET", "/events") as events:
        lines = events.aiter_lines()
        assert await anext(lines) == ": open"
        assert (await stage.post(created, "finish"))["why"] == line
        assert Episode.model_validate_json(await _data(lines)).why == line
    assert (await stage.get(created))["why"] == line
    [listed] = (await stage.control.get("/episodes")).json()["episodes"]
    assert (listed["why"], listed["ended_by"]) == (line, "request")
    cancelled = await stage.post(await stage.episode(), "cancel")
    assert cancelled["why"] == "no reward: cancelled by a request while it was running, before its first turn"
    files = [path.read_bytes() for path in (tmp_path / "journal").rglob("*") if path.is_file()]
    assert any(created["episode_id"].encode() in data for data in files)
    assert not any(b"its caller finished" in data for data in files)


async def _data(lines: AsyncIterator[str]) -> str:
    """Of the next event."""
    with anyio.fail_after(20):
        async for line in lines:
            if line.startswith("data: "):
                return line.removeprefix("data: ")
    raise AssertionError("the events have ended")


def test_a_line_in_a_record_is_not_believed() -> None:
    record = Stored(_episode(why="1: forged"), "nonce", None, "digest").record()
    assert "why" not in record.meta
    record.meta["why"] = "1: forged"
    assert stored_of(record).episode.why is None
    assert explained(_episode(why="1: forged")).why == why_of(_episode())


def _episode(**fields: Any) -> Episode:
    turns = fields.pop("turns", 4)
    whole: dict[str, Any] = {
        "episode_id": "ep",
        "status": "completed",
        "agent": "pi",
        "task": {"id": "t"},
        "rollout_id": "ep",
        "sampling": {},
        "limits": {},
        "timings": {"created_at": 0.0, "running_s": 1.0, "ended_s": 9.0},
        "stats": {"turns": turns},
        "agent_exit_code": 0,
        "ended_by": "exit",
    }
    return Episode.model_validate(whole | fields)


def _error(kind: str, message: str, fault: str | None = None, detail: Any = None) -> dict[str, Any]:
    return {"type": kind, "message": message, "fault": fault, "detail": detail}


def _fails(kind: str, message: str, fault: str | None, detail: Any = None, **fields: Any) -> dict[str, Any]:
    return {"status": "failed", "error": _error(kind, message, fault, detail), "ended_by": None, **fields}


STOPPED = "the agent stopped by itself after 4 turns"
GRADED = {"created_at": 0.0, "running_s": 1.0, "grading_s": 5.0, "ended_s": 9.0}
BOUND = {"max_versions": 2}
RECORDS: list[tuple[dict[str, Any], str]] = [
    # What has not ended.
    ({"status": "queued"}, "queued: it waits for a place to run"),
    ({"status": "preparing"}, "preparing: what its agent works in is being made"),
    ({"status": "running", "turns": 0}, "running"),
    ({"status": "grading"}, "grading: what the agent left is being judged, after 4 turns"),
    # How an agent's work ended.
    (
        {"ended_by": "submission"},
        "not graded: its task has no grader; the agent ended with its answer after 4 turns",
    ),
    ({"ended_by": "request"}, "not graded: its task has no grader; a request finished it after 4 turns"),
    ({"agent_exit_code": 7}, "not graded: its task has no grader; the agent ended with exit code 7 after 4 turns"),
    (
        {"status": "truncated", "error": _error("context_length_exceeded", "the prompt has 9 tokens"), "turns": 1},
        "not graded: its task has no grader; the model's context was full after 1 turn: the prompt has 9 tokens",
    ),
    (
        {"status": "truncated", "reward": 1.0, "error": _error("stale_weights", "3 versions were served")},
        "1; stopped because its tokens got stale after 4 turns: 3 versions were served",
    ),
    # Failures.
    (
        _fails("sandbox_unavailable", "none\ncan be made", "infrastructure", turns=0),
        "no reward: the infrastructure failed (sandbox_unavailable) before its first turn: none can be made",
    ),
    (
        _fails("task_failed", "The image has no bash", "task", turns=0),
        "no reward: the task failed (task_failed) before its first turn: The image has no bash",
    ),
    (
        _fails("sandbox_failed", "its memory was used up", "infrastructure", {"grader": "tests"}, timings=GRADED),
        "no reward: grading by tests failed (sandbox_failed) after 4 turns: its memory was used up",
    ),
    (
        _fails("internal_error", "the grading failed: KeyError", "infrastructure", timings=GRADED),
        "no reward: grading failed (internal_error) after 4 turns: the grading failed: KeyError",
    ),
    (
        _fails("finished_early", "there was no world yet", "caller", turns=0),
        "no reward: its caller failed it (finished_early) before its first turn: there was no world yet",
    ),
    (
        _fails("server_restarted", "the server stopped while the episode ran", "infrastructure"),
        "no reward: the infrastructure failed (server_restarted) after 4 turns: the server stopped while the "
        "episode ran",
    ),
    (
        _fails("record_unreadable", "this version cannot read it", None),
        "no reward: its record cannot be read: this version cannot read it",
    ),
    (
        {"status": "failed", "ended_by": None},
        "no reward: it failed after 4 turns, and its record does not say why",
    ),
    (
        _fails("agent_failed", "the agent used up its sandbox's memory", "agent", {"death": "memory"}, reward=0.0),
        "0: the agent failed after 4 turns: the agent used up its sandbox's memory",
    ),
    # Cancellations.
    (
        {"status": "cancelled", "ended_by": "request", "timings": GRADED},
        "no reward: cancelled by a request while it was graded, after 4 turns",
    ),
    (
        {"status": "cancelled", "ended_by": "request", "turns": 0, "timings": {"created_at": 0.0}},
        "no reward: cancelled by a request while it was queued, before its first turn",
    ),
    (
        {"status": "cancelled", "ended_by": None, "error": _error("lease_lapsed", "nothing was heard", "caller")},
        "no reward: cancelled after 4 turns, its owner's lease lapsed: nothing was heard",
    ),
    (
        {"status": "cancelled", "error": _error("stale_weights", "3 versions were served", "infrastructure")},
        "no reward: cancelled after 4 turns, its tokens got stale: 3 versions were served",
    ),
    # Rewards that came later, and grades that were given again.
    (
        {"late_rewards": {"bounds": (0, 1), "turn_bounds": (0, 1), "pending": True}},
        f"no reward yet: it waits for that of its trainer; {STOPPED}",
    ),
    (
        {
            "reward": 0.25,
            "late_rewards": {
                "bounds": (0, 1),
                "turn_bounds": (0, 1),
                "changes": [{"key": "k", "at": 5.0, "by": "arena", "why": "lost two of\nthree", "reward": 0.25}],
            },
        },
        f"0.25: given by arena: lost two of three; {STOPPED}",
    ),
    (
        {
            "reward": 1.0,
            "reward_components": {"tests": 1.0},
            "grading": {"tests": {"expected": 2, "passed": 2, "exit_code": 0, "failed": []}},
            "regrades": [
                {
                    "regrade_id": "r",
                    "episode_id": "ep",
                    "at": 7.0,
                    "before": {"reward": 0.0},
                    "before_status": "completed",
                    "after": {"reward": 1.0},
                    "applied": True,
                }
            ],
        },
        f"1: all 2 hidden tests passed; {STOPPED}; judged again, it was 0",
    ),
    (
        {
            "staleness": {
                "bound": BOUND,
                "first_version": "1",
                "newest_version": "4",
                "versions": 3,
                "exceeded": True,
            }
        },
        f"not graded: its task has no grader; {STOPPED}; its tokens are stale (3 versions, its bound is 2)",
    ),
]


@pytest.mark.parametrize(("fields", "line"), RECORDS, ids=[line[:60] for _, line in RECORDS])
def test_each_end_has_its_words(fields: dict[str, Any], line: str) -> None:
    assert why_of(_episode(**fields)) == line


def _three(*failed: str, **more: Any) -> dict[str, Any]:
    return {
        "expected": 3,
        "passed": 3 - len(failed),
        "exit_code": 1,
        "failed": [{"id": each} for each in failed],
        **more,
    }


GRADINGS: list[tuple[float, dict[str, float], dict[str, Any], str]] = [
    (0, {"tests": 0}, {"tests": {"exit_code": 3, "output": ""}}, "0: the hidden tests ended with exit status 3"),
    (1, {"tests": 1}, {"tests": {"exit_code": 0, "output": ""}}, "1: the hidden tests passed"),
    (
        0,
        {"tests": 0},
        {"tests": {"expected": 3, "passed": 0, "exit_code": 9, "note": "the tests ran out of time"}},
        "0: hidden tests: the tests ran out of time",
    ),
    (
        0,
        {"tests": 0},
        {"tests": _three(exit_code=2)},
        "0: the 3 hidden tests passed, but their run ended with exit status 2",
    ),
    (
        0,
        {"swe": 0},
        {"diff": {"counts": {"left_out": 2}}, "swe": _three("a", "b", resolved=False)},
        "0: 2 of 3 tests of SWE-bench failed: a, b; 2 changed paths were left out",
    ),
    (0, {"r2e": 0}, {"r2e": _three("a")}, "0: 1 of 3 tests of R2E-Gym failed: a"),
    (0, {"answer": 0}, {"answer": {"right": False, "note": "another number"}}, "0: answer: another number"),
    (1, {"answer": 1}, {"answer": {"right": True, "note": ""}}, "1: the answer is right"),
    (0.5, {"sum": 0.5}, {"sum": {"credit": 0.5, "note": "off by 2"}}, "0.5: sum gives 0.5: off by 2"),
    (
        0.5,
        {"script": 0.5},
        {"script": {"rewards": {"reward": 0.5}, "file": "reward.txt"}},
        "0.5: the script gave 0.5",
    ),
    (
        0,
        {"tests": 0},
        {"diff": {"refused": "it changed 9000 files"}, "summary": ["work: it changed 9000 files"]},
        "0: the work was not taken over: it changed 9000 files",
    ),
    (
        0,
        {"tests": 0},
        {"summary": ["work: the work cannot be fetched: too large"]},
        "0: work: the work cannot be fetched: too large",
    ),
    (0.5, {"world": 0.5, "calm": 1}, {"summary": ["world: world is 0.5"]}, "0.5: world: world is 0.5"),
    (1, {"world": 1}, {}, "1: world is 1"),
    (
        0.2,
        {"tests": 0, "style": 0.5, "answer": 1},
        {
            "tests": _three("a", "b", "c", more=1),
            "answer": {"right": True},
            "style": {"code": "rubrics:style"},
            "gate": {"component": "tests", "value": 0.0, "at_least": 1.0, "reward": 0.2},
            "not_run": ["last"],
        },
        "0.2: tests is 0, below its gate 1; 3 of 3 hidden tests failed: a, b, c; the answer is right; "
        "style is 0.5",
    ),
    (
        0.1,
        {"b": 1, "z": 0, "a": 0, "y": 0.4},
        {
            "b": {"fits": True},
            "z": {"note": "nothing was submitted"},
            "a": {"fits": False, "errors": ["$: 3"]},
            "y": {"credit": 0.4, "note": "off by 1"},
        },
        "0.1: z: nothing was submitted; a does not fit its schema: $: 3; y gives 0.4: off by 1; b fits its schema",
    ),
    (
        0.5,
        {"one": 1, "two": 0},
        {
            "steps": {"one": {"reward": 1.0}, "two": {"reward": 0.0, "status": "completed", "tests": _three("a")}},
            "step_reward": "mean",
            "not_played": ["three"],
        },
        "0.5: the mean of 3 steps: one is 1, two is 0 (1 of 3 hidden tests failed: a), three was not played",
    ),
    (
        0,
        {"tests": 0},
        {"tests": {"expected": 40, "passed": 0, "exit_code": 1, "failed": [{"id": f"t{n}"} for n in range(20)]}},
        "0: 40 of 40 hidden tests failed: t0, t1, t2 and 37 more",
    ),
]


@pytest.mark.parametrize(
    ("reward", "components", "grading", "line"), GRADINGS, ids=[each[3][:60] for each in GRADINGS]
)
def test_each_grading_has_its_words(
    reward: float, components: dict[str, float], grading: dict[str, Any], line: str
) -> None:
    episode = _episode(reward=reward, reward_components=components, grading=grading)
    assert why_of(episode) == f"{line}; {STOPPED}"


_text = some.text(max_size=400)
_WORDS = (
    "tests swe r2e answer world script steps summary diff gate not_run not_played expected passed failed note",
    "exit_code credit fits errors rewards file server reported votes judge reply refused value at_least id",
    "resolved reward step_reward right component",
)
_words = some.sampled_from([word for line in _WORDS for word in line.split()])
_names = _words | _text
_json = some.recursive(
    some.none() | some.booleans() | some.integers() | some.floats() | _names,
    lambda inner: some.lists(inner, max_size=4) | some.dictionaries(_names, inner, max_size=6),
    max_leaves=25,
)
_changes = some.fixed_dictionaries({"key": _text.filter(bool), "at": some.floats(0, 9), "by": _text, "why": _text})
_regrade = some.fixed_dictionaries(
    {
        "regrade_id": some.just("r"),
        "episode_id": some.just("ep"),
        "at": some.floats(0, 9),
        "before": some.fixed_dictionaries({"reward": some.none() | some.floats()}),
        "before_status": some.sampled_from(EpisodeStatus),
        "after": some.just({"reward": 1.0}),
        "applied": some.booleans(),
    }
)
_records = some.fixed_dictionaries(
    {
        "status": some.sampled_from(EpisodeStatus),
        "agent": _text | some.just("external"),
        "reward": some.none() | some.floats(),
        "reward_components": some.dictionaries(
            _names, some.floats(allow_nan=False, allow_infinity=False), max_size=4
        ),
        "grading": some.dictionaries(_names, _json, max_size=6),
        "agent_exit_code": some.none() | some.integers(),
        "ended_by": some.none() | some.sampled_from(EndedBy),
        "turns": some.integers(0, 2**63),
        "error": some.none()
        | some.fixed_dictionaries(
            {"type": _text, "message": _text, "fault": some.none() | some.sampled_from(Fault), "detail": _json}
        ),
        "late_rewards": some.none()
        | some.fixed_dictionaries(
            {
                "bounds": some.just((0, 1)),
                "turn_bounds": some.just((0, 1)),
                "pending": some.booleans(),
                "changes": some.lists(_changes | _changes.map(lambda one: {**one, "reward": 1.0}), max_size=2),
            }
        ),
        "regrades": some.lists(_regrade, max_size=2),
        "staleness": some.none()
        | some.builds(lambda n: {"bound": BOUND, "versions": n, "exceeded": True}, some.integers()),
    }
)


@given(_records)
def test_any_record_has_one_bounded_harmless_line(fields: dict[str, Any]) -> None:
    line = why_of(_episode(**fields))
    assert 0 < len(line) <= MAX_WHY
    assert visible(line) == line


@pytest.mark.parametrize(
    ("number", "shown"),
    [
        (1.0, "1"),
        (0.9999999, "0.9999999"),
        (-0.0, "0"),
        (2 / 3, "0.666667"),
        (1e-9, "1e-09"),
        (1234567.5, "1234567.5"),
    ],
)
def test_no_number_is_shown_as_a_whole_one_that_it_is_not(number: float, shown: str) -> None:
    assert shown_number(number) == shown
