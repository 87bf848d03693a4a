"""``turnstile episodes show``: one episode as lines for a person: facts, failed tests, and what each turn said."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from turnstile.cli.output import echo, show_facts, show_text
from turnstile.models import Episode, TurnOutline, why_of
from turnstile.models.messages import Message
from turnstile.visible import visible, visible_line

MOST_LINES = 12
MOST_CHARACTERS = 1200
"""Most characters of one text of a turn, unless all is asked for."""


def show_episode_facts(episode: Episode, *, full: bool) -> None:
    """Prints why the episode ended as it did, its record, then the failed tests: a line for each, and its
    message."""
    show_text(why_shown(episode))
    echo("")
    facts = episode.model_dump(mode="json", exclude={"schema_version", "why"})
    failed = _take_failed_tests(facts["grading"])
    show_facts(facts)
    if failed:
        echo(f"\nfailed tests: {len(failed)}")
    for test in failed:
        echo(visible(f"{test['id']}: {test.get('status', 'failed')}"))
        show_text(_bounded(str(test.get("message") or "").strip(), full=full), first="    ")


def why_shown(episode: Episode) -> str:
    """The server's line; this client's own where the server is older, and gives none."""
    return visible(episode.why or why_of(episode))


def show_turns(turns: Sequence[TurnOutline], *, full: bool) -> None:
    """Every turn: how it was sampled, the messages that were new in its prompt, and the reply."""
    for turn in turns:
        echo(f"\nturn {turn.seq}  {turn.turn_id}  parent {turn.parent_id or '(root)'}")
        show_text(_facts_of(turn), first="  ")
        for message in turn.new_messages:
            _show_message(message, full=full)
        _show_message(turn.reply, full=full, sampled=True)


def _facts_of(turn: TurnOutline) -> str:
    if turn.upstream is not None:
        facts = [turn.dialect, visible_line(turn.upstream.words, 200), f"finish {turn.finish_reason}"]
    else:
        facts = [
            turn.dialect,
            f"context {turn.context_tokens} + completion {turn.completion_tokens} tokens",
            f"finish {turn.finish_reason}",
            "weights " + ", ".join(dict.fromkeys(span.version for span in turn.weight_spans)),
        ]
    if turn.break_ is not None:
        at = turn.break_.at
        place = f" at message {at.message}{f', {at.path}' if at.path else ''}" if at is not None else ""
        facts.append(f"break {turn.break_.reason.value}{place}")
    if turn.rerendered_tokens:
        facts.append(f"{turn.rerendered_tokens} tokens rendered again")
    if turn.thread is not None and turn.thread.name:
        facts.append(f"thread {turn.thread.name}")
    return "; ".join(facts)


def _show_message(message: Message, *, full: bool, sampled: bool = False) -> None:
    """``>`` marks what the model sampled."""
    mark = "> " if sampled else "  "
    if message.reasoning:
        _show_part(f"{mark}{message.role} (thinking)", message.reasoning, full=full)
    if message.content or not (message.reasoning or message.tool_calls):
        _show_part(f"{mark}{message.role}", message.content, full=full)
    for call in message.tool_calls:
        _show_part(f"{mark}{message.role} calls {call.name}", call.arguments, full=full)


def _show_part(head: str, text: str, *, full: bool) -> None:
    echo(f"{visible(head)}:")
    show_text(_bounded(text.strip("\n"), full=full) or "(empty)", first="      ")


def _bounded(text: str, *, full: bool) -> str:
    if full:
        return text
    kept = "\n".join(text[:MOST_CHARACTERS].split("\n")[:MOST_LINES])
    left = len(text) - len(kept)
    return f"{kept}\n… {left} more characters (--full shows all)" if left else text


def _take_failed_tests(grading: dict[str, Any]) -> list[Mapping[str, Any]]:
    """The failed tests of a grading. They and their one-line summary are taken out of it."""
    tests = grading.get("tests")
    failed = tests.pop("failed", None) if isinstance(tests, dict) else None
    if not isinstance(failed, list) or not all(isinstance(test, dict) and "id" in test for test in failed):
        return []
    if failed:
        grading.pop("summary", None)
    return failed
