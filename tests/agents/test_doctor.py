"""``turnstile agents doctor``: it says what works, names what does not, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import docker
import pytest
from docker.errors import NotFound as NoSuchContainer

from local import TURNSTILE
from turnstile.models import EpisodeStatus
from turnstile_server.demo import TINY
from turnstile_server.demo.local_server import descendants, running
from turnstile_server.errors import NotFound, TaskFailed, Unprocessable
from turnstile_server.settings import Settings
from turnstile_server.tasks.task_files import SHIPPED
from turnstile_server.testing.doctor import DoctorReport, check_agent
from turnstile_server.testing.recording import AgentRequest
from turnstile_server.testing.server import TOKENIZER_FOLDER, PlayedEpisode
from waiting import wait_until_sync

pytestmark = pytest.mark.slow

LINE = "sleep 4321.5"
ASKS_NOTHING = "import sys; print('I would rather not'); sys.exit(3)"
ASKS_ONCE = """
import json, os, urllib.error, urllib.request
body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "Hello."}]}).encode()
headers = {"authorization": "Bearer " + os.environ["KEY"], "content-type": "application/json"}
for path in ("/v1/chat/completions", "/v1/no-such"):
    try:
        urllib.request.urlopen(urllib.request.Request(os.environ["URL"] + path, body, headers))
    except urllib.error.HTTPError as error:
        print(error.code)
"""
CALLS_A_TOOL = """
import json, os, subprocess, sys, urllib.request
headers = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "content-type": "application/json"}
schema = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
tools = [{"type": "function", "function": {"name": "bash", "parameters": schema}}]
messages = [{"role": "user", "content": sys.stdin.read()}]
while True:
    body = json.dumps({"model": "m", "messages": messages, "tools": tools}).encode()
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    answer = json.load(urllib.request.urlopen(urllib.request.Request(url, body, headers)))
    messages.append(answer["choices"][0]["message"])
    if not messages[-1].get("tool_calls"):
        break
    for call in messages[-1]["tool_calls"]:
        command = json.loads(call["function"]["arguments"])["command"]
        done = subprocess.run(["sh", "-c", command], capture_output=True, text=True)
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": done.stdout + done.stderr})
"""


def settings(model: Path, tasks: Mapping[str, Any] | None = None, **agents: Any) -> Settings:
    return Settings(model=model, sandboxes={"kind": "local"}, agents=agents, tasks=dict(tasks or {}))


def specs(folder: Path, **commands: list[str]) -> Path:
    """A folder of specs: one agent per command."""
    for name, command in commands.items():
        env = {"KEY": "{episode_key}", "URL": "{model_url}"}
        literal = [part.replace("{", "{{").replace("}", "}}") for part in command]
        spec = {"name": name, "version": "1", "summary": "s", "command": literal, "env": env}
        (folder / f"{name}.yaml").write_text(json.dumps(spec))
    return folder


def findings(report: DoctorReport, passed: bool | None) -> set[str]:
    return {finding.name for finding in report.findings if finding.passed is passed}


def doctor(model: Path, name: str, *options: str) -> subprocess.CompletedProcess[str]:
    command = [TURNSTILE, "agents", "doctor", name, "--model", str(model), "--sandbox", "local", *options]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_an_agent_that_works_is_told_to_work_line_by_line(tiny_model: Path) -> None:
    done = doctor(tiny_model, "plain-loop")
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0] == "plain-loop 1.1"
    assert lines[-1] == "It works here."
    assert [line.split()[0] for line in lines[1:9]] == ["ok"] * 4 + ["tools"] + ["ok"] * 3
    assert "chat 2" in done.stdout
    assert "exit code 0" in done.stdout


@pytest.mark.thorough
@pytest.mark.slow
def test_it_needs_no_model(tmp_path: Path) -> None:
    """In an empty folder, with nothing but the installed package; the model of a server does not matter."""
    command = [TURNSTILE, "agents", "doctor", "plain-loop", "--sandbox", "local"]
    env = {**os.environ, "TURNSTILE_MODEL": "tiny"}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1] == "It works here."


def test_the_shipped_tokenizer_and_template_are_those_of_the_tiny_model(tiny_model: Path) -> None:
    """All but the words of the vocabulary, which come of the standard library: it differs from one Python to the
    next."""
    shipped, made = (
        json.loads((folder / "tokenizer.json").read_text()) for folder in (TOKENIZER_FOLDER, tiny_model)
    )
    for tokenizer in (shipped, made):
        for words in ("vocab", "merges"):
            tokenizer["model"][words] = len(tokenizer["model"][words])
    assert shipped == made
    template = "chat_template.jinja"
    assert (TOKENIZER_FOLDER / template).read_text() == (tiny_model / template).read_text()


@pytest.mark.thorough
@pytest.mark.slow
def test_as_json_it_gives_the_figures(tiny_model: Path) -> None:
    done = doctor(tiny_model, "tool-loop", "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["passed"]
    assert (told["calls"], told["tool_calls"], told["reward"], told["exit_code"]) == ({"chat": 2}, 1, 1.0, 0)
    assert told["sampled"] == told["trained"] > 0
    assert (told["untrained"], told["breaks"], told["cosmetic"], told["refused"]) == ({}, {}, {}, {})


@pytest.mark.thorough
@pytest.mark.slow
def test_shell_is_checked_with_the_command_that_env_gives(tiny_model: Path) -> None:
    command = f"python3 -c {shlex.quote(CALLS_A_TOOL)}"
    done = doctor(tiny_model, "shell", "--env", f"TURNSTILE_COMMAND={command}")
    assert done.returncode == 0, done.stdout
    unset = doctor(tiny_model, "shell")
    assert unset.returncode == 1
    assert "--env TURNSTILE_COMMAND" in unset.stdout
    wrong = doctor(tiny_model, "shell", "--env", "TURNSTILE_COMMAND")
    assert (wrong.returncode, wrong.stderr) == (2, "turnstile: --env 'TURNSTILE_COMMAND' is not NAME=VALUE\n")


@pytest.mark.anyio
async def test_a_tasks_known_solution_is_played_by_shell_commands(tiny_model: Path, tmp_path: Path) -> None:
    """Beside a task that cannot be used, as a server serves it."""
    shutil.copytree(SHIPPED / "fix-cart-discount", tmp_path / "fix-cart-discount")
    (tmp_path / "bad.jsonl").write_text('{"id": "bad"}\n')
    wanted = settings(tiny_model, tasks={"sources": [str(tmp_path)]})
    report = await check_agent(wanted, "plain-loop", task_id="fix-cart-discount", wall_s=60)
    assert report.passed
    assert (report.tool_calls, report.calls) == (2, {"chat": 3})


@pytest.mark.slow
@pytest.mark.anyio
async def test_what_an_agent_failed_at_is_named(tiny_model: Path, tmp_path: Path) -> None:
    folder = specs(
        tmp_path,
        silent=["python3", "-c", ASKS_NOTHING],
        talker=["python3", "-c", ASKS_ONCE],
        sleeper=["sh", "-c", f"echo I wait; exec {LINE}"],
    )
    wanted = settings(tiny_model, specs=(folder,), install_dir=tmp_path / "installs")
    silent = await check_agent(wanted, "silent", wall_s=60)
    assert not silent.passed
    assert findings(silent, False) == {"started", "model calls", "tool calls", "ended", "work"}
    assert "I would rather not" in silent.output
    talker = await check_agent(wanted, "talker", wall_s=60)
    assert findings(talker, False) == {"tool calls", "work"}
    assert talker.refused == {"POST /v1/no-such 404": 1}
    sleeper = await check_agent(wanted, "sleeper", wall_s=2)
    assert sleeper.status is EpisodeStatus.TIMED_OUT
    assert "ended" in findings(sleeper, False)
    assert (sleeper.exit_code, sleeper.output) == (None, "I wait\n")


@pytest.mark.slow
@pytest.mark.anyio
async def test_an_agent_that_does_not_do_as_it_is_told_is_shown_with_what_was_called_and_what_it_offers(
    tiny_model: Path, tmp_path: Path
) -> None:
    program = CALLS_A_TOOL.replace("OPENAI_API_KEY", "KEY").replace(
        'os.environ["OPENAI_BASE_URL"]', 'os.environ["URL"] + "/v1"'
    )
    unable = program.replace("bash", "look").replace('"command"', '"path"')
    folder = specs(
        tmp_path,
        able=["python3", "-c", program],
        unable=["python3", "-c", unable],
        deaf=["python3", "-c", program.replace('messages.append({"role": "tool"', 'sys.exit({"role": "tool"')],
        apart=["python3", "-c", program],
    )
    apart = json.loads((folder / "apart.yaml").read_text()) | {"user": "harness"}
    (folder / "apart.yaml").write_text(json.dumps(apart))
    wanted = settings(tiny_model, specs=(folder,), install_dir=tmp_path / "installs")

    async def told(agent: str) -> dict[str, str]:
        report = await check_agent(wanted, agent, wall_s=60)
        return {finding.name: finding.text for finding in report.findings} | {"passed": str(report.passed)}

    able = await told("able")
    assert (able["passed"], able["tools"]) == ("True", "called: bash 1; offered: bash")
    unable_said = await told("unable")
    assert unable_said["tool calls"].startswith("0; of the tools that it offered the policy knows none as a shell")
    assert unable_said["tools"] == "called: none; offered: look"
    assert (await told("deaf"))["tool calls"] == "0; the policy called one, and no result came back to the model"
    apart_said = await told("apart")
    assert "Read-only file system" in apart_said["work"] or "ermission denied" in apart_said["work"]
    assert "its spec has `user: harness`, so only the MCP endpoint's tools can write" in apart_said["work"]


@pytest.mark.slow
@pytest.mark.anyio
async def test_an_agent_without_tools_is_judged_by_the_rest_if_its_spec_says_that_it_has_none(
    tiny_model: Path, tmp_path: Path
) -> None:
    folder = specs(tmp_path, talker=["python3", "-c", ASKS_ONCE])
    wanted = settings(tiny_model, specs=(folder,), install_dir=tmp_path / "installs")
    supposed = await check_agent(wanted, "talker", wall_s=60)
    assert "0; it offered the model no tools" in {finding.text for finding in supposed.findings}
    for says in (False, None):
        spec = json.loads((folder / "talker.yaml").read_text()) | {"offers_tools": says}
        (folder / "talker.yaml").write_text(json.dumps(spec))
        report = await check_agent(wanted, "talker", wall_s=60)
        assert report.passed
        assert {"tool calls", "work"} <= findings(report, None)


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.anyio
async def test_replies_that_the_agent_cuts_short_are_told(tiny_model: Path, tmp_path: Path) -> None:
    program = CALLS_A_TOOL.replace('"model": "m"', '"model": "m", "max_tokens": 5').replace(
        "OPENAI_API_KEY", "KEY"
    )
    program = program.replace('os.environ["OPENAI_BASE_URL"]', 'os.environ["URL"] + "/v1"')
    folder = specs(tmp_path, short=["python3", "-c", program])
    report = await check_agent(
        settings(tiny_model, specs=(folder,), install_dir=tmp_path / "installs"), "short", wall_s=60
    )
    assert findings(report, False) == {"tool calls", "work"}
    for finding in report.findings:
        if finding.passed is False:
            assert "1 of 1 replies were cut at their length, at 5 tokens" in finding.text


@pytest.mark.thorough
@pytest.mark.slow
def test_what_a_failed_agent_printed_is_cut_to_a_few_lines(tiny_model: Path, tmp_path: Path) -> None:
    noisy = "import sys\nfor i in range(99): print(i, 'x' * 9000)\nsys.exit(3)"
    folder = specs(tmp_path, noisy=["python3", "-c", noisy])
    done = doctor(tiny_model, "noisy", "--agent-specs", str(folder))
    assert done.returncode == 1
    assert "exit code 3" in done.stdout
    assert "\n  98 xxx" in done.stdout
    assert len(done.stdout) < 8000
    assert max(map(len, done.stdout.splitlines())) < 400


@pytest.mark.anyio
async def test_an_agent_that_cannot_be_installed_is_a_finding(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text("{name: x, version: '1', summary: s, command: [x], install: {pip: [./none]}}")
    wanted = settings(tiny_model, specs=(tmp_path,), install_dir=tmp_path / "installs")
    report = await check_agent(wanted, "x", wall_s=60)
    assert findings(report, False) == {"installed"}
    assert "could not be installed" in report.findings[0].text


def test_what_mcp_expects_is_no_refusal() -> None:
    nothing: Any = None
    requests = {
        ("POST", "/mcp", 410): 2,
        ("DELETE", "/mcp", 410): 1,
        ("GET", "/mcp", 405): 1,
        ("GET", "/x", 404): 1,
        ("GET", "/y", 200): 3,
    }
    counted = {AgentRequest(*one): count for one, count in requests.items()}
    told = PlayedEpisode(nothing, (), nothing, nothing, 0.0, None, counted)
    assert list(told.refused.items()) == [("GET /x 404", 1), ("POST /mcp 410", 2)]


@pytest.mark.anyio
async def test_what_cannot_be_played_is_refused_by_name(tiny_model: Path, tmp_path: Path) -> None:
    wanted = settings(tiny_model)
    tests = {"runner": "command", "command": ["sh", "{tests}/c.sh", "{answer}"], "files": {"inline": {"c.sh": ""}}}
    checked = {"id": "checked", "instruction": "x", "tests": tests, "gold": {"answer": "2"}}
    (tmp_path / "tasks.jsonl").write_text(json.dumps(checked) + "\n")
    asked = settings(tiny_model, tasks={"sources": [str(tmp_path)]})
    with pytest.raises(TaskFailed, match="checked wants an answer"):
        await check_agent(asked, "plain-loop", task_id="checked", wall_s=60)
    with pytest.raises(Unprocessable, match="'nobody' is not known"):
        await check_agent(wanted, "nobody", wall_s=60)
    with pytest.raises(NotFound, match="no-such-task"):
        await check_agent(wanted, "plain-loop", task_id="no-such-task", wall_s=60)
    with pytest.raises(TaskFailed, match="wants an answer"):
        await check_agent(wanted, "plain-loop", task_id="count-errors", wall_s=60)


@pytest.mark.thorough
def test_a_folder_without_a_tokenizer_is_an_error_of_usage(tmp_path: Path) -> None:
    done = doctor(tmp_path, "plain-loop")
    assert done.returncode == 2
    assert "tokenizer.json is missing" in done.stderr


def test_a_template_whose_tools_cannot_be_read_is_an_error_of_usage_before_anything_is_run(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text("{name: x, version: '1', summary: s, command: [x], install: {pip: [./none]}}")
    done = doctor(TINY, "x", "--agent-specs", str(tmp_path))
    assert (done.returncode, done.stdout) == (2, "")
    assert "shows tools in no way" in done.stderr
    assert "Leave out --model" in done.stderr


@pytest.mark.thorough
def test_without_sandboxes_it_is_an_error_of_usage(tiny_model: Path) -> None:
    done = doctor(tiny_model, "plain-loop", "--sandbox", "none")
    assert (done.returncode, done.stdout) == (2, "")
    assert "choose auto, docker, harbor, kubernetes, local or oci" in done.stderr


@pytest.mark.thorough
@pytest.mark.docker
def test_an_image_that_is_not_there_is_an_error_of_usage(tiny_model: Path) -> None:
    done = doctor(tiny_model, "plain-loop", "--sandbox", "docker", "--sandbox-image", "no-such:1")
    assert (done.returncode, done.stdout) == (2, "")
    assert "Docker has no image no-such:1" in done.stderr


@pytest.fixture
def temporary() -> Iterator[Path]:
    """Sockets lie below it, so it has a short path."""
    with tempfile.TemporaryDirectory(prefix="t", dir="/tmp") as folder:
        yield Path(folder)


def killed_at_work(
    model: Path,
    folder: Path,
    temporary: Path,
    number: signal.Signals,
    options: list[str],
    roots: Callable[[int], Iterable[int]],
) -> tuple[int, set[tuple[int, str]]]:
    """The exit code of a doctor that was sent ``number`` while its agent slept, and its processes then."""
    command = ["sh", "-c", f"exec {LINE}"]
    options = [*options, "--model", str(model), "--agent-specs", str(specs(folder, sleeper=command))]
    env = {**os.environ, "TMPDIR": str(temporary), "TURNSTILE_AGENTS__INSTALL_DIR": str(folder / "installs")}
    with subprocess.Popen(
        [TURNSTILE, "agents", "doctor", "sleeper", *options],
        env=env,
        preexec_fn=_heed_interrupts,  # noqa: PLW1509 - no other thread of the tests holds a lock that it needs
    ) as process:
        try:
            family = until_it_sleeps(process, roots)
            process.send_signal(number)
            return process.wait(60), family
        finally:
            process.kill()


@pytest.mark.cases(1)
@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_however_it_is_killed_no_process_of_it_goes_on(
    tiny_model: Path, tmp_path: Path, temporary: Path, number: signal.Signals
) -> None:
    options = ["--sandbox", "local"]
    code, family = killed_at_work(tiny_model, tmp_path, temporary, number, options, lambda pid: [pid])
    wait_until_sync(lambda: not family & running(), "its processes end")
    if number is not signal.SIGKILL:
        assert code == 128 + number
        assert os.listdir(temporary) == []


@pytest.mark.thorough
@pytest.mark.docker
def test_stopped_in_docker_it_leaves_no_container(
    tiny_model: Path, tmp_path: Path, temporary: Path, docker_image: str
) -> None:
    options = ["--sandbox", "docker", "--sandbox-image", docker_image]
    code, _ = killed_at_work(
        tiny_model, tmp_path, temporary, signal.SIGTERM, options, lambda _: containers_of(temporary)
    )
    assert code == 128 + signal.SIGTERM
    assert not containers_of(temporary)
    assert os.listdir(temporary) == []


def _heed_interrupts() -> None:
    """What a shell starts in the background ignores SIGINT, and hands that on."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def until_it_sleeps(
    process: subprocess.Popen[bytes], roots: Callable[[int], Iterable[int]]
) -> set[tuple[int, str]]:
    """The processes below one of ``roots`` (of the doctor's pid) once the agent is among them."""

    def family_at_work() -> set[tuple[int, str]]:
        assert process.poll() is None, f"it ended with {process.returncode} before the agent ran"
        for root in filter(None, roots(process.pid)):
            family = descendants(root)
            if any(is_asleep(pid) for pid, _ in family):
                return family
        return set()

    return wait_until_sync(family_at_work, within_s=200)


def is_asleep(pid: int) -> bool:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:  # ended
        return False
    return b" ".join(words[:2]).decode() == LINE


def containers_of(folder: Path) -> list[int]:
    """The first processes of the containers, stopped ones (0) too, that mount something of ``folder``."""
    client = docker.from_env()
    try:
        mine = [
            each["Id"]
            for each in client.api.containers(all=True)
            if any(str(mount.get("Source", "")).startswith(f"{folder}/") for mount in each["Mounts"])
        ]
        return [pid for pid in (first_process(client, name) for name in mine) if pid is not None]
    finally:
        client.close()


def first_process(client: docker.DockerClient, container: str) -> int | None:
    """None: it was removed since it was listed."""
    try:
        return int(client.api.inspect_container(container)["State"]["Pid"])
    except NoSuchContainer:
        return None
