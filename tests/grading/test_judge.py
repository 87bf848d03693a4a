"""A language model as grader: verdicts, votes, budgets, verdicts that are kept, and judges that fail."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import openai
import pytest
from grading_support import spec_of
from judge_server import RIGHT, WRONG, JudgeServer, Says
from pydantic import ValidationError

from bounded import bounded as bounded_section
from real_disk import tmpfs
from turnstile.models import Fault, TaskRef
from turnstile.models.evidence import grade_in_words
from turnstile_server.backends import build_backends
from turnstile_server.errors import StartupError, Unprocessable
from turnstile_server.grading.errors import GraderUnavailable
from turnstile_server.grading.grader import TaskGrader
from turnstile_server.grading.protocol import Work
from turnstile_server.kinds.judge.cache import VerdictCache
from turnstile_server.kinds.judge.client import JudgeReply
from turnstile_server.kinds.judge.prompt import build_prompt
from turnstile_server.settings import GradingSettings, JudgeSettings, Settings, TaskSettings
from turnstile_server.tasks.model import Task

pytestmark = pytest.mark.anyio

WORK = Work(answer="the answer of the work")


@pytest.fixture
def judge() -> Iterator[JudgeServer]:
    with JudgeServer(lambda body: RIGHT).serving() as server:
        yield server


def the_task(**options: Any) -> Task:
    entry = {"grader": "judge", "judge": "j", "question": "Is it polite?", **options}
    return Task.model_validate({"id": "t", "instruction": "Greet.", "grading": {"polite": entry}})


def grader(server: JudgeServer, data_dir: Path | None = None, retries: int = 0, **judge: Any) -> TaskGrader:
    judges = {"j": {"url": server.url, "model": "m", "timeout_s": 10, **judge}}
    settings = bounded_section(GradingSettings, judges=judges, retries=retries, retry_pause_s=0)
    return TaskGrader(None, spec_of, settings, TaskSettings(), data_dir)


def kept_in(folder: Path) -> list[Path]:
    return list(folder.rglob("*.json"))


def in_turn(*said: Says) -> Callable[[dict[str, Any]], Says]:
    left = list(said)
    return lambda body: left.pop(0) if len(left) > 1 else left[0]


async def test_a_verdict_is_a_component_with_its_evidence(judge: JudgeServer) -> None:
    grade = await grader(judge, temperature=0.5).grade(the_task(), WORK)
    assert (grade.reward, grade.components) == (1.0, {"polite": 1.0})
    evidence = grade.detail["polite"]
    assert (evidence["judge"], evidence["model"], evidence["temperature"]) == ("j", "m", 0.5)
    assert len(evidence["prompt"]) == 64
    assert evidence["votes"] == [
        {"value": 1.0, "reply": RIGHT.text, "model": "m-served", "cached": False, "tokens": 100}
    ]
    [body] = judge.bodies
    assert (body["model"], body["temperature"], body["max_tokens"]) == ("m", 0.5, 1024)
    assert body["response_format"] == {"type": "json_object"}
    assert "Is it polite?" in body["messages"][1]["content"]
    assert "Greet." in body["messages"][1]["content"]
    judge.reply = lambda body: WRONG
    grade = await grader(judge).grade(the_task(), WORK)
    assert grade.reward == 0.0
    assert grade.detail["summary"] == [f"polite: the judge gives 0: {WRONG.text}"]
    assert grade_in_words(grade.detail, grade.components) == "polite: the judge gave 0: bad"


async def test_the_scripted_judge_speaks_what_the_official_client_understands(judge: JudgeServer) -> None:
    async with openai.AsyncOpenAI(base_url=judge.url, api_key="k") as client:
        said = await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "x"}])
    assert said.choices[0].message.content == RIGHT.text
    assert said.usage is not None
    assert said.usage.total_tokens == 100


async def test_the_key_is_from_the_environment_or_a_file_and_in_no_message(
    judge: JudgeServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("JUDGE_KEY", "s3cret")
    await grader(judge, key_env="JUDGE_KEY").grade(the_task(), WORK)
    file = tmp_path / "key"
    file.write_text("in-a-file\n")
    await grader(judge, key_file=str(file)).grade(the_task(), WORK)
    await grader(judge).grade(the_task(), WORK)
    assert judge.keys == ["Bearer s3cret", "Bearer in-a-file", None]
    judge.reply = lambda body: Says(status=401, raw=b"no")
    with pytest.raises(GraderUnavailable) as caught:
        await grader(judge, key_env="JUDGE_KEY").grade(the_task(), WORK)
    assert "401" in caught.value.message
    assert "s3cret" not in str(caught.value.message) + str(caught.value.detail)
    monkeypatch.delenv("JUDGE_KEY")
    with pytest.raises(GraderUnavailable, match="JUDGE_KEY holds no key"):
        await grader(judge, key_env="JUDGE_KEY").grade(the_task(), WORK)


NO_VERDICT: dict[str, tuple[Says, str]] = {
    "prose": (Says("It is right."), "not one JSON object"),
    "two verdicts": (Says('{"verdict": "right"} {"verdict": "wrong"}'), "not one JSON object"),
    "a verdict twice": (Says('{"verdict": "wrong", "verdict": "right"}'), "given twice"),
    "no verdict": (Says('{"reason": "x"}'), "`verdict` and `reason` are wanted"),
    "further fields": (Says('{"verdict": "right", "score": 1}'), "`verdict` and `reason` are wanted"),
    "another verdict": (Says('{"verdict": "maybe"}'), "not one of right, wrong"),
    "a number": (Says('{"verdict": 1}'), "not one of right, wrong"),
    "a list": (Says('["right"]'), "no object"),
    "nothing": (Says(""), "no text"),
    "null": (Says(None), "no text"),
    "cut off": (Says('{"verdict": "right"}', finish="length"), "cut off"),
    "no completion": (Says(raw=b'{"choices": []}'), "no chat completion"),
    "no JSON": (Says(raw=b"<html>"), "no chat completion"),
    "nested too deep": (Says(raw=b"[" * 100_000), "no chat completion"),
    "429": (Says(status=429, raw=b"slow down"), "429: slow down"),
    "500": (Says(status=500, raw=b"oh"), "500: oh"),
    "404": (Says(status=404, raw=b"no such model"), "no such model"),
    "a redirect": (Says(status=307, raw=b"", headers={"location": "http://127.0.0.1:1/"}), "answered 307"),
    "a broken connection": (Says("x" * 1000, cut=True), "RemoteProtocolError"),
    "a flood": (Says(raw=b"x" * (5 << 20)), "more than"),
}


@pytest.mark.parametrize(("said", "told"), NO_VERDICT.values(), ids=NO_VERDICT.keys())
async def test_a_reply_without_a_verdict_is_no_reward_and_not_0(judge: JudgeServer, said: Says, told: str) -> None:
    judge.reply = lambda body: said
    with pytest.raises(GraderUnavailable) as caught:
        await grader(judge).grade(the_task(), WORK)
    assert told in caught.value.message
    assert caught.value.fault is Fault.INFRASTRUCTURE


async def test_a_judge_that_is_down_or_slow_is_no_reward() -> None:
    slow = JudgeServer(lambda body: Says(hangs=True)).serving()
    with slow as server, pytest.raises(GraderUnavailable, match=r"no verdict within 0\.2 s|Timeout"):
        await grader(server, timeout_s=0.2).grade(the_task(), WORK)
    with pytest.raises(GraderUnavailable, match="ConnectError"):
        await grader(server).grade(the_task(), WORK)


async def test_a_judge_is_asked_again_and_given_votes_are_kept(judge: JudgeServer) -> None:
    judge.reply = in_turn(RIGHT, Says(status=503, raw=b""), Says("?"), WRONG, RIGHT)
    grade = await grader(judge, retries=2).grade(the_task(votes=3), WORK)
    assert grade.reward == 1.0
    assert [vote["value"] for vote in grade.detail["polite"]["votes"]] == [1.0, 0.0, 1.0]
    assert len(judge.bodies) == 5


async def test_votes_count_by_majority_or_mean(judge: JudgeServer) -> None:
    judge.reply = in_turn(RIGHT, WRONG, WRONG)
    assert (await grader(judge).grade(the_task(votes=3), WORK)).reward == 0.0
    judge.reply = in_turn(RIGHT, WRONG, RIGHT, RIGHT)
    assert (await grader(judge).grade(the_task(votes=4, combine="mean"), WORK)).reward == 0.75


async def test_a_score_on_a_scale_becomes_0_to_1_and_stays_in_it(judge: JudgeServer) -> None:
    task = the_task(scale=[1, 5])
    for score, reward in ((1, 0.0), (4, 0.75), (5, 1.0)):
        judge.reply = lambda body, score=score: Says(json.dumps({"score": score}))  # type: ignore[misc]
        assert (await grader(judge).grade(task, WORK)).reward == reward
    for score in (0, 6, 10**400, "5", True, None, [5]):
        judge.reply = lambda body, score=score: Says(json.dumps({"score": score}))  # type: ignore[misc]
        with pytest.raises(GraderUnavailable, match="`score` is"):
            await grader(judge).grade(task, WORK)
    judge.reply = lambda body: Says('{"score": 1e999}')
    with pytest.raises(GraderUnavailable, match="`score` is inf"):
        await grader(judge).grade(task, WORK)
    judge.reply = lambda body: Says('{"score": NaN}')
    with pytest.raises(GraderUnavailable, match="NaN is no number"):
        await grader(judge).grade(task, WORK)


async def test_a_judge_that_prefers_what_comes_first_gives_half_in_both_orders(judge: JudgeServer) -> None:
    judge.reply = lambda body: Says('{"better": "first"}')
    task = the_task(compare=True, reference="Hello.")
    grade = await grader(judge).grade(task, WORK)
    assert (grade.reward, len(judge.bodies)) == (0.5, 2)
    first, second = (body["messages"][1]["content"] for body in judge.bodies)
    assert first.index("the answer of the work") < first.index("Hello.")
    assert second.index("the answer of the work") > second.index("Hello.")

    def fair(body: dict[str, Any]) -> Says:
        text = body["messages"][1]["content"]
        better = "first" if text.index("the answer of") < text.index("Hello.") else "second"
        return Says(json.dumps({"better": better, "reason": "kind"}))

    judge.reply = fair
    assert (await grader(judge).grade(task, WORK)).reward == 1.0
    judge.reply = lambda body: Says('{"better": "equal"}')
    assert (await grader(judge).grade(the_task(compare=True, reference="x", equal=1), WORK)).reward == 1.0
    assert (await grader(judge).grade(the_task(compare=True, reference="x", swap=False), WORK)).reward == 0.5


async def test_a_prompt_is_not_made_on_the_event_loop(judge: JudgeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[bool] = []

    def build(*given: Any) -> Any:
        made.append(threading.current_thread() is threading.main_thread())
        return build_prompt(*given)

    monkeypatch.setattr("turnstile_server.kinds.judge.grader.build_prompt", build)
    await grader(judge).grade(the_task(), WORK)
    assert made == [False]


async def test_nothing_submitted_is_0_without_a_call(judge: JudgeServer) -> None:
    assert (await grader(judge).grade(the_task(), Work())).reward == 0.0
    assert not judge.bodies


async def test_a_verdict_is_asked_once_for_the_same_question(judge: JudgeServer, tmp_path: Path) -> None:
    await grader(judge, tmp_path).grade(the_task(votes=3), WORK)
    assert len(judge.bodies) == 3
    grade = await grader(judge, tmp_path).grade(the_task(votes=3), WORK)  # as after a restart
    assert len(judge.bodies) == 3
    assert all(vote["cached"] for vote in grade.detail["polite"]["votes"])
    others: list[tuple[dict[str, Any], dict[str, Any], Work]] = [
        ({}, {}, Work(answer="another")),
        ({"question": "Is it rude?"}, {}, WORK),
        ({}, {"model": "other"}, WORK),
        ({}, {"temperature": 0.1}, WORK),
    ]
    for options, settings, work in others:
        before = len(judge.bodies)
        await grader(judge, tmp_path, **settings).grade(the_task(**options), work)
        assert len(judge.bodies) == before + 1


async def test_what_is_no_verdict_is_not_kept_and_damage_costs_a_call(judge: JudgeServer, tmp_path: Path) -> None:
    judge.reply = in_turn(Says("?"), RIGHT)
    with pytest.raises(GraderUnavailable):
        await grader(judge, tmp_path).grade(the_task(), WORK)
    await grader(judge, tmp_path).grade(the_task(), WORK)
    [kept] = kept_in(tmp_path)
    for damage in (b"", b'{"text": "?", "model": "m"}', b'{"text": 1}'):
        kept.write_bytes(damage)
        before = len(judge.bodies)
        assert (await grader(judge, tmp_path).grade(the_task(), WORK)).reward == 1.0
        assert len(judge.bodies) == before + 1


async def test_a_verdict_that_could_not_be_written_leaves_nothing_on_the_disk(tmp_path: Path) -> None:
    with tmpfs(tmp_path / "disk", "size=64k") as disk:
        (disk / "aa").mkdir()
        (disk / "aa" / "of-a-kill.new").write_bytes(b"x" * 20_000)
        cache = VerdictCache(disk, max_bytes=1 << 20)
        await cache.put("bb1", JudgeReply("x" * 100_000, 0, "m"))
        assert not [path for path in disk.rglob("*") if path.is_file()]
        await cache.put("bb2", JudgeReply("x" * 50_000, 0, "m"))
        assert await cache.get("bb2") is not None


async def test_verdicts_on_disk_are_bounded(judge: JudgeServer, tmp_path: Path) -> None:
    judge.reply = lambda body: Says(json.dumps({"verdict": "right", "reason": "x" * 200_000}))
    settings = GradingSettings.model_validate(
        {"judges": {"j": {"url": judge.url, "model": "m"}}, "judge_cache_mb": 1}
    )
    graded = TaskGrader(None, spec_of, settings, TaskSettings(), tmp_path)
    for number in range(9):
        await graded.grade(the_task(), Work(answer=str(number)))
    kept = kept_in(tmp_path)
    assert 2 <= len(kept) < 9
    assert sum(path.stat().st_size for path in kept) <= 1 << 20
    before = len(judge.bodies)
    await graded.grade(the_task(), Work(answer="8"))
    assert len(judge.bodies) == before, "the latest are kept"


BUDGETS = [
    ({"max_calls_per_grading": 2}, 3, "2 of 2 (grading.judges.j.max_calls_per_grading)"),
    ({"max_tokens_per_grading": 150}, 3, "200 of 150 (grading.judges.j.max_tokens_per_grading)"),
    ({"max_calls": 1}, 3, "1 of 1 (grading.judges.j.max_calls)"),
    ({"max_total_tokens": 100}, 3, "100 of 100 (grading.judges.j.max_total_tokens)"),
]


@pytest.mark.parametrize(("settings", "votes", "said"), BUDGETS)
async def test_a_spent_budget_is_no_reward_and_no_further_call(
    judge: JudgeServer, settings: dict[str, int], votes: int, said: str
) -> None:
    graded = grader(judge, **settings)
    with pytest.raises(GraderUnavailable) as caught:
        await graded.grade(the_task(votes=votes), WORK)
    assert said in caught.value.message
    assert len(judge.bodies) < votes


async def test_the_budget_of_one_work_is_not_the_budget_of_another(judge: JudgeServer) -> None:
    graded = grader(judge, max_calls_per_grading=1)
    for number in range(3):
        await graded.grade(the_task(), Work(answer=str(number)))
    assert len(judge.bodies) == 3


async def test_no_more_calls_at_once_than_the_settings_say(judge: JudgeServer) -> None:
    graded = grader(judge, parallel=2)
    async with anyio.create_task_group() as group:
        for number in range(8):
            group.start_soon(graded.grade, the_task(), Work(answer=str(number)))
    assert (len(judge.bodies), judge.most <= 2) == (8, True)


async def test_a_grading_that_is_cancelled_leaves_no_place_taken() -> None:
    with JudgeServer(lambda body: Says(hangs=True)).serving() as server:
        graded = grader(server, parallel=1)
        with anyio.move_on_after(0.2):
            await graded.grade(the_task(), WORK)
        server.reply = lambda body: RIGHT
        assert (await graded.grade(the_task(), WORK)).reward == 1.0


BAD: list[tuple[dict[str, Any], str]] = [
    ({"votes": 2}, "even number of votes"),
    ({"votes": 3, "scale": [0, 1]}, "use combine: mean"),
    ({"compare": True}, "needs the `reference`"),
    ({"compare": True, "reference": "x", "scale": [0, 1]}, "has no `scale`"),
    ({"scale": [1, 1]}, r"\[least, greatest\]"),
    ({"show": ["instruction"]}, "nothing of the work is shown"),
    ({"files": ["../x"]}, "plain relative path"),
    ({"question": ""}, "at least 1 character"),
    ({"votes": 0}, "greater than or equal to 1"),
]


@pytest.mark.parametrize(("options", "said"), BAD)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        the_task(**options)


def test_a_server_refuses_tasks_whose_judge_it_does_not_have(tmp_path: Path) -> None:
    file = tmp_path / "t.jsonl"
    file.write_text(the_task(votes=5).model_dump_json(exclude_defaults=True) + "\n")
    base = {"data_dir": tmp_path / "data"}
    with pytest.raises(StartupError, match=r"grading\.polite\.judge: there is no judge 'j'"):
        build_backends(Settings.model_validate({**base, "tasks": {"sources": [file]}}))
    judges = {"j": {"url": "http://x/v1", "model": "m", "max_calls_per_grading": 4}}
    with pytest.raises(StartupError, match=r"grading\.polite\.votes: they need 5 calls"):
        build_backends(
            Settings.model_validate({**base, "tasks": {"sources": [file]}, "grading": {"judges": judges}})
        )
    inline = TaskRef.model_validate({"instruction": "x", "grading": {"judge": {"judge": "k", "question": "?"}}})
    with pytest.raises(Unprocessable, match=r"task\.grading\.judge\.judge: there is no judge 'k'"):
        build_backends(Settings.model_validate(base)).task_of(inline)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"url": "ftp://x"}, "write an address"),
        ({"url": "http://x/v1?a=b"}, "write an address"),
        ({"key_env": "A", "key_file": "b"}, "not both"),
    ],
)
def test_a_judge_whose_settings_cannot_be_is_refused(settings: dict[str, str], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        JudgeSettings.model_validate({"url": "http://x/v1", "model": "m", **settings})
