"""Data directories with episodes that no tiny model would play: with calls of tools, a sub-agent, a compaction, a
branch, failed calls, and a grade with its evidence. One real episode's records are the pattern."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from anyio.from_thread import start_blocking_portal

from control_support import START_S, Door, EngineProcess, running_door
from turnstile.models import Delivery, Message, Span, SpanKind, Thread, ToolCall, Turn
from turnstile.models.turn import Break, BreakReason
from turnstile_server.journal import FileJournal, turn_of, turn_record
from turnstile_server.journal.protocol import Record, RecordType
from turnstile_server.journal.records import delivery_record, span_record
from turnstile_server.settings import JournalSettings

Made = Callable[[Turn], Iterable[Turn]]


def recorded(engine: EngineProcess, folder: Path, made: Made, spans: Iterable[Span] = (), **record: Any) -> str:
    """Writes ``folder/long`` with one ended episode, whose only turn is replaced by what ``made`` makes of it
    (nobody knows what became of the last reply);
    ``record``: what its record has otherwise. Returns its id."""
    with running_door(engine, folder / "short") as door, client_of(door) as api:
        answer = api.post("/episodes", json={"task": {"instruction": "Fix the calculator."}})
        episode_id: str = answer.json()["episode_id"]
        door.add_turn(episode_id)
        assert api.post(f"/episodes/{episode_id}/finish").status_code == 200
    with start_blocking_portal() as portal:
        portal.call(_copy, folder, episode_id, made, spans, record)
    return episode_id


async def _copy(folder: Path, episode_id: str, made: Made, spans: Iterable[Span], record: dict[str, Any]) -> None:
    read = await FileJournal.open(folder / "short" / "journal", JournalSettings())
    records = await read.read(episode_id)
    await read.close()
    journal = await FileJournal.open(folder / "long" / "journal", JournalSettings())
    for one in records:
        if one.type is RecordType.TURN:
            turns = [*made(turn_of(one))]
            for turn in turns:
                await journal.append(turn_record(turn))
            for turn in turns[:-1]:
                written = Delivery(turn_id=turn.turn_id, state="written", commit_s=0.001)
                await journal.append(delivery_record(episode_id, written))
            for span in spans:
                await journal.append(span_record(episode_id, span.model_dump(mode="json")))
        elif one.type is RecordType.EPISODE and one.meta["timings"].get("ended_s") is not None:
            await journal.append(Record(one.type, episode_id, {**one.meta, **record}))
        elif one.type is not RecordType.DELIVERY:
            await journal.append(one)
    await journal.close()


class Player:
    """Makes turns after the pattern of one, each a second after the other."""

    def __init__(self, pattern: Turn, tokens: int = 40) -> None:
        self._pattern = pattern
        self._ids = np.resize(pattern.context_ids, tokens)
        self.turns: list[Turn] = []

    def say(
        self,
        parent: Turn | None,
        new: Iterable[Message],
        reply: Message,
        *,
        reason: BreakReason | None = None,
        thread: Thread | None = None,
    ) -> Turn:
        number = len(self.turns)
        timings = self._pattern.timings
        turn = self._pattern.model_copy(
            update={
                "turn_id": f"turn_{number:032x}",
                "parent_id": parent.turn_id if parent else None,
                "seq": number,
                "request_key": f"key-{number}",
                "context_ids": self._ids,
                "new_messages": tuple(new),
                "reply": reply,
                "break_": Break(reason=reason) if reason else None,
                "thread": thread,
                "timings": timings.model_copy(update={"started_at": timings.started_at + number}),
            }
        )
        self.turns.append(turn)
        return turn


def calling(name: str, arguments: str, call_id: str) -> Message:
    return Message("assistant", f"I call {name}.", tool_calls=(ToolCall(name, arguments, call_id),))


def with_branches(pattern: Turn) -> list[Turn]:
    """Seven turns: the main conversation calls a tool and a sub-agent, is asked once more for a reply, and goes on
    from a compaction."""
    play = Player(pattern)
    user = Message("user", "Fix the calculator.")
    root = play.say(None, [user], calling("bash", '{"command": "ls -la"}', "call-ls"))
    long = "\n".join(f"file-{number}.py" for number in range(400))
    second = play.say(
        root,
        [Message("tool", long, tool_call_id="call-ls")],
        calling("task", '{"prompt": "look around"}', "call-sub"),
    )
    new = BreakReason.NEW_CONVERSATION
    below = play.say(
        None,
        [Message("user", "look around")],
        calling("bash", "{}", "call-in"),
        reason=new,
        thread=Thread(name="explore"),
    )
    play.say(
        below, [Message("tool", "nothing here", tool_call_id="call-in")], Message("assistant", "I saw nothing.")
    )
    done = [Message("tool", "I saw nothing.", tool_call_id="call-sub")]
    play.say(second, done, Message("assistant", "The summary: all is done."))
    play.say(second, [*done, Message("user", "Really?")], Message("assistant", "Once more: it is done."))
    play.say(
        None,
        [user, Message("assistant", "The summary: all is done."), Message("user", "Go on.")],
        Message("assistant", "Done."),
        reason=new,
    )
    return play.turns


SPANS = (
    Span(span_id="span_setup", kind=SpanKind.SETUP, name="", start_s=0.0, end_s=0.4),
    Span(
        span_id="span_create", parent_id="span_setup", kind=SpanKind.SANDBOX, name="create", start_s=0.1, end_s=0.3
    ),
    Span(span_id="span_agent", kind=SpanKind.AGENT, name="light", start_s=0.4, end_s=9.0),
    Span(
        span_id="span_tool",
        parent_id="span_agent",
        kind=SpanKind.TOOL,
        name="bash",
        start_s=1.0,
        end_s=1.4,
        attributes={"bytes_in": 20, "bytes_out": 4000},
        turn_id=f"turn_{0:032x}",
    ),
    Span(
        span_id="span_failed",
        parent_id="span_agent",
        kind=SpanKind.MODEL,
        start_s=8.0,
        end_s=8.2,
        ok=False,
        error="engine_timeout",
        attributes={"status": 504},
    ),
    Span(span_id="span_grading", kind=SpanKind.GRADING, start_s=9.0, end_s=12.0),
    Span(
        span_id="span_grader",
        parent_id="span_grading",
        kind=SpanKind.GRADER,
        name="tests",
        start_s=9.1,
        end_s=12.0,
    ),
    Span(
        span_id="span_first",
        parent_id="span_grader",
        kind=SpanKind.GRADER,
        name="attempt 1",
        start_s=9.1,
        end_s=10.0,
        ok=False,
        error="sandbox_failed",
    ),
    Span(
        span_id="span_second",
        parent_id="span_grader",
        kind=SpanKind.GRADER,
        name="attempt 2",
        start_s=10.1,
        end_s=12.0,
    ),
)


def client_of(door: Door) -> httpx.Client:
    headers = {"authorization": f"Bearer {door.key}"}
    return httpx.Client(base_url=door.url, headers=headers, timeout=START_S)
