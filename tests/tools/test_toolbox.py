"""Each tool, with good and bad arguments, as a model would see it."""

from __future__ import annotations

import re
import stat
import tracemalloc
from pathlib import Path
from typing import Any

import anyio
import pytest
from subprocess_sandbox import SubprocessSandbox
from tools_support import PlayedEpisode, alive

from bounded import bounded
from turnstile_server.errors import Gone
from turnstile_server.settings import ToolSettings
from turnstile_server.tools.functions import cut_middle, lines_from, numbered
from turnstile_server.tools.protocol import ToolResult
from turnstile_server.tools.toolbox import Toolbox
from waiting import wait_until

pytestmark = pytest.mark.anyio


class Table:
    """An episode and its tools."""

    def __init__(self, sandbox: SubprocessSandbox | None, **settings: Any) -> None:
        self.episode = PlayedEpisode("e1", sandbox)
        self.toolbox = Toolbox(bounded(ToolSettings, **settings))
        self.folder = Path(sandbox.workdir) if sandbox is not None else Path()

    async def __call__(self, name: str, **arguments: Any) -> ToolResult:
        return await self.toolbox.call(self.episode, name, arguments)

    async def refusal(self, name: str, **arguments: Any) -> str:
        result = await self(name, **arguments)
        assert result.is_error, result.text
        return result.text


@pytest.fixture
def table(sandbox: SubprocessSandbox) -> Table:
    return Table(sandbox)


async def test_bash_gives_both_outputs_in_order_and_the_exit_status(table: Table) -> None:
    result = await table("bash", command="echo one; echo two >&2; echo three; exit 3")
    assert (result.text, result.is_error) == ("one\ntwo\nthree\n[exit status 3]", False)


async def test_bash_runs_in_the_work_folder_and_every_call_is_a_new_shell(table: Table) -> None:
    await table("bash", command="cd /; export A=1; touch /nowhere 2>&-; pwd")
    assert (await table("bash", command="pwd; echo $A")).text == f"{table.folder}\n\n[exit status 0]"


async def test_bash_tells_the_line_of_a_syntax_error(table: Table) -> None:
    first = await table("bash", command="if then")
    assert "line 1" in first.text
    assert "[exit status 2]" in first.text
    assert "line 2" in (await table("bash", command="echo fine\nif then")).text


async def test_bash_closes_a_line_that_the_output_left_open(table: Table) -> None:
    assert (await table("bash", command="printf x")).text == "x\n[exit status 0]"
    assert (await table("bash", command="true")).text == "[exit status 0]"


async def test_bash_kills_a_command_at_its_time_and_says_so(table: Table) -> None:
    result = await table("bash", command="echo begun; sleep 1000", timeout_s=0.3)
    assert (result.text, result.is_error) == ("begun\n[killed after 0.3 s]", True)


async def test_bash_kills_at_the_default_time_when_none_is_asked(sandbox: SubprocessSandbox) -> None:
    result = await Table(sandbox, command_timeout_s=0.2)("bash", command="sleep 1000")
    assert result.text == "[killed after 0.2 s]"


async def test_bash_refuses_more_time_than_there_is(sandbox: SubprocessSandbox) -> None:
    text = await Table(sandbox, max_command_timeout_s=5).refusal("bash", command="true", timeout_s=6)
    assert "no command may run longer than 5 s" in text


async def test_bash_cuts_long_output_in_the_middle_and_says_how_much(sandbox: SubprocessSandbox) -> None:
    table = Table(sandbox, max_output_chars=1000)
    text = (await table("bash", command="echo BEGIN; seq 100000; echo END")).text
    assert text.startswith("BEGIN\n1\n2\n")
    assert text.endswith("99999\n100000\nEND\n[exit status 0]")
    assert len(text) < 1100
    whole = len("BEGIN\nEND\n") + sum(len(str(n)) + 1 for n in range(1, 100001))
    assert f"[… {whole - 1000} bytes left out here" in text


async def test_bash_output_that_is_not_utf8_is_still_text(table: Table) -> None:
    assert (await table("bash", command="printf 'a\\377b'")).text == "a�b\n[exit status 0]"


@pytest.mark.parametrize(
    ("arguments", "wrong"),
    [
        ({}, "command: Field required"),
        ({"command": 3}, "command: Input should be a valid string"),
        ({"command": ""}, "command: String should have at least 1 character"),
        ({"command": "a\0b"}, "command: must not contain a NUL character"),
        ({"command": "\ud800"}, "command: Input should be a valid string"),
        ({"command": "true", "timeout_s": 0}, "timeout_s: Input should be greater than 0"),
        ({"command": "true", "timeout_s": "soon"}, "timeout_s: Input should be a valid number"),
        ({"command": "true", "timeout_s": float("inf")}, "timeout_s: Input should be a finite number"),
        ({"command": "true", "cwd": "/"}, "cwd: Extra inputs are not permitted"),
    ],
)
async def test_wrong_arguments_are_told_with_what_the_tool_takes(
    table: Table, arguments: dict[str, Any], wrong: str
) -> None:
    result = await table.toolbox.call(table.episode, "bash", arguments)
    assert result.is_error
    assert wrong in result.text
    assert "It takes command, timeout_s (optional)." in result.text


async def test_null_stands_for_an_argument_left_out(table: Table) -> None:
    assert (await table("bash", command="true", timeout_s=None)).text == "[exit status 0]"


async def test_an_unknown_tool_is_told_with_those_there_are(table: Table) -> None:
    text = await table.refusal("python", code="1")
    assert text == "there is no tool 'python'; the tools are bash, read_file, write_file, edit_file, submit"


async def test_read_file_numbers_lines_as_cat_does(table: Table) -> None:
    (table.folder / "a.txt").write_text("one\n\ttwo\n\nfour\n")
    assert (await table("read_file", path="a.txt")).text == "     1\tone\n     2\t\ttwo\n     3\t\n     4\tfour"


async def test_read_file_reads_a_part_and_says_where_it_goes_on(table: Table) -> None:
    (table.folder / "a.txt").write_text("".join(f"line {n}\n" for n in range(1, 11)))
    part = await table("read_file", path="a.txt", offset=4, limit=2)
    assert part.text == "     4\tline 4\n     5\tline 5\n[lines 4 to 5 of 10; continue with offset 6]"
    rest = await table("read_file", path="a.txt", offset=10, limit=99)
    assert rest.text == "    10\tline 10"


async def test_read_file_shows_whole_lines_up_to_its_limit(sandbox: SubprocessSandbox) -> None:
    table = Table(sandbox, max_file_chars=256)
    (table.folder / "a.txt").write_text("x" * 93 + "\n" + "y" * 93 + "\n" + "z" * 93 + "\n")
    text = (await table("read_file", path="a.txt")).text
    assert text.endswith("y\n[lines 1 to 2 of 3; continue with offset 3]")
    (table.folder / "b.txt").write_text("w" * 500)
    assert (await table("read_file", path="b.txt")).text.endswith("w[… 251 characters of this line left out …]")


@pytest.mark.parametrize("text", ["", "\n", "one", "one\n", "\n\none\n\n", "é\n" * 40_000 + "last"])
def test_lines_are_those_that_a_split_gives(text: str) -> None:
    lines = text.split("\n")
    for first, most in ((1, 1), (1, 3), (2, 2), (3, 100), (16_385, 2), (39_999, 5)):
        if first <= len(lines):
            assert lines_from(text, first, most) == lines[first - 1 :][:most]


async def test_read_file_takes_no_memory_for_lines_that_it_does_not_show(table: Table) -> None:
    """A list of four million lines stops the event loop for a fifth of a second."""
    size = 4 << 20
    (table.folder / "a.txt").write_bytes(b"\n" * size)
    tracemalloc.start()
    try:
        text = (await table("read_file", path="a.txt", offset=size - 1)).text
        assert text == f"{size - 1}\t\n{size}\t"
        text = (await table("read_file", path="a.txt")).text
        assert text.endswith(f"[lines 1 to 8000 of {size}; continue with offset 8001]")
        assert tracemalloc.get_traced_memory()[1] < 5 * size
    finally:
        tracemalloc.stop()


async def test_read_file_says_what_it_cannot_read(sandbox: SubprocessSandbox) -> None:
    table = Table(sandbox, max_file_bytes=2048)
    (table.folder / "binary").write_bytes(b"\x7fELF\0\0")
    (table.folder / "empty").write_bytes(b"")
    (table.folder / "short").write_text("one\n")
    (table.folder / "large").write_text("x" * 2049)
    assert "does not exist" in await table.refusal("read_file", path="none")
    assert "is a folder" in await table.refusal("read_file", path=".")
    assert "is not a text file (6 bytes)" in await table.refusal("read_file", path="binary")
    assert "has only 1 line" in await table.refusal("read_file", path="short", offset=2)
    assert "more than 2048 bytes" in await table.refusal("read_file", path="large")
    assert "offset: Input should be greater than or equal to 1" in await table.refusal(
        "read_file", path="short", offset=0
    )
    assert (await table("read_file", path="empty")).text == "[empty is empty]"


async def test_write_file_makes_folders_and_replaces(table: Table) -> None:
    assert (
        await table("write_file", path="deep/er/a.txt", content="é\n")
    ).text == "Wrote 3 bytes to deep/er/a.txt."
    await table("write_file", path=str(table.folder / "deep/er/a.txt"), content="two")
    assert (table.folder / "deep/er/a.txt").read_text() == "two"


async def test_write_file_refuses_what_is_too_large(sandbox: SubprocessSandbox) -> None:
    table = Table(sandbox, max_file_bytes=1024)
    assert "the most is 1024" in await table.refusal("write_file", path="a", content="é" * 513)
    assert not (table.folder / "a").exists()


async def test_edit_file_replaces_the_one_place_and_keeps_the_rest(table: Table) -> None:
    script = table.folder / "run.sh"
    script.write_bytes(b"#!/bin/sh\r\necho one\r\n")
    script.chmod(0o755)
    result = await table("edit_file", path="run.sh", old="one", new="two")
    assert result.text == "Replaced 1 occurrence in run.sh."
    assert script.read_bytes() == b"#!/bin/sh\r\necho two\r\n"
    assert stat.S_IMODE(script.stat().st_mode) == 0o755


async def test_edit_file_replaces_all_only_when_told(table: Table) -> None:
    file = table.folder / "a.txt"
    file.write_text("a b a")
    assert "occurs 2 times" in await table.refusal("edit_file", path="a.txt", old="a", new="c")
    assert file.read_text() == "a b a"
    assert (await table("edit_file", path="a.txt", old="a", new="", replace_all=True)).text == (
        "Replaced 2 occurrences in a.txt."
    )
    assert file.read_text() == " b "


async def test_edit_file_makes_no_text_that_would_be_too_large(table: Table) -> None:
    """Four million times a million characters: more than the server has memory for."""
    (table.folder / "a.txt").write_text("a" * (4 << 20))
    refused = await table.refusal("edit_file", path="a.txt", old="a", new="é" * 500_000, replace_all=True)
    assert f"the file would have {(4 << 20) * 1_000_000} bytes; the most is" in refused
    assert (table.folder / "a.txt").stat().st_size == 4 << 20


async def test_edit_file_says_why_it_changed_nothing(table: Table) -> None:
    (table.folder / "a.txt").write_bytes(b"one\r\ntwo\r\n")
    (table.folder / "latin").write_bytes(b"caf\xe9")
    assert "must match exactly" in await table.refusal("edit_file", path="a.txt", old="three", new="x")
    assert "CR LF" in await table.refusal("edit_file", path="a.txt", old="one\ntwo", new="x")
    assert "nothing would change" in await table.refusal("edit_file", path="a.txt", old="one", new="one")
    assert "not UTF-8" in await table.refusal("edit_file", path="latin", old="caf", new="x")
    assert (table.folder / "latin").read_bytes() == b"caf\xe9"


async def test_edits_at_the_same_time_are_all_kept(table: Table) -> None:
    file = table.folder / "a.txt"
    file.write_text(" ".join(f"<{n}>" for n in range(8)))
    async with anyio.create_task_group() as tasks:
        for n in range(8):
            arguments = {"path": "a.txt", "old": f"<{n}>", "new": f"[{n}]"}
            tasks.start_soon(table.toolbox.call, table.episode, "edit_file", arguments)
    assert file.read_text() == " ".join(f"[{n}]" for n in range(8))


async def test_submit_keeps_the_last_answer_and_tells_nothing_of_its_worth(table: Table) -> None:
    first = await table("submit", answer="41")
    second = await table("submit", answer="42")
    assert table.episode.answers == ["41", "42"]
    assert first == second == ToolResult("Your answer was received.", structured={"received": True})


async def test_submit_refuses_an_answer_that_is_too_long(sandbox: SubprocessSandbox) -> None:
    table = Table(sandbox, max_answer_chars=16)
    assert "the most is 16" in await table.refusal("submit", answer="x" * 17)
    assert "answer: Field required" in await table.refusal("submit")
    assert table.episode.answers == []


async def test_an_episode_without_a_sandbox_has_submit_alone() -> None:
    table = Table(None)
    assert [tool.name for tool in table.toolbox.tools_of(table.episode)] == ["submit"]
    assert await table.refusal("bash", command="true") == "there is no tool 'bash'; the tools are submit"
    await table("submit", answer="42")
    assert table.episode.answers == ["42"]


async def test_an_ended_episode_has_no_tools(table: Table) -> None:
    table.episode.end()
    with pytest.raises(Gone):
        await table("bash", command="true")


async def test_more_calls_at_once_than_allowed_are_refused_and_the_others_go_on(
    sandbox: SubprocessSandbox,
) -> None:
    table = Table(sandbox, max_calls_per_episode=2)
    results: list[ToolResult] = []

    async def call() -> None:
        results.append(await table("bash", command="until [ -e go ]; do sleep 0.01; done"))

    async with anyio.create_task_group() as tasks:
        for _ in range(2):
            tasks.start_soon(call)
        await anyio.wait_all_tasks_blocked()
        assert "2 tool calls are running, which is the limit" in await table.refusal("submit", answer="x")
        (table.folder / "go").touch()
    assert [result.text for result in results] == ["[exit status 0]"] * 2
    assert not (await table("bash", command="true")).is_error


async def test_cancelling_a_call_ends_its_processes(table: Table) -> None:
    pid_file = table.folder / "pid"
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(
            table.toolbox.call,
            table.episode,
            "bash",
            {"command": "sleep 1000 & echo $! > pid.part; mv pid.part pid; wait"},
        )
        await wait_until(pid_file.exists)
        tasks.cancel_scope.cancel()
    await wait_until(lambda: not alive(int(pid_file.read_text())))


@pytest.mark.parametrize(
    ("text", "most", "dropped", "cut"),
    [
        ("abcdef", 6, 0, "abcdef"),
        ("abcdef", 4, 0, "ab\n[… 2 bytes left out here; narrow the command to see them …]\nef"),
        ("abcdef", 5, 0, "abc\n[… 1 bytes left out here; narrow the command to see them …]\nef"),
        ("aébé", 2, 0, "a\n[… 3 bytes left out here; narrow the command to see them …]\né"),
        ("abcd", 4, 7, "ab\n[… 7 bytes left out here; narrow the command to see them …]\ncd"),
    ],
)
def test_text_is_cut_in_the_middle(text: str, most: int, dropped: int, cut: str) -> None:
    assert cut_middle(text, most, dropped) == cut


def test_numbered_lines_fit_their_room() -> None:
    assert numbered(["a", "b", "c"], 9, 17) == ("     9\ta\n    10\tb", 2)
    assert numbered(["abc"], 1, 8) == ("     1\ta[… 2 characters of this line left out …]", 1)


def test_schemas_name_every_argument_with_a_description() -> None:
    for tool in Toolbox(ToolSettings()).all_tools:
        properties = tool.input_schema["properties"]
        assert set(tool.input_schema["required"]) <= set(properties)
        assert all(argument["description"] and argument["type"] for argument in properties.values())
        assert not any(word in tool.description.lower() for word in ("reward", "score", "grade", "test"))


def test_the_docs_name_every_limit_and_every_argument() -> None:
    folder = Path(__file__).parents[2] / "docs"
    docs = (folder / "tools.md").read_text("utf-8")
    both = docs + (folder / "own-tools.md").read_text("utf-8")
    assert ToolSettings.model_fields.keys() - {"bounds"} <= {*re.findall(r"`(\w+)`", both)}
    for tool in Toolbox(ToolSettings()).all_tools:
        required = tool.input_schema["required"]
        arguments = (name if name in required else f"{name}?" for name in tool.input_schema["properties"])
        assert f"| `{tool.name}` | {', '.join(f'`{argument}`' for argument in arguments)} |" in docs
