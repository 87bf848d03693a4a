"""Statistics of an episode, recomputed from its turns: there is no counter that could drift from the truth."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from turnstile.models import EpisodeStats, Untrained
from turnstile_server.capture.tree import TokenTree


def statistics(tree: TokenTree, untrained: Iterable[Untrained], discarded: Mapping[str, int]) -> EpisodeStats:
    """``branches``: turns that are not the first child of their parent; siblings by retry count too."""
    untrained_tokens: Counter[str] = Counter()
    for entry in untrained:
        untrained_tokens[entry.reason] += entry.tokens
    breaks: Counter[str] = Counter()
    cosmetic: Counter[str] = Counter()
    sampled = rerendered = branches = 0
    for node in tree:
        sampled += len(node.turn.completion_ids)
        rerendered += node.turn.rerendered_tokens
        branches += max(0, len(node.children) - 1)
        cosmetic.update(node.turn.echo)
        if node.turn.break_ is not None:
            breaks[node.turn.break_.reason.value] += 1
    return EpisodeStats(
        sampled_tokens=sampled,
        trained_tokens=sampled - untrained_tokens.total(),
        untrained=dict(untrained_tokens),
        discarded=dict(discarded),
        rerendered_tokens=rerendered,
        turns=len(tree),
        roots=len(tree.roots),
        branches=branches,
        breaks=dict(breaks),
        cosmetic=dict(cosmetic),
    )
