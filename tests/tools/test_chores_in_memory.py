"""The tools of the example `chores`, which are played in memory for demonstrations, answer as the real ones do."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path

import pytest
from subprocess_sandbox import SubprocessSandbox

from chores.chores import KINDS, chores, demonstration
from chores.world import ChoreWorld
from turnstile.models import ToolCall
from turnstile_server.settings import ToolSettings
from turnstile_server.tools.arguments import (
    BashArguments,
    EditFileArguments,
    ReadFileArguments,
    WriteFileArguments,
)
from turnstile_server.tools.functions import bash, edit_file, read_file, write_file
from turnstile_server.tools.protocol import NO_PROGRESS

TOOLS = {
    "bash": (bash, BashArguments),
    "read_file": (read_file, ReadFileArguments),
    "write_file": (write_file, WriteFileArguments),
    "edit_file": (edit_file, EditFileArguments),
}


def laid_out(folder: Path, files: dict[str, str]) -> None:
    for left in folder.iterdir():
        left.unlink()
    for name, text in files.items():
        (folder / name).write_text(text)


@pytest.mark.anyio
async def test_every_call_of_a_demonstrator_has_the_real_answer(sandbox: SubprocessSandbox) -> None:
    called, folder = set(), Path(sandbox.workdir)
    for task in itertools.islice(chores(1), 8):
        laid_out(folder, task.files)
        world = ChoreWorld(task.files)
        for reply in demonstration(task, random.Random(1), dict.fromkeys(KINDS, 0.0)):
            if "<tool_call>" not in reply:
                continue
            call = json.loads(reply.split("<tool_call>")[1].split("</tool_call>")[0])
            run, arguments = TOOLS[call["name"]]
            real = await run(sandbox, arguments(**call["arguments"]), ToolSettings(), NO_PROGRESS)  # type: ignore[operator]
            assert world.call(ToolCall(call["name"], json.dumps(call["arguments"]))) == real.text
            called.add(call["name"])
        assert {name: (folder / name).read_text() for name in world.files} == world.files
        assert task.done(world.files)
    assert called == set(TOOLS)
