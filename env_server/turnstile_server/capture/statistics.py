"""Statistics of an episode: why completions are untrained, and the sums over all turns.

Each rule is here twice. ``untrained_reasons`` and ``statistics`` state the rules over the whole tree; exports use
them. ``RunningStatistics`` keeps the same figures turn by turn, so that asking for them costs the same at any
length. What must hold: both are equal after every turn (``tests/capture/test_statistics.py``).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from turnstile.models import EpisodeStats, ParseNote, ParseStatus, Turn, Untrained
from turnstile_server.capture.node import Node
from turnstile_server.capture.provenance import Origin, auxiliary_roots, origins, start

AUXILIARY = "auxiliary"
SUPERSEDED = "superseded"
UNDELIVERED = "undelivered"
DELIVERY_UNKNOWN = "delivery_unknown"
UPSTREAM = "upstream"
"""A hosted model answered; the turn has no tokens, so this reason has none in any count."""
WITHOUT_TOKEN = ParseNote.ID_WITHOUT_TOKEN.value


def tokens_by_version(turn: Turn) -> Counter[str]:
    """Sampled tokens of the turn by the weights that sampled them."""
    counts: Counter[str] = Counter()
    for span in turn.weight_spans:
        counts[span.version] += span.end - span.start
    return counts


def upstream_counts(turn: Turn) -> dict[str, int]:
    """The tokens of a turn as a hosted model's server counted them (``EpisodeStats.upstream``)."""
    usage = turn.upstream
    if usage is None:
        return {}
    if usage.prompt_tokens is None and usage.completion_tokens is None:
        return {"uncounted": 1}
    counts = usage.model_dump(include={"prompt_tokens", "completion_tokens", "cached_tokens"}, exclude_none=True)
    return {name: int(count) for name, count in counts.items()}


def own_reason(turn: Turn) -> str | None:
    """The reason that the turn by itself is untrained by default; None where nothing in it says so."""
    if turn.upstream is not None:
        return UPSTREAM
    if turn.finish_reason == "abort":
        return "interrupted"
    if turn.sampling.given:
        return "given"
    if turn.sampling.constrained:
        return "constrained"
    if turn.sampling.temperature == 0:
        return "greedy"
    if len(turn.without_token) == len(turn.completion_ids):
        return WITHOUT_TOKEN
    return None


def delivery_reason(node: Node, quoted: Collection[str]) -> str | None:
    """The reason that the turn is untrained, where its reply may never have reached the agent; None where it did.

    ``quoted``: ids of the turns that a later conversation quotes. What the agent did next is then no consequence
    of the completion, so that the episode's reward says nothing about it.
    """
    if node.received or node.turn_id in quoted:
        return None
    return UNDELIVERED if node.delivery == "lost" else DELIVERY_UNKNOWN


def quoted_turns(of_root: Mapping[str, Origin]) -> set[str]:
    """Ids of the turns that later conversations quote, by ``provenance.origins``."""
    causes = (root.cause for root in of_root.values())
    return {cause.turn_id for cause in causes if cause is not None and cause.by != "thread"}


def untrained_reasons(nodes: Iterable[Node], of_root: Mapping[str, Origin]) -> dict[str, str]:
    """Turn id to the reason why its completion is never trained by default; all others are trained once.

    ``nodes``: all nodes, in commit order; inherited ones are counted elsewhere, and have no reason here. A
    childless turn is superseded when a later turn of the same request has a child. That reason wins over the
    turn's own, the turn's own over that of its delivery, and that over ``auxiliary``.
    """
    nodes = [node for node in nodes if not node.inherited]
    own = {node.turn_id for node in nodes}
    auxiliary = (turn_id for turn_id, root in of_root.items() if root.kind == AUXILIARY and turn_id in own)
    reasons: dict[str, str] = dict.fromkeys(auxiliary, AUXILIARY)
    quoted = quoted_turns(of_root)
    siblings: dict[str, list[Node]] = {}
    for node in nodes:
        siblings.setdefault(node.turn.request_key, []).append(node)
        reason = own_reason(node.turn) or delivery_reason(node, quoted)
        if reason is not None:
            reasons[node.turn_id] = reason
    for same_request in siblings.values():
        followed = False
        for node in reversed(same_request):
            if node.children:
                followed = True
            elif followed:
                reasons[node.turn_id] = SUPERSEDED
    return reasons


def parse_findings(turn: Turn) -> list[str]:
    """What was amiss in the calls of a turn's reply: why attempts are text, and the liberties with which others
    were read."""
    return [status.value for status in turn.parse_status if status is not ParseStatus.OK] + list(turn.parse_notes)


def statistics(
    nodes: Iterable[Node], untrained: Iterable[Untrained], discarded: Mapping[str, int]
) -> EpisodeStats:
    """The statistics, summed over ``nodes``. ``branches``: each node's children after the first, sibling turns of
    a retry count too."""
    untrained_tokens: Counter[str] = Counter()
    for entry in untrained:
        untrained_tokens[entry.reason] += entry.tokens
    breaks: Counter[str] = Counter()
    cosmetic: Counter[str] = Counter()
    upstream: Counter[str] = Counter()
    parse: Counter[str] = Counter()
    versions: Counter[str] = Counter()
    sampled = rerendered = branches = turns = roots = 0
    for node in nodes:
        branches += max(0, len(node.children) - 1)
        if node.inherited:
            continue
        turns += 1
        roots += node.parent is None
        sampled += node.sampled_count
        rerendered += node.turn.rerendered_tokens
        cosmetic.update(node.turn.echo)
        upstream.update(upstream_counts(node.turn))
        parse.update(parse_findings(node.turn))
        versions.update(tokens_by_version(node.turn))
        if node.turn.break_ is not None:
            breaks[node.turn.break_.reason.value] += 1
    return EpisodeStats(
        sampled_tokens=sampled,
        trained_tokens=sampled - untrained_tokens.total(),
        untrained=dict(untrained_tokens),
        discarded=dict(discarded),
        rerendered_tokens=rerendered,
        turns=turns,
        roots=roots,
        branches=branches,
        breaks=dict(breaks),
        cosmetic=dict(cosmetic),
        parse=dict(parse),
        weight_versions=dict(versions),
        upstream=dict(upstream),
    )


@dataclass(slots=True)
class _SameRequest:
    """Turns of one request, in commit order. Of them, the childless ones before ``followed`` are superseded."""

    nodes: list[Node] = field(default_factory=list)
    followed: int = -1
    """``seq`` of the latest turn that has a child."""

    @classmethod
    def of(cls, node: Node) -> _SameRequest:
        """One turn alone."""
        return cls([node], node.seq if node.children else -1)


class RunningStatistics:
    """The figures of ``statistics``, kept turn by turn.

    Each turn costs a constant amount. Which roots are auxiliary depends on the roots and on earlier turns, so that
    is asked anew only after a change that may decide it (``add``), when the figures are next wanted.
    """

    def __init__(self) -> None:
        self._sampled = self._rerendered = self._branches = self._turns = self._roots = 0
        self._breaks: Counter[str] = Counter()
        self._cosmetic: Counter[str] = Counter()
        self._upstream: Counter[str] = Counter()
        self._parse: Counter[str] = Counter()
        self._versions: Counter[str] = Counter()
        self._untrained: Counter[str] = Counter()
        """Tokens by reason, without ``auxiliary`` and without those of the delivery."""
        self._unreceived: dict[str, Node] = {}
        """Turns that were not known to be received when last asked. What becomes of them is asked when the figures
        are wanted; a turn that is received stays so."""
        self._quoted: set[str] | None = None
        """``quoted_turns``; None: to be asked anew."""
        self._requests: dict[str, Node | _SameRequest] = {}
        """A turn by itself where no other is of its request, as is the rule."""
        self._superseded: set[str] = set()
        self._last_root: tuple[float, int] = (float("-inf"), -1)
        self._auxiliary: dict[str, int] = {}
        """Tokens of the roots whose only reason is that they are auxiliary, or that of their delivery."""
        self._auxiliary_tokens = 0
        self._auxiliary_stale = False

    def add(self, node: Node) -> None:
        """Count a node that the tree has just taken; it is the last of its parent's children already."""
        turn, parent = node.turn, node.parent
        if node.inherited:
            if parent is None:
                self._auxiliary_stale = True
                self._last_root = max(self._last_root, start(turn))
            return
        self._turns += 1
        self._sampled += node.sampled_count
        self._untrained[WITHOUT_TOKEN] += node.sampled_count - node.trainable_count
        self._rerendered += turn.rerendered_tokens
        self._cosmetic.update(turn.echo)
        self._upstream.update(upstream_counts(turn))
        self._parse.update(parse_findings(turn))
        self._versions.update(tokens_by_version(turn))
        if turn.break_ is not None:
            self._breaks[turn.break_.reason.value] += 1
        own = own_reason(turn)
        if own is not None:
            self._untrained[own] += node.trainable_count
        self._add_request(node, turn.request_key)
        if parent is None:
            self._roots += 1
            self._auxiliary_stale = True
            self._last_root = max(self._last_root, start(turn))
        elif len(parent.children) == 1:
            self._first_child(parent)
        else:
            self._branches += 1
        if start(turn) < self._last_root:  # it may have caused a root that was added before it
            self._auxiliary_stale = True
        if own is None:
            self._unreceived[turn.turn_id] = node
        if parent is not None:
            self._unreceived.pop(parent.turn_id, None)

    def _add_request(self, node: Node, request_key: str) -> None:
        request = self._requests.setdefault(request_key, node)
        if request is node:
            return
        if isinstance(request, Node):
            request = self._requests[request_key] = _SameRequest.of(request)
        insort(request.nodes, node, key=_seq)
        if node.seq < request.followed:
            self._set_superseded(node, True)

    def figures(
        self, roots: Sequence[Node], nodes: Collection[Node], discarded: Mapping[str, int]
    ) -> EpisodeStats:
        """The statistics as they are now. ``roots`` and ``nodes`` are all of the tree's."""
        if self._auxiliary_stale:
            self._auxiliary = self._only_auxiliary(roots, nodes)
            self._auxiliary_tokens = sum(self._auxiliary.values())
            self._auxiliary_stale = False
            self._quoted = None
        untrained = Counter({reason: tokens for reason, tokens in self._untrained.items() if tokens})
        auxiliary = self._auxiliary_tokens
        for node, reason in self._undelivered(roots, nodes):
            untrained[reason] += node.trainable_count
            auxiliary -= self._auxiliary.get(node.turn_id, 0)
        if auxiliary:
            untrained[AUXILIARY] = auxiliary
        return EpisodeStats(
            sampled_tokens=self._sampled,
            trained_tokens=self._sampled - sum(untrained.values()),
            untrained=dict(untrained),
            discarded=dict(discarded),
            rerendered_tokens=self._rerendered,
            turns=self._turns,
            roots=self._roots,
            branches=self._branches,
            breaks=dict(self._breaks),
            cosmetic=dict(self._cosmetic),
            parse=dict(self._parse),
            weight_versions=dict(self._versions),
            upstream=dict(self._upstream),
        )

    def _first_child(self, parent: Node) -> None:
        """``parent`` is childless no more: it is not superseded, and what came before it of its request is."""
        if parent.parent is None:
            self._auxiliary_stale = True
        if parent.inherited:
            return
        request, seq = self._requests[parent.turn.request_key], parent.seq
        if isinstance(request, Node):
            return  # it has children by now, which says the same
        if seq < request.followed:
            self._set_superseded(parent, False)
            return
        first = bisect_right(request.nodes, request.followed, key=_seq)
        last = bisect_left(request.nodes, seq, key=_seq)
        for earlier in request.nodes[first:last]:
            self._set_superseded(earlier, True)
        request.followed = seq

    def _set_superseded(self, node: Node, superseded: bool) -> None:
        sign, tokens = (1 if superseded else -1), node.trainable_count
        own = own_reason(node.turn)
        if own is not None:
            self._untrained[own] -= sign * tokens
        self._untrained[SUPERSEDED] += sign * tokens
        if superseded:
            self._superseded.add(node.turn_id)
        else:
            self._superseded.remove(node.turn_id)
        if node.parent is None:
            self._auxiliary_stale = True

    def _only_auxiliary(self, roots: Sequence[Node], nodes: Iterable[Node]) -> dict[str, int]:
        auxiliary = auxiliary_roots(roots, nodes)
        return {
            root.turn_id: root.trainable_count
            for root in roots
            if root.turn_id in auxiliary
            and not root.inherited
            and root.turn_id not in self._superseded
            and own_reason(root.turn) is None
        }

    def _undelivered(self, roots: Sequence[Node], nodes: Iterable[Node]) -> list[tuple[Node, str]]:
        """The turns that are untrained because of their delivery, and the reason of each."""
        self._unreceived = {turn_id: node for turn_id, node in self._unreceived.items() if not node.received}
        open_turns = [node for turn_id, node in self._unreceived.items() if turn_id not in self._superseded]
        if open_turns and self._quoted is None:
            self._quoted = quoted_turns(origins(roots, nodes)) if len(roots) > 1 else set()
        reasons = ((node, delivery_reason(node, self._quoted or ())) for node in open_turns)
        return [(node, reason) for node, reason in reasons if reason is not None]


def _seq(node: Node) -> int:
    return node.seq
