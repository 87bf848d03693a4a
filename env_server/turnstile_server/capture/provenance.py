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
from turnstile_server.capture.keys import tools_key
from turnstile_server.capture.node import Node
from turnstile_server.capture.quote_index import QuoteIndex


@dataclass(frozen=True, slots=True)
class Origin:
    """Of one root: what its conversation is, and the turn that caused it, where that can be told."""

    kind: SampleKind
    cause: Cause | None = None


def origins(roots: Iterable[Node], nodes: Iterable[Node]) -> dict[str, Origin]:
    """Root turn id to its origin; ``docs/matching.md`` prints the rules. ``nodes``: all of the tree's."""
    roots = sorted(roots, key=lambda root: start(root.turn))
    auxiliary = _side_calls(roots)
    # By start, not by commit: a short side call may overtake the first call of the episode.
    main = next((root for root in roots if root.turn.turn_id not in auxiliary), None)
    known = {node.turn.turn_id: node for node in nodes} if len(roots) > 1 else {}
    causes = Causes((node.turn for node in known.values()), auxiliary)
    beginnings = _Beginnings()
    found: dict[str, Origin] = {}
    for root in roots:
        turn = root.turn
        if main is None or root is main or turn.request_key == main.turn.request_key:
            found[turn.turn_id] = Origin("main")
        elif _of_its_own(turn):
            found[turn.turn_id] = _origin(root, main, causes.of(turn), turn.turn_id in auxiliary)
        elif (repeated := known.get(_continues(turn))) is not None:
            conversation = found.get(repeated.path()[0].turn.turn_id)
            if conversation is None or _other_thread(turn, repeated.turn):
                # The agent's headers call it another conversation (or the clock went back between the calls).
                conversation = _origin(root, main, causes.of(turn), auxiliary=False)
            found[turn.turn_id] = conversation
        elif (cause := causes.summary_asked_otherwise(turn)) is not None:
            found[turn.turn_id] = Origin("compaction", cause)
        else:
            found[turn.turn_id] = found[beginnings.nearest(root).turn.turn_id]
        beginnings.add(root, main=root is main)
    summaries = {origin.cause.turn_id for origin in found.values() if origin.cause and origin.kind == "compaction"}
    for root in roots:
        if root is not main and root.turn.turn_id in summaries:
            # Asked for only to be built on: of the compaction, and no auxiliary call.
            found[root.turn.turn_id] = Origin("compaction", found[root.turn.turn_id].cause)
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
        root.turn.turn_id
        for root in roots
        if not root.children
        and root.turn.turn_id not in continued
        and _of_its_own(root.turn)
        and (probes < len(roots) if _one_token(root.turn) else with_tools and not _offers_tools(root.turn))
    }


def _origin(root: Node, main: Node, cause: Cause | None, auxiliary: bool) -> Origin:
    """Of a conversation of its own that is not the main one."""
    turn = root.turn
    if auxiliary:
        return Origin("auxiliary", cause)
    if cause is not None:
        return Origin("compaction" if cause.by == "summary" else "subagent", cause)
    same = (turn.tools_key, _system(root)) == (main.turn.tools_key, _system(main))
    return Origin("compaction" if same and not _other_thread(turn, main.turn) else "subagent")


def _of_its_own(turn: Turn) -> bool:
    """The root begins a conversation; any other renders a known one again."""
    return turn.break_ is None or turn.break_.reason == BreakReason.NEW_CONVERSATION


def _continues(turn: Turn) -> str:
    """Id of the turn that this root repeats with other system text; "" for other breaks."""
    return (turn.break_.continues or "") if turn.break_ is not None else ""


def _one_token(turn: Turn) -> bool:
    return turn.sampling.max_new_tokens == 1


def _offers_tools(turn: Turn) -> bool:
    return turn.tools_key != tools_key((), turn.template_hash)


class _Beginnings:
    """The roots so far, to find the one that shares most of another's beginning: a tree of their messages."""

    def __init__(self) -> None:
        self._next: dict[tuple[int, str, str], int] = {}
        self._roots: list[Node] = []
        """Of each place in the tree: the main root where it passes there, else the first that does."""

    def add(self, root: Node, *, main: bool) -> None:
        place = 0
        self._pass(place, root, main)
        for message in root.turn.new_messages:
            place = self._next.setdefault((place, message.role, message.content), len(self._roots))
            self._pass(place, root, main)

    def nearest(self, root: Node) -> Node:
        """The main root, then the first, among those that share equally much. One at least was added."""
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
    """The agent's headers say that it is another conversation."""
    return (
        turn.thread is not None
        and turn.thread.name is not None
        and (main.thread is None or main.thread.name != turn.thread.name)
    )


def _system(root: Node) -> tuple[str, ...]:
    texts = []
    for message in root.turn.new_messages:
        if message.role not in ("system", "developer"):
            break
        texts.append(message.content)
    return tuple(texts)


def start(turn: Turn) -> tuple[float, int]:
    """The order in which calls came. A call leaves before its turn is there, so what it causes may be committed
    first."""
    return (turn.timings.started_at, turn.seq)


class Causes:
    """Of one episode's turns. ``auxiliary``: ids of those that were asked for aside."""

    def __init__(self, turns: Iterable[Turn], auxiliary: Collection[str]) -> None:
        self._turns = sorted(turns, key=start)
        self._places = {turn.turn_id: place for place, turn in enumerate(self._turns)}
        self._quotations = QuoteIndex(self._turns)
        self._auxiliary = auxiliary

    def of(self, turn: Turn) -> Cause | None:
        """The earlier turn whose words the conversation begins with: a reply that it quotes (``summary``), or an
        argument of a call (``call``); the longest quotation counts, then the latest turn. Else the latest turn of
        the thread that the agent's headers name as its parent (``thread``)."""
        told = _contents(turn, "user", "system", "developer")
        summaries = self._quotations.replies(told)
        # Replies that come back as such are history, unless they were given to another question.
        said = self._quotations.replies([*told, *_contents(turn, "assistant")])
        summaries |= {turn_id: length for turn_id, length in said.items() if turn_id in self._auxiliary}
        arguments = self._quotations.arguments(_contents(turn, "user"))
        found = [*self._before(turn, summaries, "summary"), *self._before(turn, arguments, "call")]
        if not found:
            return self._of_thread(turn)
        _, place, by = max(found)
        return Cause.model_validate({"turn_id": self._turns[place].turn_id, "by": by})

    def summary_asked_otherwise(self, turn: Turn) -> Cause | None:
        """For a root that renders known inputs again: the latest reply that it quotes to the model, if that was
        asked for with other tools. (With the same tools it may be a complaint about the reply.)"""
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
        """(length, place, ``by``) of the turns that began before this one."""
        own = self._places[turn.turn_id]
        places = ((length, self._places[turn_id]) for turn_id, length in quoted.items())
        return [(length, place, by) for length, place in places if place < own]


def _contents(turn: Turn, *roles: Role) -> list[str]:
    return [message.content for message in turn.new_messages if message.role in roles]
