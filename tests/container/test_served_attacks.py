"""The model's commands in the hardened image, through the server: every attack of the table, and its memory.

The tools of an episode run them, asked for by OpenEnv's client outside. The container has no control group for a
sandbox: what all commands use together is bounded by the container's own memory, which the server is in too.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from attack import PRELUDE
from attacks import ATTACKS
from container_support import Container, sandbox_flags, serving, started
from openenv.core import GenericEnvClient

pytestmark = [
    pytest.mark.docker,
    pytest.mark.container,
    pytest.mark.thorough,
    pytest.mark.anyio,
    pytest.mark.timeout(900),
]

PAGE = Path(__file__).parents[2] / "docs" / "sandboxes.md"
MEMORY_MB = 256
SETTINGS = {"MODEL": "tiny", "ENGINE__KIND": "trainer"}
"""A server that starts at once: the training loop would be its engine."""
SMALL = {
    "SANDBOXES__MEMORY_MB": str(MEMORY_MB),
    "SANDBOXES__PIDS": "64",
    "SANDBOXES__DISK_MB": "16",
}
SERVED = [attack for attack in ATTACKS if not attack.after and "/opt/set-uid" not in attack.script]
"""Without those that another user looks into afterwards, and the one that brings a program of root's."""
IN_THE_IMAGE = {
    "a memory bomb": "bounded: no memory",
    "the system's programs": "refused: EACCES",
}
"""Where the answer is another than the page's: there are no control groups, and root owns the programs."""

CLEAN = """
for each in /proc/[0-9]*; do
  pid=${each#/proc/}
  if [ "$pid" != $$ ] && [ "$pid" != $PPID ]; then kill -9 "$pid"; fi
done 2> /dev/null
rm -rf /tmp/* /dev/shm/* ~/big big; echo well
"""
"""In a shell's own words at first: after a fork bomb there is no process to be had."""

HOG = """
import os, time
open("/tmp/began", "w")
try:
    open("/proc/self/oom_score_adj", "w").write("0")
except OSError:
    pass
held = []
for _ in range(12):
    if os.fork() == 0:
        fd = os.memfd_create("held")  # its pages count as nobody's when the kernel looks for the largest process
        for _ in range(100):
            os.write(fd, bytes(1 << 20))
        time.sleep(20)
        os._exit(0)
for _ in range(12):
    held.append(os.WIFSIGNALED(os.wait()[1]))
print("KILLED", sum(held))
"""


@contextlib.asynccontextmanager
async def episode(container: Container) -> AsyncIterator[GenericEnvClient]:
    """An episode of a shipped task with an agent outside, whose tools are called."""
    url = f"{container.control_url}/k/{container.key}"
    async with GenericEnvClient(base_url=url, connect_timeout_s=60, message_timeout_s=180) as env:
        await env.reset(task={"id": "add-slugify"})
        yield env


async def bash(env: GenericEnvClient, command: str) -> str:
    said = await env.step({"type": "call_tool", "tool_name": "bash", "arguments": {"command": command}})
    result: str = said.observation["result"]
    return result


def python(program: str) -> str:
    return f"cat > /tmp/program.py <<'END OF PROGRAM'\n{program}\nEND OF PROGRAM\npython3 /tmp/program.py"


def told() -> dict[str, str]:
    """By attack, the column of bubblewrap with one uid."""
    lines = PAGE.read_text().splitlines()
    [head] = [number for number, line in enumerate(lines) if line.startswith("| attack | how |")]
    column = [cell.strip() for cell in lines[head].split("|")].index("bubblewrap, one uid")
    table = {}
    for line in lines[head + 2 :]:
        if not line.startswith("|"):
            break
        cells = [cell.strip() for cell in line.split("|")]
        table[cells[1]] = cells[column]
    return table


async def test_no_attack_succeeds_and_the_answers_are_those_of_the_page(server_image: str) -> None:
    expected = {**told(), **IN_THE_IMAGE}
    answers = {}
    async with serving(server_image, **SETTINGS, **SMALL) as container, episode(container) as env:
        for attack in SERVED:
            program = f"{PRELUDE}\nLIMIT_MB = {MEMORY_MB}\n{attack.script}"
            said = await bash(env, python(program))
            answers[attack.name] = next(
                (
                    line.strip()
                    for line in said.splitlines()
                    if line.startswith(("refused: ", "bounded: ", "DONE"))
                ),
                said,
            )
            clean = await bash(env, CLEAN)
            assert "well" in clean, f"after {attack.name}: {clean}"
    assert len(answers) == len(SERVED) >= 90
    assert answers == {name: expected[name] for name in answers}


async def test_where_the_containers_memory_is_used_up_the_commands_are_killed_and_nothing_else(
    server_image: str,
) -> None:
    memory = ("--memory", "700m", "--memory-swap", "700m")
    async with serving(server_image, *memory, **SETTINGS, SANDBOXES__MEMORY_MB="512") as container:
        async with episode(container) as victim, episode(container) as env:
            await bash(victim, "echo mine > /tmp/kept")
            said = await bash(env, python(HOG))
            assert "exit status 137" in said or "KILLED" in said, said  # it was itself among the killed, or not
            assert "KILLED 0" not in said
            # Its own sandbox, another's and the server go on.
            assert "on" in await bash(env, "echo on")
            assert "mine" in await bash(victim, "cat /tmp/kept")
            async with httpx.AsyncClient(base_url=container.control_url, timeout=60) as http:
                assert (await http.get("/health")).status_code == 200
        assert container.state["Running"], container.log


async def test_doctor_says_what_holds_inside(server_image: str) -> None:
    async with serving(server_image, **SETTINGS) as container:
        said = container.run("turnstile", "doctor", timeout_s=200)
    assert "All that was tried holds here." in said
    for line in (
        "ok     sandboxes    local: bubblewrap, one uid, users kept apart by name spaces; limits: ",
        "ok     users        kept apart; one uid (",
        "ok     capabilities none, and none can be gained",
        "ok     system calls an allow-list; ",
        "ok     journal ",
    ):
        assert line in said, said


@pytest.mark.parametrize("flags", ["none", "profile"])
async def test_without_a_flag_doctor_names_both(server_image: str, flags: str) -> None:
    options = sandbox_flags()[:2] if flags == "profile" else ()
    with started(server_image, *options, **SETTINGS) as container:
        await container.ready()
        said = container.run("sh", "-c", "turnstile doctor || echo code $?", timeout_s=200)
    assert "FAILED sandboxes" in said
    assert "--security-opt seccomp=server/seccomp.json --security-opt systempaths=unconfined" in said
    assert "code 1" in said
