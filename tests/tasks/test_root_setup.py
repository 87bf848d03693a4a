"""Set-up as root: read into a build of the task's image, refused where it cannot be one, made in a real engine."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import docker
import pytest
from typer.testing import CliRunner

from turnstile.cli.app import app
from turnstile.models import TaskRef
from turnstile_server.app import start_sandboxes
from turnstile_server.backends import build_backends
from turnstile_server.errors import Unprocessable
from turnstile_server.settings import Settings
from turnstile_server.tasks.catalog import TaskCatalog
from turnstile_server.tasks.images import image_warning
from turnstile_server.tasks.inline import task_from_ref
from turnstile_server.tasks.model import Task

BASE: dict[str, Any] = {"id": "a", "instruction": "x", "image": "python:3.11-slim"}


def task(setup: object, **changes: Any) -> Task:
    return Task.model_validate({**BASE, "setup": setup, **changes})


def commands(found: Task) -> str:
    assert found.build is not None
    return dict(found.build.args)["TASK_SETUP"]


def test_the_commands_of_root_are_a_build_of_the_image_and_those_of_the_agent_stay() -> None:
    found = task([{"user": "root", "run": ["useradd bob", "echo 'it''s' > /etc/x"]}, "make"], setup_timeout_s=7)
    assert found.setup == ("make",)
    assert [shlex.split(line) for line in commands(found).splitlines() if line.startswith("run ")] == [
        ["run", "useradd bob"],
        ["run", "echo 'it''s' > /etc/x"],
    ]
    assert found.build is not None
    assert dict(found.build.args)["TASK_IMAGE"] == BASE["image"]
    assert found.build.timeout_s == 14
    assert found.image == found.build.tag()


def test_the_image_has_the_name_of_what_makes_it() -> None:
    images = [
        task({"user": "root", "run": "touch /a"}).image,
        task([{"user": "root", "run": ["touch /a"]}, "agent's"]).image,
        task({"user": "root", "run": "touch /b"}).image,
        task({"user": "root", "run": "touch /a"}, image="python:3.12-slim").image,
    ]
    assert images[0] == images[1]
    assert len(set(images)) == 3


def test_set_up_of_the_agent_has_two_forms() -> None:
    assert (
        task({"run": ["one", "two"]}).setup
        == task(["one", {"user": "agent", "run": "two"}]).setup
        == ("one", "two")
    )
    assert task({"run": "one"}).build is None


@pytest.mark.parametrize(
    ("setup", "changes", "said"),
    [
        (["make", {"user": "root", "run": "a"}], {}, "before all of the agent's"),
        ({"user": "root", "run": "a"}, {"image": None}, "name one"),
        ({"user": "nobody", "run": "a"}, {}, r"setup.user: Input should be 'agent' or 'root'"),
        ({"user": "root"}, {}, "setup.run: it is missing"),
        ({"user": "root", "run": 3}, {}, "setup.run: it must be a list"),
        ({"user": "root", "run": "a", "as": 1}, {}, "setup.as: there is no such field"),
        ({"user": "root", "run": "x" * 100_001}, {}, "100,000 bytes"),
        ({"user": "root", "run": "a\0"}, {}, "are no text"),
        ({"user": "root", "run": "\ud800"}, {}, "are no text"),
        ({"user": "root", "run": "a"}, {"setup_timeout_s": [1]}, "setup_timeout_s\n.*valid number"),
        ({"user": "root", "run": "a"}, {"setup_timeout_s": "soon"}, "setup_timeout_s\n.*valid number"),
        ({"user": "root", "run": "a"}, {"setup_timeout_s": float("inf")}, "setup_timeout_s\n.*finite"),
    ],
)
def test_what_cannot_be_is_told(setup: object, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        task(setup, **changes)


def test_it_is_shown_by_its_commands_and_no_path_of_this_machine() -> None:
    shown = task({"user": "root", "run": ["useradd bob", "touch /a"]}).model_dump(mode="json")["build"]
    assert shown == "set-up as root of python:3.11-slim: useradd bob && touch /a"


def test_the_script_stops_at_the_first_failure_and_names_it(tmp_path: Path) -> None:
    found = task({"user": "root", "run": ["exit 0", f"echo 1 > {tmp_path}/one", "exit 7", f"> {tmp_path}/two"]})
    done = subprocess.run(
        ["/bin/sh", "-c", 'eval "$TASK_SETUP"'],
        env={"PATH": os.environ["PATH"], "TASK_SETUP": commands(found)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (7, "this command of root ended with exit status 7: exit 7\n")
    assert [path.name for path in tmp_path.iterdir()] == ["one"]


def test_a_request_has_none() -> None:
    ref = TaskRef.model_validate({**BASE, "setup": {"user": "root", "run": "a"}})
    with pytest.raises(Unprocessable, match="no set-up as root"):
        task_from_ref(ref, allow_inline=True)


@pytest.mark.anyio
async def test_local_sandboxes_say_at_start_which_tasks_they_cannot_play(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rooted = {**BASE, "id": "rooted", "setup": {"user": "root", "run": "a"}, "answer": {"value": "x"}}
    plain = {"id": "plain", "instruction": "x", "answer": {"value": "x"}}
    source = tmp_path / "tasks.jsonl"
    source.write_text("".join(json.dumps(each) + "\n" for each in (rooted, plain)))
    settings = Settings(data_dir=tmp_path / "data", sandboxes={"kind": "local"}, tasks={"sources": [str(source)]})
    async with AsyncExitStack() as stack:
        await start_sandboxes(settings, build_backends(settings), stack)
    [told] = [record.getMessage() for record in caplog.records if "no images" in record.getMessage()]
    assert told.endswith("episodes of 1 tasks will fail, because these name one or are set up as root: rooted")


def test_what_is_told_of_tasks_in_images_is_bounded() -> None:
    catalog = TaskCatalog([task([], id=f"task-{number}") for number in range(9)])
    assert image_warning(catalog, "docker") is None
    assert image_warning(TaskCatalog([]), "local") is None
    assert str(image_warning(catalog, "local")).endswith("task-3, task-4, …")


QUESTION = {
    "id": "who-may",
    "instruction": "Which user may read /srv/ledger? Submit the name.",
    "setup": [
        {
            "user": "root",
            "run": [
                "echo 'clerk:x:4242:4242::/:/bin/sh' >> /etc/passwd",
                'mkdir -p /srv && echo "it\'s $((40 + 2))" > /srv/ledger && chown 4242 /srv/ledger',
                "chmod 400 /srv/ledger",
            ],
        },
        "ls -ln /srv/ledger > listing",
    ],
    "tests": {
        "runner": "command",
        "command": ["sh", "{tests}/check.sh", "{answer}"],
        "files": {
            "inline": {"check.sh": "grep -q \"^$1:x:$(ls -ln /srv/ledger | awk '{print $3}'):\" /etc/passwd"}
        },
    },
    "gold": {"answer": "clerk"},
    "wrong": [{"name": "another", "answer": "root"}],
}


@pytest.mark.docker
def test_agent_and_tests_find_what_root_made(tmp_path: Path, docker_image: str) -> None:
    """As AgentBench asks about a machine: its state is root's, the answer is checked against it."""
    path, report = tmp_path / "tasks.jsonl", tmp_path / "report.jsonl"
    sound = {**QUESTION, "image": docker_image}
    failing = {**sound, "id": "fails", "setup": {"user": "root", "run": ["true", "echo told; exit 3"]}}
    path.write_text("".join(json.dumps(each) + "\n" for each in (sound, failing)))
    arguments = ["tasks", "validate", str(path), "--sandbox", "docker", "--report", str(report)]
    engine = docker.from_env(timeout=60)
    try:
        done = CliRunner().invoke(app, arguments)
        proofs = {proof["task_id"]: proof for proof in map(json.loads, report.read_text().splitlines())}
        assert proofs["who-may"]["problems"] == [], done.output
        rewards = {work["work"]: work["rewards"] for work in proofs["who-may"]["works"]}
        assert rewards == {"gold": [1.0, 1.0], "nothing": [0.0, 0.0], "another": [0.0, 0.0]}
        (problem,) = proofs["fails"]["problems"]
        assert "the image of task fails cannot be built" in problem
        assert "told" in problem
        assert "this command of root ended with exit status 3: echo told; exit 3" in problem
        assert str(Path.cwd()) not in problem
    finally:
        engine.images.remove(str(Task.model_validate(sound).image), force=True)
        engine.close()
