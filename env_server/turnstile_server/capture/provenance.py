"""Provenance: what each conversation of an episode is, and which turn brought it about.

The roots of the tree are the episode's conversations: the main one, its re-renderings, sub-agents, what goes
on from a compaction, and auxiliary calls (titles, routers, quota probes) that the agent makes for itself. The
rules use structure alone: which call offers tools, which message quotes which turn, and what the agent's own
headers say. No agent's name and no wording of any agent occurs here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from turnstile.models import BreakReason, Cause, Role, SampleKind, Turn
from turnstile_server.capture.keys import SYSTEM_ROLES, tools_key
from turnstile_server.capture.node import Node
from turnstile_server.capture.quote_index import QuoteIndex


@dataclass(frozen=True, slots=True)
class Origin:
    """The kind of a root's conversation, and the turn that caused it where that is known."""

    kind: SampleKind
    cause: Cause | None = None


def origins(roots: Iterable[Node], nodes: Iterable[Node]) -> dict[str, Origin]:
    """Root turn id to its origin; ``docs/matching.md`` prints the rules. ``nodes``: all of the tree's."""
    roots = sorted(roots, key=lambda root: start(root.turn))
    auxiliary = _side_calls(roots)
    # By start, not by commit: a short side call may overtake the first call of the episode. Each step of a task
    # has an agent of its own, which begins anew.
    mains: dict[int, Node] = {}
    for root in roots:
        if root.turn_id not in auxiliary:
            mains.setdefault(root.turn.step, root)
    known = {node.turn_id: node for node in nodes} if len(roots) > 1 else {}
    causes = Causes((node.turn for node in known.values()), auxiliary)
    beginnings = _Beginnings()
    found: dict[str, Origin] = {}
    for root in roots:
        turn, main = root.turn, mains.get(root.turn.step)
        if main is None or root is main or turn.request_key == main.turn.request_key:
            found[turn.turn_id] = Origin("main")
        elif _of_its_own(turn):
            found[turn.turn_id] = _origin(root, main, causes.of(turn), turn.turn_id in auxiliary)
        elif (repeated := known.get(_continues(turn))) is not None:
            conversation = found.get(repeated.path()[0].turn_id)
            if conversation is None or _other_thread(turn, repeated.turn):
                # The agent's headers call it another conversation (or the clock went back between the calls).
                conversation = _origin(root, main, causes.of(turn), auxiliary=False)
            found[turn.turn_id] = conversation
        elif (cause := causes.summary_asked_otherwise(turn)) is not None:
            found[turn.turn_id] = Origin("compaction", cause)
        else:
            found[turn.turn_id] = found[beginnings.nearest(root).turn_id]
        beginnings.add(root, main=root is main)
    summaries = {origin.cause.turn_id for origin in found.values() if origin.cause and origin.kind == "compaction"}
    for root in roots:
        if root is not mains.get(root.turn.step) and root.turn_id in summaries:
            # The call was made for the compaction that quotes it, so it is no auxiliary call.
            found[root.turn_id] = Origin("compaction", found[root.turn_id].cause)
    return found


def auxiliary_roots(roots: Sequence[Node], nodes: Iterable[Node]) -> set[str]:
    """Turn ids of the roots of kind ``auxiliary``, by ``origins``.

    The answer changes only when a root is added, when a root gets its first child, and when a turn is added that
    started before a root: ``RunningStatistics`` relies on that.
    """
    if not _side_calls(roots):
        return set()
    return {turn_id for turn_id, origin in origins(roots, nodes).items() if origin.kind == "auxiliary"}


def _side_calls(roots: Sequence[Node]) -> set[str]:
    """Turn ids of the roots that are auxiliary, unless a conversation goes on from them.

    That is a conversation of its own that could not do the task: one call, without tools where another
    conversation has them, or for a single token. An agent that never offers tools has no such calls.
    """
    with_tools = sum(_offers_tools(root.turn) for root in roots)
    probes = sum(_one_token(root.turn) for root in roots)
    continued = {_continues(root.turn) for root in roots}
    return {
        root.turn_id
        for root in roots
        if not root.children
        and root.turn_id not in continued
        and _of_its_own(root.turn)
        and (probes < len(roots) if _one_token(root.turn) else with_tools and not _offers_tools(root.turn))
    }


def _origin(root: Node, main: Node, cause: Cause | None, auxiliary: bool) -> Origin:
    """The origin of a root that begins a conversation and is not the main one."""
    turn = root.turn
    if auxiliary:
        return Origin("auxiliary", cause)
    if cause is not None:
        return Origin("compaction" if cause.by == "summary" else "subagent", cause)
    same = (turn.tools_key, _system(root)) == (main.turn.tools_key, _system(main))
    return Origin("compaction" if same and not _other_thread(turn, main.turn) else "subagent")


def _of_its_own(turn: Turn) -> bool:
    """True for a root that begins a conversation, False for one that renders a known conversation again."""
    return turn.break_ is None or turn.break_.reason == BreakReason.NEW_CONVERSATION


def _continues(turn: Turn) -> str:
    """Id of the turn that this root repeats with other system text; "" for other breaks."""
    return (turn.break_.continues or "") if turn.break_ is not None else ""


def _one_token(turn: Turn) -> bool:
    return turn.sampling.max_new_tokens == 1


def _offers_tools(turn: Turn) -> bool:
    return turn.tools_key != tools_key((), turn.template_hash)


class _Beginnings:
    """A trie of the roots' messages, to find the earlier root that shares the longest beginning with a given
    one."""

    def __init__(self) -> None:
        self._next: dict[tuple[int, str, str], int] = {}
        self._roots: list[Node] = []
        """For each place of the trie: the main root if it passes there, else the first root that does."""

    def add(self, root: Node, *, main: bool) -> None:
        place = 0
        self._pass(place, root, main)
        for message in root.turn.new_messages:
            place = self._next.setdefault((place, message.role, message.content), len(self._roots))
            self._pass(place, root, main)

    def nearest(self, root: Node) -> Node:
        """Among the roots that share most, the main one, else the first. At least one root must have been
        added."""
        place = 0
        for message in root.turn.new_messages:
            following = self._next.get((place, message.role, message.content))
            if following is None:
                break
            place = following
        return self._roots[place]

    def _pass(self, place: int, root: Node, main: bool) -> None:
        if place == len(self._roots):
            self._roots.append(root)
        elif main:
            self._roots[place] = root


def _other_thread(turn: Turn, main: Turn) -> bool:
    """The agent's headers name another conversation for this turn than for ``main``."""
    return (
        turn.thread is not None
        and turn.thread.name is not None
        and (main.thread is None or main.thread.name != turn.thread.name)
    )


def _system(root: Node) -> tuple[str, ...]:
    """The system and developer texts that the conversation begins with."""
    texts = []
    for message in root.turn.new_messages:
        if message.role not in SYSTEM_ROLES:
            break
        texts.append(message.content)
    return tuple(texts)


def start(turn: Turn) -> tuple[float, int]:
    """Sort key for the order in which calls came. A turn is committed when its call ends, so a conversation that
    it caused may be committed first."""
    return (turn.timings.started_at, turn.seq)


class Causes:
    """Finds which turn caused a conversation. ``auxiliary``: ids of the turns that are side calls."""

    def __init__(self, turns: Iterable[Turn], auxiliary: Collection[str]) -> None:
        self._turns = sorted(turns, key=start)
        self._places = {turn.turn_id: place for place, turn in enumerate(self._turns)}
        self._quotations = QuoteIndex(self._turns)
        self._auxiliary = auxiliary

    def of(self, turn: Turn) -> Cause | None:
        """The earlier turn that the conversation's first messages quote: a reply (``summary``) or an argument of
        a call (``call``). The longest quotation decides, then the latest turn. Without a quotation, the latest
        turn of the conversation that the agent's headers name as the parent (``thread``)."""
        inputs = _contents(turn, "user", "system", "developer")
        summaries = self._quotations.replies(inputs)
        # A reply that comes back as an assistant message is history, unless it answered a side call.
        anywhere = self._quotations.replies([*inputs, *_contents(turn, "assistant")])
        summaries |= {turn_id: length for turn_id, length in anywhere.items() if turn_id in self._auxiliary}
        arguments = self._quotations.arguments(_contents(turn, "user"))
        found = [*self._before(turn, summaries, "summary"), *self._before(turn, arguments, "call")]
        if not found:
            return self._of_thread(turn)
        _, place, by = max(found)
        return Cause.model_validate({"turn_id": self._turns[place].turn_id, "by": by})

    def summary_asked_otherwise(self, turn: Turn) -> Cause | None:
        """For a root that renders a known conversation again: the latest reply that its inputs quote, if that
        reply was asked for with other tools. With the same tools the quotation may be a complaint about the
        reply."""
        quoted = self._quotations.replies(_contents(turn, "user", "system", "developer"))
        places = [place for _, place, _ in self._before(turn, quoted, "summary")]
        other = [place for place in places if self._turns[place].tools_key != turn.tools_key]
        return Cause(turn_id=self._turns[max(other)].turn_id, by="summary") if other else None

    def _of_thread(self, turn: Turn) -> Cause | None:
        parent = turn.thread.parent if turn.thread is not None else None
        if parent is None:
            return None
        for earlier in reversed(self._turns[: self._places[turn.turn_id]]):
            if earlier.thread is not None and earlier.thread.name == parent:
                return Cause(turn_id=earlier.turn_id, by="thread")
        return None

    def _before(self, turn: Turn, quoted: Mapping[str, int], by: str) -> list[tuple[int, int, str]]:
        """(length, place, ``by``) of the quoted turns that started before this one."""
        own = self._places[turn.turn_id]
        places = ((length, self._places[turn_id]) for turn_id, length in quoted.items())
        return [(length, place, by) for length, place in places if place < own]


def _contents(turn: Turn, *roles: Role) -> list[str]:
    return [message.content for message in turn.new_messages if message.role in roles]
