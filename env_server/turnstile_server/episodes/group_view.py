"""The rollouts of one group beside each other. Implements the control API's GroupService."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence

import anyio
import anyio.to_thread
import numpy as np

from turnstile.models import (
    EpisodeFilter,
    EpisodeSummary,
    GroupMember,
    GroupReport,
    PrefixNode,
    Sample,
    SampleSet,
    group_advantages,
    moments_of,
)
from turnstile_server.capture.prefix_tree import prefix_tree
from turnstile_server.control.protocol import OverviewService
from turnstile_server.errors import NotFound, NotTrainable


class GroupView:
    """``samples``: of an episode; raises NotFound, NotTrainable. ``most``: episodes of a group that are shown, the
    newest."""

    def __init__(
        self,
        overview: OverviewService,
        samples: Callable[[str], Awaitable[SampleSet]],
        threads: anyio.CapacityLimiter,
        most: int,
    ) -> None:
        self._overview = overview
        self._samples = samples
        self._threads = threads
        self._most = most

    async def group(self, group_id: str) -> GroupReport:
        """Raises NotFound for a group without an episode."""
        ids, total = await self._overview.sorted_page(
            EpisodeFilter(group_id=group_id), "created", 0, self._most, descending=True
        )
        found: dict[str, Sequence[Sample]] = {}
        for episode_id in reversed(ids):
            try:
                found[episode_id] = (await self._samples(episode_id)).samples
            except NotFound:  # deleted meanwhile
                continue
            except NotTrainable:  # a hosted model's: its rewards stand beside the others'
                found[episode_id] = ()
        summaries = await self._overview.summaries(found)
        if not summaries:
            raise NotFound(f"there is no episode of a group {group_id}")
        return await anyio.to_thread.run_sync(
            _report, group_id, summaries, found, total - len(summaries), limiter=self._threads
        )


def _report(
    group_id: str, summaries: Sequence[EpisodeSummary], samples: Mapping[str, Sequence[Sample]], further: int
) -> GroupReport:
    rewards = {row.episode_id: row.reward for row in summaries if row.reward is not None}
    scaled, centred = group_advantages(rewards), group_advantages(rewards, scale="none")
    members = tuple(
        GroupMember(
            summary=row,
            advantage=scaled.get(row.episode_id),
            centred=centred.get(row.episode_id),
            rows=tuple(sample.turn_spans[-1].turn_id for sample in samples[row.episode_id]),
        )
        for row in summaries
    )
    return GroupReport(
        group_id=group_id,
        mean=moments_of(rewards.values()).mean if rewards else None,
        std=moments_of(rewards.values(), less=1).deviation if len(rewards) > 1 else None,
        members=members,
        nodes=_nodes([samples[row.episode_id] for row in summaries]),
        further=further,
    )


def _nodes(of_members: Sequence[Sequence[Sample]]) -> tuple[PrefixNode, ...]:
    """``of_members``: the samples of each episode."""
    rows = [(member, sample) for member, samples in enumerate(of_members) for sample in samples]
    nodes = []
    for node in prefix_tree([sample.input_ids for _, sample in rows]):
        first = rows[node.sequences[0]][1]
        nodes.append(
            PrefixNode(
                parent=node.parent,
                start=node.start,
                end=node.end,
                members=_members(rows, node.sequences),
                ends=_members(rows, node.ends),
                sampled=int(np.count_nonzero(first.weight_version[node.start : node.end] >= 0)),
                turn_id=first.turn_spans[-1].turn_id,
            )
        )
    return tuple(nodes)


def _members(rows: Sequence[tuple[int, Sample]], sequences: Sequence[int]) -> tuple[int, ...]:
    return tuple(sorted({rows[each][0] for each in sequences}))
