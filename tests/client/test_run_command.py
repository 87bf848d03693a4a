"""``turnstile run`` and ``turnstile agents``: what they print, keep, start and stop."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest
from stub_server import FOR_EVER, INFRASTRUCTURE, Answer, Play, StubServer, running_stub
from test_cli import DONE, FAILED, UNREACHABLE, USAGE, Done, one_sentence, turnstile, turnstile_process

from turnstile.cli.run import chosen_tasks
from turnstile.exporters.parquet import read_parquet
from turnstile.models import EpisodeRequest, EpisodeStatus, ErrorInfo, Fault, TaskInfo
from turnstile.models.samples_encoding import decode_samples
from turnstile_server.demo.local_server import descendants, running
from turnstile_server.journal.protocol import RecordType
from turnstile_server.journal.reading import ReadOnlyJournal
from waiting import wait_until_sync

INTERRUPTED = 130
WAIT_S = 60


@pytest.fixture
def stub() -> Iterator[StubServer]:
    with running_stub() as door:
        door.tasks = tuple(TaskInfo(id=f"task-{number}", instruction="do it") for number in range(3))
        yield door


@pytest.fixture(autouse=True)
def own_folder(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a run is kept that names no folder."""
    folder = tmp_path_factory.mktemp("here")
    monkeypatch.chdir(folder)
    return folder


def run_command(stub: StubServer, *arguments: str | Path) -> Done:
    return turnstile("run", *arguments, TURNSTILE_URL=stub.url)


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# On a server that is there


def test_every_task_of_the_server_is_run_and_told(stub: StubServer, tmp_path: Path) -> None:
    stub.play = lambda request: Play(reward=float(request.task.id == "task-1"))
    done = run_command(stub, "-n", "2", "--seed", "5", "--out", tmp_path / "out")
    assert done.returncode == DONE, done.stderr
    assert "mean reward 0.333 over 6 graded of 6 rollouts; failed: none" in done.stdout
    assert done.stdout.count("completed") == 6
    rows = lines_of(tmp_path / "out" / "episodes.jsonl")
    assert sorted(row["task"]["id"] for row in rows) == [f"task-{number}" for number in (0, 0, 1, 1, 2, 2)]
    assert {row["episode"]["agent"] for row in rows} == {"tool-loop"}
    assert sorted(row["episode"]["seed"] for row in rows) == [5, 6, 7, 8, 9, 10]
    kept = {path.name for path in (tmp_path / "out" / "samples").iterdir()}
    assert kept == {f"{row['episode']['episode_id']}.jsonl" for row in rows}


def test_a_run_that_names_no_folder_is_kept_and_says_how_to_open_it(stub: StubServer, own_folder: Path) -> None:
    done = run_command(stub, "--run-id", "mine")
    assert done.returncode == DONE, done.stderr
    folder = "turnstile-runs/mine"
    assert done.stdout.splitlines()[-1] == f"kept in {folder}; to look at it: turnstile ui {folder}"
    rows = lines_of(own_folder / "turnstile-runs" / "mine" / "episodes.jsonl")
    assert {row["task"]["id"] for row in rows} == {"task-0", "task-1", "task-2"}
    assert len(list((own_folder / "turnstile-runs" / "mine" / "samples").iterdir())) == 3
    again = run_command(stub, "--run-id", "mine", "--json")
    assert again.stderr.splitlines()[-1].startswith("kept in turnstile-runs/mine-2;")
    assert len(again.stdout.splitlines()) == 3
    fresh = run_command(stub).stdout.splitlines()[-1]
    (run,) = {request.run_id for request in stub.created} - {"mine"}
    assert fresh == f"kept in turnstile-runs/{run}; to look at it: turnstile ui turnstile-runs/{run}"


@pytest.mark.slow
def test_a_run_is_not_kept_where_that_is_asked_and_nothing_is_left_of_one_that_never_was(
    stub: StubServer, own_folder: Path
) -> None:
    done = run_command(stub, "--no-out")
    assert done.stdout.splitlines()[-1] == "nothing of the run was kept here (--no-out)"
    assert list(own_folder.iterdir()) == []
    assert "drop it or --out" in one_sentence(run_command(stub, "--no-out", "--out", "x"), USAGE)
    turnstile("run", "--tasks", "a", "--url", "http://127.0.0.1:9")
    assert list((own_folder / "turnstile-runs").iterdir()) == []
    (own_folder / "turnstile-runs").rmdir()
    (own_folder / "turnstile-runs").write_text("a file")
    said = one_sentence(run_command(stub), FAILED)
    assert said.endswith("--out names another folder, --no-out keeps nothing")


def test_the_tasks_the_agent_and_the_limits_are_those_that_are_named(stub: StubServer, tmp_path: Path) -> None:
    limits = ("--max-turns", "3", "--max-completion-tokens", "9")
    files = ("--out", tmp_path, "--format", "safetensors")
    done = run_command(stub, "--tasks", "task-2, task-0", "--tasks", "other", "--agent", "mine", *limits, *files)
    assert done.returncode == DONE, done.stderr
    assert sorted(request.task.id for request in stub.created) == ["other", "task-0", "task-2"]  # they run at once
    assert {request.agent for request in stub.created} == {"mine"}
    assert {(r.limits.max_turns, r.limits.max_completion_tokens) for r in stub.created} == {(3, 9)}
    for path in (tmp_path / "samples").iterdir():
        assert decode_samples(path.read_bytes()).samples == ()


def test_the_server_is_asked_for_a_selection_and_a_part_of_it_is_run(stub: StubServer) -> None:
    chosen = ("--where", "repo=a/*", "--where", "id!=x", "--shard", "1/2", "--shuffle", "7")
    done = run_command(stub, *chosen, "--start", "1", "--limit", "1")
    assert done.returncode == DONE, done.stderr
    asked = [("where", "repo=a/*"), ("where", "id!=x"), ("shard", "1/2"), ("shuffle", "7")]
    assert stub.task_queries[0] == asked
    assert [request.task.id for request in stub.created] == ["task-1"]


def test_env_is_the_agents_in_every_episode(stub: StubServer) -> None:
    given = ("--env", "A=1", "--env", "LINE=x=y z", "--env", "EMPTY=", "--env", "A=2")
    done = run_command(stub, "--agent", "shell", *given)
    assert done.returncode == DONE, done.stderr
    assert len(stub.created) == 3
    assert all(request.env == {"A": "2", "LINE": "x=y z", "EMPTY": ""} for request in stub.created)


def test_parquet_files_are_written_as_rollouts_end(stub: StubServer, tmp_path: Path) -> None:
    done = run_command(stub, "--out", tmp_path, "--format", "parquet")
    assert done.returncode == DONE, done.stderr
    rows = lines_of(tmp_path / "episodes.jsonl")
    kept = list((tmp_path / "samples").iterdir())
    assert {path.name for path in kept} == {f"{row['episode']['episode_id']}.parquet" for row in rows}
    assert all(list(read_parquet(path)) == [] for path in kept)


def test_a_failure_of_the_infrastructure_that_stays_is_exit_1_and_every_fault_is_counted(
    stub: StubServer,
) -> None:
    def play(request: EpisodeRequest) -> Play:
        error = INFRASTRUCTURE
        if request.task.id == "task-1":
            error = ErrorInfo(type="agent_failed", message="it crashed", fault=Fault.AGENT)
        if request.task.id == "task-2":
            return Play(reward=1.0)
        return Play(status=EpisodeStatus.FAILED, reward=None, error=error)

    stub.play = play
    done = run_command(stub, "--retries", "0")
    assert done.returncode == FAILED
    assert "mean reward 1.000 over 1 graded of 3 rollouts; failed: agent 1, infrastructure 1" in done.stdout
    assert "failed: sandbox_failed" in done.stdout
    assert "1 × agent: it crashed" in done.stderr
    assert run_command(stub, "--retries", "0", "--tasks", "task-1").returncode == DONE


def test_json_lines_are_the_rollouts_as_they_end(stub: StubServer) -> None:
    done = run_command(stub, "--json")
    assert done.returncode == DONE, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert {row["task"]["id"] for row in rows} == {"task-0", "task-1", "task-2"}
    assert {row["reward"] for row in rows} == {1.0}
    assert "mean reward 1.000" in done.stderr


def test_two_runs_are_not_mixed(stub: StubServer, tmp_path: Path) -> None:
    assert run_command(stub, "--out", tmp_path).returncode == DONE
    before = (tmp_path / "episodes.jsonl").read_text()
    assert "episodes.jsonl" in one_sentence(run_command(stub, "--out", tmp_path), USAGE)
    assert (tmp_path / "episodes.jsonl").read_text() == before


def test_what_ended_is_kept_when_the_server_refuses_a_task(stub: StubServer, tmp_path: Path) -> None:
    stub.unknown_tasks = {"unknown"}
    ids = ("--tasks", "task-0,unknown", "--max-concurrent", "1")
    done = run_command(stub, *ids, "--out", tmp_path)
    assert done.returncode == FAILED
    assert "turnstile: the stub says not_found" in done.stderr
    assert [row["task"]["id"] for row in lines_of(tmp_path / "episodes.jsonl")] == ["task-0"]
    assert "1 rollouts" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--model", "somewhere"], "private"),
        (["--sandbox", "docker"], "private"),
        (["--tasks", "no such task"], "neither a task id nor"),
        (["--tasks", "./tasks.yaml"], "neither a task id nor"),
        (["--agent", "external"], "external"),
        (["--env", "NAME"], "--env 'NAME' is not NAME=VALUE"),
        (["--env", "=x"], "--env '=x' is not NAME=VALUE"),
        (["--tasks", "task-1", "--shard", "1/2"], "choose among all tasks"),
    ],
)
def test_what_cannot_be_run_is_a_usage_error(stub: StubServer, arguments: list[str], says: str) -> None:
    done = run_command(stub, *arguments)
    assert (done.returncode, done.stdout) == (USAGE, "")
    assert says in done.stderr


def test_a_server_without_tasks_is_told(stub: StubServer) -> None:
    stub.tasks = ()
    assert "no tasks" in one_sentence(run_command(stub), FAILED)


@pytest.mark.slow
def test_an_unreachable_server_is_exit_code_3() -> None:
    done = turnstile("run", "--tasks", "a", "--url", "http://127.0.0.1:9")
    assert done.returncode == UNREACHABLE
    assert "http://127.0.0.1:9 could not be asked" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_cancels_what_runs_and_keeps_what_is_done(
    stub: StubServer, tmp_path: Path, number: signal.Signals
) -> None:
    stub.play = lambda request: Play(0.0 if request.task.id == "task-0" else FOR_EVER)
    process = start("run", "--url", stub.url, "--out", str(tmp_path))
    wait_until_sync(lambda: len(stub.open) == 2 and (tmp_path / "episodes.jsonl").exists())
    process.send_signal(number)
    stdout, stderr = process.communicate(timeout=WAIT_S)
    assert process.returncode == INTERRUPTED, stderr
    assert stub.open == []
    assert [row["task"]["id"] for row in lines_of(tmp_path / "episodes.jsonl")] == ["task-0"]
    assert "1 graded of 1 rollouts" in stdout
    assert "interrupted" in stderr


def start(*arguments: str, **environment: str) -> subprocess.Popen[str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("TURNSTILE_")}
    return subprocess.Popen(
        [sys.executable, "-m", "turnstile", *arguments],
        env={**inherited, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


# On a private server


@pytest.fixture
def task_file(tmp_path: Path) -> Path:
    """One task without a sandbox."""
    path = tmp_path / "tasks.jsonl"
    path.write_text(json.dumps({"id": "sum", "instruction": "What is 2 + 3?", "answer": {"value": "5"}}) + "\n")
    return path


@pytest.fixture
def short_folder() -> Iterator[str]:
    """For what a killed command leaves; short, because sockets lie in it."""
    with tempfile.TemporaryDirectory(prefix="t-", ignore_cleanup_errors=True) as folder:
        yield folder


def test_a_path_of_tasks_may_have_options_for_a_private_server(task_file: Path, own_folder: Path) -> None:
    options = "?limit=1&reward_key=points"
    marked = own_folder / "a?limit=2"
    marked.mkdir()
    words = [f"{task_file}{options}", marked.name, f"rows:{task_file}{options}", "sum"]
    sources = [f"{task_file}{options}", str(marked), f"rows:{task_file}{options}"]
    assert chosen_tasks(words, private=True) == (sources, ("sum",))


@pytest.mark.parametrize("word", ["absent?limit=1", "?limit=1"])
def test_options_of_no_path_are_a_usage_error(word: str) -> None:
    said = one_sentence(turnstile("run", "--tasks", word), USAGE)
    assert said == f"turnstile: --tasks {word!r} is neither a task id nor a file or folder that exists"


async def read_back(folder: Path) -> set[str]:
    """The episodes that ``turnstile ui`` finds there, each with a turn."""
    journal = await ReadOnlyJournal.open(folder)
    try:
        found = [record.episode_id async for record in journal.episodes()]
        for episode_id in found:
            assert RecordType.TURN in {record.type for record in await journal.read(episode_id)}
        return set(found)
    finally:
        await journal.close()


PRIVATE = (
    "--engine",
    "embedded",
    "--max-concurrent",
    "2",
    "--sandbox",
    "local",
    "--max-turns",
    "2",
    "--max-completion-tokens",
    "16",
)


@pytest.mark.slow
def test_a_private_server_is_started_for_the_run_and_gone_after_it(
    tiny_model: Path, task_file: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    before = descendants(os.getpid())
    done = turnstile("run", *PRIVATE, "--model", tiny_model, "--tasks", task_file, "-n", "2", "--out", out)
    assert done.returncode == DONE, done.stderr + (out / "server.log").read_text()
    assert "2 graded of 2 rollouts" in done.stdout
    rows = lines_of(out / "episodes.jsonl")
    assert [(row["task"]["id"], row["episode"]["reward_components"]) for row in rows] == [
        ("sum", {"answer": 0.0})
    ] * 2
    assert len({row["group_id"] for row in rows}) == 1
    for row in rows:
        [sample, *_] = lines_of(out / "samples" / f"{row['episode']['episode_id']}.jsonl")
        assert sum(sample["loss_mask"]) > 0
    assert anyio.run(read_back, out / "journal") == {row["episode"]["episode_id"] for row in rows}
    assert descendants(os.getpid()) & running() <= before


@pytest.mark.slow
def test_a_run_without_tasks_that_cannot_be_used_says_so(
    tiny_model: Path, task_file: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "tasks"
    folder.mkdir()
    task_file.rename(folder / "good.jsonl")
    (folder / "bad.jsonl").write_text('{"id": "bad"}\n')
    done = turnstile("run", *PRIVATE, "--model", tiny_model, "--tasks", folder, "--no-out")
    assert done.returncode == DONE, done.stderr
    assert "1 graded of 1 rollouts" in done.stdout
    assert "turnstile: some tasks are left out, because they cannot be used" in done.stderr


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize("number", [pytest.param(signal.SIGTERM, marks=pytest.mark.thorough), signal.SIGKILL])
def test_a_private_server_does_not_outlive_its_command(
    tiny_model: Path, task_file: Path, short_folder: str, number: signal.Signals
) -> None:
    process = start(
        *("run", *PRIVATE, "--model", str(tiny_model), "--tasks", str(task_file), "-n", "1000", "--json"),
        TMPDIR=short_folder,
    )
    assert process.stdout is not None
    assert json.loads(process.stdout.readline())["status"] == "completed"
    family = descendants(process.pid)
    assert len(family) >= 3  # keeper, server, engine
    process.send_signal(number)
    process.communicate(timeout=WAIT_S)
    wait_until_sync(lambda: not family & running())


@pytest.mark.slow
def test_a_private_server_that_cannot_start_says_why(tmp_path: Path, task_file: Path) -> None:
    done = turnstile("run", "--tasks", task_file)
    assert "no model" in one_sentence(done, USAGE)
    done = turnstile("run", "--model", tmp_path, "--engine", "nonsense")
    assert done.returncode != DONE
    assert "nonsense" in done.stderr


@pytest.mark.slow
def test_without_the_server_a_private_one_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "turnstile_server").mkdir()
    (tmp_path / "turnstile_server" / "__init__.py").write_text("import a_dependency_that_is_absent\n")
    done = turnstile_process("run", "--model", "somewhere", PYTHONPATH=str(tmp_path))
    assert "pip install 'turnstile-rl[embedded]'" in one_sentence(done, USAGE)


# Agents


def test_agents_are_a_table_for_people_and_json_lines_for_scripts(stub: StubServer) -> None:
    shown = turnstile("agents", "list", TURNSTILE_URL=stub.url)
    assert shown.returncode == DONE
    assert "Calls tools until it is done." in shown.stdout
    [row] = turnstile("agents", "list", "--json", TURNSTILE_URL=stub.url).stdout.splitlines()
    assert json.loads(row)["name"] == "tool-loop"


def test_a_server_that_answers_that_it_cannot_serve_is_no_server_that_is_not_there(stub: StubServer) -> None:
    stub.answer = lambda _: Answer(503, "shutting_down")
    done = turnstile("episodes", "show", "ep_1", TURNSTILE_URL=stub.url)
    assert "turnstile serve" not in one_sentence(done, UNREACHABLE)


def test_agents_of_several_servers_say_whose_they_are(stub: StubServer) -> None:
    with running_stub() as other:
        shown = turnstile("agents", "list", "--url", stub.url, "--url", other.url)
    assert stub.url in shown.stdout
    assert other.url in shown.stdout


def test_a_server_that_fails_is_told(stub: StubServer) -> None:
    stub.answer = lambda _: Answer(500, "internal_error")
    done = run_command(stub, "--tasks", "task-0")
    assert (done.returncode, done.stdout) == (FAILED, "")


def test_a_fleet_is_named_by_a_file(stub: StubServer, tmp_path: Path) -> None:
    (tmp_path / "servers").write_text(f"{stub.url}  # the only one\n")
    done = turnstile("run", "--no-out", "--url", f"file:{tmp_path / 'servers'}")
    assert done.returncode == 0, done.stderr
    assert len(stub.created) == len(stub.tasks)
    missing = turnstile("run", "--no-out", "--url", f"file:{tmp_path / 'none'}")
    assert missing.returncode == UNREACHABLE
    assert "cannot be read" in missing.stderr
