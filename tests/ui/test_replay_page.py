"""The page of replay: each step shows the calls and the changes that the API has, and harms nobody."""

from __future__ import annotations

import asyncio
import json
import re
import shlex
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from conversation import END
from forks_support import FIRST, run, sandbox_of
from gate_support import says, staged
from light import TASK, light_work
from playwright.sync_api import Page, expect

from control_support import START_S, Door, EngineProcess, running_door
from ui.conftest import HOSTILE, Watched

pytestmark = pytest.mark.browser

BASH: Any = {
    "type": "function",
    "function": {
        "name": "bash",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
    },
}
COMMANDS = (
    "printf 'ANSWER = 42\\nWHY = None\\n' > answer.py; mkdir -p lib/deep; echo one > lib/deep/one",
    "printf '\\0\\1' > image.bin; rm lib/deep/one; mkfifo pipe; ln -s /etc/passwd passwd; chmod +x answer.py",
    f"printf '%s' {shlex.quote(HOSTILE)} > \"$(printf 'odd\\033[31m<b>')\"",
    "true",
)


@dataclass(frozen=True)
class Recorded:
    """``plain``: an episode that records nothing."""

    episode_id: str
    plain: str


async def _play(model: Path, folder: Path) -> Recorded:
    """Each turn calls a command; the fourth is the last."""
    work, wanted = light_work(model, folder, folder / "installs")
    async with staged(model, folder, work=work, **wanted) as stage:
        calls = [json.dumps({"name": "bash", "arguments": {"command": command}}) for command in COMMANDS]
        texts = [f"Step {n}.\n<tool_call>\n{call}\n</tool_call>" for n, call in enumerate(calls)]
        stage.engine.answers = [says([*stage.encode(text), *stage.encode(END)]) for text in [*texts, "Done."]]
        plain = await stage.episode(task=TASK)
        episode = await stage.episode(task=TASK, replay=True, snapshots="every_turn")
        sandbox = await sandbox_of(stage, episode)
        messages: list[Any] = [*FIRST]
        async with stage.agent(episode) as agent:
            for command in [*COMMANDS, None]:
                reply = await agent.chat.completions.create(model="m", messages=messages, tools=[BASH])
                message = reply.choices[0].message
                messages.append(message.model_dump(exclude_none=True, include={"role", "content", "tool_calls"}))
                if command is not None:
                    assert message.tool_calls, message
                    said = await run(sandbox, f"{command}; echo ran; ls")
                    messages.append({"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": said})
        await run(sandbox, "echo end > at-the-end")
        for each in (plain, episode):
            await stage.post(each, "cancel")
        return Recorded(episode["episode_id"], plain["episode_id"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("replay")


@pytest.fixture(scope="module")
def recorded(engine: EngineProcess, folder: Path) -> Recorded:
    with ThreadPoolExecutor(1) as elsewhere:  # Playwright runs a loop in this thread
        return elsewhere.submit(asyncio.run, _play(engine.model, folder)).result()


@pytest.fixture(scope="module")
def door(engine: EngineProcess, folder: Path, recorded: Recorded) -> Iterator[Door]:
    with running_door(engine, folder, control={"heartbeat_s": 1.0}) as running:
        yield running


@pytest.fixture(scope="module")
def states(door: Door, recorded: Recorded) -> list[dict[str, Any]]:
    url = f"{door.url}/episodes/{recorded.episode_id}/replay"
    answer = httpx.get(url, headers={"authorization": f"Bearer {door.key}"}, timeout=START_S)
    found: list[dict[str, Any]] = answer.json()["states"]
    return found


@pytest.mark.parametrize("watched", ["light", "dark"], indirect=True)
def test_each_step_shows_the_calls_and_changes_of_the_api(
    watched: Watched, door: Door, recorded: Recorded, states: list[dict[str, Any]]
) -> None:
    assert [one["moment"] for one in states] == ["begin", "turn", "turn", "turn", "turn", "end"]
    page = watched.open(f"/episodes/{recorded.episode_id}/replay", door.key)
    expect(page.get_by_text("The first state: its files are below.")).to_be_visible()
    for state in states:
        expect(page.get_by_role("status").filter(has_text=" of ")).to_have_text(
            f"{state['state'] + 1} of {len(states)}"
        )
        expect(changes(page).locator("> details")).to_have_count(len(state["changes"]))
        for change in state["changes"]:
            shown = changes(page).locator("> details", has_text=change["path"].replace("\x1b", "\\x1b"))
            expect(shown.locator("summary").first).to_contain_text(change["change"])
        if state["turn_id"] is not None and state["moment"] == "turn":
            expect(page.get_by_role("article", name=f"Turn {state['seq']}")).to_contain_text("command: ")
        forkable = page.get_by_role("region", name="The call").get_by_text(state["snapshot_id"] or "nothing")
        expect(forkable).to_have_count(1 if state["snapshot_id"] else 0)
        if state["state"] + 1 < len(states):
            page.keyboard.press("ArrowRight")
            expect(page).to_have_url(re.compile(rf"[?&]state={state['state'] + 1}$"))
    expect(page.get_by_role("button", name="Next →")).to_be_disabled()
    page.keyboard.press("ArrowLeft")
    expect(page).to_have_url(re.compile("state=4$"))
    expect(page.get_by_text("Nothing changed.")).to_be_visible()
    page.get_by_role("combobox").select_option("1")
    added = changes(page).locator("> details", has_text="lib/deep/one")
    expect(added.get_by_text("one", exact=True)).to_be_visible()
    edited = page.get_by_role("region", name="Changes of answer.py")
    expect(edited.locator("tr.removed")).to_have_count(1)
    expect(edited.locator("tr.added")).to_have_count(2)
    watched.check()


def test_an_address_opens_at_its_state_with_files_left_out_and_hostile_text(
    watched: Watched, door: Door, recorded: Recorded, states: list[dict[str, Any]]
) -> None:
    page = watched.open(f"/episodes/{recorded.episode_id}/replay?state=2", door.key)
    expect(changes(page).get_by_text("Not text: 2 bytes.")).to_be_visible()
    expect(changes(page).get_by_text("it is a pipe, a socket or a device")).to_be_visible()
    expect(changes(page).get_by_text("not executable → executable")).to_be_visible()
    link = changes(page).locator("> details", has_text="passwd")
    expect(link.get_by_text("/etc/passwd")).to_be_visible()
    page.get_by_text(re.compile(rf"^{states[2]['files']} files$")).click()
    tree = page.get_by_role("region", name="The work folder")
    expect(tree.get_by_text("1 without their content, and why")).to_be_visible()
    tree.get_by_text("answer.py").click()
    expect(tree.get_by_text("WHY = None")).to_be_visible()
    page.keyboard.press("ArrowRight")
    expect(page).to_have_url(re.compile("state=3$"))
    expect(tree.get_by_text(r"odd\x1b[31m<b>")).to_be_visible()
    hostile = changes(page).locator("> details")
    expect(hostile).to_contain_text(r"\x1b[31mred")
    expect(hostile).to_contain_text("<script>")
    assert page.title() != "taken"
    page.get_by_text("Result").first.click()
    expect(page.get_by_text("ran", exact=False).first).to_be_visible()
    watched.check()


def test_what_was_not_recorded_is_said(watched: Watched, door: Door, recorded: Recorded) -> None:
    page = watched.open(f"/episodes/{recorded.plain}/replay", door.key)
    expect(page.get_by_role("alert")).to_contain_text("409 conflict")
    expect(page.get_by_role("alert")).to_contain_text("replay: true")
    watched.errors = [error for error in watched.errors if "409" not in error]
    watched.check()


def changes(page: Page) -> Any:
    return page.get_by_role("region", name="Changes", exact=True)
