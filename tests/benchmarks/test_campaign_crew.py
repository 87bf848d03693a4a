"""The campaign knows a server's workers, and which of their ends somebody caused."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from campaign import crew
from campaign.crew import Crew, descriptors_of_all, server_processes

PARENT = """
import subprocess, sys
children = [subprocess.Popen(["sleep", "60"])]
children += [
    subprocess.Popen([sys.executable, "-c", "input()", word], stdin=subprocess.PIPE) for word in sys.argv[1:]
]
print([each.pid for each in children[1:]], flush=True)
input()
for each in children:
    each.kill()
    each.wait()
"""


@contextmanager
def server_with(words: list[str]) -> Iterator[tuple[int, list[int]]]:
    """A process with children that have these words in their commands, and one without; its id and theirs."""
    server = subprocess.Popen(
        [sys.executable, "-c", PARENT, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert server.stdout is not None
    try:
        yield server.pid, [int(each) for each in server.stdout.readline().strip("[]\n").split(", ")]
    finally:
        server.communicate("\n")


def test_the_workers_of_a_server_are_its_children_with_the_worker_s_program() -> None:
    with server_with([crew.PROGRAM, crew.PROGRAM]) as (pid, children):
        assert server_processes(pid) == [pid, *sorted(children)]
        assert descriptors_of_all(pid) >= 9
        several, one = Crew(2, lambda: pid), Crew(1, lambda: pid)
        assert (several.workers(), several.players()) == (sorted(children), sorted(children))
        assert several.all() == [pid, *sorted(children)]
        assert (one.workers(), one.players(), one.all()) == ([], [pid], [pid])
    assert Crew(2, lambda: None).all() == []


@pytest.mark.parametrize(
    ("codes", "killed", "starved", "sound"),
    [
        ([], 3, 0, True),
        ([-9, -9], 2, 0, True),
        ([-9, -9], 1, 0, False),
        ([-9, 1], 1, 1, True),
        ([-9, 75], 1, 0, False),
        ([75], 1, 0, False),
        ([75], 0, 1, True),
    ],
)
def test_a_worker_that_ended_by_itself_is_found(
    tmp_path: Path, codes: list[int], killed: int, starved: int, sound: bool
) -> None:
    log = tmp_path / "server.log"
    lines = [f"ERROR child: worker {at % 2} has ended with code {code}; so" for at, code in enumerate(codes)]
    log.write_text("\n".join(["INFO something", *lines]))
    found = list(Crew(2, lambda: 1, killed, starved).unexpected_deaths(log))
    assert (not found) == sound
    assert not list(Crew(1, lambda: 1).unexpected_deaths(log))
