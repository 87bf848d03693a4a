"""``turnstile episodes tree | diff | tail`` and ``turnstile top``, against a running server."""

from __future__ import annotations

import io
import os
import pty
import signal
import socket
import subprocess
import sys
import termios
import threading
from contextlib import suppress
from dataclasses import replace
from typing import Any

import httpx
import pytest
from rich.console import Console
from test_cli import DONE, FAILED, on, one_sentence, rows_of, turnstile
from test_hostile_text import ALL, harmless

from client.trainer_types import outline
from control_support import KEYS, Door
from turnstile.cli import top
from turnstile.cli.episode_diff import Parting
from turnstile.cli.episode_tree import TurnTree
from turnstile.models import Message
from turnstile.sync import Client
from turnstile.visible import visible

GREET = {"role": "user", "content": "say hello"}


def say(door: Door, episode_id: str, *messages: dict[str, Any]) -> dict[str, Any]:
    """One model call of the episode's agent; the assistant's message."""
    answer = httpx.post(
        f"{door.agent_url}/e/{episode_id}/v1/chat/completions",
        headers={"authorization": f"Bearer {KEYS.given[episode_id]}"},
        json={"model": "m", "max_tokens": 4, "messages": list(messages)},
        timeout=60,
    )
    assert answer.status_code == 200, answer.text
    message: dict[str, Any] = answer.json()["choices"][0]["message"]
    return message


@pytest.fixture(scope="module")
def branched(door: Door) -> tuple[str, str]:
    """Two episodes that part at their second turn. The first goes on in two ways, then begins anew."""
    with Client(door.url, key=door.key) as client:
        first, second = (client.create_episode("say hello", group_id="views") for _ in range(2))
        reply = say(door, first.episode_id, GREET)
        for more in ("again", "once more"):
            say(door, first.episode_id, GREET, reply, {"role": "user", "content": more})
        say(door, first.episode_id, {"role": "user", "content": "another thing"})
        say(door, second.episode_id, GREET)
        first.finish()
        second.cancel()
    return first.episode_id, second.episode_id


def test_the_tree_goes_down_and_branches_to_the_right(door: Door, branched: tuple[str, str]) -> None:
    shown = turnstile("episodes", "tree", branched[0], **on(door))
    assert shown.returncode == DONE, shown.stderr
    why, counts, _, *lines = shown.stdout.splitlines()
    assert why == "not graded: its task has no grader; its caller finished it after 4 turns"
    assert counts.startswith("4 turns, 2 roots, 1 branches; ")
    begins = [line.split("  ")[0] for line in lines if "●" in line]
    assert begins == ["● 0", "├─● 1", "└─● 2", "● 3"]
    assert sum("break new_conversation" in line for line in lines) == 1
    assert "; root" in lines[0]
    assert all("trained" in line for line in lines if "●" in line)
    assert sum("= " in line for line in lines) == 3


def test_the_tree_as_json_has_a_line_for_each_turn(door: Door, branched: tuple[str, str]) -> None:
    rows = rows_of(turnstile("episodes", "tree", branched[0], "--json", **on(door)))
    with Client(door.url, key=door.key) as client:
        handle = client.episode(branched[0])
        turns, forest, stats = handle.turns(), handle.tree(), handle.status().stats
    assert [row["turn_id"] for row in rows] == [each.turn_id for each in turns]
    assert [row["parent_id"] for row in rows] == [None, turns[0].turn_id, turns[0].turn_id, None]
    assert sum(row["trained_tokens"] for row in rows) == stats.trained_tokens == int(forest.loss_mask.sum())
    assert rows[3]["break"]["reason"] == "new_conversation"
    assert [row["kind"] for row in rows[1]["rows"]] == ["main"]


def test_a_conversation_of_thousands_of_turns_stays_in_its_column(door: Door, branched: tuple[str, str]) -> None:
    with Client(door.url, key=door.key) as client:
        forest = client.episode(branched[0]).tree()
    base = outline(Message("user", "go"), Message("assistant", "on"))
    turns = [
        base.model_copy(update={"turn_id": f"t{n}", "seq": n, "parent_id": f"t{n - 1}" if n else None})
        for n in range(5000)
    ]
    lines = list(TurnTree(turns, forest).lines())
    assert {first for first, _, _ in lines} == {"● "}
    assert len(lines) == 5000


def test_two_episodes_are_compared_and_their_messages_part(door: Door, branched: tuple[str, str]) -> None:
    shown = turnstile("episodes", "diff", *branched, **on(door))
    assert shown.returncode == DONE, shown.stderr
    rows = {line.split("  ")[0].strip(): line for line in shown.stdout.splitlines() if "  " in line}
    assert "completed" in rows["status"]
    assert "cancelled" in rows["status"]
    assert "cancelled by a request" in rows["why"]
    [row] = rows_of(turnstile("episodes", "diff", *branched, "--json", **on(door)))
    with Client(door.url, key=door.key) as client:
        first, second = (client.episode(each).turns() for each in branched)
    assert row["parts"]
    if first[0].reply.content == second[0].reply.content:  # as the tiny model pleases
        assert (row["same_turns"], row["turns"]) == (1, [first[1].turn_id, None])
        assert "B has no further one" in shown.stdout
    else:
        assert (row["same_turns"], row["turns"]) == (0, [first[0].turn_id, second[0].turn_id])
        assert "The messages part at turn 0" in shown.stdout
    assert any(line.startswith(("-  ", "+  ")) for line in row["diff"])
    same = turnstile("episodes", "diff", branched[0], branched[0], **on(door))
    assert "The messages of all 4 turns are the same." in same.stdout


def test_a_parting_is_at_the_first_message_that_differs_whatever_the_ids() -> None:
    ask = Message("user", "go")
    one, other = (outline(ask, Message("assistant", text)) for text in ("a\nb\nc", "a\nx\nc"))
    parting = Parting.of([one, one], [one.model_copy(update={"turn_id": "other"}), other])
    assert parting.same == 1
    lines = parting.diff("A", "B")
    assert [line for line in lines if line[0] in "+-"] == ["--- A", "+++ B", "-  b", "+  x"]
    assert Parting.of([], []).words() == "The messages of all 0 turns are the same."


@pytest.mark.slow
def test_an_episode_is_followed_to_its_end(door: Door) -> None:
    with Client(door.url, key=door.key) as client:
        episode = client.create_episode("say hello")
        say(door, episode.episode_id, GREET)
        go_on = threading.Event()

        def play() -> None:
            go_on.wait(60)
            say(door, episode.episode_id, {"role": "user", "content": "later"})
            episode.finish()

        player = threading.Thread(target=play)
        player.start()
        threading.Timer(0.3, go_on.set).start()
        shown = turnstile("episodes", "tail", episode.episode_id, "--interval", "0.05", **on(door))
        player.join()
    assert shown.returncode == DONE, shown.stderr
    lines = shown.stdout.splitlines()
    assert lines[0] == f"{episode.episode_id} is running"
    assert [line.split()[1] for line in lines if line.startswith("turn ")] == ["0", "1"]
    assert lines[-1] == "not graded: its task has no grader; its caller finished it after 2 turns"
    *turns, last = rows_of(turnstile("episodes", "tail", episode.episode_id, "--json", **on(door)))
    assert [each["seq"] for each in turns] == [0, 1]
    assert last["why"] == lines[-1]
    assert all(each["completion_tokens"] > 0 and "completion_ids" not in each for each in turns), (
        "no arrays are fetched"
    )


@pytest.mark.parametrize("command", [("tree",), ("tail",), ("diff",)])
def test_an_unknown_episode_is_one_sentence(door: Door, command: tuple[str]) -> None:
    ids = ("ep_unknown",) * (2 if command == ("diff",) else 1)
    assert "ep_unknown" in one_sentence(turnstile("episodes", *command, *ids, **on(door)), FAILED)


@pytest.mark.slow
def test_top_shows_servers_engines_and_open_episodes_once(door: Door) -> None:
    with Client(door.url, key=door.key) as client:
        episode = client.create_episode("say hello", episode_id="ep_of_top")
        say(door, episode.episode_id, GREET)
        try:
            shown = turnstile("top", "--interval", "0.1", "--limit", "1000", **on(door))
            narrow = turnstile("top", "--interval", "0.1", **{**on(door), "COLUMNS": "80"}).stdout
            [row] = rows_of(turnstile("top", "--interval", "0.1", "--limit", "1000", "--json", **on(door)))
        finally:
            episode.cancel()
    assert shown.returncode == DONE, shown.stderr
    [server] = row["servers"]
    assert server["server"] == door.url
    assert server["node"] == socket.gethostname()
    assert server["node"] in shown.stdout
    assert server["episodes"]["running"] >= 1
    assert server["engine"]["ok"]
    assert "ep_of_top" in [each["episode_id"] for each in row["episodes"]]
    line = next(line for line in shown.stdout.splitlines() if line.startswith("ep_of_top"))
    assert line.split()[1:3] == ["running", "external"]
    assert "tokens/s" in shown.stdout
    assert max(map(len, narrow.splitlines())) <= 80
    assert len([line for line in narrow.splitlines() if line.startswith(door.url.removeprefix("http://"))]) == 2


def test_rates_are_differences_and_a_server_that_began_anew_has_no_negative_one(door: Door) -> None:
    with Client(door.url, key=door.key) as client:
        look = top.Look.take(client, 0)
    counter = "turnstile_tokens_sampled_total"
    before, now = (
        replace(look, at=at, metrics={door.url: {counter: value}}) for at, value in ((10.0, 100.0), (12.0, 150.0))
    )
    assert now.rates(before, door.url)["tokens/s"] == 25.0
    assert replace(before, at=14.0).rates(now, door.url)["tokens/s"] == 50.0


def test_what_agents_wrote_is_shown_harmlessly(door: Door) -> None:
    with Client(door.url, key=door.key) as client:
        episode = client.create_episode("say hello")
        forest, look = episode.tree(), top.Look.take(client, 1)
        episode.cancel()
    hostile = outline(Message("user", ALL), Message("assistant", ALL))
    assert harmless(visible("".join(words for _, _, words in TurnTree([hostile], forest).lines()), lines=True))
    episodes = tuple(each.model_copy(update={"agent": ALL}) for each in look.episodes)
    drawn = io.StringIO()
    Console(file=drawn, width=3000).print(top._picture(replace(look, episodes=episodes), look))
    assert harmless(drawn.getvalue())
    assert "\\x1b]52" in drawn.getvalue()


@pytest.mark.slow
def test_top_stays_on_a_terminal_until_it_is_interrupted(door: Door) -> None:
    terminal, end = pty.openpty()
    termios.tcsetwinsize(end, (40, 120))
    command = [sys.executable, "-m", "turnstile", "top", "--interval", "0.1", "--url", door.url, "--key", door.key]
    process = subprocess.Popen(command, stdin=end, stdout=end, stderr=end, start_new_session=True)
    try:
        os.close(end)
        shown = b""
        while shown.count(b"Ctrl-C ends it") < 3:  # drawn again and again
            shown += os.read(terminal, 65536)
        process.send_signal(signal.SIGINT)
        with suppress(OSError):  # EIO: the other side is closed
            while data := os.read(terminal, 65536):
                shown += data
        assert process.wait(60) == DONE
    finally:
        process.kill()
        process.wait()
        os.close(terminal)
    assert b"Traceback" not in shown
    assert b"\x1b[?1049l" in shown, "the screen from before is back"


def test_an_interrupt_whose_exception_is_lost_is_remembered() -> None:
    before = signal.getsignal(signal.SIGINT)
    with top._Interrupts() as interrupts:
        assert not interrupts.came
        with suppress(KeyboardInterrupt):  # as the interpreter does in a finalizer
            signal.raise_signal(signal.SIGINT)
        assert interrupts.came
    assert signal.getsignal(signal.SIGINT) is before
