"""Specs are checked when the server starts; an install appears whole or not at all."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import anyio
import pytest
import yaml

from installed_plugins import declare
from local import ROOT, TURNSTILE
from turnstile_server.agents.installer import PYTHON_VERSION, Installer
from turnstile_server.agents.registry import AGENTS, load_registry
from turnstile_server.agents.shipped import SPECS
from turnstile_server.agents.spec import AgentSpec, Install
from turnstile_server.errors import AgentNotInstalled, StartupError, Unprocessable
from turnstile_server.grading.programs import LAUNCH_CLIENT
from turnstile_server.settings import AgentSettings

pytestmark = pytest.mark.anyio

GOOD = "name: mine\nversion: '1'\nsummary: s\ncommand: [python3, '{home}/a.py']\n"


def spec(**install: object) -> AgentSpec:
    return AgentSpec(name="mine", version="1", summary="s", command=("true",), install=Install(**install))


def test_the_agents_that_ship_are_good_specs() -> None:
    shipped = {path.stem for path in SPECS.glob("*.yaml")}
    assert {one.name for one in load_registry()} == shipped
    assert {plugin.name for plugin in AGENTS.declared() if plugin.ours} == shipped


def test_an_agent_of_a_package_may_extend_one_that_ships_and_is_told_where_it_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "good.yaml").write_text("name: good\nextends: plain-loop\nsummary: mine\n")
    (tmp_path / "bad.yaml").write_text(GOOD.replace("name: mine", "name: bad") + "comand: [x]\n")
    (tmp_path / "acme_agents.py").write_text(
        "from pathlib import Path\n"
        "HERE = Path(__file__).parent\n"
        "GOOD, BAD = HERE / 'good.yaml', HERE / 'bad.yaml'\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    places = {"good": "acme_agents:GOOD", "bad": "acme_agents:BAD", "other": "acme_agents:GOOD", "text": "os:sep"}
    declare(monkeypatch, tmp_path / "site", AGENTS.group, **places)
    registry = load_registry()
    assert registry.get("good").summary == "mine"
    assert registry.get("plain-loop").summary != "mine"
    for name, said in (("bad", "comand"), ("other", "its spec has the name 'good'"), ("text", "it is a str")):
        with pytest.raises(Unprocessable, match=said):
            registry.get(name)
        assert said in caplog.text
    assert load_registry(["acme_agents:GOOD"]).get("good").summary == "mine"
    with pytest.raises(StartupError, match="comand"):
        load_registry(["acme_agents:BAD"])


def test_a_folder_of_specs_adds_agents_and_may_replace_one(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(GOOD)
    (tmp_path / "b.yaml").write_text(GOOD.replace("name: mine", "name: tool-loop"))
    registry = load_registry([tmp_path])
    assert registry.get("mine").command == ("python3", "{home}/a.py")
    assert registry.get("tool-loop").summary == "s"


def test_agents_that_run_the_models_commands_themselves_say_so() -> None:
    registry = load_registry()
    apart = {one.name for one in registry if one.user == "harness"}
    assert {one.name for one in registry if one.launches == "agent"} == {"mini-swe-agent"}
    assert apart == {
        "plain-loop",
        "tool-loop",
        "mini-swe-agent",
        *(one.name for one in registry if one.extends is not None),
    }
    assert len(apart) == 9


def test_a_spec_may_extend_another_one(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(GOOD + "env: {A: '1', B: '2'}\ninstall: {npm: [x@1.0.0]}\nuser: agent\n")
    (tmp_path / "b.yaml").write_text("name: other\nextends: mine\nuser: harness\nenv: {B: '3'}\n")
    registry = load_registry([tmp_path])
    mine, other = registry.get("mine"), registry.get("other")
    assert (other.user, other.env, other.command) == ("harness", {"A": "1", "B": "3"}, mine.command)
    installer = Installer(AgentSettings(install_dir=tmp_path), LAUNCH_CLIENT)
    assert installer.name_of(other) == installer.name_of(mine)


def test_a_spec_with_a_command_of_its_own_does_not_go_on_as_the_one_it_extends(tmp_path: Path) -> None:
    resume = "user: agent\nresume: {arguments: [--continue]}\n"
    (tmp_path / "a.yaml").write_text(GOOD + resume)
    (tmp_path / "b.yaml").write_text("name: other\nextends: mine\ncommand: [other]\n")
    (tmp_path / "c.yaml").write_text("name: third\nextends: mine\nenv: {A: '1'}\n")
    registry = load_registry([tmp_path])
    assert [registry.get(name).can_resume for name in ("mine", "other", "third")] == [True, False, True]


def test_a_spec_that_was_dumped_is_the_same_when_it_is_read_again(tmp_path: Path) -> None:
    for spec in (load_registry().get("plain-loop"), load_registry().get("tool-loop")):
        (tmp_path / "a.yaml").write_text(yaml.safe_dump(spec.model_dump(mode="json")))
        assert load_registry([tmp_path]).get(spec.name) == spec


def test_a_spec_may_extend_an_agent_that_ships(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("name: mine\nextends: plain-loop\nenv: {A: '1'}\n")
    registry = load_registry([tmp_path])
    assert registry.get("mine").install == registry.get("plain-loop").install


def test_volatile_patterns_may_hold_braces(tmp_path: Path) -> None:
    """They are no placeholders."""
    (tmp_path / "a.yaml").write_text(GOOD + "volatile: ['\\d{4}-\\d{2}-\\d{2}', '\\d{1,9} tokens left']\n")
    assert load_registry([tmp_path]).get("mine").volatile == (r"\d{4}-\d{2}-\d{2}", r"\d{1,9} tokens left")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (GOOD.replace("version: '1'\n", ""), "version"),
        (GOOD + "comand: [x]\n", "comand"),
        (GOOD.replace("name: mine", "name: external"), "external"),
        (GOOD + "install: {tree: nowhere}\n", "nowhere"),
        (GOOD + "dialect: telegraph\n", "telegraph.*anthropic, chat, completions, gemini, responses"),
        ("name: [", "cannot be read"),
        (
            GOOD + "env: {A: '{modle_url}/v1'}\n",
            r"bad\.yaml.*env\.A: there is no placeholder \{modle_url\}.*\{model_url\}",
        ),
        (GOOD.replace("{home}", "{home"), r"command\.1: .*\{home\}"),
        (GOOD + "volatile: ['(']\n", r"volatile: .*not a regular expression"),
        (GOOD + "volatile: ['x*']\n", r"volatile: .*matches an empty text"),
        (GOOD + "volatile: ['(a+)+b']\n", r"volatile: .*takes too long"),
        (GOOD + "stdin: '{}'\n", r"stdin: .*\{instruction\}"),
        (GOOD + "files: {'{home}/a': '{home.b}'}\n", r"files\.\{home\}/a: "),
        (GOOD + "files: {'/{x}': ''}\n", r"files\./\{x\}: there is no placeholder \{x\}"),
        (
            GOOD.replace("{home}", "{episode_key}") + "user: harness\n",
            r"command\.1: every command in the sandbox can read an argument",
        ),
        (GOOD + "user: root\n", "user: "),
        (
            GOOD + "launches: agent\n",
            "launches: agent is for an agent with user: harness",
        ),
        (GOOD + "launches: work\n", "launches: "),
        (GOOD + "extends: nobody\n", r"extends: 'nobody' is no agent"),
        (GOOD + "extends: mine\n", "extends: 'mine'"),
        (GOOD + "extends: [x]\n", "extends: "),
        ("- name\n", "not a mapping"),
    ],
)
def test_a_bad_spec_stops_the_start_and_names_what_is_wrong(tmp_path: Path, text: str, told: str) -> None:
    (tmp_path / "bad.yaml").write_text(text)
    with pytest.raises(StartupError, match=told):
        load_registry([tmp_path])


def test_the_spec_in_the_docs_is_a_good_one() -> None:
    blocks = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs" / "agents.md").read_text(), re.DOTALL)
    smallest = yaml.safe_load(next(block for block in blocks if block.startswith("name:")))
    assert AgentSpec.model_validate(smallest).name == "my-agent"
    rules = yaml.safe_load(next(block for block in blocks if block.startswith("end:")))
    assert AgentSpec.model_validate({**smallest, **rules}).end


def test_the_specs_of_agents_that_do_not_ship_are_good_ones(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "agents" / "other-agents.md").read_text()
    for index, block in enumerate(re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)):
        (tmp_path / f"{index}.yaml").write_text(block)
    registry = load_registry([tmp_path])
    assert {registry.get(name).user for name in ("kilo", "copilot")} == {"agent"}


def test_an_unknown_agent_names_those_there_are() -> None:
    with pytest.raises(Unprocessable, match=r"tool-loop.*external"):
        load_registry().get("nobody")


async def test_a_tree_is_installed_once_and_anew_when_it_changes(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "agent.py").write_text("1")
    installer = Installer(AgentSettings(install_dir=tmp_path / "installs"), LAUNCH_CLIENT)
    mine = spec(tree=str(tree))
    assert not installer.installed(mine)
    async with anyio.create_task_group() as tasks:
        for _ in range(4):
            tasks.start_soon(installer.install, mine)
    first = installer.name_of(mine)
    assert first.startswith("mine-")
    assert first.endswith(f"-py{PYTHON_VERSION}")
    assert (installer.folder / first / "files" / "agent.py").read_text() == "1"
    (tree / "agent.py").write_text("2")
    assert not installer.installed(mine)
    await installer.install(mine)
    assert (installer.folder / installer.name_of(mine) / "files" / "agent.py").read_text() == "2"
    assert sorted(path.name for path in installer.folder.iterdir()) == sorted({first, installer.name_of(mine)})


async def test_an_agent_that_launches_gets_how_to_ask_and_is_installed_anew_when_that_changes(
    tmp_path: Path,
) -> None:
    mine = spec().model_copy(update={"launches": "agent"})
    client = tmp_path / "client.py"
    client.write_text("1")
    first, again = (Installer(AgentSettings(install_dir=tmp_path / "installs"), path) for path in (client, client))
    await first.install(mine)
    assert (first.folder / first.name_of(mine) / "files" / "turnstile_launch.py").read_text() == "1"
    client.write_text("2")
    assert not again.installed(mine)


@pytest.mark.slow
async def test_what_pip_cannot_find_is_told_and_leaves_nothing(tmp_path: Path) -> None:
    installer = Installer(AgentSettings(install_dir=tmp_path), LAUNCH_CLIENT)
    with pytest.raises(AgentNotInstalled, match="no-such-folder-at-all"):
        await installer.install(spec(pip=("./no-such-folder-at-all",)))
    assert os.listdir(tmp_path) == []


@pytest.mark.slow
async def test_an_install_that_takes_too_long_is_ended_with_its_processes(tmp_path: Path) -> None:
    slow = tmp_path / "slow"
    slow.mkdir()
    (slow / "setup.py").write_text("import time; time.sleep(1000)")
    installer = Installer(AgentSettings(install_dir=tmp_path / "installs", install_timeout_s=3), LAUNCH_CLIENT)
    with pytest.raises(AgentNotInstalled, match="install_timeout_s"):
        await installer.install(spec(pip=(str(slow),)))
    assert os.listdir(tmp_path / "installs") == []
    assert not [line for line in _command_lines() if str(slow).encode() in line]


def _command_lines() -> Iterator[bytes]:
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            yield path.read_bytes()


@pytest.mark.slow
def test_agents_are_installed_by_command_before_an_episode_needs_them(tmp_path: Path) -> None:
    (tmp_path / "tree").mkdir()
    (tmp_path / "mine.yaml").write_text(GOOD + "install: {tree: tree}\n")
    command = [TURNSTILE, "agents", "install", "--agent-specs", str(tmp_path)]
    env = {**os.environ, "TURNSTILE_AGENTS__INSTALL_DIR": str(tmp_path / "installs")}
    env["TURNSTILE_SANDBOXES__KIND"] = "local"
    for said in ("is installed", "was installed before"):
        done = subprocess.run([*command, "mine"], env=env, capture_output=True, text=True, check=True)
        assert said in done.stdout
    unknown = subprocess.run([*command, "nobody"], env=env, capture_output=True, text=True, check=False)
    assert unknown.returncode == 2
    assert "mine" in unknown.stderr
