"""What an agent wrote reaches no terminal as a command: each command of the client, and the server's log."""

from __future__ import annotations

import json
import logging
import re
from dataclasses import replace
from io import StringIO
from typing import Any

import pytest
import typer

from client.trainer_types import outline, rollout
from turnstile.cli import output
from turnstile.cli.run_report import failures, show_rollouts
from turnstile.cli.transcript import show_episode_facts, show_turns
from turnstile.models import EpisodeStatus, ErrorInfo, Fault, TaskRef, TurnOutline
from turnstile.models.messages import Message, ToolCall
from turnstile.visible import visible, visible_json
from turnstile_server.observability.log_lines import LogFormatter

HOSTILE = {
    "title": "\x1b]0;owned\x07",
    "clipboard": "\x1b]52;c;cm0gLXJmIH4K\x1b\\",
    "link": "\x1b]8;;http://evil/\x1b\\click\x1b]8;;\x1b\\",
    "colour": "\x1b[31mred\x1b[0m",
    "clear": "\x1b[2J\x1b[H",
    "c1": "\x9b31m\x9d0;x\x9c\x85",
    "backspace": "reward 0.0\b\b\b1.0",
    "return": "reward 0.0\rreward 1.0",
    "bell and null": "\x07\x00\x7f",
    "direction": "\u202egnp.exe\u2066x\u2069\u200f",
    "hidden": "pass\u200bword\ufeff\u00ad\U000e0041",
    "separators": "one\u2028two\u2029three\x0bfour\x0cfive\x1cfive",
    "half": "\ud83d",
}
ACTED_ON = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff\U000e0000-\U000e007f]"
)
ALL = " ".join(HOSTILE.values())


def harmless(text: str) -> bool:
    return ACTED_ON.search(text) is None


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_what_a_terminal_would_act_on_is_shown_as_its_escape(text: str) -> None:
    assert not harmless(text)
    for lines in (False, True):
        shown = visible(text, lines=lines)
        assert harmless(shown)
        assert len(shown) >= len(text)
    assert "\n" not in visible(f"a\n{text}\nb")
    assert visible(f"a\n{text}\n\tb", lines=True).count("\n") == 2


def test_what_a_person_reads_stays_as_it_is() -> None:
    for text in ("plain", "Grüße, 你好, עברית, हिन्दी 🎉 – “quoted”\u00a0…", ""):
        assert visible(text) == text
    assert visible("a\r\nb\n\tc", lines=True) == "a\nb\n\tc"
    assert visible("\x1b\n\u202e\U000e0041") == "\\x1b\\n\\u202e\\U000e0041"


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_json_is_exact_for_every_reader_and_harmless_for_a_terminal(text: str) -> None:
    value = {"text": text, text: ["Grüße", 1e300, 2**70, None]}
    for written in (json.dumps(value), json.dumps(value, ensure_ascii=False)):
        assert harmless(visible_json(written))
        assert json.loads(visible_json(written)) == value


def _record() -> dict[str, Any]:
    """An episode in which everything that an agent can write is hostile."""
    return {
        "agent_output": ALL,
        "grading": {
            "summary": [ALL],
            ALL: ALL,
            "tests": {"failed": [{"id": ALL, "status": ALL, "message": f"{ALL}\n{ALL}"}]},
        },
        "metadata": {ALL: ALL},
    }


def _turn() -> TurnOutline:
    reply = Message("assistant", ALL, reasoning=ALL, tool_calls=(ToolCall(ALL, ALL),))
    return outline(Message("tool", f"{ALL}\n{ALL}"), reply)


@pytest.mark.parametrize("full", [False, True])
def test_an_episode_and_its_turns_are_shown_harmlessly(capsys: pytest.CaptureFixture[str], full: bool) -> None:
    episode = rollout(0.0).episode
    assert episode is not None
    error = ErrorInfo(type="agent_failed", message=ALL, fault=Fault.AGENT, detail=ALL)
    hostile = episode.model_copy(update={**_record(), "error": error})
    show_episode_facts(hostile, full=full)
    show_turns([_turn()], full=full)
    text = _printed(capsys)
    assert harmless(text)
    assert text.count("\\x1b]52") >= 5


def test_a_run_shows_its_rollouts_and_their_failures_harmlessly(capsys: pytest.CaptureFixture[str]) -> None:
    made = rollout(None, status=EpisodeStatus.FAILED)
    error = ErrorInfo(type="agent_failed", message=ALL, fault=Fault.AGENT)
    failed = replace(made, task=TaskRef(instruction=ALL), error=error)
    show_rollouts([failed])
    for line in failures([failed]):
        output.echo(line)
    output.echo_json(json.dumps(failed.as_json(), ensure_ascii=False))
    assert harmless(_printed(capsys))


def _printed(capsys: pytest.CaptureFixture[str]) -> str:
    found = capsys.readouterr()
    return found.out + found.err


def test_tables_facts_texts_and_errors_of_commands_are_harmless(capsys: pytest.CaptureFixture[str]) -> None:
    output.show_table([output.Column("id"), output.Column("t", "text")], [[ALL, ALL], [output.Cell(ALL, ALL), ""]])
    output.show_facts(_record())
    output.show_text(ALL, first="> ")
    output.echo(ALL)
    with pytest.raises(typer.Exit):
        output.fail(ALL, 1)
    output.echo_json(json.dumps({"text": ALL}, ensure_ascii=False))
    text = _printed(capsys)
    assert harmless(text)
    assert "\\x1b]52" in text


def test_a_table_has_a_line_for_each_row_whatever_is_in_it(capsys: pytest.CaptureFixture[str]) -> None:
    output.show_table([output.Column("id"), output.Column("t")], [["one\nforged 1.0", "x\ry"], ["two", "y"]])
    assert len(_printed(capsys).strip().split("\n")) == 4


def test_a_log_message_is_one_line_and_a_traceback_is_indented() -> None:
    log = logging.getLogger("test_hostile_text")
    log.propagate = False
    written = StringIO()
    handler = logging.StreamHandler(written)
    handler.setFormatter(LogFormatter())
    log.addHandler(handler)
    try:
        log.warning("agent said %s", f"{ALL}\n2026-01-01 00:00:00,000 ERROR root: forged")
        try:
            raise ValueError(f"{ALL}\n2026-01-01 00:00:00,000 ERROR root: forged")
        except ValueError:
            log.exception("it failed")
    finally:
        log.removeHandler(handler)
    text = written.getvalue()
    assert harmless(text)
    heads = [line for line in text.splitlines() if not line.startswith(" ")]
    assert len(heads) == 2
    assert not any(line.startswith("2026-01-01") for line in text.splitlines())
