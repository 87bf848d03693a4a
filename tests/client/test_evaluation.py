"""``turnstile eval`` and its figures: means, pass@k, differences and their intervals."""

from __future__ import annotations

import json
import math
import os
import random
import signal
import sys
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st
from stub_server import FOR_EVER, INFRASTRUCTURE, Play, StubServer, running_stub
from test_cli import DONE, FAILED, UNREACHABLE, USAGE, Done, one_sentence, turnstile
from test_run_command import INTERRUPTED, start

from hosted_model import KEY, MODEL, HostedModel, Reply, serving
from turnstile.cli.evaluate import contender_of
from turnstile.evaluation import (
    Played,
    evaluate,
    mean_estimate,
    powers,
    share_estimate,
    student,
    unlike,
)
from turnstile.models import EpisodeStatus, TaskInfo
from turnstile.models.stats import chance_at_k
from waiting import wait_until_sync

pytestmark = pytest.mark.slow

# Figures


@pytest.mark.parametrize(
    ("degrees", "quantile"),
    [(1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (5, 2.571), (10, 2.228), (30, 2.042), (120, 1.980)],
)
def test_students_quantiles_are_those_of_the_tables(degrees: int, quantile: float) -> None:
    assert student(degrees) == pytest.approx(quantile, rel=2e-3)


def test_pass_at_k_is_the_share_of_subsets_with_a_right_one() -> None:

    for n in range(1, 7):
        for right in range(n + 1):
            outcomes = [True] * right + [False] * (n - right)
            for k in range(1, n + 1):
                subsets = list(combinations(outcomes, k))
                assert chance_at_k(n, right, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


def played(name: str, *rewards: Sequence[float]) -> Played:
    return Played(name, {f"t{number}": list(found) for number, found in enumerate(rewards)})


def test_figures_are_over_tasks_and_only_over_graded_rollouts() -> None:
    # One task with many rollouts weighs no more than another.
    one = played("one", [1.0] * 8, [0.0, 0.0], [1.0, 0.0])
    one.add("t2", None, "infrastructure")
    one.add("t9", None, None)
    score = evaluate([one], (1, 2, 4, 8, 16)).scores[0]
    assert (score.graded, score.ungraded) == (12, {"infrastructure": 1, "none": 1})
    assert score.reward is not None
    assert (score.reward.value, score.reward.tasks) == (pytest.approx(0.5), 3)
    assert [(each.k, each.value, each.tasks) for each in score.pass_at_k] == [
        (1, pytest.approx(0.5), 3),
        (2, pytest.approx(2 / 3), 3),
        (4, 1.0, 1),
        (8, 1.0, 1),
    ]


def test_a_difference_is_of_the_same_tasks() -> None:
    base = played("base", [0.0], [0.0], [1.0], [1.0], [0.0])
    better = played("better", [1.0], [1.0], [1.0], [1.0])
    found = evaluate([base, better], (1,)).differences
    assert [(each.name, each.than, each.pass_at_1.value, each.pass_at_1.tasks) for each in found] == [
        ("better", "base", 0.5, 4)
    ]
    assert not found[0].clear
    assert unlike([base, better]) == ("t4",)
    # Paired: every task a little better is clear, however unlike the tasks are.
    many = [[1.0, 0.0], [0.0, 0.0]] * 8
    up = [[1.0, 1.0], [1.0, 0.0]] * 7 + [[1.0, 0.0], [1.0, 0.0]]
    assert evaluate([played("base", *many), played("up", *up)], (1,)).differences[0].clear


def test_what_is_right_is_said() -> None:
    found = evaluate([played("a", [0.4], [0.6])], (1,), solved_at=0.5)
    assert (found.solved_at, found.scores[0].pass_at_k[0].value) == (0.5, 0.5)


def test_one_task_and_tasks_alike_have_no_interval_of_the_mean() -> None:
    for numbers in ([0.3], [0.3, 0.3, 0.3]):
        assert mean_estimate(numbers).low is None
    assert share_estimate([1.0], 4).low is None
    assert evaluate([played("none")], (1,)).scores[0].reward is None


@given(st.lists(st.floats(0, 1), min_size=2, max_size=30), st.integers(1, 8))
def test_an_interval_of_a_share_holds_it_and_stays_a_share(shares: list[float], n: int) -> None:
    found = share_estimate(shares, n * len(shares))
    assert found.low is not None
    assert found.high is not None
    assert 0.0 <= found.low <= found.value + 1e-9
    assert found.value - 1e-9 <= found.high <= 1.0
    assert found.high - found.low > 0.01


@pytest.mark.parametrize(
    ("tasks", "n", "k"),
    [(5, 4, 1), (5, 16, 1), (12, 1, 1), (12, 4, 1), (12, 16, 4), (40, 1, 1), (40, 4, 1), (40, 16, 4)],
)
def test_intervals_hold_the_truth_about_as_often_as_they_say(tasks: int, n: int, k: int) -> None:
    """By simulation: tasks of unlike difficulty, 95 % intervals of pass@k and of the mean."""
    draw = random.Random(5)
    right, wrong = 0.8, 1.2
    truth = 1.0 - math.prod((wrong + tries) / (right + wrong + tries) for tries in range(k))
    held = means = 0
    for _ in range(400):
        chances = [draw.betavariate(right, wrong) for _ in range(tasks)]
        solved = [sum(draw.random() < each for _ in range(n)) for each in chances]
        of_tasks = [chance_at_k(n, each, k) for each in solved]
        share, mean = share_estimate(of_tasks, n * tasks), mean_estimate([each / n for each in solved])
        assert share.low is not None
        assert share.high is not None
        held += share.low <= truth <= share.high
        means += mean.low is not None and mean.high is not None and mean.low <= right / 2.0 <= mean.high
    assert 0.92 <= held / 400 <= 0.99
    assert 0.91 <= means / 400 <= 0.985


def test_the_ks_are_powers_of_two() -> None:
    assert [powers(n) for n in (1, 3, 8)] == [(1,), (1, 2), (1, 2, 4, 8)]
    assert math.isclose(chance_at_k(4, 1, 4), 1.0)


# The command


def stored(folder: Path, **rewards: Sequence[float | None]) -> Path:
    """A folder of ``turnstile run --out``, as far as the command reads it."""
    folder.mkdir()
    lines = [
        {"task": {"id": task}, "reward": reward, "error": None if reward is not None else {"fault": "task"}}
        for task, found in rewards.items()
        for reward in found
    ]
    (folder / "episodes.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_runs_that_are_there_are_compared(tmp_path: Path) -> None:
    before = stored(tmp_path / "before", a=[0.0, 1.0], b=[0.0, 0.0], c=[1.0])
    after = stored(tmp_path / "after", a=[1.0, 1.0], b=[1.0, 0.0])
    done = turnstile("eval", "--on", before, "--on", f"now={after}", "-n", "2")
    assert done.returncode == DONE, done.stderr
    assert "before" in done.stdout
    assert "now − before: pass@1 +0.500 over 2 tasks: not told apart" in done.stdout
    assert "not every model has a reward for 1 of the tasks: c" in done.stderr
    report = json.loads(turnstile("eval", "--on", before, "--on", after, "--k", "2", "--json").stdout)
    assert [score["name"] for score in report["scores"]] == ["before", "after"]
    assert [each["k"] for each in report["scores"][0]["pass_at_k"]] == [2]


def test_a_rollout_without_a_reward_is_told_and_no_zero(tmp_path: Path) -> None:
    done = turnstile("eval", "--on", stored(tmp_path / "one", a=[1.0, None], b=[1.0, 0.0]))
    assert done.returncode == FAILED
    assert " 3/4 " in done.stdout
    assert "0.750" in done.stdout


def on_stub(stub: StubServer, *arguments: str | Path) -> Done:
    return turnstile("eval", "--on", f"ours={stub.url}", *arguments)


def test_a_server_is_played_and_what_it_played_is_kept(tmp_path: Path) -> None:
    with running_stub() as stub:
        stub.tasks = tuple(TaskInfo(id=f"task-{number}", instruction="do it") for number in range(3))
        stub.play = lambda request: Play(reward=float(request.task.id != "task-1"))
        done = on_stub(stub, "--limit", "2", "-n", "2", "--seed", "5", "--out", tmp_path / "out")
        assert done.returncode == DONE, done.stderr
        assert " 4/4 " in done.stdout
        lines = (tmp_path / "out" / "ours" / "episodes.jsonl").read_text().splitlines()
        assert sorted(json.loads(line)["task"]["id"] for line in lines) == ["task-0"] * 2 + ["task-1"] * 2
        again = turnstile("eval", "--on", tmp_path / "out" / "ours", "-n", "2")
        assert again.stdout.splitlines()[-1].split()[1:] == done.stdout.splitlines()[-1].split()[1:]
        assert on_stub(stub, "--out", tmp_path / "out").returncode == USAGE  # two runs are not mixed


def test_every_model_plays_the_tasks_of_the_first() -> None:
    with running_stub() as first, running_stub() as second:
        first.tasks = tuple(TaskInfo(id=f"task-{number}", instruction="do it") for number in (0, 1, 2))
        second.tasks = tuple(TaskInfo(id=f"task-{number}", instruction="do it") for number in (9, 2, 1))
        done = turnstile("eval", "--on", f"a={first.url}", "--on", f"b={second.url}", "--json")
    assert done.returncode == DONE, done.stderr
    scores = json.loads(done.stdout)["scores"]
    assert [(score["name"], score["reward"]["tasks"]) for score in scores] == [("a", 3), ("b", 2)]
    assert "not every model has a reward for 1 of the tasks: task-0" in done.stderr


def test_an_earlier_run_counts_for_the_tasks_that_are_asked(tmp_path: Path) -> None:
    before = stored(tmp_path / "before", a=[0.0], b=[1.0], c=[1.0])
    after = stored(tmp_path / "after", b=[0.0], d=[1.0])
    report = json.loads(turnstile("eval", "--on", before, "--on", after, "--json").stdout)
    assert [score["reward"]["tasks"] for score in report["scores"]] == [3, 1]
    chosen = json.loads(turnstile("eval", "--on", before, "--tasks", "a,b", "--json").stdout)
    assert (chosen["scores"][0]["reward"]["value"], chosen["scores"][0]["reward"]["tasks"]) == (0.5, 2)


def test_what_was_asked_for_and_cannot_be_given_is_said(tmp_path: Path) -> None:
    one, other = stored(tmp_path / "one", a=[0.0], b=[1.0]), stored(tmp_path / "other", a=[None], b=[None])
    done = turnstile("eval", "--on", one, "--on", other, "--k", "9")
    assert "no task has 9 graded rollouts, so there is no pass@9" in done.stderr
    assert "other and one have no task in common, so no difference" in done.stderr


def test_the_key_of_a_server_is_that_of_its_variable_or_of_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "turnstile-data").mkdir()
    (tmp_path / "turnstile-data" / "control.key").write_text("from-the-folder\n")
    monkeypatch.setenv("OTHER_KEY", "from-the-variable")
    places = [contender_of(word, (), None).place for word in ("http://a:1", "http://a:1#OTHER_KEY")]
    assert [(place.urls, place.key) for place in places if place is not None] == [
        (("http://a:1",), "from-the-folder"),
        (("http://a:1",), "from-the-variable"),
    ]


def test_what_the_infrastructure_fails_is_counted_by_its_fault() -> None:
    with running_stub() as stub:
        stub.tasks = (TaskInfo(id="task-0", instruction="do it"),)
        stub.play = lambda request: Play(status=EpisodeStatus.FAILED, reward=None, error=INFRASTRUCTURE)
        done = on_stub(stub, "--retries", "0")
    assert done.returncode == FAILED
    assert " 0/1 " in done.stdout
    assert f"infrastructure: {INFRASTRUCTURE.message}" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--on", "upstream:gpt"), "upstream:MODEL@URL"),
        (("--on", ""), "names no model"),
        (("--on", "upstream:gpt@http://localhost/v1#NO_SUCH_VARIABLE"), "no NO_SUCH_VARIABLE"),
        (("--on", "http://127.0.0.1:9", "--on", "http://127.0.0.1:9"), "name them"),
        (("--on", "http://127.0.0.1:9", "--tasks", "a", "--limit", "1"), "drop them or the ids"),
    ],
)
def test_what_cannot_be_compared_is_a_usage_error(arguments: tuple[str, ...], said: str) -> None:
    assert said in one_sentence(turnstile("eval", *arguments), USAGE)


def test_a_file_that_is_no_run_is_told_by_its_line(tmp_path: Path) -> None:
    folder = stored(tmp_path / "run", a=[1.0])
    (folder / "episodes.jsonl").write_text('{"task": {"id": "a"}, "reward": 1.0, "error": null}\nnonsense\n')
    done = turnstile("eval", "--on", folder)
    assert (done.returncode, "line 2" in done.stderr) == (USAGE, True)


def test_a_server_that_cannot_be_reached_is_exit_3() -> None:
    assert turnstile("eval", "--on", "http://127.0.0.1:9").returncode == UNREACHABLE


def test_what_was_played_before_a_server_failed_is_reported() -> None:
    with running_stub() as stub:
        stub.tasks = (TaskInfo(id="task-0", instruction="do it"),)
        done = on_stub(stub, "--on", "gone=http://127.0.0.1:9")
    assert done.returncode == UNREACHABLE
    assert "http://127.0.0.1:9 could not be asked" in done.stderr
    assert " 1/1 " in done.stdout
    assert "gone" not in done.stdout


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_cancels_what_runs_and_reports_what_is_done(tmp_path: Path, number: signal.Signals) -> None:
    with running_stub() as stub:
        stub.tasks = tuple(TaskInfo(id=f"task-{number}", instruction="do it") for number in range(2))
        stub.play = lambda request: Play(0.0 if request.task.id == "task-0" else FOR_EVER)
        process = start("eval", "--on", f"ours={stub.url}", "--on", "http://127.0.0.1:9", "--out", str(tmp_path))
        wait_until_sync(lambda: len(stub.open) == 1 and (tmp_path / "ours" / "episodes.jsonl").exists())
        process.send_signal(number)
        stdout, stderr = process.communicate(timeout=60)
        assert (process.returncode, stub.open) == (INTERRUPTED, []), stderr
    assert " 1/1 " in stdout
    assert "ours: interrupted" in stderr


def test_runs_that_are_there_are_read_before_anything_is_played(tmp_path: Path) -> None:
    folder = stored(tmp_path / "run", a=[1.0])
    with running_stub() as stub:
        stub.tasks = (TaskInfo(id="task-0", instruction="do it"),)
        for written in (b"", b"\xff\n", b'{"task": {"id": "a"}, "reward": "1", "error": null}\n'):
            (folder / "episodes.jsonl").write_bytes(written)
            assert "episodes.jsonl" in one_sentence(on_stub(stub, "--on", folder), USAGE)
        assert stub.created == []


def test_a_folder_is_called_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "policy").mkdir()
    monkeypatch.chdir(tmp_path / "policy")
    assert [contender_of(word, (), None).name for word in (".", "../policy/", "tiny")] == [
        "policy",
        "policy",
        "tiny",
    ]


def test_a_hosted_models_name_may_have_an_at_sign() -> None:
    place = contender_of("upstream:@maker/model@2026@https://host/v1", (), None).place
    assert place is not None
    assert place.flags == (
        "--engine",
        "upstream",
        "--model",
        "@maker/model@2026",
        "--engine-url",
        "https://host/v1",
    )


@pytest.mark.anyio
async def test_a_hosted_model_is_evaluated_from_the_command_line(tmp_path: Path) -> None:
    model = HostedModel("messages", [Reply("I cannot help.", finish="end_turn")])
    out = tmp_path / "out"
    async with serving(model):
        command = (sys.executable, "-m", "turnstile", "eval", "--tasks", "all", "--limit", "1", "-n", "2")
        on = ("--on", f"hosted=upstream:{MODEL}@{model.url}#HOSTED_KEY", "--out", str(out), "--sandbox", "local")
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("TURNSTILE_")}
        done = await anyio.run_process((*command, *on), env={**inherited, "HOSTED_KEY": KEY}, check=False)
    assert done.returncode == DONE, done.stderr.decode()
    assert " 2/2 " in done.stdout.decode()
    rows = [json.loads(line) for line in (out / "hosted" / "episodes.jsonl").read_text().splitlines()]
    assert {(row["reward"], row["episode"]["upstream"]) for row in rows} == {(0.0, MODEL)}
    assert rows[0]["episode"]["stats"]["upstream"]["completion_tokens"] == 7
    assert len(list((out / "hosted" / "journal").iterdir())) == 2
    assert list((out / "hosted" / "samples").iterdir()) == []
