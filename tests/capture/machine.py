"""A random agent on one token tree, checked against the oracle after every step.

The agent runs several conversations side by side, edits what it sends back (harmlessly and not), retries,
disconnects, compacts and spawns sub-agents. Alphabets are tiny on purpose: equal texts, equal ids and ties must
really happen. ``SEEN`` counts the interesting cases, so that a test can demand that each of them occurred.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from hypothesis import event
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from capture.oracle import VOLATILE, Kept, Oracle, cosmetics, system_text
from capture.turns import make_tool, make_turn
from turnstile.models import EpisodeStatus, Message, Tool, ToolCall, Turn
from turnstile_server.capture import (
    Action,
    CallMatch,
    EarlierCall,
    EpisodeFacts,
    TokenTree,
    VolatileText,
    decide,
    export_samples,
)
from turnstile_server.capture.keys import request_key, tools_key
from turnstile_server.capture.packed_parts import Packing

SEEN: Counter[str] = Counter()

NESTED = {"type": "object", "default": {}, "properties": {"deep": {"type": "integer", "default": 1}}}
RUN = make_tool("run", {"code": {"type": "string"}, "n": {"type": "integer", "default": 0}, "o": NESTED})
READ = make_tool("read", {"path": {"type": "string"}})
READ_REORDERED = Tool(
    "read",
    {
        "function": {
            "parameters": {"properties": {"path": {"type": "string"}}, "type": "object"},
            "name": "read",
        },
        "type": "function",
    },
)
READ_DESCRIBED = make_tool("read", {"path": {"type": "string"}}, "Reads.")

# The first two are the same offer, the others are not.
TOOLS: list[list[Tool]] = [[RUN, READ], [READ_REORDERED, RUN], [RUN, READ_DESCRIBED], [RUN], []]
FACTS = EpisodeFacts(episode_id="ep_1", rollout_id="ep_1", status=EpisodeStatus.COMPLETED, reward=1.0)

texts = st.sampled_from(["", "a", "b", " a", "a\n", "ab"])
arguments = st.sampled_from(
    [
        '{"code": "1"}',
        '{"code": "1  \\n2\\n"}',
        '{"code": "1 "}',
        '{"code": " 2\\n"}',
        '{"n": 0, "code": "1"}',
        '{"code":"1","n":1.0}',
        '{"code": "1", "o": {"deep": 1}}',
        '{"code": true}',
        "{}",
        "{broken",
    ]
)
ids = st.sampled_from([None, "c1", "c2", "c3"])
calls = st.builds(ToolCall, name=st.sampled_from(["run", "read"]), arguments=arguments, id=ids)
reasonings = st.sampled_from([None, None, "", "r", "q"])
replies = st.builds(
    Message,
    role=st.just("assistant"),
    content=texts,
    reasoning=reasonings,
    tool_calls=st.lists(calls, max_size=2).map(tuple),
)
short_replies = st.builds(
    Message, role=st.just("assistant"), content=st.sampled_from(["", "a"]), reasoning=st.sampled_from([None, "r"])
)
inputs = st.builds(
    Message,
    role=st.sampled_from(["user", "tool", "tool", "system", "developer"]),
    content=st.sampled_from(["u", "v"]),
    name=st.sampled_from([None, None, "n"]),
)
index = st.integers(0, 1 << 16)


def respelled(text: str) -> str:
    """The same JSON value in other spelling."""
    try:
        value = json.loads(text)
    except ValueError:
        return text
    compact = json.dumps(value, separators=(",", ":"))
    return compact if compact != text else json.dumps(value, indent=1, sort_keys=True)


def filled(text: str) -> str:
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return json.dumps({"n": 0, "o": {"deep": 1}, **value})


def tidied(text: str) -> str:
    """Trailing whitespace of code lines stripped, as Claude Code does."""
    try:
        value = json.loads(text)
    except ValueError:
        return text
    code = value.get("code")
    if isinstance(code, str):
        value["code"] = "\n".join(line.rstrip() for line in code.rstrip().split("\n"))
    return json.dumps(value)


def with_arguments(message: Message, rewrite: Any) -> Message:
    changed = (replace(call, arguments=rewrite(call.arguments)) for call in message.tool_calls)
    return replace(message, tool_calls=tuple(changed))


def split(message: Message) -> list[Message]:
    """One reply as several assistant messages: the text, then each call."""
    parts = [replace(message, tool_calls=())]
    return parts + [Message("assistant", tool_calls=(call,)) for call in message.tool_calls]


HARMLESS: dict[str, Any] = {
    "verbatim": lambda m: [m],
    "trim": lambda m: [replace(m, content=m.content.strip())],
    "pad": lambda m: [replace(m, content=f" {m.content}\n")],
    "respell": lambda m: [with_arguments(m, respelled)],
    "fill": lambda m: [m if any(c.name != "run" for c in m.tool_calls) else with_arguments(m, filled)],
    "tidy": lambda m: [with_arguments(m, tidied)],
    "tidy_and_fill": lambda m: [
        m if any(c.name != "run" for c in m.tool_calls) else with_arguments(m, lambda a: filled(tidied(a)))
    ],
    "drop_reasoning": lambda m: [replace(m, reasoning=None)],
    "change_reasoning": lambda m: [replace(m, reasoning="other")],
    "rename_ids": lambda m: [replace(m, tool_calls=tuple(replace(c, id=f"x{c.id}") for c in m.tool_calls))],
    "drop_ids": lambda m: [replace(m, tool_calls=tuple(replace(c, id=None) for c in m.tool_calls))],
    "split": split,
}
REAL: dict[str, Any] = {
    "text": lambda m: replace(m, content=m.content + "!"),
    "call_name": lambda m: with_calls(m, [replace(c, name="write") for c in m.tool_calls]),
    "argument": lambda m: with_arguments(m, lambda a: '{"code": "other"}'),
    "drop_call": lambda m: with_calls(m, m.tool_calls[:-1]),
    "add_call": lambda m: with_calls(m, [*m.tool_calls, ToolCall("read", "{}", "c9")]),
}


Step = tuple[Message, str, list[Message], str]
"""A reply, how it is echoed, the inputs that follow, the finish reason."""
exchanges = st.lists(
    st.tuples(
        replies | short_replies,
        st.sampled_from(sorted(HARMLESS)),
        st.lists(inputs, min_size=1, max_size=2),
        st.sampled_from(["stop", "stop", "stop", "abort"]),
    ),
    min_size=1,
    max_size=3,
)


def with_calls(message: Message, changed: Any) -> Message:
    return replace(message, tool_calls=tuple(changed))


@dataclass
class Conversation:
    """What the agent holds. ``faithful``: nothing in it was really edited since ``mark``, where the last reply
    of the model ended."""

    messages: list[Message]
    tools: int
    faithful: bool = True
    mark: int | None = None
    template: str = "t"

    def fork(self) -> Conversation:
        return replace(self, messages=list(self.messages))


@dataclass
class Call:
    """A call in flight: its place was fixed when it arrived."""

    conversation: Conversation
    sent: Conversation
    """The conversation as it was sent."""
    match: CallMatch
    key: str
    request: str
    asked: dict[str, object]
    size: int
    connected: bool = True
    joined: list[tuple[Conversation, int]] = field(default_factory=list)
    """Conversations that wait for this call too, with their own lengths: one may hold a reply in more parts."""


def harmless_for(conversation: Conversation, how: str) -> str:
    """An agent knows no defaults of a tool that it does not offer."""
    offers_run = any(tool.name == "run" for tool in TOOLS[conversation.tools])
    return how if offers_run or "fill" not in how else "verbatim"


class CaptureMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.tree = TokenTree(VolatileText([VOLATILE]), Packing(block_turns=2, open_blocks=1))
        self.oracle = Oracle()
        self.conversations: list[Conversation] = []
        self.flights: list[Call] = []
        self.discarded: Counter[str] = Counter()
        self.seq = 0
        self.sent: dict[str, Conversation] = {}
        self.touched: Conversation | None = None
        self.accounted: object = None

    def saw(self, what: str) -> None:
        SEEN[what] += 1
        event(what)

    def pick(self, number: int) -> Conversation:
        self.touched = self.conversations[number % len(self.conversations)]
        return self.touched

    # The agent -----------------------------------------------------------------------------------------------

    @initialize(text=st.sampled_from(["u", "v"]), system=st.sampled_from([None, "s"]))
    def first(self, text: str, system: str | None) -> None:
        self.start(text, system, 0)

    @rule(
        text=st.sampled_from(["u", "v"]),
        system=st.sampled_from([None, "s", "S", "v1", "v2"]),
        tools=st.sampled_from([0, 0, 0, 2, 3, 4]),
    )
    def start(self, text: str, system: str | None, tools: int) -> None:
        head = [Message("system", system)] if system else []
        self.conversations.append(Conversation([*head, Message("user", text)], tools))

    @rule(number=index, message=inputs)
    def add_input(self, number: int, message: Message) -> None:
        self.pick(number).messages.append(message)

    @rule(number=index)
    def fork(self, number: int) -> None:
        self.conversations.append(self.pick(number).fork())

    @rule(number=index)
    def compact(self, number: int) -> None:
        old = self.pick(number)
        head = [m for m in old.messages[:1] if m.role == "system"]
        self.conversations.append(Conversation([*head, Message("user", "summary")], old.tools))

    @rule(number=index, at=index, how=st.sampled_from(sorted(HARMLESS)))
    def edit_harmlessly(self, number: int, at: int, how: str) -> None:
        conversation = self.pick(number)
        own = self.own_replies(conversation)
        if not own or not conversation.faithful:
            return
        position = own[at % len(own)]
        parts = HARMLESS[harmless_for(conversation, how)](conversation.messages[position])
        self.saw(f"harmless:{how}")
        conversation.messages[position : position + 1] = parts
        assert conversation.mark is not None
        conversation.mark += len(parts) - 1

    def own_replies(self, conversation: Conversation) -> list[int]:
        """Assistant messages; in a faithful conversation all of them are the model's."""
        return [i for i, m in enumerate(conversation.messages) if m.role == "assistant"]

    @rule(number=index, at=index, how=st.sampled_from(sorted(REAL)))
    def edit_reply(self, number: int, at: int, how: str) -> None:
        conversation = self.pick(number)
        own = self.own_replies(conversation)
        if own:
            position = own[at % len(own)]
            conversation.messages[position] = REAL[how](conversation.messages[position])
            conversation.faithful = False
            self.saw(f"real:{how}")

    @rule(number=index, at=index)
    def edit_input(self, number: int, at: int) -> None:
        conversation = self.pick(number)
        inputs = [i for i, m in enumerate(conversation.messages) if m.role != "assistant"]
        if not inputs:
            return
        position = inputs[at % len(inputs)]
        message = conversation.messages[position]
        conversation.messages[position] = replace(message, content=message.content + " ")
        conversation.faithful = False
        self.saw(f"real:{message.role}")

    @rule(
        number=index,
        role=st.sampled_from(["system", "developer"]),
        text=st.sampled_from(["t 1", "t 2", "x", "v1", "v2", "v3"]),
    )
    def tick(self, number: int, role: Any, text: str) -> None:
        """The agent writes its system text anew with every call: a clock."""
        conversation = self.pick(number)
        head = [message for message in conversation.messages if message.role not in ("system", "developer")]
        conversation.messages[:] = [Message(role, text), *head]
        conversation.faithful = False
        self.saw("tick")

    @rule(number=index, text=st.sampled_from(["v1", "v2", "v3"]))
    def tock(self, number: int, text: str) -> None:
        """The clock is one that the agent's spec names: no edit."""
        conversation = self.pick(number)
        head = conversation.messages[0]
        if head.role == "system" and head.content.startswith("v"):
            conversation.messages[0] = replace(head, content=text)
            self.saw("tock")

    @rule(number=index, at=index)
    def drop_message(self, number: int, at: int) -> None:
        conversation = self.pick(number)
        if len(conversation.messages) > 1:
            del conversation.messages[at % len(conversation.messages)]
            conversation.faithful = False

    @rule(number=index, at=index)
    def truncate(self, number: int, at: int) -> None:
        conversation = self.pick(number)
        conversation.messages = conversation.messages[: 1 + at % len(conversation.messages)]
        conversation.faithful = False

    @rule(number=index, at=index, message=replies)
    def insert_foreign(self, number: int, at: int, message: Message) -> None:
        """Few-shot examples, OpenCode's closing assistant message."""
        conversation = self.pick(number)
        conversation.messages.insert(at % (len(conversation.messages) + 1), message)
        conversation.faithful = False

    @rule(number=index, tools=st.integers(0, len(TOOLS) - 1))
    def change_tools(self, number: int, tools: int) -> None:
        conversation = self.pick(number)
        if {conversation.tools, tools} == {0, 1}:
            self.saw("tools:reordered")
        elif conversation.tools != tools:
            conversation.faithful = False
        conversation.tools = tools

    @rule(number=index)
    def change_template(self, number: int) -> None:
        conversation = self.pick(number)
        conversation.template += "'"
        conversation.faithful = False

    # Calls ---------------------------------------------------------------------------------------------------

    @rule(number=index, marked=st.booleans(), asked=st.sampled_from([{}, {}, {"temperature": 0.2}]))
    def call(self, number: int, marked: bool, asked: dict[str, object]) -> None:
        self.arrive(self.pick(number), marked, asked)

    @precondition(lambda self: self.flights)
    @rule(number=index, marked=st.booleans(), gone=st.booleans())
    def call_again(self, number: int, marked: bool, gone: bool) -> None:
        """The same call while the first is still in flight; its caller may have hung up."""
        flight = self.flights[number % len(self.flights)]
        flight.connected = flight.connected and not gone
        self.arrive(flight.sent.fork(), marked, flight.asked)

    @precondition(lambda self: self.seq)
    @rule(number=index, marked=st.booleans(), lost=st.booleans())
    def call_again_later(self, number: int, marked: bool, lost: bool) -> None:
        """The same call once it was answered. ``lost``: its answer never arrived, where it was on its way."""
        open_turns = [k for k in self.oracle.turns if k.delivery != "written" and not self.has_child(k)]
        choice = open_turns if lost and open_turns else self.oracle.turns
        kept = choice[number % len(choice)]
        if kept.turn.turn_id not in self.sent:
            return
        if choice is open_turns:
            kept.delivery = self.tree[kept.turn.turn_id].delivery = "lost"
        conversation = self.sent[kept.turn.turn_id].fork()
        self.conversations.append(conversation)
        self.arrive(conversation, marked, dict(kept.turn.asked_sampling))

    @rule(number=index, reply=replies, marked=st.booleans())
    def lose_a_reply_and_call_again(self, number: int, reply: Message, marked: bool) -> None:
        conversation = self.pick(number)
        flight = self.arrive(conversation.fork(), False, {})
        if flight is not None:
            self.flights.remove(flight)
            flight.connected = False
            self.land(flight, reply, "verbatim", written=False, count=2, context=[1])
            self.arrive(conversation, marked, {})

    @rule(number=index, steps=exchanges)
    def exchange(self, number: int, steps: list[Step]) -> None:
        """Ordinary steps of an agent: call, reply, the next input."""
        conversation = self.pick(number)
        for reply, echo, messages, finish in steps:
            flight = self.arrive(conversation, False, {})
            if flight is not None:
                self.flights.remove(flight)
                self.land(flight, reply, echo, written=True, count=2, context=[1], finish_reason=finish)
            conversation.messages.extend(messages)

    @rule(steps=exchanges, system=st.sampled_from([None, "s", "v1"]))
    def start_and_exchange(self, steps: list[Step], system: str | None) -> None:
        self.start("u", system, 0)
        self.exchange(len(self.conversations) - 1, steps)

    def has_child(self, kept: Kept) -> bool:
        return any(other.parent is kept for other in self.oracle.turns)

    def arrive(self, conversation: Conversation, marked: bool, asked: dict[str, object]) -> Call | None:
        """Fixes the place of a call and does what the retry table says; the call in flight if one began."""
        tools = TOOLS[conversation.tools]
        key = tools_key(tools, conversation.template)
        match = self.matched(conversation, tools, key)
        parent = match.parent.turn.turn_id if match.parent else None
        request = request_key(parent, match.request_messages, key, asked)
        state, earlier = self.earlier(request)
        action = decide(state, marked=marked)
        assert action.name == EXPECTED_ACTION[state.name][0 if marked else 1]
        self.saw(f"retry:{state.name}:{'marked' if marked else 'unmarked'}")
        if action is Action.JOIN:
            assert isinstance(earlier, Call)
            earlier.joined.append((conversation, len(conversation.messages)))
            return None
        if action is Action.REPLAY:
            assert isinstance(earlier, Turn)
            self.deliver(conversation, earlier.reply, len(conversation.messages), "verbatim")
            return None
        if action is Action.REPLACE:
            assert isinstance(earlier, Call)
            self.flights.remove(earlier)
            self.discarded["replaced"] += 2
        flight = Call(conversation, conversation.fork(), match, key, request, asked, len(conversation.messages))
        self.flights.append(flight)
        return flight

    def earlier(self, request: str) -> tuple[EarlierCall, Call | Turn | None]:
        flights = [f for f in self.flights if f.request == request]
        if flights:
            flight = flights[-1]
            return (EarlierCall.IN_FLIGHT if flight.connected else EarlierCall.IN_FLIGHT_GONE), flight
        whole = [k for k in self.oracle.turns if k.turn.request_key == request and k.turn.finish_reason != "abort"]
        found = self.tree.identical(request)
        assert (found.turn_id if found else None) == (whole[-1].turn.turn_id if whole else None)
        if not whole:
            return EarlierCall.NONE, None
        delivered = whole[-1].delivery == "written"
        return (EarlierCall.WRITTEN if delivered else EarlierCall.UNDELIVERED), whole[-1].turn

    @rule()
    def rest(self) -> None:
        """No call comes for a while."""
        self.tree.cool()
        while self.tree.pack():
            self.saw("pack")

    @precondition(lambda self: self.flights)
    @rule(number=index)
    def hang_up(self, number: int) -> None:
        self.flights[number % len(self.flights)].connected = False

    @precondition(lambda self: self.flights)
    @rule(number=index)
    def fail(self, number: int) -> None:
        """The engine failed after two tokens: no turn."""
        self.flights.pop(number % len(self.flights))
        self.discarded["engine_error"] += 2

    @precondition(lambda self: self.flights)
    @rule(
        number=index,
        reply=replies | short_replies,
        count=st.integers(1, 4),
        echo=st.sampled_from(sorted(HARMLESS)),
        finish=st.sampled_from(["stop", "stop", "stop", "length", "abort"]),
        special=st.sampled_from(["", "", "", "constrained", "greedy"]),
        versions=st.sampled_from([("v0",), ("v1",), ("v0", "v1"), ("v1", "v0")]),
        context=st.lists(st.integers(0, 9), max_size=3),
        written=st.booleans(),
    )
    def commit(
        self,
        number: int,
        reply: Message,
        count: int,
        echo: str,
        finish: str,
        special: str,
        versions: tuple[str, ...],
        context: list[int],
        written: bool,
    ) -> None:
        """Any call in flight may end first."""
        if number % len(self.flights):
            self.saw("commit:out_of_order")
        flight = self.flights.pop(number % len(self.flights))
        self.land(
            flight,
            reply,
            echo,
            written=written,
            count=count,
            context=context,
            versions=versions,
            finish_reason=finish,
            temperature=0.0 if special == "greedy" else 1.0,
            constrained=special == "constrained",
        )

    def land(
        self, flight: Call, reply: Message, echo: str, *, written: bool, count: int, context: list[int], **how: Any
    ) -> None:
        turn = make_turn(
            flight.match,
            reply,
            seq=self.seq,
            tools_key=flight.key,
            completion_ids=[100 + (self.seq + i) % 7 for i in range(count)],
            context_ids=context,
            asked=flight.asked,
            **how,
        )
        self.seq += 1
        node = self.tree.add(turn)
        kept = self.oracle.record(turn)
        self.sent[turn.turn_id] = flight.sent
        if not reply.content and not reply.tool_calls:
            self.saw("commit:end_of_turn_only")
        if turn.finish_reason == "abort":
            self.saw("commit:interrupted")
        if not flight.connected:
            node.delivery = kept.delivery = "lost"
        elif written:
            node.delivery = kept.delivery = "written"
        waiting = [(flight.conversation, flight.size), *flight.joined] if flight.connected else []
        for conversation, size in waiting:
            self.deliver(conversation, reply, size, echo)

    def deliver(self, conversation: Conversation, reply: Message, size: int, echo: str) -> None:
        """The agent takes the reply into its history, in its own way, unless it went on meanwhile."""
        if len(conversation.messages) != size or conversation.messages[-1].role == "assistant":
            return
        echo = harmless_for(conversation, echo)
        conversation.messages.extend(HARMLESS[echo](reply))
        conversation.mark = len(conversation.messages)
        self.saw(f"harmless:{echo}")

    # What must hold ------------------------------------------------------------------------------------------

    def matched(self, conversation: Conversation, tools: list[Tool], key: str) -> CallMatch:
        before = self.fingerprint()
        match = self.tree.match(conversation.messages, tools, key)
        assert self.fingerprint() == before, "searching changed the tree"
        self.agree(match, conversation.messages, tools, key)
        if conversation.faithful and conversation.mark is not None:
            assert match.parent is not None
            assert list(match.new_messages) == conversation.messages[conversation.mark :]
        return match

    def agree(self, match: CallMatch, messages: list[Message], tools: list[Tool], key: str) -> None:
        expected = self.oracle.expect(messages, tools, key)
        assert list(match.new_messages) == messages[expected.covered :]
        if match.parent is None:
            assert expected.parents == []
        else:
            parent = self.kept(match.parent.turn.turn_id)
            assert parent in expected.parents
            schemas = {tool.name: tool.parameters for tool in tools}
            heard = self.last_reply(messages[: expected.covered])
            names = cosmetics(parent.path[-1].message, heard, schemas)
            if system_text([m for m, _ in parent.said]) != system_text(messages[: expected.covered]):
                names.add("system_volatile")
            assert set(match.echo) == names
            assert len(match.echo) == len(names)
            for name in names:
                self.saw(f"cosmetic:{name}")
            self.saw("match:branch" if match.parent.children else "match:continuation")
            if parent.turn.finish_reason == "abort":
                self.saw("match:continues_interrupted")
            if self.twins(parent):
                self.saw("match:tie")
        broken = match.broken
        at = (broken.at.message, broken.at.path) if broken and broken.at else None
        found = (broken.reason.value, *at) if broken and at else None
        assert found in expected.breaks, (found, expected.breaks)
        self.saw(f"break:{found[0] if found else 'none'}")

    def last_reply(self, messages: list[Message]) -> Message:
        start = len(messages)
        while start and messages[start - 1].role == "assistant":
            start -= 1
        run = messages[start:]
        return Message(
            "assistant",
            content="".join(m.content for m in run),
            reasoning="".join(m.reasoning or "" for m in run) or None,
            tool_calls=tuple(c for m in run for c in m.tool_calls),
        )

    def twins(self, kept: Kept) -> bool:
        same = [k for k in self.oracle.turns if [s.message for s in k.path] == [s.message for s in kept.path]]
        return len(same) > 1

    def kept(self, turn_id: str) -> Kept:
        return next(k for k in self.oracle.turns if k.turn.turn_id == turn_id)

    def fingerprint(self) -> object:
        return [
            (n.turn.turn_id, id(n.parent), tuple(id(c) for c in n.children), n.end, n.token_count, n.delivery)
            for n in self.tree
        ]

    @invariant()
    def a_call_of_the_last_conversation_would_find_its_place(self) -> None:
        if self.touched is not None and self.touched.messages:
            tools = TOOLS[self.touched.tools]
            self.matched(self.touched, tools, tools_key(tools, self.touched.template))

    def tokens_are_what_was_fed_and_sampled(self) -> None:
        for node, kept in zip(self.tree, self.oracle.turns, strict=True):
            assert node.tokens().tolist() == kept.tokens
            before = node.parent.tokens().tolist() if node.parent else []
            deltas = node.turn.context_ids.tolist() + node.turn.completion_ids.tolist()
            assert node.tokens().tolist() == before + deltas
            assert node.token_count == len(kept.tokens)
            assert node.prompt_count == len(kept.tokens) - len(node.turn.completion_ids)

    @invariant()
    def every_sampled_token_is_accounted_for(self) -> None:
        if self.accounted == (
            state := (len(self.tree), dict(self.discarded), [node.delivery for node in self.tree])
        ):
            return
        self.accounted = state
        self.tokens_are_what_was_fed_and_sampled()
        facts = replace(FACTS, discarded=dict(self.discarded))
        for node in self.tree:
            self.kept(node.turn.turn_id).repeated = node.repeated
        out = export_samples(self.tree, facts)
        everything = export_samples(self.tree, facts, include_untrained=True)
        reasons = self.oracle.untrained()
        owners = self.oracle.trainers()
        rest = {entry.turn_id: entry for entry in out.untrained}
        assert {turn_id: entry.reason for turn_id, entry in rest.items()} == reasons
        assert len(rest) == len(out.untrained)
        trained = [
            (span.turn_id, s.sample_id.removeprefix("smp_"))
            for s in out.samples
            for span in s.turn_spans
            if span.trained
        ]
        assert sorted(trained) == sorted((t, o.removeprefix("turn_")) for t, o in owners.items())
        tokens = {k.turn.turn_id: len(k.turn.completion_ids) for k in self.oracle.turns}
        assert all(entry.tokens == tokens[entry.turn_id] for entry in out.untrained)
        on = sum(int(s.loss_mask.sum()) for s in out.samples)
        assert on == out.stats.trained_tokens == sum(int(s.loss_mask.sum()) for s in everything.samples)
        assert on + sum(e.tokens for e in out.untrained) == out.stats.sampled_tokens == sum(tokens.values())
        assert all(s.loss_mask.any() for s in out.samples)
        leaves = [n.turn.turn_id for n in self.tree.leaves()]
        assert [f"turn_{s.sample_id.removeprefix('smp_')}" for s in everything.samples] == leaves
        assert {s.sample_id for s in out.samples} <= {s.sample_id for s in everything.samples}
        assert everything.untrained == out.untrained
        assert everything.stats == out.stats == self.tree.statistics(facts.discarded)
        assert out.stats.model_dump() == {**self.oracle.statistics(), "discarded": dict(self.discarded)}
        for reason in reasons.values():
            self.saw(f"untrained:{reason}")
        for sample in everything.samples:
            self.consistent(sample)

    def consistent(self, sample: Any) -> None:
        kept = self.kept(f"turn_{sample.sample_id.removeprefix('smp_')}")
        assert sample.input_ids.tolist() == kept.tokens
        assert [span.turn_id for span in sample.turn_spans] == [k.turn.turn_id for k in kept.line()]
        position = 0
        sampled = np.zeros(len(kept.tokens), bool)
        for span, member in zip(sample.turn_spans, kept.line(), strict=True):
            assert span.context_start == position
            assert span.start - position == len(member.turn.context_ids)
            assert span.end - span.start == len(member.turn.completion_ids)
            assert (sample.loss_mask[span.context_start : span.start] == 0).all()
            assert (sample.loss_mask[span.start : span.end] == span.trained).all()
            if span.trained:
                assert sample.logprobs[span.start : span.end].tolist() == member.turn.logprobs.tolist()
            versions = [sample.weight_version_names[i] for i in sample.weight_version[span.start : span.end]]
            assert versions == [w.version for w in member.turn.weight_spans for _ in range(w.start, w.end)]
            sampled[span.start : span.end] = True
            position = span.end
        assert position == len(kept.tokens)
        assert (sample.weight_version[~sampled] == -1).all()
        assert (sample.logprobs[sample.loss_mask == 0] == 0.0).all()
        assert sample.reward == 1.0
        assert sample.kind != "retry" or not any(span.trained for span in sample.turn_spans)


# Marked, unmarked: the table of docs/matching.md.
EXPECTED_ACTION = {
    "NONE": ("GENERATE", "GENERATE"),
    "IN_FLIGHT": ("JOIN", "GENERATE"),
    "IN_FLIGHT_GONE": ("REPLACE", "REPLACE"),
    "UNDELIVERED": ("REPLAY", "REPLAY"),
    "WRITTEN": ("REPLAY", "GENERATE"),
}
