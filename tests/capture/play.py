"""Golden cases as strings: a small notation for conversations and for the rows that a trainer gets.

A call is written ``"system:s user:u1 assistant:a1 tool:t1"``. A row is shown as
``"<user:u1> [a1] <tool:t1> {a2}"``: ``<…>`` is context, ``[…]`` a completion that is trained in this row, ``{…}``
one that is not.
Every word is one token; a reply's tokens are its text and an end-of-turn token that is not shown.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from capture.turns import make_turn
from turnstile.models import EpisodeStatus, Message, Role, Sample, SampleSet, Tool
from turnstile_server.capture import CallMatch, EpisodeFacts, Node, TokenTree, export_samples
from turnstile_server.capture.keys import tools_key
from turnstile_server.capture.node import DeliveryState

END_OF_TURN = 1
FACTS = EpisodeFacts(episode_id="ep_1", rollout_id="ep_1", status=EpisodeStatus.COMPLETED)


def says(text: str) -> list[Message]:
    """``"user:u1 assistant:a1"`` as messages."""
    pairs = (word.split(":", 1) for word in text.split())
    return [Message(cast(Role, role), content) for role, content in pairs]


def reply(text: str = "", **fields: Any) -> Message:
    return Message("assistant", text, **fields)


class Play:
    """One episode, played by hand."""

    def __init__(self) -> None:
        self.tree = TokenTree()
        self._words: list[str] = ["", "end"]

    def match(self, call: str | Sequence[Message], tools: Sequence[Tool] = (), template: str = "t") -> CallMatch:
        messages = says(call) if isinstance(call, str) else call
        return self.tree.match(messages, tools, tools_key(tools, template))

    def turn(
        self,
        call: str | Sequence[Message],
        answer: str | Message,
        *,
        tools: Sequence[Tool] = (),
        template: str = "t",
        match: CallMatch | None = None,
        delivery: DeliveryState = "written",
        **fields: Any,
    ) -> Node:
        """Plays a call to its end; ``match``: its place, when that was fixed earlier."""
        found = match if match is not None else self.match(call, tools, template)
        said = reply(answer) if isinstance(answer, str) else answer
        context = [self.token(f"{m.role}:{m.content}") for m in found.new_messages]
        node = self.tree.add(
            make_turn(
                found,
                said,
                seq=len(self.tree),
                tools_key=tools_key(tools, template),
                template_hash=template,
                context_ids=context,
                completion_ids=[self.token(said.content), END_OF_TURN],
                **fields,
            )
        )
        node.delivery = delivery
        return node

    def export(self, facts: EpisodeFacts = FACTS, *, include_untrained: bool = False) -> SampleSet:
        return export_samples(self.tree, facts, include_untrained=include_untrained)

    def rows(self, *, include_untrained: bool = False) -> list[str]:
        return [self.show(sample) for sample in self.export(include_untrained=include_untrained).samples]

    def kinds(self) -> list[tuple[str, str]]:
        return [(self.show(s), s.kind) for s in self.export(include_untrained=True).samples]

    def show(self, sample: Sample) -> str:
        shown: list[str] = []
        for span in sample.turn_spans:
            context = sample.input_ids[span.context_start : span.start].tolist()
            shown += [f"<{self._words[token]}>" for token in context]
            words = [self._words[t] for t in sample.input_ids[span.start : span.end].tolist() if t != END_OF_TURN]
            trained = bool(sample.loss_mask[span.start : span.end].all())
            shown.append(("[{}]" if trained else "{{{}}}").format(" ".join(words)))
        return " ".join(shown)

    def untrained(self) -> dict[str, str]:
        return {entry.turn_id: entry.reason for entry in self.export().untrained}

    def token(self, word: str) -> int:
        if word not in self._words:
            self._words.append(word)
        return self._words.index(word)


def broken(match: CallMatch) -> tuple[str, int, str] | None:
    """(reason, index of the first divergent message, path inside it)."""
    if match.broken is None:
        return None
    assert match.broken.at is not None
    return (match.broken.reason.value, match.broken.at.message, match.broken.at.path)
